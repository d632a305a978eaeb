"""The seconds of a step: computation, communication, and how far they overlap.

docs/how-plan-works.md explains how both follow from operations, bytes and rates.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from types import MappingProxyType
from typing import Any, NamedTuple

from fsdp_trainer.config.devices import Device
from fsdp_trainer.config.formats import is_compact, moments_format
from fsdp_trainer.config.schema import Optim
from fsdp_trainer.optim.footprint import state_bytes
from fsdp_trainer.planning.plan.block_memory import moved_bytes, trace_blocks
from fsdp_trainer.planning.plan.compute import (
    MEMORY,
    Seconds,
    compute_seconds,
    newton_schulz_rate,
    phase_seconds,
    planned_work,
    seconds_of,
    spread_of,
    unit_seconds,
)
from fsdp_trainer.planning.plan.expert_exchange import HOST_WAIT, mixtures
from fsdp_trainer.planning.plan.messages import (
    AGAIN,
    BLOCKS,
    ELSEWHERE,
    FIRST,
    HOST,
    LAST,
    REDUCED,
    REPLICAS,
    WAITED,
    Group,
    Message,
    PlannedMessages,
    RankGroups,
    Recorded,
    updates_on_host,
)
from fsdp_trainer.planning.plan.muon_update import newton_schulz_flops, owner_traffic
from fsdp_trainer.planning.plan.pipeline_stages import RankStages, units_of
from fsdp_trainer.planning.plan.planned_model import PlannedModel
from fsdp_trainer.planning.plan.planned_run import PlannedRun
from fsdp_trainer.planning.plan.second_model import SOFT_BYTES, PlannedTeacher, teacher_units
from fsdp_trainer.planning.plan.work import (
    ATTENTION,
    BACKWARD,
    EXPERTS,
    FORWARD,
    HEAD,
    MOVED,
    PASSES,
    PRODUCTS,
    READING,
    SCALED,
    WEIGHTS,
    Work,
    added,
)

LINKS = (0.5, 0.85)
"""Lower and upper share of a link's rate that collectives reach.

NCCL's own tests on 256 H100 measured 200 (all-gather) to 340 GB/s of 400 (NVIDIA/nccl#1218).
"""
PARTS = {
    PRODUCTS: "products",
    SCALED: "products",
    EXPERTS: "products",
    ATTENTION: "attention",
    PASSES: "elementwise",
    WEIGHTS: "passes over parameters",
}
"""Names of parts of a step's budget by kind of work; the head's are one part."""
HIDDEN = "hidden messages"
"""Those that computation hides."""
HOST_ADAMW = 20e9
"""Rate of host memory in bytes per second and rank with sharding.cpu_offload. Assumed."""


class Times(NamedTuple):
    """Seconds of one step.

    exposed: communication that does not overlap with computation; idle: time in which a rank of a
    pipeline waits for its first micro-batch or for the last one of other ranks; forwards:
    additional forwards without gradients, such as those of a reference model; reading: one such
    forward over the rows of a step, which is not part of the step; parts: of computation, by name;
    work: of the rank.
    """

    compute: float
    communication: float
    exposed: float
    optimizer: float
    idle: float = 0.0
    forwards: float = 0.0
    reading: float = 0.0
    parts: Mapping[str, float] = MappingProxyType({})
    work: Mapping[str, float] = MappingProxyType({})

    @property
    def figures(self) -> dict[str, Any]:
        return {name: value for name, value in self._asdict().items() if isinstance(value, float)}

    @property
    def budget(self) -> dict[str, float]:
        """Seconds by what the step spends them on; those of hidden messages are not its own."""
        return {
            **self.parts,
            "update": self.optimizer,
            "forwards": self.forwards,
            "idle": self.idle,
            "messages": self.exposed,
            HIDDEN: self.communication - self.exposed,
        }

    def scaled(self, factor: float) -> "Times":
        figures = {name: factor * value for name, value in self.figures.items()}
        parts = {name: factor * value for name, value in self.parts.items()}
        return Times(**figures, parts=parts, work=self.work)

    @property
    def step(self) -> float:
        """Seconds from the start of a step to the start of the next."""
        return self.compute + self.exposed + self.optimizer + self.idle + self.forwards


def times(
    run: PlannedRun,
    device: Device,
    best: bool,
    load: float = 1.0,
    recorded: Recorded | None = None,
) -> Times:
    """Return the times of one step.

    In a pipeline they are those of the slowest rank, for which the others wait. best: True for the
    fast end of measured rates of computation and links, False for the slow end; load: rows that the
    busiest rank's experts get, divided by the number with even routing; recorded: messages and work
    of a rehearsal, in place of planned ones.
    """
    ends = run, device, best, load
    if recorded is None:
        each = [StageTimes(*ends, stages).times() for stages in run.stages_by_rank]
    else:
        stages, messages = run.stages_of_all, recorded.messages
        each = [
            StageTimes(*ends, stages[rank], messages, work).times() for rank, work in recorded.works
        ]
    return max(each, key=lambda times: times.step)


@dataclass(frozen=True)
class StageTimes:
    """The times of a step on a rank with some stages of a pipeline.

    recorded, recorded_work: the messages and the work of a step, if they were recorded. Other
    fields: see `times`.
    """

    run: PlannedRun
    device: Device
    best: bool
    load: float
    stages: RankStages
    recorded: list[Message] | None = None
    recorded_work: Work | None = None

    def times(self) -> Times:
        model, layout, compute = self.run.model, self.run.layout, self.compute
        count, lanes, links = layout.micro_batches, self.lanes, LINKS[self.best]
        exposed = self.forward_exposed + self.backward_exposed + self.moving_exposed
        waited = lanes[WAITED] + count * self.host_waits
        further = phase_seconds(self.work, READING, self.each)
        if self.recorded is None:
            teacher = teacher_seconds(self.run.teacher, self.groups.shard, self.device, self.best)
            waited, further = waited + count * teacher.exposed, count * teacher.compute
        exposed, total = exposed + waited, sum(lanes.values()) + waited - lanes[WAITED]
        total += 2 * count * self.moving
        computed = count * sum(compute)
        # a forward is one of three passes over the blocks, and one of three products of the head
        computing = count * (compute.forward + compute.head / 3)
        reading = computing + waited / 3 + self.forward_exposed / self.forwards
        if self.recorded is None:
            further += self.run.further_forwards * reading
        own = units_of(self.stages, model).all.own
        exchange = self.run.exchange
        between = exchange.seconds(own, self.device, links)
        total, exposed = total + between, exposed + exchange.exposed(between, computed + exposed)
        return Times(
            computed,
            total,
            exposed,
            optimizer_seconds(model, own, self.device, layout.ranks)
            + owners_seconds(self.stages, model, self.device, self.best),
            layout.stages.idle_micro_batches * (computed + exposed) / count,
            further,
            reading,
            self.parts,
            self.work,
        )

    @cached_property
    def groups(self) -> RankGroups:
        return RankGroups.of(self.run.layout, self.device.linked_gpus)

    @cached_property
    def lanes(self) -> dict[str, float]:
        seconds: dict[str, float] = defaultdict(float)
        messages = list(PlannedMessages(self.run, self.stages, self.device))
        if self.recorded is not None:  # without copies to the host
            messages = [one for one in messages if one.dimension == HOST] + self.recorded
        for one in messages:
            if one.lane != ELSEWHERE:
                share = self.load if one.dimension == "expert" else 1.0
                seconds[one.lane] += share * one.seconds(self.device, LINKS[self.best])
        return seconds

    @property
    def of_one_unit(self) -> float:
        """Fraction of the blocks in one unit.

        Nothing hides the communication of the first unit and of the last one.
        """
        return 1 / ceil(len(self.stages.blocks) / self.run.layout.sharding.blocks_per_unit)

    @cached_property
    def each(self) -> dict[str, float]:
        return unit_seconds(self.run.model, self.device, self.best)

    @cached_property
    def work(self) -> Work:
        model, count = self.run.model, self.run.layout.micro_batches
        if self.recorded_work is None:
            work = planned_work(model, self.stages.blocks, self.stages.is_last, self.load)
            return added({}, work, count)
        if model.tower is None:  # a rehearsal has no images
            return self.recorded_work
        again = {FORWARD: 1 + self.run.further_forwards}
        tower = {
            name: size * again.get(name.partition(" ")[0], 1)
            for name, size in model.tower.work.items()
        }
        return added(self.recorded_work, tower, count)

    @cached_property
    def compute(self) -> Seconds:
        whole = seconds_of(self.work, self.each)
        return Seconds(*(seconds / self.run.layout.micro_batches for seconds in whole))

    @property
    def parts(self) -> dict[str, float]:
        parts = dict.fromkeys(PARTS.values(), 0.0)
        for kind, seconds in self.each.items():
            for phase in (FORWARD, BACKWARD):
                parts[PARTS[kind]] += self.work.get(f"{phase} {kind}", 0.0) * seconds
        return parts | {HEAD: phase_seconds(self.work, HEAD, self.each)}

    @property
    def gathers(self) -> int:
        return 1 if self.run.layout.gathers_once else self.run.layout.micro_batches

    @property
    def forwards(self) -> int:
        """Number of forwards with these messages in a micro-batch; recorded ones are of all."""
        return 1 + self.run.further_forwards * (self.recorded is not None)

    @property
    def forward_exposed(self) -> float:
        passes, unit = self.gathers * self.forwards, self.of_one_unit
        first, blocks, last = (self.lanes[lane] / passes for lane in (FIRST, BLOCKS, LAST))
        behind = max(0.0, blocks * (1 - unit) + last - self.compute.forward)
        return passes * (first + blocks * unit + behind)

    @property
    def backward_exposed(self) -> float:
        """Seconds of a step's gathers and reductions that backward does not hide."""
        count, lanes, unit = self.run.layout.micro_batches, self.lanes, self.of_one_unit
        reductions = 1 if self.run.layout.reduces_once else count
        again = lanes[AGAIN] / self.gathers
        first, blocks, last = (lanes[REDUCED[part]] / reductions for part in (FIRST, BLOCKS, LAST))

        def exposed(again: float, reduces: bool, replicas: float) -> float:
            middle = blocks * reduces + replicas
            behind = (again + middle) * (1 - unit) + last * reduces - self.compute.backward
            return (again + middle) * unit + first * reduces + max(0.0, behind)

        others = (count - 1) * exposed(again * (self.gathers > 1), reductions > 1, 0.0)
        return others + exposed(again, True, lanes[REPLICAS])

    @property
    def host_waits(self) -> float:
        """Seconds of a micro-batch in which the host waits for the numbers of rows of experts.

        They are kept for recomputation.
        """
        if self.groups.experts.ranks == 1:
            return 0.0
        return mixtures(self.run.model.config, self.stages.blocks) * HOST_WAIT

    @cached_property
    def moving(self) -> float:
        """Seconds to copy a micro-batch's activations to the host, or back."""
        model = self.run.model
        if not model.checkpointing.offload:
            return 0.0
        if self.recorded_work is None:
            traced, _ = trace_blocks(model, "cuda")
            moved = float(sum(moved_bytes(model, traced, "cuda")))
        else:
            moved = self.work.get(f"{FORWARD} {MOVED}", 0.0) / self.run.layout.micro_batches
        return moved / (self.device.host_link * LINKS[self.best])

    @property
    def moving_exposed(self) -> float:
        """Seconds of a step's copies of activations that forward and backward do not hide.

        GPUs without NVLink gather and reduce through the same link.
        """
        count, lanes = self.run.layout.micro_batches, self.lanes
        free = [count * self.compute.forward, count * self.compute.backward]
        if self.device.link <= self.device.host_link:
            free[0] -= lanes[FIRST] + lanes[BLOCKS] + lanes[LAST]
            free[1] -= lanes[AGAIN] + sum(lanes[lane] for lane in REDUCED.values())
        return sum(max(0.0, count * self.moving - max(0.0, each)) for each in free)


class TeacherSeconds(NamedTuple):
    """Seconds of a teacher's computation in a micro-batch, and of its exposed messages."""

    compute: float = 0.0
    exposed: float = 0.0


def teacher_seconds(
    teacher: PlannedTeacher | None, shard: Group, device: Device, best: bool
) -> TeacherSeconds:
    """Return the seconds of a teacher's forward, its logits, and the comparison of both models.

    Messages within a tensor group are not counted.
    """
    if teacher is None:
        return TeacherSeconds()
    model, layout = teacher.model, teacher.model.layout
    logits = layout.tokens * model.config.vocab_size / layout.sharding.tensor * SOFT_BYTES
    compared = teacher.compares * logits / (device.memory_rate * MEMORY)
    if teacher.is_stored:  # its stored lists are compared in the same way as logits
        return TeacherSeconds(compared)
    forward, _, head = compute_seconds(model, device, best)
    units, links = teacher_units(model), LINKS[best]
    parts = units.ends, units.gathered - units.ends
    first, blocks = (
        Message("shard", FIRST, size * shard.sent, size * shard.across).seconds(device, links)
        for size in parts
    )
    exposed = 0.0 if units.stays else first + max(0.0, blocks - forward)
    return TeacherSeconds(forward + head / 3 + compared, exposed)


def owners_seconds(stages: RankStages, model: PlannedModel, device: Device, best: bool) -> float:
    """Return the seconds in which Muon's owners receive matrices, orthogonalise them and answer.

    stages: those that contain the owners' matrices.
    """
    if not model.optim.spec.has_owners:
        return 0.0
    spread = 1.0 if device.efficiency else spread_of(model, best)
    products = newton_schulz_flops(stages, model) / newton_schulz_rate(model.optim, device)
    traffic = owner_traffic(stages, model, device.linked_gpus)
    return products * spread + traffic.seconds(device, LINKS[best])


def gradient_passes(optim: Optim, master_dtype: str) -> int:
    """Return how often a gradient is read or written for norm, clipping and update.

    A GPU's fused update clips; torch's kernel writes the clipped gradient back. Without clipping
    norm and update read it once each.
    """
    if optim.grad_clip is optim.grad_clip_value is None:
        return 2
    moments = moments_format(optim, master_dtype)
    is_fused = optim.spec.is_fused and moments != "8bit"
    if not is_fused or master_dtype != "float32" or optim.grad_clip_value is not None:
        return 4
    return 2 if is_compact(optim, master_dtype) else 3


def optimizer_seconds(model: PlannedModel, numbers: float, device: Device, ranks: int) -> float:
    """Return the seconds of gradient norm, clipping and AdamW for `numbers` trained parameters.

    They are determined by reading from and writing to memory, or a disk that the ranks of a node
    share. ranks: number of all ranks.
    """
    stored = model.stored_number
    state = state_bytes(model.optim, model.precision.master_dtype)
    passes = gradient_passes(model.optim, model.precision.master_dtype)
    if updates_on_host(model) and passes > 2:
        passes = 4
    moved = numbers * (2 * stored + 2 * state + passes * stored)  # weights, moments, gradient
    if not updates_on_host(model):
        return moved / (device.memory_rate * MEMORY)
    seconds = moved / HOST_ADAMW
    if model.optim.offload == "none":
        return seconds
    seconds += numbers * model.number / device.host_link  # new weights to the device
    if model.optim.offload == "cpu":
        return seconds
    # norm and clipping read and write the gradient before anything is read from the disk
    before = numbers * 3 * stored / HOST_ADAMW
    files = 2 * numbers * (stored + state) * min(ranks, device.per_node) / device.offload_disk
    return before + max(seconds - before, files)
