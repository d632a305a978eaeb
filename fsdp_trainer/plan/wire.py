"""The bytes that a rank sends in a step, along each dimension of the mesh.

All are closed formulas, which docs/plan.md explains.
"""

from dataclasses import dataclass
from typing import NamedTuple

from fsdp_trainer.base.eight_bit_messages import BYTES
from fsdp_trainer.config.devices import Device
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.models.decoder import NORMS
from fsdp_trainer.plan.compute import recomputed
from fsdp_trainer.plan.expert_exchange import EXCHANGES, HOST_WAIT, exchanged_bytes, mixtures
from fsdp_trainer.plan.fsdp_units import FsdpUnit, ModelUnits, sum_of
from fsdp_trainer.plan.muon_update import owner_traffic
from fsdp_trainer.plan.pipeline_stages import RankStages, units_of
from fsdp_trainer.plan.planned_model import PlannedModel
from fsdp_trainer.plan.planned_run import PlannedRun
from fsdp_trainer.plan.rank_part import exchanged
from fsdp_trainer.plan.second_model import PlannedTeacher, teacher_units


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

    def seconds(self, size: float, device: Device, efficiency: float) -> float:
        """Return the seconds to gather or reduce a message of `size` bytes.

        The slower of the links within and between nodes determines them. efficiency: share of the
        links' rate that is reached.
        """
        within = size * self.sent / device.link if self.on_node > 1 else 0.0
        return (
            max(within, size * self.across / device.network) / efficiency if self.ranks > 1 else 0.0
        )


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
        """Return the groups of a layout on nodes with `per_node` ranks each."""
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


class Wire(NamedTuple):
    """Bytes that a rank sends in one step along one dimension of the mesh.

    ranks: size of the dimension; across: the part of the bytes that leaves the node.
    """

    ranks: int
    gathered: float
    reduced: float
    across: float


class TensorTraffic(NamedTuple):
    """Messages of a micro-batch in a tensor group.

    size: bytes of a message with all tokens of the micro-batch; gathers, sums: how often it is
    gathered, and summed.
    """

    size: float
    gathers: float
    sums: float


def tensor_traffic(model: PlannedModel, stages: RankStages | None = None) -> TensorTraffic:
    """Return the messages of a tensor group. stages: those of a pipeline's rank; None for all.

    Each block gathers and sums twice in forward, and twice in backward; the embedding and the head
    once. Recomputation ends before the last sum of the block, unless a norm or a gate follows it.
    """
    config = model.config
    again = recomputed(model.checkpointing).elementwise
    reached = model.whole.backward_share
    family = config.family_spec
    needs_last_sum = NORMS[family.norms][3] is not None or family.gates_shared_expert
    summed_again = 2 if needs_last_sum else 1
    own = stages.blocks if stages else tuple(range(config.num_hidden_layers))
    # each rank sends its own tokens to experts: tokens are gathered only for a dense feed-forward
    # next to them
    with_experts = 0 if config.shared_size else mixtures(config, own)
    blocks = len(own) - with_experts
    once = with_experts * (1 + reached * (1 + again))
    ends = stages.is_first + stages.is_last if stages else 2
    return TensorTraffic(
        size=model.layout.tokens * config.hidden_size * model.number,
        gathers=blocks * (2 + reached * (2 + 2 * again)) + once + ends,
        sums=blocks * (2 + reached * (2 + summed_again * again)) + once + ends,
    )


class ContextTraffic(NamedTuple):
    """Bytes that a rank sends in a micro-batch to the ranks that split its rows.

    across: the part of them that leaves the node. At the same time it receives as many.
    """

    sent: float
    across: float

    def seconds(self, device: Device, efficiency: float) -> float:
        """Return the seconds on the slower of the links. No computation overlaps with them."""
        return max(self.sent / device.link, self.across / device.network) / efficiency


def context_exchange(model: PlannedModel, group: Group) -> ContextTraffic:
    """Return the traffic of a context group in all blocks: forward, recomputation and backward."""
    if group.ranks == 1:
        return ContextTraffic(0.0, 0.0)
    block = exchanged(model.layout, model.part)
    own = block.numbers * model.layout.batch.micro_rows * model.number
    again = recomputed(model.checkpointing).elementwise
    messages = block.forward + model.own.backward_share * (block.backward + again * block.forward)
    sent = own * model.config.num_hidden_layers * messages
    others = group.ranks - group.on_node
    leaving = {
        "each": others / (group.ranks - 1),
        "all": group.across / group.sent,
        "next": float(others > 0),  # for the last rank of a node: the others wait for it
    }
    return ContextTraffic(sent, sent * leaving[block.receivers])


class RowTraffic(NamedTuple):
    """Bytes of rows that a rank sends to other ranks' experts and back in a micro-batch.

    across: the part of them that leaves the node; waits: how often the host waits for the numbers
    of rows, which are kept for recomputation. With even routing the rank receives as many bytes at
    the same time.
    """

    sent: float = 0.0
    across: float = 0.0
    waits: float = 0.0

    def seconds(self, device: Device, efficiency: float, load: float) -> float:
        """Return the seconds on the slower of the links. No computation overlaps with them.

        load: rows of the busiest rank, for which all wait, divided by the number with even routing.
        """
        link = max(self.sent / device.link, self.across / device.network)
        return load * link / efficiency + self.waits * HOST_WAIT


def expert_exchange(model: PlannedModel, group: Group, stages: RankStages) -> RowTraffic:
    """Return the rows that a rank of an expert group sends: forward, recomputation and backward.

    group: the ranks among which the experts are divided; stages: those of a pipeline's rank.
    """
    if group.ranks == 1:
        return RowTraffic()
    blocks = mixtures(model.config, stages.blocks)
    again = recomputed(model.checkpointing).elementwise
    size = blocks * EXCHANGES * exchanged_bytes(model.layout, model.config, model.number)
    sent = size * group.sent * (1 + model.own.backward_share * (1 + again))
    others = (group.ranks - group.on_node) / (group.ranks - 1)
    return RowTraffic(sent, sent * others, blocks)


class Hops(NamedTuple):
    """Messages that a rank of a pipeline sends in a micro-batch.

    size: bytes of each; forward, backward: number of messages to the next and to the previous
    stage; leaves: True if the neighbours in the pipeline are on other nodes.
    """

    size: float
    forward: int
    backward: int
    leaves: bool

    def seconds(self, device: Device, efficiency: float) -> float:
        """Return the seconds in both directions.

        Messages are received at the same time. No computation overlaps with them.
        """
        messages = 2 * max(self.forward, self.backward)
        return (
            messages * self.size / ((device.network if self.leaves else device.link) * efficiency)
        )


def hops(model: PlannedModel, device: Device, stages: RankStages) -> Hops:
    """Return the messages of a rank with these stages: its part of the residual stream."""
    layout = model.layout
    if layout.sharding.pipeline == 1:
        return Hops(0.0, 0, 0, False)
    count = layout.stages.order.stages - stages.turns
    size = layout.tokens / layout.sharding.tensor * model.config.hidden_size * model.number
    leaves = layout.stage_ranks >= device.linked_gpus
    return Hops(size, count - stages.is_last, count - stages.is_first, leaves)


def wire(run: PlannedRun, device: Device) -> dict[str, Wire]:
    """Return the bytes sent in one step, by dimension of the mesh.

    In a pipeline they are those of the rank that sends most. Counted are all-gathers in forward
    and, for blocks that were freed, in backward, and the reduction of each gradient. In a pipeline
    weights are gathered once per step, and the residual stream and its gradient are sent.
    """
    groups = RankGroups.of(run.layout, device.linked_gpus)
    ways = [_wire_of(stages, run, device, groups) for stages in run.stages_by_rank]
    return max(ways, key=lambda way: sum(one.gathered + one.reduced for one in way.values()))


def _wire_of(
    stages: RankStages, run: PlannedRun, device: Device, groups: RankGroups
) -> dict[str, Wire]:
    """Return the bytes that a rank with these stages sends."""
    model, layout, count = run.model, run.layout, run.layout.micro_batches
    weights = weight_traffic(stages, run)
    ways = _weight_ways(weights, groups)
    tensor, traffic = groups.tensor, tensor_traffic(model, stages)
    if tensor.ranks > 1:
        size = count * traffic.size
        ways["tensor"] = Wire(
            tensor.ranks,
            size * traffic.gathers * tensor.sent,
            size * traffic.sums * tensor.sent,
            size * (traffic.gathers + traffic.sums) * tensor.across,
        )
    if weights.experts:
        ways["eshard"] = _sent(groups.expert_shards, weights.experts, weights.reduced_experts)
        rows, experts = expert_exchange(model, groups.experts, stages), groups.experts
        if experts.ranks > 1:
            half = count * rows.sent / 2
            ways["expert"] = Wire(experts.ranks, half, half, count * rows.across)
    if groups.context.ranks > 1:
        exchange = context_exchange(model, groups.context)
        times = count * stages.of_blocks(model.config)
        half = times * exchange.sent / 2
        ways["context"] = Wire(groups.context.ranks, half, half, times * exchange.across)
    if run.exchange.groups > 1:
        sent = run.exchange.sent(units_of(stages, model).all.own)
        ways["groups"] = Wire(run.exchange.groups, 0.0, sent, sent)
    owners = owner_traffic(stages, model, device.linked_gpus)
    if owners.answered:
        ways["owners"] = Wire(layout.stage_ranks, owners.sent, owners.answered, owners.across)
    if layout.sharding.pipeline > 1:
        passed = hops(model, device, stages)
        on, back = (count * passed.size * sent for sent in (passed.forward, passed.backward))
        across = (on + back) * passed.leaves
        ways["pipeline"] = Wire(layout.sharding.pipeline, on, back, across)
    return ways


class WeightTraffic(NamedTuple):
    """Bytes of weights and gradients of a rank's stages in a step, before they are divided.

    gathered, reduced: of all but experts; copied: gathered from a second copy; experts,
    reduced_experts: of experts on a separate mesh; all_reduced: shards that replicas sum.
    """

    gathered: float
    copied: float
    reduced: float
    experts: float
    reduced_experts: float
    all_reduced: float


def weight_traffic(stages: RankStages, run: PlannedRun) -> WeightTraffic:
    """Return the bytes of weights and gradients of a rank with these stages, and of a teacher."""
    model, layout = run.model, run.layout
    count, units = layout.micro_batches, units_of(stages, model)
    freed = sum_of(freed_blocks(stages, units, model))
    ends = units.all.gathered - units.all_blocks.gathered
    gathers = 1 if layout.gathers_once else count
    factor, has_copy = sent_factor(model), layout.copy_ranks > 0
    # a second copy is of numbers that were decoded once, and is gathered as it is
    again = gathers * freed.gathered * (1.0 if has_copy else block_factor(model))
    gathered = gathers * units.all_blocks.gathered * block_factor(model)
    gathered += gathers * (ends + freed_images(units, model).gathered) * factor
    gathered += 0.0 if has_copy else again
    if layout.sharding.accumulate == "unsharded" and gathers > 1 and not units.tied:
        # FSDP2 prefetches this unit once too often: it resets the order of units only when
        # gradients are reduced
        gathered += units.last.gathered * factor
    experts = gathers * (units.all.experts + freed.experts) * block_factor(model)
    gathered -= experts
    gathered += count * teacher_message(run.teacher_in_memory) * factor
    number, replicated = sent_number(model), model.reduced_number
    reductions = 1 if layout.reduces_once else count
    trained = units.all.trained_padded - units.all.trained_experts
    return WeightTraffic(
        gathered,
        again if has_copy else 0.0,
        trained * number * reductions,
        experts,
        units.all.trained_experts * number * reductions,
        2 * units.all.own * replicated,
    )


def _weight_ways(weights: WeightTraffic, groups: RankGroups) -> dict[str, Wire]:
    """Return the bytes of weights and gradients on the mesh of fully_shard."""
    replicate, summed = groups.replicate, weights.all_reduced
    ways = {
        "shard": _sent(groups.shard, weights.gathered, weights.reduced),
        "replicate": Wire(replicate.ranks, 0.0, summed * replicate.sent, summed * replicate.across),
    }
    if weights.copied:
        ways["copy"] = _sent(groups.again, weights.copied, 0.0)
    return ways


def _sent(group: Group, gathered: float, reduced: float) -> Wire:
    """Return what each rank of a group sends of gathered and reduced messages."""
    return Wire(
        group.ranks,
        gathered * group.sent,
        reduced * group.sent,
        (gathered + reduced) * group.across,
    )


def teacher_message(teacher: PlannedTeacher | None) -> float:
    """Return the bytes of a teacher's weights that are gathered in a micro-batch."""
    if teacher is None:
        return 0.0
    units = teacher_units(teacher.model)
    return 0.0 if units.stays else units.gathered


def freed_blocks(stages: RankStages, units: ModelUnits, model: PlannedModel) -> list[FsdpUnit]:
    """Return the blocks that backward gathers again."""
    if model.keeps_gathered:
        return []
    first = model.own.backward_from
    return [unit for i, unit in zip(stages.blocks, units.blocks, strict=True) if i >= first]


def freed_images(units: ModelUnits, model: PlannedModel) -> FsdpUnit:
    """Return what backward gathers again of a tower for images, as one unit."""
    tower = model.tower
    if tower is None or model.keeps_gathered or not tower.trains_anything:
        return FsdpUnit()
    return units.all_images if tower.is_reached else sum_of(units.images[tower.depth : -1])


def sent_factor(model: PlannedModel) -> float:
    """Return what a gathered byte is of a message: less than 1 if weights are sent in 8 bits."""
    return BYTES / model.number if model.layout.encodes_weights else 1.0


def block_factor(model: PlannedModel) -> float:
    """Return the same for blocks, which may be gathered in float8."""
    return 1 / model.number if model.precision.float8 == "tensorwise" else sent_factor(model)


def sent_number(model: PlannedModel) -> float:
    """Return the bytes of a number in the messages of gradients."""
    return BYTES if model.layout.encodes_gradients else model.reduced_number
