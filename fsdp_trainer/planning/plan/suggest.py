"""Suggestions: overrides that make a run fit, or faster, each with the figures of its plan."""

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

from fsdp_trainer.errors import UserError
from fsdp_trainer.planning.plan.changes import (
    FASTER,
    FINE_TUNING,
    NO_CHANGE,
    SMALLER,
    Candidate,
    Change,
    Effect,
    changes_of,
    offload_states,
    smaller_moments,
    together,
)
from fsdp_trainer.planning.plan.plan import GIB, RunPlan

MAX_SUGGESTIONS = 10
PLACES_OF_STATES = re.compile(
    r"(optim\.offload=\w+( sharding\.cpu_offload=true)?|sharding\.cpu_offload=true)"
)
ENOUGH = 4
"""Number of suggestions from which on combinations of more changes are not tried."""
GAIN = 0.02
"""Smallest share of the time that a change must save to be suggested as faster."""
SAVING = 0.01
"""Smallest share of the memory that a change must save to be added for the least memory."""
ALWAYS = (smaller_moments, offload_states)
"""Ways to save memory that are offered wherever they suffice, beside adapters and more ranks."""
USUAL = ("sharding=fsdp", "activation_checkpoint=full", "batch.micro_rows=1")
"""The changes that people usually make first to save memory."""


class Suggestion(NamedTuple):
    """Overrides, and the figures of the plan with them.

    peak_bytes: peak memory of a rank; cost: additional device time per token, 0.25 for a quarter
    more, negative if it takes less; effect: what the overrides alter besides time and memory;
    host_fits: True if most nodes have enough host memory for it.
    """

    override: str
    peak_bytes: float
    cost: float
    reason: str
    effect: Effect = Effect.TIME
    host_fits: bool = True


def suggest(run: Candidate, plan: RunPlan | None = None) -> list[Suggestion]:
    """Return changes that make a run fit or, if it fits, changes that make it faster.

    Changes that do not alter the training come first, then those that may, each group by cost.
    plan: of the run, if it is known.
    """
    plan = plan or run.plan()
    return faster(run, plan) if plan.fits else fitting(run, plan)


def faster(run: Candidate, plan: RunPlan) -> list[Suggestion]:
    """Return the changes with which a run is faster and still fits, fastest first.

    Of those that differ only in a number the fastest; equal to a percent, the one of least memory.
    """
    tried = [suggestion(change, run, plan) for change in changes_of(run, FASTER)]
    gains = [option for option in tried if option and option.cost < -GAIN]
    best = best_of_each(gains, lambda option: (round(option.cost, 2), option.peak_bytes))
    return sorted(best, key=lambda option: option.cost)[:MAX_SUGGESTIONS]


def fitting(run: Candidate, plan: RunPlan) -> list[Suggestion]:
    """Return changes that make a run fit.

    They concern these devices, more devices, adapters, and shorter rows.
    """
    options = best_of_each(sufficient_changes(run, plan))
    elsewhere = [*larger_world(run, plan), *with_adapters(run, plan)]
    here = [option for option in options if option.effect < Effect.ADAPTER]
    for way in ALWAYS:  # people ask for these, though something else may suffice
        words = {change.override for change in way(run)}
        if not any(words & set(option.override.split()) for option in here):
            elsewhere += with_usual(run, plan, list(way(run)))[:1]
    here = here[: MAX_SUGGESTIONS - 1 - len(elsewhere)]
    shorter = [option for option in options if option.effect == Effect.ROWS]
    chosen = [*here, *elsewhere, *shorter][:MAX_SUGGESTIONS]
    return sorted(chosen, key=learning_then_cost)


def learning_then_cost(option: Suggestion) -> tuple:
    alters_learning = option.effect >= Effect.COMPUTATION
    return alters_learning, option.cost, option.effect, -option.peak_bytes


def sufficient_changes(run: Candidate, plan: RunPlan) -> list[Suggestion]:
    """Return groups of up to three changes that make the run fit, without superfluous changes."""
    sufficient: dict[frozenset[str], Suggestion] = {}  # by what is typed
    for count in (1, 2, 3):
        for group in combinations(changes_of(run, SMALLER), count):
            words = frozenset(change.override for change in group)
            change = together(*group)
            if change is None or any(fewer < words for fewer in sufficient):
                continue
            if option := suggestion(change, run, plan):
                sufficient[words] = option
        if len(sufficient) >= ENOUGH:
            break
    return list(sufficient.values())


def least_altering(option: Suggestion) -> tuple:
    return not option.host_fits, option.effect, option.cost, -option.peak_bytes


def best_of_each(
    options: Iterable[Suggestion], order: Callable[[Suggestion], tuple] = least_altering
) -> list[Suggestion]:
    """Return the first by `order` of each group of suggestions that differ only in a number.

    So do those that differ in the place of states.
    """

    def group(override: str) -> str:
        return PLACES_OF_STATES.sub("offload", re.sub(r"=\d+\b", "=", override))

    best: dict[str, Suggestion] = {}
    for option in sorted(options, key=order):
        best.setdefault(group(option.override), option)
    return list(best.values())


def larger_world(run: Candidate, plan: RunPlan) -> list[Suggestion]:
    """Return the smallest number of ranks that fits, with as few of the usual changes as possible.

    Returns [] if there is none.
    """
    for usual in usual_changes(run):
        changed = run.changed(usual.keys)
        world = None if changed.is_refused() else smallest_world(changed)
        if world is None:
            continue
        units = "GPUs" if run.on_gpu else "ranks"
        reason = "; ".join(filter(None, [f"{world} {units} instead of {run.world}", usual.reason]))
        new = replace(changed, world=world).plan()
        if new.empty_share:
            reason += (
                f"; {new.empty_share:.0%} of their rows are empty: batch.rows={new.computed_rows}"
            )
        override = f"plan.world_size={world} {usual.override}".strip()
        return [Suggestion(override, new.peak_bytes, cost(new, plan), reason, Effect.WORLD)]
    return []


def usual_changes(run: Candidate) -> list[Change]:
    by_name = {change.override.split()[0]: change for change in changes_of(run, SMALLER)}
    usual = [by_name[name] for name in USUAL if name in by_name]
    groups = [group for count in range(len(usual) + 1) for group in combinations(usual, count)]
    return [change for change in (together(NO_CHANGE, *group) for group in groups) if change]


def smallest_world(run: Candidate) -> int | None:
    """Return the smallest number of ranks above the run's own with which it fits, or None.

    Tries powers of two within a node, then multiples of a node.
    """
    sharding = run.cfg.sharding
    inner = sharding.context * sharding.tensor
    # a replica's ranks hold all experts together
    group = sharding.pipeline * sharding.replicas * math.lcm(inner, sharding.expert)
    node = math.lcm(run.device.per_node, group)

    def fits(world: int) -> bool:
        # fewer ranks have more micro-batches each, so that a bisection is possible
        larger = replace(run, world=world)
        return not larger.layout.pipeline_problem and larger.plan().fits

    for world in (2**i for i in range(10)):
        if run.world < world < node and world % group == 0 and fits(world):
            return world
    first = run.world // node + 1
    for nodes in (first * 2**i for i in range(16)):
        if fits(nodes * node):
            fewer = range(first, nodes)
            return node * (first + bisect_left(fewer, True, key=lambda n: fits(n * node)))
    return None


def with_adapters(run: Candidate, plan: RunPlan) -> list[Suggestion]:
    return with_usual(run, plan, changes_of(run, FINE_TUNING))


def with_usual(run: Candidate, plan: RunPlan, ways: Iterable[Change]) -> list[Suggestion]:
    suggestions = []
    for way in ways:
        changes = [together(way, usual) for usual in usual_changes(run)]
        tried = (suggestion(change, run, plan) for change in changes if change)
        suggestions += [option for option in tried if option][:1]
    return suggestions


def least_memory(run: Candidate, plan: RunPlan) -> Suggestion:
    """Return the changes with which a rank needs least memory, on the same number of devices.

    Greedy: repeatedly adds the change that saves most. The length of rows is not changed, and the
    result need not fit.
    """
    changes = [*changes_of(run, SMALLER), *changes_of(run, FINE_TUNING)]
    changes = [change for change in changes if change.effect != Effect.ROWS]
    chosen, smallest = NO_CHANGE, plan
    while True:
        longer = [change for change in (together(chosen, one) for one in changes) if change]
        plans = [(change, plan_with(change, run, must_fit=False)) for change in longer]
        allowed = [(change, new) for change, new in plans if new]
        change, new = min(allowed, key=lambda pair: pair[1].peak_bytes, default=(chosen, smallest))
        if new.peak_bytes > (1 - SAVING) * smallest.peak_bytes:
            break
        chosen, smallest = change, new
    return Suggestion(chosen.override, smallest.peak_bytes, cost(smallest, plan), chosen.reason)


def suggestion(change: Change, run: Candidate, plan: RunPlan) -> Suggestion | None:
    """Return a change with its figures; None if the run does not fit with it.

    plan: plan of the run without the change, for comparison.
    """
    new = plan_with(change, run)
    if new is None:
        return None
    reason = change.reason
    if new.memory.host and not plan.memory.host:
        of_rank, of_node = new.memory.host / GIB, new.host_bytes_per_node / GIB
        reason += f" ({of_rank:,.0f} GiB a rank, {of_node:,.0f} a node)"
    fits = new.host_fits
    return Suggestion(change.override, new.peak_bytes, cost(new, plan), reason, change.effect, fits)


def plan_with(change: Change, run: Candidate, must_fit: bool = True) -> RunPlan | None:
    """Return the plan with a change; None if training would refuse it, or if it does not fit.

    must_fit: False to return also a plan that does not fit.
    """
    changed = run.changed(change.keys)
    try:
        plan = changed.plan()
    except UserError:  # an adapter that does not fit the model
        return None
    if must_fit and not plan.fits:
        return None
    return None if changed.is_refused() else plan


def cost(new: RunPlan, old: RunPlan) -> float:
    """Return the additional device time per token compared with the old plan, as if that fitted.

    0.25 stands for a quarter more. Rounded to two digits: the plan is less precise than that.
    """
    per_token = new.seconds * new.world_size / new.tokens
    before = old.seconds * old.world_size / old.tokens
    return round(per_token / before - 1, 2)
