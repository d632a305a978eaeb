"""The seconds of a step: computation, communication, and how far they overlap.

All are closed formulas, which docs/plan.md explains.
"""

from math import ceil
from typing import NamedTuple

from fsdp_trainer.config.devices import Device
from fsdp_trainer.config.dimensions import dimension_sizes, expert_sizes, fsdp_ranks, own_length
from fsdp_trainer.config.pipeline_schedules import idle_micro_batches, micro_batches, schedule_of
from fsdp_trainer.config.rules.rules_objective import further_forwards
from fsdp_trainer.config.schema import Sharding, TrainConfig
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import NORMS
from fsdp_trainer.optim.footprint import state_bytes
from fsdp_trainer.parallel.memory_check import keeps_gathered
from fsdp_trainer.plan.compute import (
    MEMORY,
    SPREAD,
    compute_seconds,
    newton_schulz_rate,
    recomputed,
)
from fsdp_trainer.plan.expert_exchange import (
    EXCHANGES,
    HOST_WAIT,
    busiest_over_mean,
    exchanged_bytes,
    mixtures,
)
from fsdp_trainer.plan.fsdp_units import FsdpUnit, ModelUnits, model_parts, sum_of
from fsdp_trainer.plan.memory import moved_bytes, trace_blocks
from fsdp_trainer.plan.muon_update import newton_schulz_flops, owner_traffic
from fsdp_trainer.plan.pipeline_stages import (
    StageShare,
    reduces_once,
    stage_ranks,
    stage_shares,
    stays_gathered,
    units_of,
)
from fsdp_trainer.plan.rank_part import exchanged, share_of_rank
from fsdp_trainer.plan.second_model import SOFT_BYTES, named_teacher, teacher_of, teacher_units

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LINKS = (0.5, 0.85)
"""Lower and upper share of a link's rate that collectives reach.

NCCL's own tests on 256 H100 measured 200 (all-gather) to 340 GB/s of 400 (NVIDIA/nccl#1218).
"""
HOST_ADAMW = 20e9
"""Rate of host memory in bytes per second and rank with sharding.cpu_offload. Assumed."""


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


class Wire(NamedTuple):
    """Bytes that a rank sends in one step along one dimension of the mesh.

    ranks: size of the dimension; across: the part of the bytes that leaves the node.
    """

    ranks: int
    gathered: float
    reduced: float
    across: float


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


def groups(sharding: Sharding, world: int, per_node: int) -> tuple[Group, Group]:
    """Return the shard and the replicate group of a rank.

    Ranks of a tensor group are neighbours, then ranks of a shard group.
    """
    sizes = dimension_sizes(sharding, world)
    replicas, shards = sizes["replicate"], fsdp_ranks(sizes)
    on_node = max(1, per_node // sizes["tensor"])
    shard = Group(shards, min(shards, on_node))
    return shard, Group(replicas, min(replicas, max(1, on_node // shards)))


def tensor_group(sharding: Sharding, per_node: int) -> Group:
    """Return the tensor group of a rank, which consists of neighbouring ranks."""
    return Group(sharding.tensor, min(sharding.tensor, per_node))


class TensorTraffic(NamedTuple):
    """Messages of a micro-batch in a tensor group.

    size: bytes of a message with all tokens of the micro-batch; gathers, sums: how often it is
    gathered, and summed.
    """

    size: float
    gathers: float
    sums: float


def tensor_traffic(
    cfg: TrainConfig, config: ModelConfig, share: StageShare | None = None
) -> TensorTraffic:
    """Return the messages of a tensor group. share: stages of a pipeline's rank; None for all.

    Each block gathers and sums twice in forward, and twice in backward; the embedding and the head
    once. Recomputation ends before the last sum of the block, unless a norm or a gate follows it.
    """
    tokens = cfg.batch.micro_rows * own_length(cfg.sharding, cfg.batch.seq_len)
    again = recomputed(cfg.activation_checkpoint).elementwise
    reached = model_parts(config, cfg).backward_share
    family = config.family_spec
    needs_last_sum = NORMS[family.norms][3] is not None or family.gates_shared_expert
    summed_again = 2 if needs_last_sum else 1
    own = share.blocks if share else tuple(range(config.num_hidden_layers))
    # each rank sends its own tokens to experts: tokens are gathered only for a dense feed-forward
    # next to them
    with_experts = 0 if config.shared_size else mixtures(config, own)
    blocks = len(own) - with_experts
    once = with_experts * (1 + reached * (1 + again))
    ends = share.is_first + share.is_last if share else 2
    return TensorTraffic(
        size=tokens * config.hidden_size * BYTES[cfg.precision.param_dtype],
        gathers=blocks * (2 + reached * (2 + 2 * again)) + once + ends,
        sums=blocks * (2 + reached * (2 + summed_again * again)) + once + ends,
    )


def context_group(sharding: Sharding, per_node: int) -> Group:
    """Return the context group of a rank: its ranks are neighbours, one tensor group apart."""
    return Group(sharding.context, min(sharding.context, max(1, per_node // sharding.tensor)))


class ContextTraffic(NamedTuple):
    """Bytes that a rank sends in a micro-batch to the ranks that share its rows.

    across: the part of them that leaves the node. At the same time it receives as many.
    """

    sent: float
    across: float

    def seconds(self, device: Device, efficiency: float) -> float:
        """Return the seconds on the slower of the links. No computation overlaps with them."""
        return max(self.sent / device.link, self.across / device.network) / efficiency


def context_exchange(cfg: TrainConfig, config: ModelConfig, group: Group) -> ContextTraffic:
    """Return the traffic of a context group in all blocks: forward, recomputation and backward.

    config: the part of the model on one rank of a tensor group.
    """
    if group.ranks == 1:
        return ContextTraffic(0.0, 0.0)
    block = exchanged(cfg, config)
    own = block.numbers * cfg.batch.micro_rows * BYTES[cfg.precision.param_dtype]
    again = recomputed(cfg.activation_checkpoint).elementwise
    reached = model_parts(config, cfg).backward_share
    messages = block.forward + reached * (block.backward + again * block.forward)
    sent = own * config.num_hidden_layers * messages
    others = group.ranks - group.on_node
    shares = {
        "each": others / (group.ranks - 1),
        "all": group.across / group.sent,
        "next": float(others > 0),  # for the last rank of a node: the others wait for it
    }
    return ContextTraffic(sent, sent * shares[block.receivers])


def expert_groups(sharding: Sharding, world: int, per_node: int) -> tuple[Group, Group]:
    """Return the group over which a block's experts are divided, and that of the same experts.

    Ranks of the first one are neighbours.
    """
    sizes = expert_sizes(sharding, world)
    experts, shards = sizes["expert"], sizes["eshard"]
    on_node = max(1, per_node // experts)
    return Group(experts, min(experts, per_node)), Group(shards, min(shards, on_node))


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


def expert_exchange(
    cfg: TrainConfig, config: ModelConfig, group: Group, share: StageShare
) -> RowTraffic:
    """Return the rows that a rank of an expert group sends: forward, recomputation and backward.

    group: the ranks among which the experts are divided; share: stages of a pipeline's rank.
    """
    if group.ranks == 1:
        return RowTraffic()
    blocks = mixtures(config, share.blocks)
    again = recomputed(cfg.activation_checkpoint).elementwise
    reached = model_parts(config, cfg).backward_share
    size = blocks * EXCHANGES * exchanged_bytes(cfg, config)
    sent = size * group.sent * (1 + reached * (1 + again))
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


def hops(
    cfg: TrainConfig, config: ModelConfig, world: int, device: Device, share: StageShare
) -> Hops:
    """Return the messages of a rank with these stages: its part of the residual stream."""
    sharding = cfg.sharding
    if sharding.pipeline == 1:
        return Hops(0.0, 0, 0, False)
    tokens = cfg.batch.micro_rows * own_length(sharding, cfg.batch.seq_len) / sharding.tensor
    stages = schedule_of(sharding).stages - share.turns
    size = tokens * config.hidden_size * BYTES[cfg.precision.param_dtype]
    leaves = world // sharding.pipeline >= device.per_node
    return Hops(size, stages - share.is_last, stages - share.is_first, leaves)


def wire(cfg: TrainConfig, config: ModelConfig, world: int, device: Device) -> dict[str, Wire]:
    """Return the bytes sent in one step, by dimension of the mesh.

    In a pipeline they are those of the rank that sends most. Counted are all-gathers in forward
    and, for blocks that were freed, in backward, and the reduction of each gradient. In a pipeline
    weights are gathered once per step, and the residual stream and its gradient are sent.
    """
    shares = stage_shares(cfg, config, world)
    ways = [_wire_of(share, cfg, config, world, device) for share in shares]
    return max(ways, key=lambda way: sum(one.gathered + one.reduced for one in way.values()))


def _wire_of(
    share: StageShare, cfg: TrainConfig, config: ModelConfig, world: int, device: Device
) -> dict[str, Wire]:
    shard, replicate = groups(cfg.sharding, world, device.per_node)
    tensor = tensor_group(cfg.sharding, device.per_node)
    traffic = tensor_traffic(cfg, config, share)
    owners = owner_traffic(share, cfg, config, world, device.per_node)
    of_teacher = teacher_message(cfg, config, shard.ranks)
    config = share_of_rank(config, tensor.ranks)
    count = micro_batches(cfg, world)
    units = units_of(share, cfg, config, shard.ranks)
    reduce = BYTES[cfg.precision.reduce_dtype]
    freed = sum_of(freed_blocks(share, units, cfg, config))
    again = freed.gathered
    ends = units.all.gathered - units.all_blocks.gathered
    gathers = 1 if stays_gathered(cfg) else count
    gathered = gathers * ((units.all_blocks.gathered + again) * float8_share(cfg) + ends)
    if cfg.sharding.accumulate == "unsharded" and gathers > 1 and not units.tied:
        # FSDP2 prefetches this unit once too often: it resets the order of units only when
        # gradients are reduced
        gathered += units.last.gathered
    experts = gathers * (units.all.experts + freed.experts)
    gathered -= experts
    gathered += count * of_teacher
    trained = units.all.trained_padded - units.all.trained_experts
    reductions = 1 if reduces_once(cfg) else count
    reduced = trained * reduce * reductions
    all_reduced = 2 * units.all.own * reduce
    ways = {
        "shard": Wire(
            shard.ranks,
            gathered * shard.sent,
            reduced * shard.sent,
            (gathered + reduced) * shard.across,
        ),
        "replicate": Wire(
            replicate.ranks, 0.0, all_reduced * replicate.sent, all_reduced * replicate.across
        ),
    }
    if tensor.ranks > 1:
        size = count * traffic.size
        ways["tensor"] = Wire(
            tensor.ranks,
            size * traffic.gathers * tensor.sent,
            size * traffic.sums * tensor.sent,
            size * (traffic.gathers + traffic.sums) * tensor.across,
        )
    if experts:
        among = expert_groups(cfg.sharding, world, device.per_node)
        reduced = units.all.trained_experts * reduce * reductions
        rows = expert_exchange(cfg, config, among[0], share)
        ways |= _expert_ways(among, experts, reduced, rows, count)
    context = context_group(cfg.sharding, device.per_node)
    if context.ranks > 1:
        exchange = context_exchange(cfg, config, context)
        times = count * share.of_blocks(config)
        half = times * exchange.sent / 2
        ways["context"] = Wire(context.ranks, half, half, times * exchange.across)
    if owners.answered:
        ways["owners"] = Wire(stage_ranks(cfg, world), owners.sent, owners.answered, owners.across)
    if cfg.sharding.pipeline > 1:
        passed = hops(cfg, config, world, device, share)
        on, back = (count * passed.size * sent for sent in (passed.forward, passed.backward))
        across = (on + back) * passed.leaves
        ways["pipeline"] = Wire(cfg.sharding.pipeline, on, back, across)
    return ways


def teacher_message(cfg: TrainConfig, config: ModelConfig, group: int) -> float:
    """Return the bytes of a teacher's weights that are gathered in a micro-batch.

    config: the complete model that is trained.
    """
    teacher = teacher_of(cfg, config)
    if teacher is None:
        return 0.0
    units = teacher_units(teacher, group)
    return 0.0 if units.stays else units.gathered


def _expert_ways(
    groups: tuple[Group, Group], gathered: float, reduced: float, rows: RowTraffic, count: int
) -> dict[str, Wire]:
    """Return the bytes of experts' weights and gradients, and of rows.

    count: number of micro-batches.
    """
    experts, shards = groups
    ways = {
        "eshard": Wire(
            shards.ranks,
            gathered * shards.sent,
            reduced * shards.sent,
            (gathered + reduced) * shards.across,
        )
    }
    if experts.ranks > 1:
        half = count * rows.sent / 2
        ways["expert"] = Wire(experts.ranks, half, half, count * rows.across)
    return ways


def freed_blocks(
    share: StageShare, units: ModelUnits, cfg: TrainConfig, config: ModelConfig
) -> list[FsdpUnit]:
    """Return the blocks that backward gathers again.

    config: the part of the model on one rank of a tensor group.
    """
    if keeps_gathered(cfg.sharding):
        return []
    first = model_parts(config, cfg).backward_from
    return [unit for i, unit in zip(share.blocks, units.blocks, strict=True) if i >= first]


def float8_share(cfg: TrainConfig) -> float:
    """Return the factor on a block's gathered bytes if it is gathered in float8; otherwise 1."""
    tensorwise = cfg.precision.float8 == "tensorwise"
    return 1 / BYTES[cfg.precision.param_dtype] if tensorwise else 1.0


def times(
    cfg: TrainConfig,
    config: ModelConfig,
    world: int,
    device: Device,
    best: bool,
    load: float = 1.0,
) -> Times:
    """Return the times of one step.

    In a pipeline they are those of the slowest rank, for which the others wait. best: True for the
    fast end of measured rates of computation and links, False for the slow end; load: rows that the
    busiest rank's experts get, divided by the number with even routing.
    """
    shares = stage_shares(cfg, config, world)
    each = [_times_of(share, cfg, config, world, device, best, load) for share in shares]
    return max(each, key=lambda times: times.step)


def _times_of(
    share: StageShare,
    cfg: TrainConfig,
    config: ModelConfig,
    world: int,
    device: Device,
    best: bool,
    load: float,
) -> Times:
    shard, replicate = groups(cfg.sharding, world, device.per_node)
    tensor = tensor_group(cfg.sharding, device.per_node)
    traffic = tensor_traffic(cfg, config, share)
    passed = hops(cfg, config, world, device, share)
    of_owners = owners_seconds(share, cfg, config, world, device, best)
    of_teacher = teacher_seconds(cfg, config, shard, device, best)
    config = share_of_rank(config, tensor.ranks)
    units = units_of(share, cfg, config, shard.ranks)
    count, links = micro_batches(cfg, world), LINKS[best]
    stored = BYTES[cfg.precision.master_dtype]
    from_host = 1 / device.host_link if cfg.sharding.cpu_offload else 0.0
    experts, expert_shards = expert_groups(cfg.sharding, world, device.per_node)

    def gather(unit: FsdpUnit, share: float = 1.0) -> float:
        of_host = (unit.own * stored + unit.frozen) * from_host
        of_experts = expert_shards.seconds(unit.experts * share, device, links)
        others = shard.seconds((unit.gathered - unit.experts) * share, device, links)
        return of_experts + others + of_host

    def reduce(unit: FsdpUnit, last: bool) -> float:
        number = BYTES[cfg.precision.reduce_dtype]
        others = unit.trained_padded - unit.trained_experts
        seconds = shard.seconds(others * number, device, links)
        seconds += expert_shards.seconds(unit.trained_experts * number, device, links)
        over_replicas = 2 * replicate.seconds(unit.own * number, device, links) if last else 0.0
        return seconds + over_replicas + unit.own * stored * from_host

    separate_last = FsdpUnit() if units.tied else units.last
    all_blocks = units.all_blocks
    first, last = gather(units.first), gather(separate_last)
    blocks = gather(all_blocks, float8_share(cfg))
    unit = 1 / ceil(
        len(share.blocks) / cfg.sharding.blocks_per_unit
    )  # share of the blocks in one unit: nothing hides the communication of the first and last
    forward, backward, head = compute_seconds(cfg, config, device, best)
    own = share.of_blocks(config)
    slowest = own * busiest_over_mean(cfg, config, load)
    forward, backward, head = slowest * forward, slowest * backward, share.is_last * head
    gathers = 1 if stays_gathered(cfg) else count

    moving = moving_seconds(cfg, config, device, links)
    exposed = count * (max(0.0, moving - forward) + max(0.0, moving - backward))
    exposed += gathers * (first + blocks * unit + max(0.0, blocks * (1 - unit) + last - forward))
    again = gather(sum_of(freed_blocks(share, units, cfg, config)), float8_share(cfg))
    total = gathers * (first + blocks + last + again) + count * 2 * moving
    for i in range(count):
        is_last = i == count - 1
        reduces = is_last or not reduces_once(cfg)
        ends, middle, lasts = (
            reduce(unit, is_last) if reduces else 0.0
            for unit in (units.first, all_blocks, separate_last)
        )
        exposed += (
            again * unit
            + max(0.0, (again + middle) * (1 - unit) + lasts - backward)
            + middle * unit
            + ends
        )
        total += ends + middle + lasts
    # no computation overlaps with the following messages
    context = context_group(cfg.sharding, device.per_node)
    exchange = context_exchange(cfg, config, context)
    messages = count * (traffic.gathers + traffic.sums)
    waited = messages * tensor.seconds(traffic.size, device, links)
    waited += count * passed.seconds(device, links)
    if context.ranks > 1:
        waited += count * own * exchange.seconds(device, links)
    rows = expert_exchange(cfg, config, experts, share)
    waited += count * rows.seconds(device, links, load)
    waited += count * of_teacher.exposed
    exposed, total = exposed + waited, total + waited
    compute = count * (forward + backward + head + of_teacher.compute)
    # a forward is one of three passes over the blocks, and one of three products of the head
    reading = count * (forward + head / 3) + waited / 3
    reading += gathers * (first + blocks * unit + max(0.0, blocks * (1 - unit) + last - forward))
    return Times(
        compute,
        total,
        exposed,
        _optimizer_seconds(cfg, units.all.own, device) + of_owners,
        idle_micro_batches(cfg.sharding) * (compute + exposed) / count,
        further_forwards(cfg) * reading,
        reading,
    )


class TeacherSeconds(NamedTuple):
    """Seconds of a teacher's computation in a micro-batch, and of its exposed messages."""

    compute: float = 0.0
    exposed: float = 0.0


def teacher_seconds(
    cfg: TrainConfig, config: ModelConfig, shard: Group, device: Device, best: bool
) -> TeacherSeconds:
    """Return the seconds of a teacher's forward, its logits, and the comparison of both models.

    Messages within a tensor group are not counted. config: the complete model that is trained.
    """
    named, teacher = named_teacher(cfg, config), teacher_of(cfg, config)
    if named is None:
        return TeacherSeconds()
    ranks = cfg.sharding.tensor
    tokens = cfg.batch.micro_rows * own_length(cfg.sharding, cfg.batch.seq_len)
    logits = tokens * named.config.vocab_size / ranks * SOFT_BYTES
    compared = named.compares * logits / (device.memory_rate * MEMORY)
    if teacher is None:  # its stored lists are compared in the same way as logits
        return TeacherSeconds(compared)
    forward, _, head = compute_seconds(
        teacher.cfg, share_of_rank(teacher.config, ranks), device, best
    )
    units, links = teacher_units(teacher, shard.ranks), LINKS[best]
    ends = units.first.gathered + units.last.gathered * (not teacher.config.tie_word_embeddings)
    first, blocks = (shard.seconds(size, device, links) for size in (ends, units.gathered - ends))
    exposed = 0.0 if units.stays else first + max(0.0, blocks - forward)
    return TeacherSeconds(forward + head / 3 + compared, exposed)


def moving_seconds(
    cfg: TrainConfig, config: ModelConfig, device: Device, efficiency: float
) -> float:
    """Return the seconds to copy a micro-batch's activations to the host, or back."""
    if not cfg.activation_checkpoint.offload:
        return 0.0
    traced, _ = trace_blocks(cfg, config, "cuda")
    return sum(moved_bytes(cfg, config, traced, "cuda")) / (device.host_link * efficiency)


def owners_seconds(
    share: StageShare,
    cfg: TrainConfig,
    config: ModelConfig,
    world: int,
    device: Device,
    best: bool,
) -> float:
    """Return the seconds in which Muon's owners receive matrices, orthogonalise them and answer.

    share: the stages that contain the owners' matrices.
    """
    if cfg.optim.name != "muon":
        return 0.0
    spread = 1.0 if device.efficiency else 1 / SPREAD if best else SPREAD
    products = newton_schulz_flops(share, cfg, config, world) / newton_schulz_rate(cfg, device)
    traffic = owner_traffic(share, cfg, config, world, device.per_node)
    return products * spread + traffic.seconds(device, LINKS[best])


def _optimizer_seconds(cfg: TrainConfig, numbers: float, device: Device) -> float:
    """Return the seconds of gradient norm, clipping and AdamW for `numbers` trained parameters.

    They are determined by reading from and writing to memory.
    """
    stored = BYTES[cfg.precision.master_dtype]
    state = state_bytes(cfg.optim, cfg.precision.master_dtype)
    moved = numbers * (
        2 * stored + 2 * state + 4 * stored
    )  # weights; both moments; the gradient for norm, clipping (twice) and update
    return moved / (HOST_ADAMW if cfg.sharding.cpu_offload else device.memory_rate * MEMORY)
