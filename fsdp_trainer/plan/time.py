"""The seconds of a step: computation, communication, and how far they overlap.

All are closed formulas, which docs/how-plan-works.md explains.
"""

from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import NamedTuple

from fsdp_trainer.config.devices import Device
from fsdp_trainer.config.formats import is_compact, moments_format
from fsdp_trainer.config.schema import Optim
from fsdp_trainer.optim.footprint import state_bytes
from fsdp_trainer.plan.block_memory import moved_bytes, trace_blocks
from fsdp_trainer.plan.compute import (
    MEMORY,
    Seconds,
    compute_seconds,
    newton_schulz_rate,
    spread_of,
)
from fsdp_trainer.plan.expert_exchange import busiest_over_mean
from fsdp_trainer.plan.fsdp_units import FsdpUnit, ModelUnits, sum_of
from fsdp_trainer.plan.muon_update import newton_schulz_flops, owner_traffic
from fsdp_trainer.plan.pipeline_stages import RankStages, units_of
from fsdp_trainer.plan.planned_model import PlannedModel
from fsdp_trainer.plan.planned_run import PlannedRun
from fsdp_trainer.plan.second_model import SOFT_BYTES, PlannedTeacher, teacher_units
from fsdp_trainer.plan.wire import (
    Group,
    RankGroups,
    block_factor,
    context_exchange,
    expert_exchange,
    freed_blocks,
    freed_images,
    hops,
    sent_factor,
    sent_number,
    tensor_traffic,
)

LINKS = (0.5, 0.85)
"""Lower and upper share of a link's rate that collectives reach.

NCCL's own tests on 256 H100 measured 200 (all-gather) to 340 GB/s of 400 (NVIDIA/nccl#1218).
"""
ENCODING, DECODING = 36, 15
"""Bytes read and written to encode a number of a message in 8 bits, and to decode it.

Counted from the operators of base/eight_bit_messages.py; not measured on a GPU.
"""
HOST_ADAMW = 20e9
"""Rate of host memory in bytes per second and rank with sharding.cpu_offload. Assumed."""


class Times(NamedTuple):
    """Seconds of one step.

    exposed: communication that does not overlap with computation; idle: time in which a rank of a
    pipeline waits for its first micro-batch or for the last one of other ranks; forwards:
    additional forwards without gradients, such as those of a reference model; reading: one such
    forward over the rows of a step, which is not part of the step.
    """

    compute: float
    communication: float
    exposed: float
    optimizer: float
    idle: float = 0.0
    forwards: float = 0.0
    reading: float = 0.0

    @property
    def step(self) -> float:
        """Seconds from the start of a step to the start of the next."""
        return self.compute + self.exposed + self.optimizer + self.idle + self.forwards


def times(run: PlannedRun, device: Device, best: bool, load: float = 1.0) -> Times:
    """Return the times of one step.

    In a pipeline they are those of the slowest rank, for which the others wait. best: True for the
    fast end of measured rates of computation and links, False for the slow end; load: rows that the
    busiest rank's experts get, divided by the number with even routing.
    """
    each = [StageTimes(run, stages, device, best, load).times() for stages in run.stages_by_rank]
    return max(each, key=lambda times: times.step)


class Gathering(NamedTuple):
    """Seconds to gather a rank's units.

    exposed: of the first gathering, what forward does not hide; again: to gather blocks again in
    backward; total: of both.
    """

    exposed: float
    again: float
    total: float


class Reducing(NamedTuple):
    """Seconds of a backward's messages: those that are exposed, and all reductions."""

    exposed: float
    total: float


@dataclass(frozen=True)
class StageTimes:
    """The times of a step on a rank with some stages of a pipeline. best, load: see `times`."""

    run: PlannedRun
    stages: RankStages
    device: Device
    best: bool
    load: float

    def times(self) -> Times:
        """Return the times of the step."""
        model, layout, compute = self.run.model, self.run.layout, self.compute
        count, gathering, moving = layout.micro_batches, self.gathering, self.moving
        gathers = 1 if layout.gathers_once else count
        exposed = count * sum(max(0.0, moving - free) for free in self.free_to_move)
        exposed += gathers * gathering.exposed
        total = gathers * gathering.total + count * 2 * moving
        for i in range(count):
            reducing = self.reducing(is_last=i == count - 1)
            exposed += reducing.exposed
            total += reducing.total
        teacher = teacher_seconds(self.run.teacher, self.groups.shard, self.device, self.best)
        waited = self.waited(teacher.exposed)
        exposed, total = exposed + waited, total + waited
        computed = count * (compute.forward + compute.backward + compute.head + teacher.compute)
        # a forward is one of three passes over the blocks, and one of three products of the head
        reading = count * (compute.forward + compute.head / 3) + waited / 3
        reading += gathers * gathering.exposed
        optimizer = optimizer_seconds(model, self.units.all.own, self.device, layout.ranks)
        exchange = self.run.exchange
        between = exchange.seconds(self.units.all.own, self.device, self.links)
        total, exposed = total + between, exposed + exchange.exposed(between, computed + exposed)
        return Times(
            computed,
            total,
            exposed,
            optimizer + owners_seconds(self.stages, model, self.device, self.best),
            layout.stages.idle_micro_batches * (computed + exposed) / count,
            self.run.further_forwards * reading,
            reading,
        )

    @property
    def links(self) -> float:
        """Fraction of the links' rate that collectives reach."""
        return LINKS[self.best]

    @cached_property
    def groups(self) -> RankGroups:
        """The groups in which the rank communicates."""
        return RankGroups.of(self.run.layout, self.device.linked_gpus)

    @cached_property
    def units(self) -> ModelUnits:
        """The units of the rank's stages."""
        return units_of(self.stages, self.run.model)

    @property
    def last_unit(self) -> FsdpUnit:
        """The unit of norm and head, empty if it is that of the embedding."""
        return FsdpUnit() if self.units.tied else self.units.last

    @property
    def of_one_unit(self) -> float:
        """Fraction of the blocks in one unit.

        Nothing hides the communication of the first unit and of the last one.
        """
        return 1 / ceil(len(self.stages.blocks) / self.run.layout.sharding.blocks_per_unit)

    @cached_property
    def compute(self) -> Seconds:
        """The computation of a micro-batch."""
        model = self.run.model
        forward, backward, head = compute_seconds(model, self.device, self.best)
        own = self.stages.of_blocks(model.config)
        ranks = self.run.layout.sharding.expert
        slowest = own * busiest_over_mean(model.part, ranks, self.load)
        return Seconds(slowest * forward, slowest * backward, self.stages.is_last * head)

    @cached_property
    def gathering(self) -> Gathering:
        """The gathering of units for one forward and backward."""
        unit, model = self.of_one_unit, self.run.model
        factor, others = block_factor(model), sent_factor(model)
        ends = self.units.first, self.last_unit, self.units.all_images
        first, last, images = (self._gather(each, others) for each in ends)
        blocks = self._gather(self.units.all_blocks, factor) + images
        hidden = max(0.0, blocks * (1 - unit) + last - self.compute.forward)
        freed = sum_of(freed_blocks(self.stages, self.units, model))
        has_copy = self.run.layout.copy_ranks > 0
        # a second copy is gathered as it is, from neighbours
        how = (1.0, self.groups.again) if has_copy else (factor, None)
        again = self._gather(freed, *how)
        again += self._gather(freed_images(self.units, model), others)
        return Gathering(first + blocks * unit + hidden, again, first + blocks + last + again)

    def reducing(self, is_last: bool) -> Reducing:
        """Return the messages of a backward. is_last: True for the last micro-batch."""
        unit, again, units = self.of_one_unit, self.gathering.again, self.units
        ends = middle = last = 0.0
        if is_last or not self.run.layout.reduces_once:
            middle_units = sum_of([units.all_blocks, units.all_images])
            ends, middle, last = (
                self._reduce(unit, is_last) for unit in (units.first, middle_units, self.last_unit)
            )
        hidden = max(0.0, (again + middle) * (1 - unit) + last - self.compute.backward)
        return Reducing(again * unit + hidden + middle * unit + ends, ends + middle + last)

    def waited(self, teacher: float) -> float:
        """Return the seconds of a step's messages with which no computation overlaps.

        teacher: those of its messages in a micro-batch.
        """
        model, device, links, groups = self.run.model, self.device, self.links, self.groups
        count, traffic = self.run.layout.micro_batches, tensor_traffic(model, self.stages)
        messages = count * (traffic.gathers + traffic.sums)
        waited = messages * groups.tensor.seconds(traffic.size, device, links)
        waited += count * hops(model, device, self.stages).seconds(device, links)
        if groups.context.ranks > 1:
            own = self.stages.of_blocks(model.config)
            exchange = context_exchange(model, groups.context)
            waited += count * own * exchange.seconds(device, links)
        rows = expert_exchange(model, groups.experts, self.stages)
        waited += count * rows.seconds(device, links, self.load)
        return waited + count * teacher

    @cached_property
    def moving(self) -> float:
        """Seconds to copy a micro-batch's activations to the host, or back."""
        model = self.run.model
        if not model.checkpointing.offload:
            return 0.0
        traced, _ = trace_blocks(model, "cuda")
        moved = sum(moved_bytes(model, traced, "cuda"))
        return moved / (self.device.host_link * self.links)

    @property
    def free_to_move(self) -> tuple[float, float]:
        """Seconds of forward and of backward in which the link to the host is free.

        GPUs without NVLink gather and reduce through the same link.
        """
        forward, backward = self.compute.forward, self.compute.backward
        if self.device.link > self.device.host_link:
            return forward, backward
        gathering = self.gathering
        messages = gathering.total - gathering.again, gathering.again + self.reducing(False).total
        return max(0.0, forward - messages[0]), max(0.0, backward - messages[1])

    def _gather(self, unit: FsdpUnit, factor: float = 1.0, group: Group | None = None) -> float:
        """Return the seconds to gather a unit.

        factor: on the bytes of its messages; group: that gathers all but experts on a separate
        mesh; None: the ranks that shard it.
        """
        model = self.run.model
        stored = model.stored_number if model.optim.offload == "none" else model.number
        of_host = (unit.own * stored + unit.frozen) * self._from_host
        shard, expert_shards = group or self.groups.shard, self.groups.expert_shards
        of_experts = expert_shards.seconds(unit.experts * factor, self.device, self.links)
        others = (unit.gathered - unit.experts) * factor
        seconds = of_experts + shard.seconds(others, self.device, self.links) + of_host
        if self.run.layout.encodes_weights and group is None:
            seconds += self._in_memory(unit.gathered / model.number * DECODING)
        return seconds

    def _reduce(self, unit: FsdpUnit, is_last: bool) -> float:
        """Return the seconds to reduce a unit's gradients. is_last: also over replicas."""
        model, device, links = self.run.model, self.device, self.links
        number, stored = sent_number(model), model.stored_number
        shard, expert_shards = self.groups.shard, self.groups.expert_shards
        others = unit.trained_padded - unit.trained_experts
        seconds = shard.seconds(others * number, device, links)
        seconds += expert_shards.seconds(unit.trained_experts * number, device, links)
        over_replicas = 0.0
        if is_last:
            size = unit.own * model.reduced_number
            over_replicas = 2 * self.groups.replicate.seconds(size, device, links)
        if self.run.layout.encodes_gradients:
            seconds += self._in_memory(unit.trained_padded * (ENCODING + DECODING))
        return seconds + over_replicas + unit.own * stored * self._to_host

    def _in_memory(self, size: float) -> float:
        """Return the seconds to read from and write to the device's memory `size` bytes in all."""
        return size / (self.device.memory_rate * MEMORY)

    @property
    def _from_host(self) -> float:
        """Seconds to copy a byte of the weights from the host; 0 if they are not gathered there."""
        return 1 / self.device.host_link if self.run.layout.sharding.cpu_offload else 0.0

    @property
    def _to_host(self) -> float:
        """Seconds to copy a byte of a gradient to the host; 0 if it is not updated there."""
        return 1 / self.device.host_link if updates_on_host(self.run.model) else 0.0


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
    ends = units.first.gathered + units.last.gathered * (not model.config.tie_word_embeddings)
    first, blocks = (shard.seconds(size, device, links) for size in (ends, units.gathered - ends))
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


def updates_on_host(model: PlannedModel) -> bool:
    """Return True if the host updates the weights."""
    return model.layout.sharding.cpu_offload or model.optim.offload != "none"


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
