"""Search for the layouts of a run that fit its devices, sorted by speed.

Every layout is judged by its plan. The model, the devices and their number, the length of rows and
the number of rows in a step are fixed.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fsdp_trainer.config.context_methods import context_problems
from fsdp_trainer.planning.plan.changes import Candidate, copy_fits, expert_counts
from fsdp_trainer.planning.plan.plan import RunPlan


class Choice(NamedTuple):
    overrides: tuple[str, ...]
    keys: dict[str, Any]


class PlannedLayout(NamedTuple):
    overrides: tuple[str, ...]
    run: Candidate
    plan: RunPlan

    @property
    def computes_once(self) -> bool:
        again = {"activation_checkpoint=full", "activation_checkpoint=selective"}
        moved = {f"{key}=true" for key in ON_HOST}
        return (again | moved).isdisjoint(self.overrides)


class Dimension(NamedTuple):
    """One property of a layout for which the search makes a choice.

    choices: yields the choices, the one with least memory first; always_grows: True if every choice
    needs more memory than the one before, so that after one that does not fit no other does;
    otherwise the search ends only at the first misfit after a fit; is_needed: returns False if a
    choice is not worth trying, given the layouts found with the choices before it.
    """

    choices: Callable[[Candidate], Iterator[Choice]]
    always_grows: bool = False
    is_needed: Callable[[Candidate, list[PlannedLayout]], bool] = lambda run, layouts: True


ACTIVATIONS, STATES = "activation_checkpoint.offload", "sharding.cpu_offload"
ON_HOST = {ACTIVATIONS: ("activations",), STATES: ("parameters", "gradients", "optimizer")}
"""Keys that move tensors to the host, and the categories of memory that this may free."""


def tensor_is_needed(run: Candidate, layouts: list[PlannedLayout]) -> bool:
    """Return False if larger tensor groups no longer make the fastest layout faster.

    Larger groups send more. They also gather less, but at that size computation already hides the
    time of gathering. They are tried anyway while no layout fits and gives each rank a row.
    """
    return _still_grows("tensor", run, layouts)


def pipeline_is_needed(run: Candidate, layouts: list[PlannedLayout]) -> bool:
    """Return False if longer pipelines no longer make the fastest layout faster.

    Also returns False if exposed communication takes less than a quarter of the fastest layout's
    step: a pipeline would lose more time by waiting for its stages.
    """
    full = [layout.plan for layout in layouts if not layout.plan.empty_share]
    if run.cfg.sharding.pipeline > 1 and full:
        fastest = min(full, key=lambda plan: plan.seconds)
        if fastest.slow.exposed < fastest.slow.step / 4:
            return False
    return _still_grows("pipeline", run, layouts)


def expert_is_needed(run: Candidate, layouts: list[PlannedLayout]) -> bool:
    """Return False if larger expert groups no longer make the fastest layout faster."""
    size = run.cfg.sharding.expert
    smaller = [count for count in expert_counts(run) if count < size]
    return len(smaller) < 2 or _is_fastest(f"sharding.expert={smaller[-1]}", layouts)


def _still_grows(name: str, run: Candidate, layouts: list[PlannedLayout]) -> bool:
    size = getattr(run.cfg.sharding, name)
    return size <= 2 or _is_fastest(f"sharding.{name}={size // 2}", layouts)


def _is_fastest(override: str, layouts: list[PlannedLayout]) -> bool:
    full = [layout for layout in layouts if not layout.plan.empty_share]
    if not full:
        return True
    return override in min(full, key=lambda layout: layout.plan.seconds).overrides


def tensor_groups(run: Candidate) -> Iterator[Choice]:
    yield from _groups("tensor", run, run.device.per_node)


def expert_groups(run: Candidate) -> Iterator[Choice]:
    """Yield expert sizes to try: common divisors of the numbers of experts and of ranks."""
    others = run.changed(ANY_SIZE)
    typed = ("sharding.expert=1",) if run.cfg.sharding.expert > 1 else ()
    for size in expert_counts(others):
        keys = {"sharding.expert": size}
        if not others.changed(keys).is_refused():
            yield Choice((f"sharding.expert={size}",) if size > 1 else typed, keys)


def pipelines(run: Candidate) -> Iterator[Choice]:
    """Yield pipeline sizes to try: powers of two up to the nodes that pass validation.

    Pipelines run across nodes, because they send little.
    """
    yield from _groups("pipeline", run, max(1, run.world // run.device.per_node))


def context_groups(run: Candidate) -> Iterator[Choice]:
    """Yield context sizes to try: powers of two up to the number of ranks that pass validation."""
    auto = () if run.cfg.sharding.context_method == "auto" else ("sharding.context_method=auto",)
    for overrides, keys in _groups("context", run, run.world):
        keys = keys | {"sharding.context_method": "auto"}
        cfg = run.changed(keys).cfg
        if not any(context_problems(cfg.sharding, cfg.batch.seq_len, cfg.model, run.config)):
            splits_rows = keys["sharding.context"] > 1
            yield Choice((*overrides, *auto) if splits_rows else overrides, keys)


def _groups(name: str, run: Candidate, largest: int) -> Iterator[Choice]:
    """Yield 1, and the powers of two up to `largest` that pass validation.

    name: a field of Sharding.
    """
    key = f"sharding.{name}"
    typed = getattr(run.cfg.sharding, name) > 1
    yield Choice((f"{key}=1",) if typed else (), {key: 1})
    other = run.changed(ANY_SIZE)
    for size in (2**i for i in range(1, largest.bit_length())):
        if not other.changed({key: size}).is_refused():
            yield Choice((f"{key}={size}",), {key: size})


def context_is_needed(run: Candidate, layouts: list[PlannedLayout]) -> bool:
    """Return False if a larger context group would only send more.

    Within a node that is so if a layout with a smaller group fits without recomputation or moving
    tensors to the host, and has a row for each rank. Across nodes it is so if any layout fits and
    has a row for each rank.
    """
    sharding = run.cfg.sharding
    full = [layout for layout in layouts if not layout.plan.empty_share]
    if sharding.tensor * sharding.context > run.device.per_node:
        return not full
    return not any(layout.computes_once for layout in full)


def meshes(run: Candidate) -> Iterator[Choice]:
    """Yield FSDP over all ranks, then HSDP with more and more replicas, then DDP.

    Meshes that do not fit the expert groups are left out: a replica holds all experts.
    """
    for choice in _meshes(run):
        if run.changed(choice.keys).layout.problem is None:
            yield choice


def _meshes(run: Candidate) -> Iterator[Choice]:
    cfg = run.cfg
    # the other dimensions have been chosen: shards and replicas divide the remaining ranks
    ranks = run.changed(_sharding("fsdp", 1)).layout.batch_ranks
    one = ("sharding.replicas=1",) if cfg.sharding.replicas > 1 else ()
    whole = Choice(("sharding=fsdp", *one), _sharding("fsdp", 1))
    yield whole
    per_node, sharded = run.device.per_node, run.changed(whole.keys)
    freed = cfg.sharding.reshard_after_forward == "auto" and not sharded.keeps_gathered
    if freed and copy_fits(sharded.layout, per_node, cfg.precision.float8):
        key = "sharding.reshard_after_forward"
        yield Choice((*whole.overrides, f"{key}={per_node}"), whole.keys | {key: per_node})
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
"""Values of the later choices that are valid with any size of an earlier choice."""


def micro_rows(run: Candidate) -> Iterator[Choice]:
    """Yield 1 row, and powers of two with which no row is empty; the rest is accumulated."""
    batch, readers = run.cfg.batch, run.layout.batch_ranks
    largest = max(1, batch.rows // readers)
    if run.cfg.sharding.context > 1:
        largest = 1  # half the context size with half the rows has the same tokens, and sends less
    for rows in (2**i for i in range(largest.bit_length())):
        choice = Choice((f"batch.micro_rows={rows}",), {"batch.micro_rows": rows})
        fills = rows == 1 or batch.rows % (rows * readers) == 0
        if fills and run.changed(choice.keys).layout.pipeline_problem is None:
            yield choice


def recomputation(run: Candidate) -> Iterator[Choice]:
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
"""The choices in their order: each one depends on those before it.

Most of the time is spent on tracing a block. There is a trace for each tensor size, number of
tokens and mode of recomputation, whatever the mesh is. Llama 70B on 512 GPUs takes only 21 traces:
larger groups are not tried when they no longer help, split rows are computed one at a time, and
the memory of more than two rows is extrapolated from the traces of one and two.
"""


class Search:
    """Tries layouts.

    layouts: layouts that fit, fastest first; nearest: the layout with least memory of all; tried:
    number of layouts planned.
    """

    def __init__(self, run: Candidate):
        self.world = run.world
        self.device = run.device
        self.layouts: list[PlannedLayout] = []
        self.nearest: PlannedLayout | None = None
        self.tried = 0
        self.states_typed = run.cfg.sharding.cpu_offload
        self.host_needed = run.plan().host_bytes_per_node if self.states_typed else 0.0
        self._choose(run, (), DIMENSIONS)
        self.layouts.sort(key=by_speed)

    def order(self, layouts: list[PlannedLayout]) -> None:
        self.layouts = layouts

    def name_nearest(self, layout: PlannedLayout) -> None:
        self.nearest = layout

    def _choose(
        self, run: Candidate, overrides: tuple[str, ...], dimensions: tuple[Dimension, ...]
    ) -> bool:
        """Try all choices of the first dimension with all choices of the other dimensions.

        Returns True if any of them fits.
        """
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
        """Try a layout and, if it does not fit, the same with tensors in host memory.

        Offloading that could not make it fit is not tried. Returns True if any of them fits.
        """
        typed = (f"{ACTIVATIONS}=false",) if run.cfg.activation_checkpoint.offload else ()
        run = run.changed({ACTIVATIONS: False})
        plan = self._try(run, (*overrides, *typed))
        if self._fits(plan) or not run.on_gpu:
            return self._fits(plan)
        # if one kind of offloading exceeds the host's memory, so does its combination with another
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
        self.tried += 1
        layout = PlannedLayout(overrides, run, run.plan())
        if self._fits(layout.plan) and not run.is_refused():
            self.layouts.append(layout)
        if not self.nearest or lack(layout) < lack(self.nearest):
            self.nearest = layout
        return layout.plan

    def _fits(self, plan: RunPlan) -> bool:
        """Return True if device and host have enough memory.

        If the user configured sharding.cpu_offload, the host has what the run needs as it is.
        """
        return plan.fits and (plan.host_fits or plan.host_bytes_per_node <= self.host_needed)


def least_on_device(plan: RunPlan, keys: tuple[str, ...]) -> float:
    """Return a lower bound on the bytes of a rank if these keys of ON_HOST are set."""
    freed = {category for key in keys for category in ON_HOST[key]} | {"allowance"}
    held = [
        sum(size for category, size in moment.bytes.items() if category not in freed)
        for moment in plan.memory.moments
    ]
    return max(held)


def by_speed(layout: PlannedLayout) -> tuple[float, float]:
    return layout.plan.seconds, layout.plan.peak_bytes


def lack(layout: PlannedLayout) -> tuple[bool, float]:
    return not layout.plan.host_fits, layout.plan.peak_bytes
