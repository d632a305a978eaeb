"""A plan whose peak and messages are those of a short rehearsal.

What needs no rehearsal stays arithmetic: times, host memory, rollouts, checkpoints, the allowance.
"""

from dataclasses import fields, replace
from typing import Any

from fsdp_trainer.apps.plan.stored_answers import Store
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.errors import UserError
from fsdp_trainer.plan.changes import Candidate
from fsdp_trainer.plan.memory import PHASES, Moment
from fsdp_trainer.plan.plan import RunPlan
from fsdp_trainer.rehearse.collectives import NUMBER
from fsdp_trainer.rehearse.rehearsal import EVERYONE, OWNERS, Rehearsal
from fsdp_trainer.rehearse.rehearsed_run import without_left_out
from fsdp_trainer.rehearse.short_rehearsal import short_rehearsal
from fsdp_trainer.rehearse.step_recorder import HEAD

Facts = dict[str, Any]
"""What is kept of a rehearsal: `moments` by phase with their place, and `sent`."""


class RehearsalFailed(Exception):
    """Raised with the reason if a step cannot be run; never stored."""


def rehearsed_plan(run: Candidate, plan: RunPlan, store: Store) -> tuple[RunPlan, str]:
    """Return a run's plan with the peak and the messages of a rehearsal, and "".

    If that is refused or fails, return the plan of the formulas, and why.
    """
    try:
        same, _ = without_left_out(run)
        facts = store.get(facts_key(same), lambda: facts_of(same))
    except UserError as error:
        store.distrust()  # the next one may succeed, once a package is installed
        reasons = "; ".join(f"{each.what} {each.reason}".splitlines()[0] for each in error.problems)
        return plan, f"nothing was rehearsed, and the peak is that of formulas: {reasons}"
    except RehearsalFailed as error:
        store.distrust()
        bound = "the rehearsal of a step failed, and the peak is that of formulas, a lower bound"
        return plan, f"{bound}: {error}"
    formula = plan if same is run else same.plan()
    return with_facts(plan, formula, facts), ""


def facts_key(run: Candidate) -> Any:
    """Return what decides a rehearsal. run: without what is left out."""
    cfg = run.cfg
    names = [each.name for each in fields(TrainConfig) if each.name not in ("run", "launch")]
    parts = [repr(getattr(cfg, name)) for name in names]
    launched = [cfg.launch.groups, cfg.launch.rollout_ranks]
    return ["facts", parts, launched, repr(run.config), run.world, run.on_gpu]


def facts_of(run: Candidate) -> Facts:
    """Rehearse a run, and return what is kept of it. Raises RehearsalFailed."""
    rehearsal = short_rehearsal(run)
    problems = [one.problem for one in rehearsal.kinds if one.problem]
    problems += [str(one) for one in rehearsal.mismatches]
    if problems:
        raise RehearsalFailed(problems[0])
    sent = rehearsal.busiest.sent()
    sent.pop(EVERYONE, None)
    return {"moments": largest_moments(rehearsal), "sent": sent}


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
    """Return a plan's phase for a phase of training and a place in the model."""
    if phase in ("clip", "update"):
        return "update"
    if HEAD in place:
        return "head and loss"
    return "backward" if phase == "backward" else "forward"


def with_facts(plan: RunPlan, formula: RunPlan, facts: Facts) -> RunPlan:
    """Return a plan with the memory and the messages of a rehearsal.

    formula: the plan of the run as it was rehearsed; what it lacks of `plan` is added.
    """
    planned, before = (
        {moment.phase: moment for moment in each.memory.moments} for each in (plan, formula)
    )
    moments = []
    for phase in PHASES:
        if phase not in planned:
            continue
        own = planned[phase]
        if phase in facts["moments"] and phase in before:
            place, held = facts["moments"][phase]
            own = Moment(when(phase, place), corrected(own.bytes, before[phase].bytes, held), phase)
        moments.append(own)
    tensors = max(moment.total - moment.bytes["allowance"] for moment in moments)
    memory = plan.memory._replace(moments=tuple(moments), tensors=tensors)
    sent = {name: size for name, size in facts["sent"].items() if name != OWNERS}
    return replace(plan, memory=memory, rehearsed=sent)


def corrected(
    planned: dict[str, float], formula: dict[str, float], held: dict[str, int]
) -> dict[str, float]:
    """Return bytes by category: those held, with what formulas say of the rest of the run."""
    return {
        name: max(0.0, held[name] + size - formula[name]) if name in held else size
        for name, size in planned.items()
    }


def when(phase: str, place: str) -> str:
    """Return the words for a moment, such as `backward of block 32`."""
    if phase in ("update", "head and loss"):
        return "optimizer step" if phase == "update" else phase
    numbers = [int(number) + 1 for number in NUMBER.findall(place)]
    return f"{phase} of block {numbers[-1]}" if numbers else f"{phase} of {place}"
