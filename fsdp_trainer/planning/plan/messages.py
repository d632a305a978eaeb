"""The bytes that a rank sends in a step, by dimension of the mesh and by what may hide them.

Those of a rehearsal are recorded; the arithmetic here stands for layouts that are not rehearsed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fsdp_trainer.base.eight_bit_messages import BYTES
from fsdp_trainer.config.devices import Device
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.models.decoder import NORMS
from fsdp_trainer.planning.plan.compute import MEMORY, recomputed
from fsdp_trainer.planning.plan.expert_exchange import EXCHANGES, exchanged_bytes, mixtures
from fsdp_trainer.planning.plan.fsdp_units import FsdpUnit, sum_of
from fsdp_trainer.planning.plan.muon_update import owner_traffic
from fsdp_trainer.planning.plan.pipeline_stages import RankStages, units_of
from fsdp_trainer.planning.plan.planned_model import PlannedModel
from fsdp_trainer.planning.plan.planned_run import PlannedRun
from fsdp_trainer.planning.plan.rank_part import exchanged
from fsdp_trainer.planning.plan.second_model import teacher_units
from fsdp_trainer.planning.plan.work import Work

FIRST, BLOCKS, LAST, AGAIN = "first", "blocks", "last", "again"
"""Gathers in forward: of the first unit, of blocks, of the last unit; and those in backward."""
REDUCED = {FIRST: "reduced first", BLOCKS: "reduced blocks", LAST: "reduced last"}
REPLICAS = "replicas"
"""Reductions in each backward, and those in the last one of a step."""
WAITED = "waited"
"""Messages with which no computation overlaps."""
ELSEWHERE = "elsewhere"
"""Messages that are timed with the update, with a second model or with other groups of ranks."""
HOST, IN_MEMORY = COPIES = ("host", "memory")
"""In place of a dimension: copies over the link to the host, and inside the device's memory."""
ENCODING, DECODING = 36, 15
"""Bytes read and written to encode a number of a message in 8 bits, and to decode it.

Counted from the operators of base/eight_bit_messages.py; not measured on a GPU.
"""


class Group(NamedTuple):
    """A group of ranks that communicate: their number, and the number of them on one node."""

    ranks: int
    on_node: int

    @property
    def sent(self) -> float:
        """Share of a gathered or reduced message that each rank sends: (n - 1) / n.

        It is the same for a ring and for every other algorithm that sends nothing twice.
        """
        return (self.ranks - 1) / self.ranks

    @property
    def across(self) -> float:
        """Share of the message that leaves the node through each rank's part of the network."""
        nodes = self.ranks / self.on_node
        return (nodes - 1) / nodes / self.on_node

    @property
    def elsewhere(self) -> float:
        return (self.ranks - self.on_node) / max(1, self.ranks - 1)


@dataclass(frozen=True)
class RankGroups:
    """The groups in which a rank communicates.

    Ranks of a tensor group are neighbours; those of a context group are one tensor group apart;
    then come ranks of a shard group, and of a replicate group. experts: the group over which a
    block's experts are divided, whose ranks are neighbours; expert_shards: that of the same
    experts. again: the group that gathers blocks in backward, with a second copy neighbours.
    """

    shard: Group
    replicate: Group
    tensor: Group
    context: Group
    experts: Group
    expert_shards: Group
    again: Group

    @classmethod
    def of(cls, layout: Layout, per_node: int) -> "RankGroups":
        sizes, shards = layout.sizes, layout.fsdp_ranks
        tensor, context, replicas = sizes["tensor"], sizes["context"], sizes["replicate"]
        experts, expert_shards = layout.expert_sizes["expert"], layout.expert_sizes["eshard"]
        on_node = max(1, per_node // tensor)
        of_experts = max(1, per_node // experts)
        again = layout.copy_ranks or shards
        return cls(
            shard=Group(shards, min(shards, on_node)),
            replicate=Group(replicas, min(replicas, max(1, on_node // shards))),
            tensor=Group(tensor, min(tensor, per_node)),
            context=Group(context, min(context, on_node)),
            experts=Group(experts, min(experts, per_node)),
            expert_shards=Group(expert_shards, min(expert_shards, of_experts)),
            again=Group(again, min(again, on_node)),
        )


class Message(NamedTuple):
    """Bytes that a rank sends in a step along one dimension, and what may hide them.

    lane: FIRST or another of the names above; across: the part of `sent` that leaves the node;
    reduces: False for what is gathered, or sent to the next ranks; ranks: size of the dimension.
    """

    dimension: str
    lane: str
    sent: float
    across: float = 0.0
    reduces: bool = False
    ranks: int = 1

    def seconds(self, device: Device, efficiency: float) -> float:
        """Return the seconds on the slower of the links.

        efficiency: share of the links' rate that is reached.
        """
        if self.dimension == HOST:
            return self.sent / device.host_link
        if self.dimension == IN_MEMORY:
            return self.sent / (device.memory_rate * MEMORY)
        return max(self.sent / device.link, self.across / device.network) / efficiency


class Recorded(NamedTuple):
    """Figures of time from a rehearsal: messages of the busiest rank, and the work of a step.

    works: rank of the pipeline and work, for each kind of rank.
    """

    messages: list[Message]
    works: list[tuple[int, Work]]


class Wire(NamedTuple):
    """Bytes that a rank sends in one step along one dimension of the mesh.

    ranks: size of the dimension; across: the part of the bytes that leaves the node.
    """

    ranks: int
    gathered: float
    reduced: float
    across: float


def wire_of(messages: Iterable[Message]) -> dict[str, Wire]:
    wires: dict[str, Wire] = {}
    for one in messages:
        if one.dimension not in COPIES:
            _, gathered, reduced, across = wires.get(one.dimension, (1, 0.0, 0.0, 0.0))
            gathered += one.sent * (not one.reduces)
            reduced += one.sent * one.reduces
            wires[one.dimension] = Wire(one.ranks, gathered, reduced, across + one.across)
    return wires


def busiest_wire(
    run: PlannedRun, device: Device, recorded: list[Message] | None = None
) -> dict[str, Wire]:
    """Return the bytes by dimension of the rank that sends most.

    recorded: those of a rehearsal, in which ranks send nothing to other groups, and owners of
    matrices do not move them.
    """
    ways = [wire_of(PlannedMessages(run, each, device)) for each in run.stages_by_rank]
    planned = max(ways, key=lambda way: sum(one.gathered + one.reduced for one in way.values()))
    if recorded is None:
        return planned
    unrecorded = {
        name: one for name, one in planned.items() if one.ranks == 1 or name in ("groups", "owners")
    }
    return unrecorded | wire_of(recorded)


class PlannedMessages:
    """The messages of a rank with some stages of a pipeline, by arithmetic.

    Counted are all-gathers in forward and, for blocks that were freed, in backward, and the
    reduction of each gradient. In a pipeline weights are gathered once per step.
    """

    def __init__(self, run: PlannedRun, stages: RankStages, device: Device):
        self.run, self.stages, self.device = run, stages, device
        self.model, self.layout = run.model, run.layout
        self.groups = RankGroups.of(run.layout, device.linked_gpus)
        self.units = units_of(stages, run.model)
        self.count = run.layout.micro_batches
        self.gathers = 1 if run.layout.gathers_once else self.count

    def __iter__(self) -> Iterator[Message]:
        yield from self._gathered()
        yield from self._reduced()
        yield from self._tensor()
        yield from self._experts()
        yield from self._context()
        yield from self._others()

    def _gathered(self) -> Iterator[Message]:
        units, model, layout = self.units, self.model, self.layout
        factor = BYTES / model.number if layout.encodes_weights else 1.0
        # blocks may be gathered in float8; a second copy is of numbers that were decoded once
        of_blocks = 1 / model.number if model.precision.float8 == "tensorwise" else factor
        yield from self._gather(FIRST, units.first, factor)
        yield from self._gather(BLOCKS, units.all_blocks, of_blocks)
        yield from self._gather(BLOCKS, units.all_images, factor)
        last = FsdpUnit() if units.tied else units.last
        # FSDP2 prefetches this unit once too often: it resets the order of units only when
        # gradients are reduced
        more = layout.sharding.accumulate == "unsharded" and self.gathers > 1
        yield from self._gather(LAST, last, factor * (1 + more / self.gathers))
        if not model.keeps_gathered:
            blocks = zip(self.stages.blocks, units.blocks, strict=True)
            freed = sum_of([unit for i, unit in blocks if i >= model.own.backward_from])
            yield from self._gather(AGAIN, freed, 1.0 if layout.copy_ranks else of_blocks)
            yield from self._gather(AGAIN, self._freed_images, factor)
        if self.run.teacher_in_memory:
            teacher = teacher_units(self.run.teacher_in_memory.model)
            size = 0.0 if teacher.stays else self.count * teacher.gathered * factor
            yield self._sent("shard", ELSEWHERE, self.groups.shard, size)

    @property
    def _freed_images(self) -> FsdpUnit:
        """The part of a tower for images that backward gathers again, as one unit."""
        tower = self.model.tower
        if tower is None or not tower.trains_anything:
            return FsdpUnit()
        return (
            self.units.all_images
            if tower.is_reached
            else sum_of(self.units.tower[tower.depth : -1])
        )

    def _gather(self, lane: str, unit: FsdpUnit, factor: float) -> Iterator[Message]:
        """Yield the gathers of a unit in a step. factor: on the bytes of its messages."""
        model, times, is_copy = self.model, self.gathers, lane == AGAIN and self.layout.copy_ranks
        group = self.groups.again if is_copy else self.groups.shard
        size = (unit.gathered - unit.experts) * factor * times
        yield self._sent("copy" if is_copy else "shard", lane, group, size)
        if unit.experts:
            experts = unit.experts * factor * times
            yield self._sent("eshard", lane, self.groups.expert_shards, experts)
        if self.layout.sharding.cpu_offload:
            stored = model.stored_number if model.optim.offload == "none" else model.number
            yield Message(HOST, lane, (unit.own * stored + unit.frozen) * times)
        if self.layout.encodes_weights and not is_copy:
            yield Message(IN_MEMORY, lane, unit.gathered / model.number * DECODING * times)

    def _reduced(self) -> Iterator[Message]:
        units, model, layout = self.units, self.model, self.layout
        number = BYTES if layout.encodes_gradients else model.reduced_number
        times = 1 if layout.reduces_once else self.count
        middle = sum_of([units.all_blocks, units.all_images])
        last = FsdpUnit() if units.tied else units.last
        for part, unit in ((FIRST, units.first), (BLOCKS, middle), (LAST, last)):
            lane, trained = REDUCED[part], unit.trained_padded
            others = (trained - unit.trained_experts) * number * times
            yield self._sent("shard", lane, self.groups.shard, others, reduces=True)
            if experts := unit.trained_experts * number * times:
                yield self._sent("eshard", lane, self.groups.expert_shards, experts, reduces=True)
            if updates_on_host(model):
                yield Message(HOST, lane, unit.own * model.stored_number * times)
            if layout.encodes_gradients:
                yield Message(IN_MEMORY, lane, trained * (ENCODING + DECODING) * times)
        size = 2 * units.all.own * model.reduced_number
        yield self._sent("replicate", REPLICAS, self.groups.replicate, size, reduces=True)

    def _tensor(self) -> Iterator[Message]:
        """Yield the messages of a tensor group.

        Each block gathers and sums twice in forward, and twice in backward; the embedding and the
        head once. Recomputation ends before the last sum of the block, unless a norm or a gate
        follows it. Each rank sends its own tokens to experts: tokens are gathered only for a dense
        feed-forward next to them.
        """
        model, group = self.model, self.groups.tensor
        if group.ranks == 1:
            return
        config, own = model.config, self.stages.blocks
        again = recomputed(model.checkpointing)
        reached, family = model.whole.backward_share, config.family_spec
        needs_last_sum = NORMS[family.norms][3] is not None or family.gates_shared_expert
        with_experts = 0 if config.shared_size else mixtures(config, own)
        blocks = len(own) - with_experts
        once = with_experts * (1 + reached * (1 + again))
        once += self.stages.is_first + self.stages.is_last
        size = self.count * self._tokens
        gathers = blocks * (2 + reached * (2 + 2 * again)) + once
        sums = blocks * (2 + reached * (2 + (1 + needs_last_sum) * again)) + once
        yield self._sent("tensor", WAITED, group, size * gathers)
        yield self._sent("tensor", WAITED, group, size * sums, reduces=True)

    def _experts(self) -> Iterator[Message]:
        """Yield the rows to other ranks' experts and back: forward, recomputation and backward.

        With even routing the rank receives as many bytes at the same time.
        """
        model, group = self.model, self.groups.experts
        if group.ranks == 1:
            return
        again = recomputed(model.checkpointing)
        blocks = mixtures(model.config, self.stages.blocks)
        size = blocks * EXCHANGES * exchanged_bytes(model.layout, model.config, model.number)
        sent = size * group.sent * (1 + model.own.backward_share * (1 + again)) * self.count
        yield from self._halves("expert", WAITED, group.ranks, sent, sent * group.elsewhere)

    def _context(self) -> Iterator[Message]:
        model, group = self.model, self.groups.context
        if group.ranks == 1:
            return
        block, again = exchanged(model.layout, model.part), recomputed(model.checkpointing)
        own = block.numbers * model.layout.batch.micro_rows * model.number
        backward = block.backward + again * block.forward
        messages = block.forward + model.own.backward_share * backward
        sent = own * len(self.stages.blocks) * messages * self.count
        leaving = {
            "each": group.elsewhere,
            "all": group.across / group.sent,
            "next": float(group.elsewhere > 0),  # for a node's last rank, for which others wait
        }
        across = sent * leaving[block.receivers]
        yield from self._halves("context", WAITED, group.ranks, sent, across)

    def _others(self) -> Iterator[Message]:
        run, layout, stages = self.run, self.layout, self.stages
        per_node, ranks = self.device.linked_gpus, layout.stage_ranks
        if run.exchange.groups > 1:
            sent = run.exchange.sent(self.units.all.own)
            yield Message("groups", ELSEWHERE, sent, sent, True, run.exchange.groups)
        owners = owner_traffic(stages, self.model, per_node)
        if owners.answered:
            yield Message("owners", ELSEWHERE, owners.sent, owners.across, False, ranks)
            yield Message("owners", ELSEWHERE, owners.answered, 0.0, True, ranks)
        if layout.sharding.pipeline > 1:
            size = self.count * self._tokens / layout.sharding.tensor
            for is_end, reduces in ((stages.is_last, False), (stages.is_first, True)):
                sent = size * (layout.stages.order.stages - stages.turns - is_end)
                across = sent * (ranks >= per_node)
                yield Message("pipeline", WAITED, sent, across, reduces, layout.stages.ranks)

    @property
    def _tokens(self) -> float:
        """Bytes of the hidden states of a micro-batch."""
        return self.layout.tokens * self.model.config.hidden_size * self.model.number

    def _sent(
        self, dimension: str, lane: str, group: Group, size: float, reduces: bool = False
    ) -> Message:
        """Return what each rank of a group sends of messages of `size` bytes."""
        sent, across = size * group.sent, size * group.across
        return Message(dimension, lane, sent, across, reduces, group.ranks)

    def _halves(
        self, dimension: str, lane: str, ranks: int, sent: float, across: float
    ) -> Iterator[Message]:
        for reduces in (False, True):
            yield Message(dimension, lane, sent / 2, across / 2, reduces, ranks)


def updates_on_host(model: PlannedModel) -> bool:
    return model.layout.sharding.cpu_offload or model.optim.offload != "none"
