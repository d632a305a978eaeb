"""A plan whose peak and messages are those of a short rehearsal.

What needs no rehearsal stays arithmetic: times, host memory, rollouts, checkpoints, the allowance.
"""

from dataclasses import fields, replace
from typing import Any

from fsdp_trainer.apps.plan.stored_answers import Store
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.errors import UserError
from fsdp_trainer.planning.plan.changes import Candidate
from fsdp_trainer.planning.plan.memory import Moment, summed
from fsdp_trainer.planning.plan.messages import Message, Recorded
from fsdp_trainer.planning.plan.plan import RunPlan
from fsdp_trainer.planning.rehearse.collectives import NUMBER
from fsdp_trainer.planning.rehearse.rehearsal import Rehearsal
from fsdp_trainer.planning.rehearse.rehearsed_run import without_left_out
from fsdp_trainer.planning.rehearse.short_rehearsal import short_rehearsal
from fsdp_trainer.planning.rehearse.step_recorder import HEAD_MODULE

Facts = dict[str, Any]
"""What is kept of a rehearsal: `moments` by phase with their place, `messages` and `works`."""


class RehearsalFailed(Exception):
    """Raised with the reason if a step cannot be run; never stored."""


def rehearsed_plan(run: Candidate, plan: RunPlan, store: Store) -> tuple[RunPlan, str]:
    """Return a run's plan with the peak and the messages of a rehearsal, and "".

    If that is refused or fails, return the plan with its lower bound, and why.
    """
    try:
        same, _ = without_left_out(run)
        facts = store.get(facts_key(same), lambda: facts_of(same))
    except UserError as error:
        store.distrust()  # the next one may succeed, once a package is installed
        reasons = "; ".join(f"{each.what} {each.reason}".splitlines()[0] for each in error.problems)
        return plan, f"nothing was rehearsed, and the peak is a lower bound: {reasons}"
    except RehearsalFailed as error:
        store.distrust()
        bound = "the rehearsal of a step failed, and the peak is a lower bound"
        return plan, f"{bound}: {error}"
    return with_facts(run, plan, plan if same is run else same.plan(), facts), ""


def facts_key(run: Candidate) -> Any:
    """Return what decides a rehearsal. run: without what is left out."""
    cfg = run.cfg
    names = [each.name for each in fields(TrainConfig) if each.name not in ("run", "launch")]
    parts = [repr(getattr(cfg, name)) for name in names]
    launched = [cfg.launch.groups, cfg.launch.rollout_ranks]
    device = run.on_gpu, run.device.linked_gpus
    return ["facts", parts, launched, repr(run.config), run.world, device]


def facts_of(run: Candidate) -> Facts:
    """Rehearse a run, and return what is kept of it. Raises RehearsalFailed."""
    rehearsal = short_rehearsal(run)
    problems = [one.problem for one in rehearsal.kinds if one.problem]
    problems += [str(one) for one in rehearsal.mismatches]
    if problems:
        raise RehearsalFailed(problems[0])
    return shown_by(rehearsal, run)


def shown_by(rehearsal: Rehearsal, run: Candidate) -> Facts:
    messages = list(rehearsal.busiest.messages(run.device.linked_gpus))
    works = [
        [one.kind.rank // run.layout.stage_ranks, one.work] for one in rehearsal.kinds if one.step
    ]
    return {"moments": largest_moments(rehearsal), "messages": messages, "works": works}


def largest_moments(rehearsal: Rehearsal) -> dict[str, list[Any]]:
    """Return for each phase of a plan the place with most bytes of all kinds, and these bytes."""
    largest: dict[str, list[Any]] = {}
    for kind in rehearsal.kinds:
        for (phase, place), held in kind.step.moments.items() if kind.step else ():
            name = phase_of(phase, place)
            if name not in largest or sum(held.values()) > sum(largest[name][1].values()):
                largest[name] = [place, held]
    return largest


def phase_of(phase: str, place: str) -> str:
    if phase in ("clip", "update"):
        return "update"
    if HEAD_MODULE in place:
        return "head and loss"
    return "backward" if phase == "backward" else "forward"


def with_facts(run: Candidate, plan: RunPlan, same: RunPlan, facts: Facts) -> RunPlan:
    """Return a plan with the memory and the messages of a rehearsal.

    same: the plan of the run as it was rehearsed; what its bound lacks of `plan`'s is added.
    """
    bounds, before = (
        {moment.phase: moment.bytes for moment in each.memory.moments} for each in (plan, same)
    )
    moments = [
        Moment(when(phase, place), corrected(held, bounds[phase], before[phase]), phase)
        for phase, (place, held) in facts["moments"].items()
        if phase in before
    ]
    moments += [one for one in plan.memory.moments if one.phase not in facts["moments"]]
    has_messages = run.layout.fsdp_ranks * run.layout.sizes["replicate"] > 1
    old, device = plan.memory, "cuda" if run.on_gpu else "cpu"
    memory = summed(moments, device, has_messages, old.host, old.disk)
    works = [(rank, work) for rank, work in facts["works"]]
    recorded = Recorded([Message(*each) for each in facts["messages"]], works)
    return replace(run.plan(recorded=recorded), memory=memory, rehearsed=True)


def corrected(
    held: dict[str, int], bound: dict[str, float], before: dict[str, float]
) -> dict[str, float]:
    """Return bytes by category: those held, with what the bound says of the rest of the run."""
    return {name: max(0.0, size + bound[name] - before[name]) for name, size in held.items()}


def when(phase: str, place: str) -> str:
    """Return the words for a moment, such as `backward of block 32`."""
    if phase in ("update", "head and loss"):
        return "optimizer step" if phase == "update" else phase
    numbers = [int(number) + 1 for number in NUMBER.findall(place)]
    return f"{phase} of block {numbers[-1]}" if numbers else f"{phase} of {place}"
