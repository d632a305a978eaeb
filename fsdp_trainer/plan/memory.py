"""The memory of a rank at each moment of a step.

Follows the order in which FSDP2 gathers, computes and reduces. Each kind of block is traced once.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from fsdp_trainer.base.eight_bit_messages import BYTES
from fsdp_trainer.offload.offloaded_optimizer import BUFFERS
from fsdp_trainer.offload.parts import SLICED_BYTES
from fsdp_trainer.optim.footprint import Update, update_bytes
from fsdp_trainer.parallel.memory_check import Places
from fsdp_trainer.plan.block_memory import (
    logit_bytes,
    moved_bytes,
    norm_traced,
    pinned_bytes,
    trace_blocks,
)
from fsdp_trainer.plan.blocks import TracedPart
from fsdp_trainer.plan.fsdp_units import FsdpUnit, ModelUnits, sum_of
from fsdp_trainer.plan.pipeline_stages import (
    RankStages,
    added_units,
    fetched_units,
    matrices_of,
    units_of,
)
from fsdp_trainer.plan.planned_model import PlannedModel
from fsdp_trainer.plan.planned_run import PlannedRun
from fsdp_trainer.plan.planned_tower import PlannedTower
from fsdp_trainer.plan.second_model import (
    COMPARED_BYTES,
    PlannedTeacher,
    TeacherUnits,
    teacher_units,
)
from fsdp_trainer.plan.wire import sent_factor

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "gathered",
    "communication",
    "activations",
    "logits",
    "allowance",
)
PHASES = ("forward", "head and loss", "backward", "update")
GIB = 2**30
SUM_BYTES = 4
"""Bytes of a number in sums of 8-bit messages, and in what their encoding has cut off."""
BESIDE = {"cuda": 1.0 * GIB, "cpu": 0.45 * GIB}
"""Bytes of a process without its tensors.

cuda: context, NCCL's channels and cuBLAS's workspaces, assumed; cpu: Python with torch, measured.
"""
ROUNDING = {"cuda": 0.03, "cpu": 0.02}
"""Share of the tensors' bytes that the allocator loses to fragmentation; on a GPU assumed."""


class Moment(NamedTuple):
    """Bytes that a rank holds at one moment of a step.

    when: description for people, such as `backward of block 32`; bytes: by category, with all of
    `CATEGORIES`; phase: one of `PHASES`, for scripts. Categories: gathered: unsharded parameters,
    and unsharded gradients that are not yet reduced; communication: messages of both; activations:
    including temporary tensors of operators; logits: tensors that the head allocates; allowance:
    bytes that belong to no tensor.
    """

    when: str
    bytes: dict[str, float]
    phase: str

    @property
    def total(self) -> float:
        """Sum over the categories, in bytes."""
        return sum(self.bytes.values())


class Memory(NamedTuple):
    """The memory of a rank in a step.

    moments: the largest moment of each phase; host: bytes of host memory that a rank on a GPU uses
    for offloaded tensors; tensors: most bytes of tensors at any moment, without the allowance;
    disk: bytes of files of states.
    """

    moments: tuple[Moment, ...]
    host: float
    tensors: float
    disk: float = 0.0

    @property
    def peak(self) -> Moment:
        """The moment with most bytes."""
        return max(self.moments, key=lambda moment: moment.total)


def memory(run: PlannedRun, device: str = "cuda", load: float = 1.0) -> Memory:
    """Return the memory of the rank that needs most, in a step whose tokens are all supervised.

    device: cuda or cpu; load: rows that the experts of this rank get, divided by the number with
    even routing.

    Compiled blocks keep the tensors that torch's partitioner would keep. The memory with
    activation_checkpoint=budget is interpolated between none and full.
    """
    steps = [Step(run, stages, device, load) for stages in run.stages_by_rank]
    for step in steps:
        step.score_answers()
        step.forward()
        step.head()
        step.backward()
        step.update()
    moments = [moment for step in steps for moment in step.moments.largest()]
    phases = dict.fromkeys(moment.phase for moment in moments)
    largest = [
        max((m for m in moments if m.phase == phase), key=lambda moment: moment.total)
        for phase in PHASES
        if phase in phases
    ]
    tensors = max(step.moments.most_tensors for step in steps)
    host, disk = (max(getattr(step.states, place) for step in steps) for place in ("host", "disk"))
    return Memory(tuple(largest), host, tensors, disk)


# --- what does not change in a step


@dataclass(frozen=True)
class RankUnits:
    """The FSDP units of a rank's stages.

    stored: with all bytes; fetched: with the bytes that each micro-batch gathers; staged: bytes
    that stay gathered from the first micro-batch of the step; blocks_per_unit: see sharding; ranks,
    expert_ranks: numbers of ranks over which parameters are sharded, and experts; copy_ranks:
    number of those among which a second copy is divided, 0: there is none; frozen: number of units
    of blocks before all that backward reaches, which keep no copy; encoded: bytes that are received
    for a gathered byte in 8-bit numbers, 0: weights are sent as they are.
    """

    stored: ModelUnits
    fetched: ModelUnits
    staged: float
    blocks_per_unit: int
    ranks: int
    expert_ranks: int
    device: str
    copy_ranks: int
    frozen: int
    encoded: float

    @classmethod
    def of(cls, model: PlannedModel, stages: RankStages, device: str) -> "RankUnits":
        """Return the units of a rank with these stages."""
        layout, stored = model.layout, units_of(stages, model)
        size, gathered = layout.sharding.blocks_per_unit, added_units(stored, layout, device)
        fetched = fetched_units(gathered, layout.gathers_once)
        frozen = stages.is_first * model.own.backward_from // size
        return cls(
            stored,
            fetched,
            gathered.all.gathered - fetched.all.gathered,
            size,
            layout.fsdp_ranks,
            layout.expert_sizes["eshard"],
            device,
            layout.copy_ranks,
            frozen,
            sent_factor(model) if layout.encodes_weights else 0.0,
        )

    @cached_property
    def sizes(self) -> list[int]:
        """Number of blocks of each unit of blocks."""
        count, size = len(self.fetched.blocks), self.blocks_per_unit
        return [min(size, count - i) for i in range(0, count, size)]

    @cached_property
    def of_blocks(self) -> list[FsdpUnit]:
        """The units of blocks."""
        blocks, size = self.fetched.blocks, self.blocks_per_unit
        return [sum_of(blocks[i : i + size]) for i in range(0, len(blocks), size)]

    def received_again(self, number: int) -> float:
        """Return the same for a unit of blocks that backward gathers, maybe from a second copy."""
        message = self.message(self.of_blocks[number])
        return 0.0 if self.copy_ranks else self.received(message)

    @property
    def copies(self) -> float:
        """Bytes of this rank's part of all weights in the number format of the computation."""
        gathered, experts = self.stored.all.gathered, self.stored.all.experts
        return (gathered - experts) / self.ranks + experts / self.expert_ranks

    def copy_of(self, number: int) -> float:
        """Return the bytes of a second copy of a unit of blocks that a rank holds."""
        if not self.copy_ranks or number < self.frozen:
            return 0.0
        return self.of_blocks[number].gathered / self.copy_ranks

    def message(self, *units: FsdpUnit) -> float:
        """Return the bytes of the message that gathers units; 0 if one rank holds them."""
        experts = sum(unit.experts for unit in units)
        others = sum(unit.gathered for unit in units) - experts
        return others * (self.ranks > 1) + experts * (self.expert_ranks > 1)

    def gloo_copy(self, message: float) -> float:
        """Return the bytes of the temporary copy of a message for gloo; 0 on a GPU.

        Gathers of weights as they are need none: see parallel/gloo_messages.py.
        """
        return message if self.device == "cpu" and self.ranks > 1 else 0.0

    def received(self, message: float) -> float:
        """Return the temporary bytes beside a message of gathered weights, while it arrives.

        In 8-bit numbers they are this rank's encoded part and those of all ranks.
        """
        sent = message * self.encoded
        return sent * (1 + 1 / self.ranks) + self.gloo_copy(sent)


class Activations(NamedTuple):
    """The memory of a micro-batch's blocks and ends on a rank.

    traced: of each block; moved: bytes of each block that are in host memory between its forward
    and its backward; hidden: bytes of the hidden states of all tokens in the head; stream: between
    blocks; norm: the norm before the head, and an MTP head; common: bytes that all blocks use;
    waiting: bytes of a pipeline's forwards that wait for their backward.
    """

    traced: list[TracedPart]
    moved: list[int]
    hidden: int
    stream: float
    norm: TracedPart
    common: float
    waiting: float

    @classmethod
    def of(cls, model: PlannedModel, stages: RankStages, device: str, load: float) -> "Activations":
        """Return the memory on a rank with these stages."""
        layout = model.layout
        traced, common = trace_blocks(model, device, load)
        traced = stages.of(traced)
        hidden = layout.tokens * model.config.hidden_size * model.number
        stream = hidden / layout.sharding.tensor
        norm = norm_traced(model.own, layout.tokens, model.precision.param_dtype)
        heads = model.part.shape.mtp_heads
        if heads:  # taken to be as the last block, with states and embeddings joined before
            norm = norm._replace(saved=norm.saved + traced[-1].saved + 4 * hidden)
        return cls(
            traced,
            moved_bytes(model, traced, device),
            hidden * (1 + heads),
            stream,
            norm,
            float(common),
            _waiting(model, stages, traced, common, stream),
        )


def _waiting(
    model: PlannedModel, stages: RankStages, traced: list[TracedPart], common: float, stream: float
) -> float:
    """Return the bytes of activations of a pipeline's forwards that wait for their backward.

    Each forward keeps the activations of its blocks, and its output. In addition there are one
    input being received and one output being sent.
    """
    division = model.layout.stages
    if division.ranks == 1:
        return 0.0
    saved = sum(block.saved for block in traced) / division.order.stages
    return stages.waiting * (saved + common + stream) + 2 * stream


class States(NamedTuple):
    """The model's states on a rank.

    device: bytes of parameters and of optimizer state on the device; host: bytes in host memory,
    with activations that are moved there; gradient: bytes of a number of a sharded gradient on the
    device; disk: bytes in files.
    """

    device: dict[str, float]
    host: float
    gradient: int
    disk: float = 0.0

    @classmethod
    def of(cls, units: FsdpUnit, master: int, places: Places, copies: float) -> "States":
        """Return the states of all units of a rank. Mapped files are not counted as memory.

        master: bytes of a trained weight's number; copies: bytes of weights to compute with that
        are no states.
        """
        held: dict[str, dict[str, float]] = {"device": {}, "host": {}, "disk": {}}

        def add(place: str, category: str, size: float) -> None:
            held[place][category] = held[place].get(category, 0.0) + size

        add(places.states, "parameters", units.own * master)
        add(places.states, "optimizer", units.state)
        filed = sum(held["disk"].values())
        add(places.gradients, "parameters", units.frozen + buffers_bytes(filed))
        if places.copies:
            add(places.copies, "parameters", copies)
        on_device = places.gradients == "device"
        host = sum(held["host"].values()) + (0.0 if on_device else units.own * master)
        return cls(held["device"], host, master if on_device else 0, filed)

    def with_others(
        self, activations: Activations, teacher: TeacherUnits | None, whole: float
    ) -> "States":
        """Return the states with moved activations, a teacher, and models that are not sharded.

        whole: bytes of the latter. A teacher is on the host only with sharding.cpu_offload.
        """
        host, device = self.host, dict(self.device)
        host += sum(pinned_bytes(moved, activations.stream) for moved in activations.moved)
        if teacher is not None and not device:
            host += teacher.states
        elif teacher is not None:
            device["parameters"] += teacher.states
        if whole:
            device["parameters"] = device.get("parameters", 0.0) + whole
        return self._replace(device=device, host=host)


def buffers_bytes(filed: float) -> float:
    """Return the bytes of the buffers through which states in files are updated.

    filed: bytes of a rank's states. A parameter is never larger than all of them.
    """
    return BUFFERS * min(filed, SLICED_BYTES)


# --- what changes


@dataclass
class Held:
    """Bytes that a rank holds, from moment to moment.

    gradients: sharded gradients, or the unsharded ones that are reduced once a step; sharded: the
    sharded part of them; gathered: unsharded parameters that stay gathered; saved: activations kept
    for backward; waiting: unsharded gradients not yet copied into a message; copying: moved
    activations while they are copied out or back; in_flight: messages of gradients; reduced:
    messages between replicas, which stay until the end of backward if the gradient is a cast copy
    of them; teacher_gathered, teacher_activations: of a teacher, without its shards.
    """

    gradients: float
    sharded: float
    gathered: float
    saved: float
    waiting: float = 0.0
    copying: float = 0.0
    in_flight: deque[float] = field(default_factory=deque)
    reduced: float = 0.0
    teacher_gathered: float = 0.0
    teacher_activations: float = 0.0

    def keep_gathered(self, size: float) -> None:
        """Add parameters that stay gathered; a negative size removes them."""
        self.gathered += size

    def after_block(self, saved: float, moved: float) -> None:
        """Add what a block saves for backward, of which `moved` is copied out."""
        self.copying = moved
        self.saved += saved - moved

    def before_backward(self, saved: float, moved: float, next_moved: float) -> None:
        """Remove what a block saved, as `after_block` added it, and copy the next one's back."""
        self.saved -= saved - moved
        self.copying = next_moved

    def keep_teacher(self, gathered: float, activations: float) -> None:
        """Add a teacher's gathered parameters, and set what it leaves of activations."""
        self.teacher_gathered += gathered
        self.teacher_activations = activations

    def end_backward(self, gathered: float) -> None:
        """Leave only what stays gathered until the next micro-batch."""
        self.gathered, self.waiting = gathered, 0.0

    def wait(self, gradients: float) -> None:
        """Keep unsharded gradients, which are copied into the next message."""
        self.waiting = gradients

    def send(self, message: float, buffers: int) -> None:
        """Add a message of gradients; of earlier ones all but `buffers` - 1 have arrived."""
        while len(self.in_flight) >= buffers:
            self.in_flight.popleft()
        self.in_flight.append(message)

    def reduce(self, unsharded: float, sharded: float, between_replicas: float) -> None:
        """Remove reduced unsharded gradients, and add their shards and messages of replicas."""
        self.gradients += sharded - unsharded
        self.sharded += sharded
        self.reduced += between_replicas

    def end_step(self, gradients: float) -> None:
        """Leave nothing but this rank's sharded gradients."""
        self.in_flight.clear()
        self.gathered, self.saved, self.reduced = 0.0, 0.0, 0.0
        self.gradients = self.sharded = gradients


class Now(NamedTuple):
    """Bytes of one moment in addition to those that are held.

    activations: all of them, with those that are kept; gathered: in addition to what stays
    gathered; fetched, sent: messages of parameters and of gradients.
    """

    activations: float
    gathered: float = 0
    fetched: float = 0
    sent: float = 0
    logits: float = 0


class LargestMoments:
    """The largest moment of each phase.

    states: bytes of states on the device; most_sharded: of all sharded gradients from messages.
    """

    def __init__(self, device: str, states: dict[str, float], most_sharded: float):
        self.device, self.states, self.most_sharded = device, states, most_sharded
        self.most_tensors = 0.0
        self._most_fetched = 0.0
        self._of_phase: dict[str, tuple[float, str, dict[str, float], float]] = {}
        """By phase: total, when, bytes by category, and idle bytes.

        Idle bytes are in the pools of CUDA streams. The largest message of parameters is
        subtracted, since `largest` adds it everywhere.
        """

    def add(self, phase: str, when: str, held: Held, now: Now) -> None:
        """Record a moment, if it is the largest of its phase."""
        parts = {
            "gradients": held.gradients,
            "gathered": held.gathered + held.waiting + now.gathered + held.teacher_gathered,
            "communication": now.fetched + now.sent + sum(held.in_flight) + held.reduced,
            "activations": now.activations + held.copying + held.teacher_activations,
            "logits": now.logits,
        }
        self._most_fetched = max(self._most_fetched, now.fetched)
        # CUDA's allocator reuses a freed block only on the same stream. Messages of parameters
        # have their own stream, and so have reduced gradients (`foreach_reduce` of torch's FSDP2),
        # which zero_grad frees before the next forward
        on_gpu = self.device == "cuda"
        idle = max(0.0, self.most_sharded - held.sharded) - now.fetched if on_gpu else 0.0
        self.most_tensors = max(self.most_tensors, sum(parts.values()) + sum(self.states.values()))
        total = sum(parts.values()) + idle
        if phase not in self._of_phase or total > self._of_phase[phase][0]:
            self._of_phase[phase] = total, when, parts, idle

    def largest(self) -> list[Moment]:
        """Return the largest moment of each phase."""
        moments = []
        most_fetched = self._most_fetched if self.device == "cuda" else 0.0
        for phase, (_, when, held, idle) in self._of_phase.items():
            pools = most_fetched + idle
            tensors = sum(held.values()) + sum(self.states.values())
            lost = BESIDE[self.device] + ROUNDING[self.device] * tensors
            parts = {**self.states, **held, "allowance": lost + pools}
            moments.append(Moment(when, {name: parts.get(name, 0.0) for name in CATEGORIES}, phase))
        return moments


# --- a step


class Step:
    """The last micro-batch of a step, and the update, on a rank with some stages of a pipeline.

    units, activations, states do not change; held does; moments: the largest of each phase; later:
    True if other micro-batches came before this one; sums_whole: True if gradients were summed
    unsharded in them; takes_gradients: True if one rank's gradients become those of its weights
    without a message (see torch_private.spare_one_rank); compared: bytes for each logit that is
    compared with a teacher's.
    """

    def __init__(self, run: PlannedRun, stages: RankStages, device: str, load: float):
        model, layout = run.model, run.layout
        self.model, self.layout, self.stages, self.device = model, layout, stages, device
        self.units = RankUnits.of(model, stages, device)
        self.activations = Activations.of(model, stages, device, load)
        self.teacher = run.teacher_in_memory
        self.compared = COMPARED_BYTES if run.teacher and run.teacher.compares else 0
        self.teacher_units = teacher_units(self.teacher.model, device) if self.teacher else None
        self.tower = model.tower
        whole, master = self.units.stored.all, model.stored_number
        # rollout ranks score what they have generated
        self.scoring = run.scoring if run.training_ranks_score else ()
        others = sum(one.weights for one in self.scoring)
        teacher = self.teacher_units
        places = Places.of(layout.sharding, model.optim)
        if device == "cpu":
            places = places.without_host()
        states = States.of(whole, master, places, self.units.copies)
        self.states = states.with_others(self.activations, teacher, others)
        if layout.encodes_gradients and layout.sharding.error_feedback:
            kept = self.states.device.get("optimizer", 0.0) + whole.trained_padded * SUM_BYTES
            self.states.device["optimizer"] = kept
        self.reshard = not model.keeps_gathered
        self.backward_from = stages.is_first * model.own.backward_from
        self.later = layout.batch.rows > layout.batch.micro_rows * layout.batch_ranks
        self.sums_whole = self.later and layout.reduces_once
        self.held = self._held_at_first()
        is_alone = self.units.ranks == layout.sizes["replicate"] == 1
        self.takes_gradients = is_alone and self.states.gradient > 0
        reduced = 0.0 if self.takes_gradients else whole.own * self.states.gradient
        self.moments = LargestMoments(device, self.states.device, reduced)

    def _held_at_first(self) -> Held:
        """Return the bytes held when the micro-batch begins."""
        whole, replicated = self.units.stored.all, self.layout.sizes["replicate"] > 1
        gradients = 0.0
        if self.sums_whole:
            gradients = float(whole.trained * self.model.reduced_number)
        elif self.later:
            number = self.model.reduced_number if replicated else self.states.gradient
            gradients = float(whole.own * number)
        teacher = self.teacher_units
        return Held(
            gradients=gradients,
            sharded=0.0 if self.sums_whole else gradients,
            gathered=self.units.staged,
            saved=self.activations.common + self.activations.waiting + self.pixels,
            teacher_gathered=teacher.gathered * teacher.stays if teacher is not None else 0.0,
        )

    def at(self, phase: str, when: str, now: Now) -> None:
        """Record a moment, if it is the largest of its phase."""
        self.moments.add(phase, when, self.held, now)

    def score_answers(self) -> None:
        """Record the moments in which reward models score answers, before the step."""
        teacher = self.teacher_units
        gathered = teacher.gathered * teacher.stays if teacher is not None else 0.0
        for one in self.scoring:
            held = Held(0.0, 0.0, 0.0, 0.0, teacher_gathered=gathered)
            now = Now(one.activations(self.device))
            self.moments.add("forward", f"the forward of the reward {one.title}", held, now)

    def forward(self) -> None:
        """Record the moments of the forward of the embedding and the blocks.

        A unit's message stays until the next unit's is copied out: FSDP2's `wait_for_unshard` keeps
        the previous one in a local variable until it returns.
        """
        if self.teacher is not None and self.teacher_units is not None:
            self.teacher_forward(self.teacher, self.teacher_units)
        held, units, stream = self.held, self.units, self.activations.stream
        traced, moved = self.activations.traced, self.activations.moved
        if self.tower is not None:
            self.tower_forward(self.tower)
        first = units.fetched.first
        before = units.message(first)
        self.at("forward", "embedding", Now(held.saved + stream, first.gathered, before))
        if units.fetched.tied or not self.reshard:
            held.keep_gathered(first.gathered)
        done = 0
        for i, unit in enumerate(units.of_blocks):
            mine, own = unit.gathered, units.message(unit)
            ahead = units.of_blocks[i + 1 : i + 1 + self.layout.sharding.prefetch]
            fetched = own + units.message(*ahead)
            sent = max(before, units.received(own))
            when = f"gathering before block {done + 1}"
            self.at("forward", when, Now(held.saved + stream, mine, fetched, sent))
            before = own
            for _ in range(units.sizes[i]):
                now = Now(held.saved + traced[done].forward, mine, fetched)
                self.at("forward", f"forward of block {done + 1}", now)
                held.after_block(traced[done].saved, moved[done])
                done += 1
            held.keep_gathered(units.copy_of(i) if self.reshard else mine)

    @property
    def pixels(self) -> float:
        """Bytes of a micro-batch's pixels."""
        return 0.0 if self.tower is None else self.tower.pixels

    def tower_forward(self, tower: PlannedTower) -> None:
        """Record the moments of the forward of a tower for images.

        Its own unit stays gathered meanwhile, and its states for the language model until they are
        among those of all tokens.
        """
        held, units = self.held, self.units
        *parts, rest = units.fetched.images
        for number, unit in enumerate(parts[: tower.depth]):
            block, message = tower.traced(number), units.message(unit)
            now = Now(held.saved + block.forward, rest.gathered + unit.gathered, 2 * message)
            self.at("forward", f"forward of block {number + 1} of the tower", now)
            held.after_block(block.saved, 0)
            held.keep_gathered(0 if self.reshard else unit.gathered)
        held.keep_gathered(0 if self.reshard else sum_of([*parts[tower.depth :], rest]).gathered)
        held.after_block(tower.kept_by_projectors, 0)
        stream = self.activations.stream
        now = Now(held.saved + tower.projected + 2 * stream, units.fetched.first.gathered)
        self.at("forward", "images among the tokens", now)

    def tower_backward(self, tower: PlannedTower) -> None:
        """Record the moments of the backward of a tower for images, its last block first."""
        held, units = self.held, self.units
        *parts, rest = units.fetched.images
        for unit in parts[tower.depth :]:
            whole = unit.trained * self.model.number
            held.keep_gathered(0 if self.reshard else -unit.gathered)
            self.at("backward", "projector", Now(held.saved + tower.stream, unit.gathered + whole))
            self._send(unit, whole, 0.0, "the projector")
        held.after_block(-tower.kept_by_projectors, 0)
        for number in reversed(range(tower.depth if tower.is_reached else 0)):
            unit, block = parts[number], tower.traced(number)
            fetched = 2 * units.message(unit) if self.reshard else 0.0
            held.keep_gathered(0 if self.reshard else -unit.gathered)
            held.before_backward(block.saved, 0, 0)
            others = rest.gathered * self.reshard + unit.gathered
            now = Now(held.saved + block.backward, others, fetched)
            when = f"block {number + 1} of the tower"
            self.at("backward", f"backward of {when}", now)
            self._send(unit, unit.trained * self.model.number, fetched, when)
        if tower.is_reached:
            self._send(rest, rest.trained * self.model.number, 0.0, "the tower's ends")

    def teacher_forward(self, teacher: PlannedTeacher, units: TeacherUnits) -> None:
        """Record the moments of the teacher's forward.

        A teacher leaves its head gathered, and its hidden states. A reference model computes its
        own logits and leaves nothing.
        """
        model, held = teacher.model, self.held
        hidden = model.layout.tokens * model.config.hidden_size * model.number
        [*_, block], common = trace_blocks(model, self.device)
        is_freed = not units.stays
        message = self.units.message(units.block)
        tied = units.first.gathered * model.config.tie_word_embeddings
        now = Now(
            held.saved + common + block.forward,
            is_freed * (units.block.gathered + tied),
            is_freed * 2 * message,
            is_freed * self.units.received(message),
        )
        self.at("forward", f"the {teacher.name}'s forward", now)
        end, after = f"the end of the {teacher.name}'s forward", held.saved + common + 2 * hidden
        if not teacher.compares:
            logits = logit_bytes(model, self.device, differentiates=False)
            self.at("forward", end, Now(after, is_freed * units.last.gathered, logits=logits))
            return
        held.keep_teacher(is_freed * units.last.gathered, hidden)
        self.at("forward", end, Now(after))

    def head(self) -> None:
        """Record the moments of final norm, head and loss, forward and backward.

        The gradients are computed together with the logits, the weight's gradient in float32.
        Backward returns scaled copies of them.
        """
        if not self.stages.is_last:
            return
        phase, half = "head and loss", self.model.number < 4
        units, last, hidden = self.units, self.units.fetched.last, self.activations.hidden
        tied, last_blocks = units.fetched.tied, units.of_blocks[-1]
        if not tied:
            self._gather_head(last)
        mine = 0 if tied else last.gathered
        trained = trained_numbers(self.model.own.head)
        slopes = trained * 4 + hidden
        inputs = hidden * (2 if half else 1)  # in float32 the norm keeps its input
        before = self.held.saved + self.activations.norm.saved
        fetched = units.message(last_blocks if tied else last)
        logits = slopes + self._logits(trained)
        self.at(phase, "head and loss", Now(before + inputs, mine, fetched, logits=logits))
        fetched = units.message(last_blocks) if self.reshard else 0.0
        whole = trained * self.model.number
        copied = whole if half else 0
        if self._compares and self.teacher_units is not None:
            # the teacher's head is freed when the student's forward ends
            is_freed = not self.teacher_units.stays
            self.held.keep_teacher(-is_freed * self.teacher_units.last.gathered, 0.0)
        now = Now(before, mine + copied, fetched, logits=slopes)
        self.at(phase, "backward of the head", now)
        if tied:
            self.held.wait(whole)
        else:
            self._send(last, whole, fetched, "head")

    def _gather_head(self, last: FsdpUnit) -> None:
        """Record the moment in which the head's own unit is gathered."""
        message, before = self.units.message(last), self.units.message(self.units.of_blocks[-1])
        now = Now(self.held.saved + self.activations.stream, last.gathered, message, before)
        self.at("head and loss", "gathering before the head", now)

    @property
    def _compares(self) -> bool:
        """True if a chunk's logits are compared with those of a teacher in memory."""
        return self.teacher is not None and self.teacher.compares

    def _logits(self, trained: int) -> float:
        """Return the bytes of a chunk's logits. trained: size of the head's matrix, 0 if frozen."""
        model, compute = self.model, self.model.number
        if model.config.scores:
            return 0.0  # one score for each answer
        copy = trained * compute if compute < 4 and self.device == "cpu" else 0
        return logit_bytes(model, self.device, self.compared) + copy

    def backward(self) -> None:
        """Record the moments of backward of the blocks, last ones first, and of the embedding."""
        held, units, stream = self.held, self.units, self.activations.stream
        traced, moved = self.activations.traced, self.activations.moved
        done = len(traced)
        for i, unit in reversed([*enumerate(units.of_blocks)]):
            if done <= self.backward_from:
                break  # nothing before this block is trained
            mine, whole = unit.gathered, 0.0
            ahead = units.of_blocks[max(0, i - max(1, self.layout.sharding.prefetch)) : i]
            fetched = units.message(*ahead) if self.reshard else 0.0
            held.keep_gathered(0 if self.reshard else -mine)
            copied = units.received_again(i - 1) if i and self.reshard else 0.0
            when = f"gathering before block {done} goes back"
            self.at("backward", when, Now(held.saved + stream, mine, fetched + copied))
            held.keep_gathered(-units.copy_of(i))
            for _ in range(units.sizes[i]):
                block = traced[done - 1]
                next_moved = moved[done - 2] if done > 1 else 0.0
                held.before_backward(block.saved, moved[done - 1], next_moved)
                now = Now(
                    held.saved + block.backward - block.gradients,
                    mine + whole + block.gradients,
                    fetched,
                )
                self.at("backward", f"backward of block {done}", now)
                whole += units.fetched.blocks[done - 1].trained * self.model.number
                done -= 1
            self._send(unit, whole, fetched, f"block {done + 1}")
        if self.tower is not None and self.tower.trains_anything:
            self.tower_backward(self.tower)
        self._backward_of_embedding()

    def _backward_of_embedding(self) -> None:
        """Record the moments of the embedding's backward, after which nothing stays gathered."""
        held, numbers = self.held, 0
        if self.stages.is_first:
            numbers = trained_numbers(self.model.own.embedding)
        whole = numbers * self.model.number
        now = Now(held.saved + self.activations.stream, whole)
        self.at("backward", "backward of the embedding", now)
        held.end_backward(self.units.staged)
        self._send(self.units.fetched.first, whole, 0.0, "embedding")

    def _send(self, unit: FsdpUnit, whole: float, fetched: float, name: str) -> None:
        """Record the moments in which a unit's gradients are reduced to this rank's shard.

        whole: bytes of the unsharded gradients, which are copied into a message. Messages stay
        until later units send theirs (sharding.reduce_scatter_buffers); fetched: bytes of messages
        of parameters; name: of the unit.
        """
        phase = "head and loss" if name == "head" else "backward"
        when = f"reduction of the gradient of {name}"
        held, reduce = self.held, self.model.reduced_number
        if not unit.trained:
            return  # the previous message stays until the next one
        if self.takes_gradients:
            self._take(unit, whole, fetched, phase, when)
            return
        message, out = unit.trained_padded * reduce, unit.own * reduce
        held.send(message, self.layout.sharding.reduce_scatter_buffers)
        activations = held.saved + self.activations.stream
        self.at(phase, when, Now(activations, 0 if self.sums_whole else whole, fetched))
        held.reduce(unit.trained * reduce if self.sums_whole else 0, 0, 0)
        adds = self.sums_whole or not self.later
        replicas = self.layout.sizes["replicate"]
        sent = 0.0  # what one rank moves to the host stays in the message until then
        if self.units.ranks > 1 or replicas > 1:
            sent = self._beside_message(unit, message) + out
        self.at(phase, when, Now(activations, 0, fetched, sent))
        is_cast = replicas > 1 and reduce != self.model.stored_number
        held.reduce(0, adds * unit.own * self.states.gradient, is_cast * out)

    def _take(self, unit: FsdpUnit, whole: float, fetched: float, phase: str, when: str) -> None:
        """Record the moment in which a unit's gradients become those of its weights. See `_send`.

        Those of later micro-batches are added to them. Casts are made one after another, each after
        the parameter's gathered copy is freed: together these are as large as the casts.
        """
        held, number = self.held, self.model.number
        before = 0.0
        if self.sums_whole:
            number = self.model.reduced_number
            before, whole = unit.trained * number, 0.0
        out = unit.own * self.states.gradient * (self.sums_whole or not self.later)
        if out and number != self.states.gradient:
            whole = out + unit.largest * number
        self.at(phase, when, Now(held.saved + self.activations.stream, whole, fetched))
        held.reduce(before, out, 0)

    def _beside_message(self, unit: FsdpUnit, message: float) -> float:
        """Return the temporary bytes beside a message of gradients and its result."""
        if self.layout.encodes_gradients:  # what is sent, what is received, a sum and an addend
            return unit.trained_padded * 2 * BYTES + 2 * unit.own * SUM_BYTES
        # without sharding FSDP2 sends nothing
        return 0.0 if self.units.ranks == 1 else self.units.gloo_copy(message)

    def update(self) -> None:
        """Record the moment of the optimizer's step."""
        gradients = self.units.stored.all.own * self.states.gradient
        held, fetched, model = self.held, self.units.fetched, self.model
        held.end_step(gradients)
        units = (fetched.first, fetched.last, *fetched.blocks, *fetched.images)
        largest = max(unit.own for unit in units)
        matrices = matrix_numbers(matrices_of(self.stages, model.whole))
        ranks, group = self.layout.stage_ranks, self.layout.fsdp_ranks
        update = Update(self.device, largest, gradients, *matrices, ranks, group)
        needs = update_bytes(model.optim, model.precision.master_dtype, update)
        self.at("update", "optimizer step", Now(needs))


def trained_numbers(table: Tensor) -> int:
    """Return the size of the embedding's or the head's matrix, 0 if it is frozen."""
    return table.numel() if table.requires_grad else 0


def matrix_numbers(shapes: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    """Return the size of the largest matrix of some stacks, and the sum of all."""
    largest = max((rows * columns for _, rows, columns in shapes), default=0)
    return largest, sum(map(math.prod, shapes))
