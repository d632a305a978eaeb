"""Layouts of a run that fit its devices: each tried by the same plan, fastest first.

Fixed are the model, the devices and their number, the length of rows and the rows of a step.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fsdp_trainer.config.context import context_problems
from fsdp_trainer.config.dimensions import layout_problem
from fsdp_trainer.config.pipeline import pipeline_problem
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.devices import Device
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.plan.changes import Candidate, expert_counts
from fsdp_trainer.plan.plan import RunPlan


class Choice(NamedTuple):
    """Overrides, and the keys that they set."""

    overrides: tuple[str, ...]
    keys: dict[str, Any]


class PlannedLayout(NamedTuple):
    """Overrides, and the plan with them."""

    overrides: tuple[str, ...]
    plan: RunPlan

    @property
    def computes_once(self) -> bool:
        """True if nothing is computed again, nor moved to the host."""
        again = {"activation_checkpoint=full", "activation_checkpoint=selective"}
        moved = {f"{key}=true" for key in ON_HOST}
        return (again | moved).isdisjoint(self.overrides)


class Dimension(NamedTuple):
    """One thing that is chosen about a layout.

    choices: those that hold least memory first, or those that are always tried. always_grows: after
    one that does not fit, no other does; else only after one that fits. is_needed: returns False
    for a choice that is not worth a try after these layouts of the choices before it.
    """

    choices: Callable[[Candidate], Iterator[Choice]]
    always_grows: bool = False
    is_needed: Callable[[Candidate, list[PlannedLayout]], bool] = lambda run, layouts: True


ACTIVATIONS, STATES = "activation_checkpoint.offload", "sharding.cpu_offload"
ON_HOST = {ACTIVATIONS: ("activations",), STATES: ("parameters", "gradients", "optimizer")}
"""Keys that move something to the host, and the categories of memory that they free at most."""


def tensor_is_needed(run: Candidate, layouts: list[PlannedLayout]) -> bool:
    """Return False where larger tensor groups have begun to make the fastest layout slower.

    Larger ones send more; they gather less, of which the time is hidden by then. Where no layout
    fits and gives each rank a row, they are tried all the same.
    """
    return _still_grows("tensor", run, layouts)


def pipeline_is_needed(run: Candidate, layouts: list[PlannedLayout]) -> bool:
    """Return False where longer pipelines have begun to make the fastest layout slower.

    Nor are any tried where communication holds up that layout for less than a quarter of a step:
    they would rather wait for each other.
    """
    full = [layout.plan for layout in layouts if not layout.plan.empty_share]
    if run.cfg.sharding.pipeline > 1 and full:
        fastest = min(full, key=lambda plan: plan.seconds)
        if fastest.slow.exposed < fastest.slow.step / 4:
            return False
    return _still_grows("pipeline", run, layouts)


def expert_is_needed(run: Candidate, layouts: list[PlannedLayout]) -> bool:
    """Return False where more ranks that divide the experts have begun to make it slower."""
    size = run.cfg.sharding.expert
    smaller = [count for count in expert_counts(run) if count < size]
    return len(smaller) < 2 or _is_fastest(f"sharding.expert={smaller[-1]}", layouts)


def _still_grows(name: str, run: Candidate, layouts: list[PlannedLayout]) -> bool:
    size = getattr(run.cfg.sharding, name)
    return size <= 2 or _is_fastest(f"sharding.{name}={size // 2}", layouts)


def _is_fastest(override: str, layouts: list[PlannedLayout]) -> bool:
    """Return whether the fastest layout has an override. True where none gives each rank a row."""
    full = [layout for layout in layouts if not layout.plan.empty_share]
    if not full:
        return True
    return override in min(full, key=lambda layout: layout.plan.seconds).overrides


def tensor_groups(run: Candidate) -> Iterator[Choice]:
    """Powers of two up to the devices of a node, which a run would not refuse."""
    yield from _groups("tensor", run, run.device.per_node)


def expert_groups(run: Candidate) -> Iterator[Choice]:
    """1, and the divisors of the number of experts that divide the ranks."""
    others = run.changed(ANY_SIZE)
    typed = ("sharding.expert=1",) if run.cfg.sharding.expert > 1 else ()
    for size in expert_counts(others):
        keys = {"sharding.expert": size}
        if not others.changed(keys).is_refused():
            yield Choice((f"sharding.expert={size}",) if size > 1 else typed, keys)


def pipelines(run: Candidate) -> Iterator[Choice]:
    """Powers of two up to the nodes, which a run would not refuse: between nodes little is sent."""
    yield from _groups("pipeline", run, max(1, run.world // run.device.per_node))


def context_groups(run: Candidate) -> Iterator[Choice]:
    """Powers of two up to the ranks, which a run would not refuse."""
    auto = () if run.cfg.sharding.context_method == "auto" else ("sharding.context_method=auto",)
    for overrides, keys in _groups("context", run, run.world):
        keys = keys | {"sharding.context_method": "auto"}
        if not any(context_problems(run.changed(keys).cfg, run.config)):
            shares_rows = keys["sharding.context"] > 1
            yield Choice((*overrides, *auto) if shares_rows else overrides, keys)


def _groups(name: str, run: Candidate, largest: int) -> Iterator[Choice]:
    """Yield 1, and the powers of two that divide the ranks and break no rule between keys."""
    key = f"sharding.{name}"
    typed = getattr(run.cfg.sharding, name) > 1
    yield Choice((f"{key}=1",) if typed else (), {key: 1})
    other = run.changed(ANY_SIZE)
    for size in (2**i for i in range(1, largest.bit_length())):
        if not other.changed({key: size}).is_refused():
            yield Choice((f"{key}={size}",), {key: size})


def context_is_needed(run: Candidate, layouts: list[PlannedLayout]) -> bool:
    """Return False where ranks that share rows would only send more.

    Inside a node: where with longer parts of rows nothing has to be computed again or moved to the
    host, and each rank has a row. Beyond it: where any layout fits and each rank has a row.
    """
    sharding = run.cfg.sharding
    full = [layout for layout in layouts if not layout.plan.empty_share]
    if sharding.tensor * sharding.context > run.device.per_node:
        return not full
    return not any(layout.computes_once for layout in full)


def meshes(run: Candidate) -> Iterator[Choice]:
    """Shards over all ranks, over groups that replicate each other, and none.

    The ranks that divide experts are those of one replica.
    """
    for choice in _meshes(run):
        if layout_problem(run.changed(choice.keys).cfg.sharding, run.world) is None:
            yield choice


def _meshes(run: Candidate) -> Iterator[Choice]:
    cfg = run.cfg
    # the sizes of other dimensions are chosen already: these two have the remaining ranks
    ranks = run.changed(_sharding("fsdp", 1)).readers
    one = ("sharding.replicas=1",) if cfg.sharding.replicas > 1 else ()
    yield Choice(("sharding=fsdp", *one), _sharding("fsdp", 1))
    for replicas in range(2, ranks):
        if ranks % replicas == 0:
            words = ("sharding=hsdp", f"sharding.replicas={replicas}")
            yield Choice(words, _sharding("hsdp", replicas))
    if ranks > 1 and not cfg.sharding.cpu_offload:
        yield Choice(("sharding=ddp", *one), _sharding("ddp", 1))


def _sharding(strategy: str, replicas: int) -> dict[str, Any]:
    return {"sharding.strategy": strategy, "sharding.replicas": replicas}


ANY_SIZE = _sharding("fsdp", 1) | {
    "sharding.expert": 1,
    "activation_checkpoint.offload": False,
    "batch.micro_rows": 1,
}
"""Choices that come later, as they may be with any size of those before."""


def micro_rows(run: Candidate) -> Iterator[Choice]:
    """One row at a time, and powers of two with which no row is empty; the rest is accumulation."""
    batch = run.cfg.batch
    largest = max(1, batch.rows // run.readers)
    if run.cfg.sharding.context > 1:
        largest = 1  # half the rows on half the ranks: as many tokens, and fewer messages
    for rows in (2**i for i in range(largest.bit_length())):
        choice = Choice((f"batch.micro_rows={rows}",), {"batch.micro_rows": rows})
        fills = rows == 1 or batch.rows % (rows * run.readers) == 0
        if fills and pipeline_problem(run.changed(choice.keys).cfg, run.world) is None:
            yield choice


def recomputation(run: Candidate) -> Iterator[Choice]:
    """Blocks that are computed again as a whole, in part, and not at all."""
    for mode in ("full", "selective", "none"):
        yield Choice((f"activation_checkpoint={mode}",), {"activation_checkpoint.mode": mode})


DIMENSIONS = (
    Dimension(tensor_groups, is_needed=tensor_is_needed),
    Dimension(context_groups, is_needed=context_is_needed),
    Dimension(pipelines, is_needed=pipeline_is_needed),
    Dimension(expert_groups, is_needed=expert_is_needed),
    Dimension(meshes),
    Dimension(micro_rows),
    Dimension(recomputation, always_grows=True),
)
"""In the order in which they are chosen: each sees what was chosen before it.

Most of the time goes into tracing a block, anew for each size of a tensor group, number of tokens
and mode of recomputation, whatever the mesh. So Llama 70B on 512 GPUs takes 21 traces: larger
groups are not tried once they slow the step down, rows that are shared are taken one at a time, and
more than two rows follow from the traces of one and of two.
"""


class Search:
    """Tries layouts. layouts: those that fit, fastest first; nearest: of all the least memory."""

    def __init__(self, cfg: TrainConfig, config: ModelConfig, world: int, device: Device):
        self.world = world
        self.device = device
        self.layouts: list[PlannedLayout] = []
        self.nearest: PlannedLayout | None = None
        self.tried = 0
        self.states_typed = cfg.sharding.cpu_offload
        self._choose(Candidate(cfg, config, world, device), (), DIMENSIONS)
        self.layouts.sort(key=lambda layout: (layout.plan.seconds, peak(layout)))

    def _choose(
        self, run: Candidate, overrides: tuple[str, ...], dimensions: tuple[Dimension, ...]
    ) -> bool:
        """Try all choices of the first dimension with all of the others. Returns if any fits."""
        if not dimensions:
            return self._try_with_host(run, overrides)
        dimension, *others = dimensions
        fits, before = False, len(self.layouts)
        for choice in dimension.choices(run):
            chosen = run.changed(choice.keys)
            if not dimension.is_needed(chosen, self.layouts[before:]):
                break
            if self._choose(chosen, (*overrides, *choice.overrides), tuple(others)):
                fits = True
            elif fits or dimension.always_grows:
                break
        return fits

    def _try_with_host(self, run: Candidate, overrides: tuple[str, ...]) -> bool:
        """Try a layout; where it does not fit, the same with something in host memory.

        What could not make it fit is not tried.
        """
        typed = (f"{ACTIVATIONS}=false",) if run.cfg.activation_checkpoint.offload else ()
        run = run.changed({ACTIVATIONS: False})
        plan = self._try(run, (*overrides, *typed))
        if self._fits(plan) or not run.on_gpu:
            return self._fits(plan)
        # one that the host has no room for alone has none with another
        refused = {STATES} if self.states_typed else set()
        for keys in ((ACTIVATIONS,), (STATES,), (ACTIVATIONS, STATES)):
            moved = run.changed(dict.fromkeys(keys, True))
            is_too_large = least_on_device(plan, keys) > plan.memory_bytes
            if is_too_large or refused.intersection(keys) or moved.is_refused():
                continue
            tried = self._try(moved, (*overrides, *(f"{key}=true" for key in keys)))
            if self._fits(tried):
                return True
            if not tried.host_fits:
                refused.update(keys)
        return False

    def _try(self, run: Candidate, overrides: tuple[str, ...]) -> RunPlan:
        """Plan a layout and add it if it fits."""
        self.tried += 1
        layout = PlannedLayout(overrides, run.plan())
        if self._fits(layout.plan) and not run.is_refused():
            self.layouts.append(layout)
        if not self.nearest or lack(layout) < lack(self.nearest):
            self.nearest = layout
        return layout.plan

    def _fits(self, plan: RunPlan) -> bool:
        """Return True if device and host have enough; who typed that states move knows the host."""
        return plan.fits and (plan.host_fits or self.states_typed)


def least_on_device(plan: RunPlan, keys: tuple[str, ...]) -> float:
    """Return the bytes that a rank holds at least if these of ON_HOST are set."""
    freed = {category for key in keys for category in ON_HOST[key]} | {"allowance"}
    held = [
        sum(size for category, size in moment.bytes.items() if category not in freed)
        for moment in plan.memory.moments
    ]
    return max(held)


def lack(layout: PlannedLayout) -> tuple[bool, float]:
    """Return the order of layouts that do not fit: last those that the host has no room for."""
    return not layout.plan.host_fits, peak(layout)


def peak(layout: PlannedLayout) -> float:
    """Return the bytes that a rank holds at most."""
    return layout.plan.memory.peak.total
