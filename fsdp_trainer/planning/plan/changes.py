"""Changes of a configuration that may save memory or time: what to type, and why.

`SMALLER`, `FASTER` and `FINE_TUNING` are tables of functions that yield the changes which a run has
not made yet. To add a change, write a function and add it to a table.
"""

import math
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, NamedTuple

from fsdp_trainer.config.check import Report
from fsdp_trainer.config.composing.compose import find_file
from fsdp_trainer.config.devices import Device
from fsdp_trainer.config.formats import moments_format
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.config.rules.rules import check_rules
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.models.config import EXPERTS, ModelConfig
from fsdp_trainer.models.from_config.resolve import sharding_problems
from fsdp_trainer.parallel.memory_check import stays_gathered
from fsdp_trainer.planning.plan.fsdp_units import KnownModels
from fsdp_trainer.planning.plan.messages import Recorded
from fsdp_trainer.planning.plan.plan import RunPlan, make_plan

SMALLEST_CHUNK_MIB = 128
SHORTEST_ROW = 512
"""Tokens of the shortest row that is suggested."""


class Effect(IntEnum):
    """Things that a change may alter. From COMPUTATION on, training may give another result."""

    TIME = 0
    MOMENTS = 1
    """The format of the optimizer's moments."""
    WORLD = 2
    """The number of ranks."""
    COMPUTATION = 3
    """The format of the computation, or the optimizer."""
    ADAPTER = 4
    """The weights that are trained."""
    ROWS = 5
    """The length of a row."""


class Change(NamedTuple):
    """A change: its override, the keys it sets, a reason to print, and what else it alters."""

    override: str
    keys: dict[str, Any]
    reason: str
    effect: Effect = Effect.TIME


NO_CHANGE = Change("", {}, "")


@dataclass(frozen=True)
class Candidate:
    """A run to plan.

    world: number of ranks; device: the device of each rank; known: the models of earlier plans;
    correction: bytes of tensors and seconds of a rehearsal over those of the plan without one, by
    which those of other runs like it are multiplied.
    """

    cfg: TrainConfig
    config: ModelConfig
    world: int
    device: Device
    known: KnownModels = field(default_factory=KnownModels)
    correction: tuple[float, float] = (1.0, 1.0)

    @property
    def on_gpu(self) -> bool:
        return self.device.name != "cpu"

    @property
    def layout(self) -> Layout:
        return Layout(self.cfg.sharding, self.world, self.cfg.batch)

    @property
    def keeps_gathered(self) -> bool:
        """True if units stay gathered from forward to backward."""
        return stays_gathered(self.layout, self.config, self.cfg.precision)

    def changed(self, keys: dict[str, Any]) -> "Candidate":
        """Return the run with other values of keys, e.g. {"optim.state_dtype": "8bit"}."""
        cfg = self.cfg
        for key, value in keys.items():
            node, name = key.split(".")
            cfg = replace(cfg, **{node: replace(getattr(cfg, node), **{name: value})})
        return replace(self, cfg=cfg)

    def plan(self, load: float = 1.0, recorded: Recorded | None = None) -> RunPlan:
        """Return the plan of the run. Raises UserError if an adapter does not fit the model.

        load, recorded: see `make_plan`.
        """
        run = self.cfg, self.config, self.world, self.device
        plan = make_plan(*run, load, self.known, recorded)
        return plan if self.correction == (1.0, 1.0) else plan.scaled(*self.correction)

    def is_refused(self) -> bool:
        if self.layout.problem or self.layout.pipeline_problem:
            return True
        report, cfg = Report({}, [], set()), deepcopy(self.cfg)
        cfg.model.depth = None  # everything that follows from it is set already
        check_rules(cfg, report)
        return bool(report.problems) or any(sharding_problems(self.cfg, self.config))


def together(*changes: Change) -> Change | None:
    """Combine several changes into one; return None if two of them set the same key."""
    keys = {key: value for change in changes for key, value in change.keys.items()}
    if len(keys) < sum(len(change.keys) for change in changes):
        return None
    return Change(
        override=" ".join(change.override for change in changes if change.override),
        keys=keys,
        reason="; ".join(change.reason for change in changes if change.reason),
        effect=max(change.effect for change in changes),
    )


def set_key(key: str, value: Any, reason: str, effect: Effect = Effect.TIME) -> Change:
    typed = str(value).lower() if isinstance(value, bool) else value
    return Change(f"{key}={typed}", {key: value}, reason, effect)


def recompute_more(run: Candidate) -> Iterator[Change]:
    key, mode = "activation_checkpoint.mode", run.cfg.activation_checkpoint.mode
    if mode not in ("full", "selective"):
        reason = "all but attention and every second product is computed again"
        yield Change("activation_checkpoint=selective", {key: "selective"}, reason)
    if mode != "full":
        reason = "blocks are computed again in backward"
        yield Change("activation_checkpoint=full", {key: "full"}, reason)
    if run.cfg.activation_checkpoint.every > 1:
        yield set_key("activation_checkpoint.every", 1, "every block is computed again")


def offload_activations(run: Candidate) -> Iterator[Change]:
    if run.on_gpu and not run.cfg.activation_checkpoint.offload:
        reason = "what blocks keep for backward waits in host memory"
        yield set_key("activation_checkpoint.offload", True, reason)


def fewer_rows(run: Candidate) -> Iterator[Change]:
    for rows in sorted(halves(run.cfg.batch.micro_rows)):
        yield set_key("batch.micro_rows", rows, "more micro-batches, more communication")


def halves(number: int) -> list[int]:
    """Return number ÷ 2, ÷ 4 … down to 1, rounded down."""
    return [number // 2**i for i in range(1, number.bit_length())]


def shard_states(run: Candidate) -> Iterator[Change]:
    """Yield FSDP over all ranks, which together hold one copy of the states."""
    sharding = run.cfg.sharding
    if sharding.strategy != "fsdp" and run.world > 1:
        override = "sharding=fsdp" + (" sharding.replicas=1" if sharding.replicas > 1 else "")
        keys = {"sharding.strategy": "fsdp", "sharding.replicas": 1}
        yield Change(override, keys, "all ranks share one copy of the states")


def expert_counts(run: Candidate) -> list[int]:
    """Return the possible sizes of an expert group, ascending from 1; only 1 without experts."""
    if EXPERTS not in run.config.feed_forwards or run.config.by_transformers:
        return [1]
    sizes = run.layout.expert_sizes
    ranks = sizes["replicate"] * sizes["eshard"] * sizes["expert"]
    largest = math.gcd(ranks, run.config.num_experts)
    return [size for size in range(1, largest + 1) if largest % size == 0]


def divide_experts(run: Candidate) -> Iterator[Change]:
    """Yield larger expert groups, up to the devices of a node."""
    for size in expert_counts(run):
        if run.cfg.sharding.expert < size <= run.device.per_node:
            reason = "ranks divide the experts, and tokens go to them"
            change = set_key("sharding.expert", size, reason)
            if run.cfg.compile.enabled:
                keys = change.keys | {"compile.enabled": False}
                change = change._replace(override=f"{change.override} compile=disabled", keys=keys)
            yield change


def gather_less(run: Candidate) -> Iterator[Change]:
    sharding = run.cfg.sharding
    if sharding.strategy != "ddp" and (run.keeps_gathered or run.layout.copy_ranks):
        reason = "blocks are gathered again in backward"
        yield set_key("sharding.reshard_after_forward", True, reason)
    if sharding.prefetch > 1:
        yield set_key("sharding.prefetch", 1, "fewer blocks are gathered ahead")
    if sharding.blocks_per_unit > 1:
        yield set_key("sharding.blocks_per_unit", 1, "blocks are gathered one at a time")
    if sharding.accumulate == "unsharded":
        reason = "every micro-batch reduces its gradients"
        yield set_key("sharding.accumulate", "sharded", reason)


def offload_states(run: Candidate) -> Iterator[Change]:
    sharding, offload = run.cfg.sharding, run.cfg.optim.offload
    if not run.on_gpu or sharding.strategy == "ddp":
        return
    if offload == "none" and not sharding.cpu_offload:
        reason = "the host holds and updates the states, and the device has weights to compute with"
        yield set_key("optim.offload", "cpu", reason)
        yield set_key("sharding.cpu_offload", True, "the host holds and updates the states")
    if offload != "disk":
        reason = "files hold the states, of which a part at a time is in memory"
        change = set_key("optim.offload", "disk", reason)
        yield change
        if not sharding.cpu_offload:
            keys = change.keys | {"sharding.cpu_offload": True}
            override = f"{change.override} sharding.cpu_offload=true"
            yield Change(override, keys, f"{reason}; the host has weights to compute with")


def smaller_head_chunks(run: Candidate) -> Iterator[Change]:
    if run.on_gpu and (run.cfg.loss.chunk_mib or math.inf) > SMALLEST_CHUNK_MIB:
        reason = "the head's products are smaller; the time that this costs is not counted"
        yield set_key("loss.chunk_mib", SMALLEST_CHUNK_MIB, reason)


def smaller_moments(run: Candidate) -> Iterator[Change]:
    key, stored = "optim.state_dtype", moments_format(run.cfg.optim, run.cfg.precision.master_dtype)
    spec = run.cfg.optim.spec
    if stored == "float32":
        reason = "moments are kept in bfloat16"
        yield Change(spec.in_bfloat16, {key: "bfloat16"}, reason, Effect.MOMENTS)
    if stored != "8bit":
        yield Change(spec.in_8_bits, {key: "8bit"}, "moments are kept in 8 bits", Effect.MOMENTS)


def one_moment(run: Candidate) -> Iterator[Change]:
    other = run.cfg.optim.spec.with_fewer_moments
    if other and run.cfg.model.init_from is None:
        reason = "one moment of the blocks' matrices in place of two: other steps"
        yield Change(f"optim={other}", {"optim.name": other}, reason, Effect.COMPUTATION)


def shorter_numbers(run: Candidate) -> Iterator[Change]:
    precision = run.cfg.precision
    mixed = {
        "precision.param_dtype": "bfloat16",
        "precision.reduce_dtype": "float32",
        "precision.master_dtype": "float32",
    }
    if precision.param_dtype == "float32":
        reason = "forward and backward compute in bfloat16: other numbers"
        yield Change("precision=bf16", mixed, reason, Effect.COMPUTATION)
    if precision.master_dtype == "float32":
        pure = mixed | {"precision.master_dtype": "bfloat16", "precision.float8": None}
        reason = (
            "weights, gradients and moments are kept in bfloat16: other numbers, "
            "which may learn less"
        )
        yield Change("precision=pure_bf16", pure, reason, Effect.COMPUTATION)
    if precision.reduce_dtype == "float32" and run.world > 1:
        reason = "gradients are summed over ranks in bfloat16: other numbers"
        yield set_key("precision.reduce_dtype", "bfloat16", reason, Effect.COMPUTATION)


def shorter_rows(run: Candidate) -> Iterator[Change]:
    for length in (run.cfg.batch.seq_len // 2, run.cfg.batch.seq_len // 4):
        if length >= SHORTEST_ROW:
            reason = "fewer tokens a step: another training"
            yield set_key("batch.seq_len", length, reason, Effect.ROWS)


def compile_blocks(run: Candidate) -> Iterator[Change]:
    if run.on_gpu and not run.cfg.compile.enabled:
        reason = "blocks are compiled, which takes a minute or so first"
        yield Change("compile=enabled", {"compile.enabled": True}, reason)


def recompute_less(run: Candidate) -> Iterator[Change]:
    key, mode = "activation_checkpoint.mode", run.cfg.activation_checkpoint.mode
    if mode != "none":
        reason = "backward computes nothing again"
        yield Change("activation_checkpoint=none", {key: "none"}, reason)
    if mode not in ("none", "selective"):
        reason = "backward computes less again"
        yield Change("activation_checkpoint=selective", {key: "selective"}, reason)


def keep_activations(run: Candidate) -> Iterator[Change]:
    if run.cfg.activation_checkpoint.offload:
        reason = "nothing is copied to the host and back"
        yield set_key("activation_checkpoint.offload", False, reason)


MOST_DOUBLINGS = 4
"""How often a micro-batch is doubled to find one that is faster and still fits."""


def other_rows(run: Candidate) -> Iterator[Change]:
    """Yield smaller micro-batches that leave fewer rows empty, and larger micro-batches."""
    batch, readers = run.cfg.batch, run.layout.batch_ranks
    if batch.rows % (batch.micro_rows * readers):
        for rows in halves(batch.micro_rows):
            yield set_key("batch.micro_rows", rows, "fewer rows that ranks compute are empty")
    for doublings in range(1, MOST_DOUBLINGS + 1):
        rows = batch.micro_rows * 2**doublings
        if rows * readers <= batch.rows:
            yield set_key("batch.micro_rows", rows, "fewer micro-batches, less communication")


def copy_fits(layout: Layout, per_node: int, float8: str | None) -> bool:
    """Return True if a second copy can be divided among the ranks of each of several nodes."""
    sharding, ranks = layout.sharding, layout.fsdp_ranks
    whole = sharding.tensor == sharding.expert == 1 and float8 != "tensorwise"
    return whole and 1 < per_node < ranks and ranks % per_node == 0


def gather_more(run: Candidate) -> Iterator[Change]:
    """Yield sharding over fewer ranks, or parameters that stay gathered for longer."""
    sharding, per_node = run.cfg.sharding, run.device.per_node
    if run.world == 1 or sharding.strategy != "fsdp":
        return
    reason = "nothing is gathered; every rank holds all"
    yield Change("sharding=ddp", {"sharding.strategy": "ddp"}, reason)
    if not run.keeps_gathered:
        reason = "blocks stay gathered until backward"
        yield set_key("sharding.reshard_after_forward", False, reason)
        if copy_fits(run.layout, per_node, run.cfg.precision.float8):
            reason = "backward gathers blocks inside a node, from a second copy there"
            yield set_key("sharding.reshard_after_forward", per_node, reason)
    nodes, rest = divmod(run.world, per_node)
    if nodes > 1 and not rest:
        override = f"sharding=hsdp sharding.replicas={nodes}"
        keys = {"sharding.strategy": "hsdp", "sharding.replicas": nodes}
        yield Change(override, keys, "blocks are gathered inside nodes")


def published_id(size: str) -> str | None:
    file = find_file(f"model/{size}")
    written = re.search(r"\(([\w.-]+/[\w.-]+)\)", file.read_text()) if file else None
    return written and written[1]


def adapters(run: Candidate) -> Iterator[Change]:
    """Yield training of an adapter instead of all weights, also with frozen weights in 4 bits."""
    cfg = run.cfg
    source = cfg.model.init_from or published_id(cfg.model.name)
    if source is None or cfg.train.freeze:
        return
    four_bits = {"adapter.base": "nf4"}
    if cfg.adapter.name == "none":
        reason = (
            "low-rank matrices are trained, the weights are frozen; optim.lr about 10 times as high"
        )
        lora = {"adapter.name": "lora", "model.init_from": source}
        typed = "" if cfg.model.init_from else f" model.init_from={source}"
        yield Change(f"adapter=lora{typed}", lora, reason, Effect.ADAPTER)
        reason = f"{reason}, on weights of 4 bits"
        yield Change(f"adapter=qlora{typed}", lora | four_bits, reason, Effect.ADAPTER)
    elif cfg.adapter.base != "nf4":
        reason = "frozen weights are kept in 4 bits"
        yield Change("adapter.base=nf4", four_bits, reason, Effect.ADAPTER)


Table = tuple[Callable[[Candidate], Iterator[Change]], ...]

SMALLER: Table = (
    recompute_more,
    offload_activations,
    fewer_rows,
    shard_states,
    divide_experts,
    gather_less,
    offload_states,
    smaller_head_chunks,
    smaller_moments,
    one_moment,
    shorter_numbers,
    shorter_rows,
)
"""Changes that may save memory on the same devices."""
FASTER: Table = (
    compile_blocks,
    recompute_less,
    keep_activations,
    other_rows,
    divide_experts,
    gather_more,
)
"""Changes that may save time, perhaps for more memory. They do not change the computed values."""
FINE_TUNING: Table = (adapters,)
"""Changes that save memory when existing weights are fine-tuned."""


def changes_of(run: Candidate, table: Table) -> list[Change]:
    return [change for changes in table for change in changes(run)]
