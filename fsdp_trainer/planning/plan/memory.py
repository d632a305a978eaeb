"""A lower bound of the memory of a rank, cheap enough to screen hundreds of layouts.

Counts only what a step surely holds at the same time: states, activations that blocks keep, traced
once for each kind of block, and what is gathered or reduced meanwhile. A rehearsal finds the rest.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from fsdp_trainer.config.schema import ActivationCheckpoint
from fsdp_trainer.optim.offload.offloaded_optimizer import BUFFERS
from fsdp_trainer.optim.offload.parts import SLICED_BYTES
from fsdp_trainer.parallel.memory_check import (
    LeastMemory,
    MemoryItem,
    StateSetup,
    gathered_on_rank,
    least_held,
)
from fsdp_trainer.planning.plan.block_memory import (
    logit_bytes,
    moved_bytes,
    pinned_bytes,
    trace_blocks,
)
from fsdp_trainer.planning.plan.pipeline_stages import RankStages
from fsdp_trainer.planning.plan.planned_run import PlannedRun
from fsdp_trainer.planning.plan.second_model import COMPARED_BYTES, teacher_units

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
BESIDE = {"cuda": 1.0 * GIB, "cpu": 0.45 * GIB}
"""Bytes of a process without its tensors.

cuda: context, NCCL's channels and cuBLAS's workspaces, assumed; cpu: Python with torch, measured.
"""
ROUNDING = {"cuda": 0.03, "cpu": 0.02}
"""Share of the tensors' bytes that the allocator loses to fragmentation; on a GPU assumed."""
OPTIMIZER = ("moments", "average")
"""Items of the memory check that are of the optimizer; the other states are parameters."""


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
        return sum(self.bytes.values())

    @property
    def tensors(self) -> float:
        return self.total - self.bytes.get("allowance", 0.0)


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
        return max(self.moments, key=lambda moment: moment.total)


def memory(run: PlannedRun, device: str = "cuda", load: float = 1.0) -> Memory:
    """Return a lower bound of the memory of the rank that needs most with full rows.

    device: cuda or cpu; load: rows that the experts of this rank get, divided by the number with
    even routing.
    """
    held = least_of_run(run)
    each = [RankMemory(run, held, stages, device, load) for stages in run.stages_by_rank]
    moments = [moment for rank in each for moment in rank.moments()]
    host, disk = (max(rank.elsewhere(place) for rank in each) for place in ("host", "disk"))
    alone = run.layout.fsdp_ranks * run.layout.sizes["replicate"] == 1
    return summed(moments, device, not alone, host, disk)


def summed(
    moments: Iterable[Moment], device: str, has_messages: bool, host: float, disk: float
) -> Memory:
    """Return the memory of a rank with these moments, and with the allowance at each phase's
    largest.

    has_messages: False if gradients of one rank become those of its weights without a message.
    """
    largest: dict[str, Moment] = {}
    for moment in moments:
        if moment.phase not in largest or moment.tensors > largest[moment.phase].tensors:
            largest[moment.phase] = moment
    sizes = [moment.bytes for moment in largest.values()]
    # CUDA's allocator reuses a freed block only on the same stream. Messages of parameters have
    # their own stream, and so have reduced gradients (`foreach_reduce` of torch's FSDP2), which
    # zero_grad frees before the next forward
    gradients = has_messages * max((each.get("gradients", 0.0) for each in sizes), default=0.0)
    before = [largest[phase].bytes for phase in PHASES[:2] if phase in largest]
    # of a unit and of the one that is prefetched
    fetched = max(
        min(each.get("communication", 0.0), 2 * each.get("gathered", 0.0)) for each in before
    )
    whole = []
    for name in PHASES:
        if name not in largest:
            continue
        moment = largest[name]
        held = {name: moment.bytes.get(name, 0.0) for name in CATEGORIES}
        idle = max(0.0, gradients - held["gradients"]) + max(0.0, fetched - held["gathered"])
        lost = BESIDE[device] + ROUNDING[device] * moment.tensors
        held["allowance"] = lost + idle * (device == "cuda")
        whole.append(moment._replace(bytes=held))
    tensors = max(moment.tensors for moment in whole)
    return Memory(tuple(whole), host, tensors, disk)


def least_of_run(run: PlannedRun) -> LeastMemory:
    model = run.model
    setup = StateSetup(model.layout, model.precision, model.optim, model.adapter, run.averages)
    return model.whole.remembered(
        f"{model.layout.sharding} {model.layout.ranks} {setup[1:]}",
        lambda: least_held(model.whole.counted, setup),
    )


class RankMemory:
    def __init__(
        self, run: PlannedRun, least: LeastMemory, stages: RankStages, device: str, load: float
    ):
        """least: see parallel.memory_check; device, load: see `memory`."""
        self.run, self.model, self.layout = run, run.model, run.layout
        self.least, self.stages, self.device, self.load = least, stages, device, load
        traced, self.common = trace_blocks(run.model, device, load)
        self.traced = stages.of(traced)
        self.moved = moved_bytes(run.model, self.traced, device)
        self.hidden = run.layout.tokens * run.model.config.hidden_size * run.model.number
        self.stream = self.hidden / run.layout.sharding.tensor
        self.scoring = run.scoring if run.training_ranks_score else ()
        self.teacher = None
        if run.teacher_in_memory is not None:
            self.teacher = teacher_units(run.teacher_in_memory.model)
        self.states = self._states()

    def _is_here(self, item: MemoryItem) -> bool:
        """Return True if an item is on the device; a CPU is the host itself."""
        return item.place == "device" or (self.device == "cpu" and item.place == "host")

    def _states(self) -> dict[str, float]:
        """Return the bytes on the device in the whole step, with models that are not trained."""
        held = dict.fromkeys(("parameters", "optimizer", "gathered"), 0.0)
        for item in filter(self._is_here, self.least.states):
            held["optimizer" if item.name in OPTIMIZER else "parameters"] += item.size
        held["parameters"] += sum(one.weights for one in self.scoring)
        if self.teacher is not None:
            held["parameters"] += self.teacher.states * self._is_here(self.least.gradients)
            held["gathered"] = self.teacher.gathered * self.teacher.stays
        return held

    def elsewhere(self, place: str) -> float:
        """Return the bytes of a rank on a GPU that are on the host, or on disk."""
        if self.device == "cpu" and place == "host":
            return 0.0
        items = [*self.least.states, self.least.gradients]
        held = sum(item.size for item in items if item.place == place)
        if place == "host":
            held += sum(pinned_bytes(moved, self.stream) for moved in self.moved)
            held += BUFFERS * min(self.elsewhere("disk"), SLICED_BYTES)
            if self.teacher is not None and self.least.gradients.place == "host":
                held += self.teacher.states
        return held

    @property
    def saved(self) -> float:
        """Bytes that blocks keep at the end of forward, also of micro-batches that wait."""
        saved = sum(block.saved for block in self.traced) / self.layout.stages.order.stages
        waiting = self.stages.waiting * (saved + self.common + self.stream)
        tower = self.model.tower
        return saved - sum(self.moved) + self.common + waiting + (tower.kept if tower else 0.0)

    @cached_property
    def whole_block(self) -> int:
        """Bytes that a block keeps once backward has computed it again; 0 if that is not known."""
        mode, divides = self.model.checkpointing.mode, self.layout.sharding.tensor > 1
        if self.model.compiled or divides or mode == "none":
            return 0
        plain = replace(self.model, checkpointing=ActivationCheckpoint(mode="none"))
        return trace_blocks(plain, self.device, self.load)[0][self.stages.blocks[-1]].saved

    def moments(self) -> Iterator[Moment]:
        for one in self.scoring:
            when = f"the forward of the reward {one.title}"
            yield self._moment(PHASES[0], when, activations=one.activations(self.device))
        first, last, own = self.traced[0], self.traced[-1], self.model.own
        number, everything = len(self.traced), self.least.gathered
        gathered = (everything or self.least.unit).size
        held = {"gradients": self._summed_before, "gathered": gathered}
        before = self.saved - last.saved
        yield self._moment(
            "forward", f"forward of block {number}", **held, activations=before + last.forward
        )
        if self.stages.is_last:
            head = gathered if everything else own.head.numel() * self.model.number * (gathered > 0)
            sizes = held | {"gathered": head, "activations": self.saved + self.hidden}
            yield self._moment("head and loss", "head and loss", **sizes, logits=self._logits())
        if own.backward_from < number:
            when = f"backward of block {number}"
            again = self.saved - last.saved + max(last.saved, self.whole_block) + self.stream
            yield self._moment("backward", when, **held, activations=again)
        gradients = self.least.gradients.size * self._is_here(self.least.gradients)
        if not own.backward_from:
            held = {"gradients": gradients, "gathered": self.least.unit.size}
            activations = self.common + max(first.saved, self.whole_block) + self.stream
            yield self._moment("backward", "backward of block 1", **held, activations=activations)
        yield self._moment("update", "optimizer step", gradients=gradients)

    def _moment(self, phase: str, when: str, **held: float) -> Moment:
        names = [*self.states, *(name for name in held if name not in self.states)]
        sizes = {name: self.states.get(name, 0.0) + held.get(name, 0.0) for name in names}
        return Moment(when, sizes, phase)

    @property
    def _summed_before(self) -> float:
        layout, sharding = self.layout, self.layout.sharding
        if layout.batch.rows <= layout.batch.micro_rows * layout.batch_ranks:
            return 0.0
        if not layout.reduces_once:
            return self.least.gradients.size * self._is_here(self.least.gradients)
        numbers, size = self.model.whole.counted.whole, self.model.reduced_number
        return gathered_on_rank(numbers, sharding, size, whole=True) / sharding.pipeline

    def _logits(self) -> float:
        """Return the bytes of a chunk's logits and of the gradients that are made with them."""
        if not self.model.config.predicts:
            return 0.0  # a few numbers for each text
        head, teacher = self.model.own.head, self.run.teacher
        compared = COMPARED_BYTES if teacher and teacher.compares else 0
        slopes = head.numel() * 4 * head.requires_grad + self.hidden
        return slopes + logit_bytes(self.model, self.device, compared)
