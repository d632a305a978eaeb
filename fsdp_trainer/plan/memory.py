"""How much memory a rank takes at each moment of a step: the order in which FSDP2 works, walked through over blocks that are traced once.

docs/plan.md says how right it is.
"""

import math
from collections import deque
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from fsdp_trainer.config.dimensions import dimension_sizes
from fsdp_trainer.config.schema import ActivationCheckpoint, TrainConfig
from fsdp_trainer.models.attention_choice import AttentionContext, choose
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.freeze import trained_shares
from fsdp_trainer.models.head import Head
from fsdp_trainer.optim.footprint import state_bytes, update_bytes
from fsdp_trainer.parallel.memory_check import keeps_gathered
from fsdp_trainer.plan.blocks import (
    Input,
    Traced,
    compiled_saving,
    remembered,
    shapes,
    trace_block,
    trace_norm,
)

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
"""What a process takes before it holds a tensor. cuda: context, NCCL's channels, cuBLAS's workspaces: an assumption; cpu: measured, Python with torch."""
ROUNDING = {"cuda": 0.03, "cpu": 0.02}
"""Of what is held, lost between it: an assumption on a GPU."""


class Moment(NamedTuple):
    """Bytes that a rank holds at one moment of a step, by category, all of `CATEGORIES`.

    when: for people, such as `backward of block 32`; phase: one of `PHASES`, for scripts.
    gathered: whole parameters of units, and whole gradients that are not yet reduced;
    communication: messages of both; activations: with what operators need for a moment;
    logits: what the head makes; allowance: what no tensor accounts for.
    """

    when: str
    bytes: dict[str, float]
    phase: str

    @property
    def total(self) -> float:
        """Bytes."""
        return sum(self.bytes.values())


class Memory(NamedTuple):
    """moments: of each phase of a step the one at which most is held. host: bytes in the host's memory, where the device is a GPU."""

    moments: tuple[Moment, ...]
    host: float

    @property
    def peak(self) -> Moment:
        """The moment at which most is held."""
        return max(self.moments, key=lambda moment: moment.total)


def memory(cfg: TrainConfig, config: ModelConfig, world: int, device: str = "cuda") -> Memory:
    """Return what the rank of `world` that holds most holds, in a step whose tokens are all
    supervised. device: cuda or cpu.

    Compiled blocks keep what torch's partitioner would; activation_checkpoint=budget counts as a
    share between none and full.
    """
    step = Step(cfg, config, world, device)
    step.forward()
    step.head()
    step.backward()
    step.update()
    return Memory(step.moments(), step.host)


class FsdpUnit(NamedTuple):
    """What `fully_shard` gathers and reduces together. padded: numbers, shards made equal; whole: as they are."""

    padded: float
    whole: float

    @classmethod
    def of(cls, weights: list[torch.Size], group: int) -> "FsdpUnit":
        """group: ranks that share each parameter out by its rows."""
        padded = sum(-(-shape[0] // group) * group * shape[1:].numel() for shape in weights)
        return cls(padded, sum(shape.numel() for shape in weights))

    def plus(self, other: "FsdpUnit") -> "FsdpUnit":
        """Of both."""
        return FsdpUnit(self.padded + other.padded, self.whole + other.whole)

    def times(self, count: float) -> "FsdpUnit":
        """Of so many alike, or of a share of one."""
        return FsdpUnit(self.padded * count, self.whole * count)


class Step:
    """The last micro-batch of a step, and the update. What the attributes say is in bytes, and changes on the way.

    gradients: sharded ones; gathered: whole parameters that stay; waiting: whole gradients that no message has taken; kept: activations
    for backward; flying: messages of gradients.
    """

    def __init__(self, cfg: TrainConfig, config: ModelConfig, world: int, device: str):
        self.cfg, self.config, self.device, sharding, precision = (
            cfg,
            config,
            device,
            cfg.sharding,
            cfg.precision,
        )
        self.compute, self.reduce, self.master = (
            getattr(torch, dtype).itemsize
            for dtype in (precision.param_dtype, precision.reduce_dtype, precision.master_dtype)
        )
        sizes = dimension_sizes(sharding, world)
        self.group = sizes["shard"]
        self.reshard, self.tied = not keeps_gathered(sharding), config.tie_word_embeddings
        self.shares = trained_shares(config, cfg)
        self._make_units(sharding.blocks_per_unit)
        self.traced, shared = trace_blocks(cfg, config, device)
        self.tokens = cfg.batch.micro_rows * cfg.batch.seq_len
        self.stream = self.tokens * config.hidden_size * self.compute
        self.norm: Traced = remembered(trace_norm, config, self.tokens, precision.param_dtype)

        shard = self.trained.padded / self.group
        frozen = (self.all.padded - self.trained.padded) / self.group
        offload = sharding.cpu_offload and device == "cuda"
        states = {
            "parameters": shard * self.master + frozen * self.compute,
            "optimizer": moment_bytes(cfg, config, self.group),
        }
        self.host = sum(states.values()) + shard * self.master if offload else 0.0
        self.always = {} if offload else states
        self.stored = 0 if offload else self.master  # a sharded gradient's number
        self.later = (
            math.ceil(cfg.batch.rows / (cfg.batch.micro_rows * world)) > 1
        )  # there were micro-batches before this one
        self.whole = self.later and sharding.accumulate == "unsharded"
        self.replicated = sizes["replicate"] > 1
        before = (
            self.trained.whole * self.reduce
            if self.whole
            else shard * (self.reduce if self.replicated else self.stored)
        )
        self.gradients = float(before) if self.later else 0.0
        self.most_sharded = shard * self.stored
        self.sharded = 0.0 if self.whole else self.gradients  # of the gradients
        self.gathered, self.waiting, self.kept = 0.0, 0.0, float(shared)
        self.flying: deque[float] = deque()
        self.reduced = 0.0  # messages of replicas, which stay until the end of backward where a copy becomes the gradient
        self.most_fetched = 0.0
        self.phases: dict[str, tuple[float, str, dict[str, float], float]] = {}
        """By name: total, when, bytes by category, and bytes that lie idle in streams' pools, less
        what is added to all moments: the largest message of parameters."""

    def _make_units(self, blocks_per_unit: int) -> None:
        weights, count = remembered(shapes, self.config), self.config.num_hidden_layers
        table = FsdpUnit.of(
            [torch.Size((self.config.embedding_rows, self.config.hidden_size))], self.group
        )
        norm = FsdpUnit.of([torch.Size((self.config.hidden_size,))], self.group)
        self.block, self.table = FsdpUnit.of(weights, self.group), table
        self.first, self.last = (
            (table.plus(norm), table.plus(norm)) if self.tied else (table, norm.plus(table))
        )
        self.sizes = [
            min(blocks_per_unit, count - i) for i in range(0, count, blocks_per_unit)
        ]  # of units, in blocks
        self.units = [self.block.times(size) for size in self.sizes]
        self.all = (
            self.block.times(count)
            .plus(self.last)
            .plus(FsdpUnit(0, 0) if self.tied else self.first)
        )
        shares = self.shares
        embedding = FsdpUnit(0, 0) if self.tied else self.first.times(shares.embedding)
        self.trained = self.last.times(shares.head).plus(embedding)
        self.trained = self.trained.plus(self.block.times(sum(shares.blocks)))

    def at(
        self,
        phase: str,
        when: str,
        activations: float,
        gathered: float = 0,
        fetched: float = 0,
        sent: float = 0,
        logits: float = 0,
    ):
        """A moment. gathered: beside what stays so; fetched, sent: messages of parameters and of gradients."""
        held = {
            "gradients": self.gradients,
            "gathered": self.gathered + self.waiting + gathered,
            "communication": fetched + sent + sum(self.flying) + self.reduced,
            "activations": activations,
            "logits": logits,
        }
        self.most_fetched = max(self.most_fetched, fetched)
        # CUDA's allocator gives blocks that were freed on one stream to no other: messages of
        # parameters have a stream of their own, and so have reduced gradients (`foreach_reduce`
        # of torch's FSDP2), which zero_grad frees before the next forward
        on_gpu = self.device == "cuda"
        idle = max(0.0, self.most_sharded - self.sharded) - fetched if on_gpu else 0.0
        total = sum(held.values()) + idle
        if phase not in self.phases or total > self.phases[phase][0]:
            self.phases[phase] = total, when, held, idle

    def moments(self) -> tuple[Moment, ...]:
        """Of each phase the largest."""
        moments = []
        most_fetched = self.most_fetched if self.device == "cuda" else 0.0
        for phase, (_, when, held, idle) in self.phases.items():
            pools = most_fetched + idle
            tensors = sum(held.values()) + sum(self.always.values())
            lost = BESIDE[self.device] + ROUNDING[self.device] * tensors
            parts = {**self.always, **held, "allowance": lost + pools}
            moments.append(Moment(when, {name: parts.get(name, 0.0) for name in CATEGORIES}, phase))
        return tuple(moments)

    def message(self, *units: FsdpUnit) -> float:
        """All-gathered, before it is copied out. One rank needs none."""
        return sum(unit.padded for unit in units) * self.compute if self.group > 1 else 0.0

    def copy(self, message: float) -> float:
        """gloo makes another one of each message, for a moment."""
        return message if self.device == "cpu" and self.group > 1 else 0.0

    def forward(self) -> None:
        """The embedding and the blocks. A unit's message stays until the next unit's is copied out."""
        mine = self.first.padded * self.compute
        self.at("forward", "embedding", self.kept + self.stream, mine, self.message(self.first))
        if self.tied or not self.reshard:
            self.gathered += mine
        done = 0
        for i, unit in enumerate(self.units):
            mine, own = unit.padded * self.compute, self.message(unit)
            fetched = own + self.message(*self.units[i + 1 : i + 1 + self.cfg.sharding.prefetch])
            self.at(
                "forward",
                f"gathering before block {done + 1}",
                self.kept + self.stream,
                mine,
                fetched + self.copy(own),
            )
            for _ in range(self.sizes[i]):
                self.at(
                    "forward",
                    f"forward of block {done + 1}",
                    self.kept + self.traced[done].forward,
                    mine,
                    fetched,
                )
                self.kept += self.traced[done].kept
                done += 1
            self.gathered += 0 if self.reshard else mine

    def head(self) -> None:
        """Final norm, head and loss: gradients are made with the logits, that of the weight in float32. Backward returns scaled copies."""
        config, half = self.config, self.compute < 4
        mine = 0 if self.tied else self.last.padded * self.compute
        fetched = self.message(self.units[-1] if self.tied else self.last)
        rows = rows_at_once(self.cfg, config, self.tokens, self.device)
        each = self.compute + (4 if half else 0) + (8 if config.final_logit_softcapping else 0)
        logits = rows * config.vocab_size * each + (
            self.table.whole * self.compute if half and self.device == "cpu" else 0
        )
        slopes = self.table.whole * 4 * self.shares.head + self.stream
        inputs = self.stream * (2 if half else 1)  # in float32 the norm keeps its input
        self.at(
            "head and loss",
            "head and loss",
            self.kept + self.norm.kept + inputs,
            mine,
            fetched,
            logits=slopes + logits,
        )
        fetched = self.message(self.units[-1]) if self.reshard else 0.0
        whole = self.table.whole * self.compute * self.shares.head
        self.at(
            "head and loss",
            "backward of the head",
            self.kept + self.norm.kept,
            mine + (whole if half else 0),
            fetched,
            logits=slopes,
        )
        if self.tied:
            self.waiting = whole
        else:
            self._send(self.last.times(self.shares.head), whole, fetched, "head")

    def backward(self) -> None:
        """Of the blocks, last ones first, and of the embedding."""
        done = len(self.traced)
        for i, unit in reversed([*enumerate(self.units)]):
            mine, whole = unit.padded * self.compute, 0.0
            fetched = (
                self.message(*self.units[max(0, i - max(1, self.cfg.sharding.prefetch)) : i])
                if self.reshard
                else 0.0
            )
            self.gathered -= 0 if self.reshard else mine
            copied = self.copy(self.message(self.units[i - 1])) if i and self.reshard else 0.0
            self.at(
                "backward",
                f"gathering before block {done} goes back",
                self.kept + self.stream,
                mine,
                fetched + copied,
            )
            for _ in range(self.sizes[i]):
                traced = self.traced[done - 1]
                self.kept -= traced.kept
                activations = self.kept + traced.backward - traced.gradients
                share = self.shares.blocks[done - 1]
                self.at(
                    "backward",
                    f"backward of block {done}",
                    activations,
                    mine + whole + traced.gradients * share,
                    fetched,
                )
                whole += self.block.whole * self.compute * share
                done -= 1
            trained = self.block.times(sum(self.shares.blocks[done : done + self.sizes[i]]))
            self._send(trained, whole, fetched, f"block {done + 1}")
        whole = self.table.whole * self.compute * self.shares.embedding
        self.at("backward", "backward of the embedding", self.kept + self.stream, whole)
        self.gathered = self.waiting = 0.0
        self._send(self.first.times(self.shares.embedding), whole, 0.0, "embedding")

    def _send(self, unit: FsdpUnit, whole: float, fetched: float, name: str) -> None:
        """Whole gradients become a message, which stays until the next unit's; what is reduced of it is this rank's gradient."""
        phase, when = (
            "head and loss" if name == "head" else "backward",
            f"reduction of the gradient of {name}",
        )
        while len(self.flying) >= self.cfg.sharding.reduce_scatter_buffers:
            self.flying.popleft()
        message, out = unit.padded * self.reduce, unit.padded / self.group * self.reduce
        self.flying.append(message)
        self.at(phase, when, self.kept + self.stream, 0 if self.whole else whole, fetched)
        self.gradients -= unit.whole * self.reduce if self.whole else 0
        again = (
            message if self.group == 1 else self.copy(message)
        )  # FSDP2 divides by 1.0 what it does not send
        self.at(phase, when, self.kept + self.stream, 0, fetched, again + out)
        if self.replicated and self.reduce != self.master:
            self.reduced += out
        if self.whole or not self.later:
            self.gradients += unit.padded / self.group * self.stored
            self.sharded += unit.padded / self.group * self.stored

    def update(self) -> None:
        """The optimizer's step."""
        self.flying.clear()
        self.reduced, self.gradients = 0.0, self.trained.padded / self.group * self.stored
        self.sharded = self.gradients
        largest = max(self.table.padded, self.block.padded) / self.group
        gradients = self.trained.padded / self.group * self.stored
        master = self.cfg.precision.master_dtype
        needs = update_bytes(self.cfg.optim, master, self.device, largest, gradients)
        self.at("update", "optimizer step", needs)


def moment_bytes(cfg: TrainConfig, config: ModelConfig, group: int) -> float:
    """Of both of the optimizer's moments, on the rank that has most rows. Rows whose 8-bit blocks would be too short stay in float32."""

    def of(weights: list[torch.Size]) -> float:
        return sum(
            state_bytes(cfg.optim, cfg.precision.master_dtype, shape)
            * -(-shape[0] // group)
            * shape[1:].numel()
            for shape in weights
        )

    shares = trained_shares(config, cfg)
    table = of([torch.Size((config.embedding_rows, config.hidden_size))])
    norm = of([torch.Size((config.hidden_size,))])
    embedding = 0.0 if config.tie_word_embeddings else table * shares.embedding
    blocks = of(remembered(shapes, config)) * sum(shares.blocks)
    return blocks + norm + table * shares.head + embedding


def trace_blocks(cfg: TrainConfig, config: ModelConfig, device: str) -> tuple[list[Traced], float]:
    """Of every block, and bytes that all blocks share: rotations and masks."""
    length, rows, precision, recompute = (
        cfg.batch.seq_len,
        cfg.batch.micro_rows,
        cfg.precision,
        cfg.activation_checkpoint,
    )
    windows = [window if window and window < length else None for window in config.windows]
    context = AttentionContext(
        device=device,
        dtype=precision.param_dtype,
        head_dim=config.head_dim,
        softcap=config.attn_logit_softcapping is not None,
        windowed=any(windows),
        compiled=cfg.compile.enabled,
        selective=recompute.mode == "selective",
    )
    layout = choose(cfg.model.attention, cfg.model.attention_kernel, context).layout
    known: dict[tuple, Traced] = {}

    def trace(window: int | None, mode: str) -> Traced:
        if (window, mode) not in known:
            of = Input(rows, length, precision.param_dtype, layout, device == "cuda", window)
            mode_of_block = ActivationCheckpoint(mode=mode, save=recompute.save)
            traced: Traced = remembered(trace_block, config, of, mode_of_block)
            if cfg.compile.enabled:
                traced = traced.less(compiled_saving(config, of, mode_of_block, traced))
            known[window, mode] = traced
        return known[window, mode]

    def block(i: int, window: int | None) -> Traced:
        if recompute.mode == "budget":
            none, full = trace(window, "none"), trace(window, "full")
            return Traced(
                *(round(f + recompute.budget * (n - f)) for n, f in zip(none, full, strict=True))
            )
        return trace(window, recompute.mode if i % recompute.every == 0 else "none")

    rotation = (
        2
        * rows
        * length
        * config.rotary_dim
        * (
            4
            if config.family_spec.rope_in_float32
            else getattr(torch, precision.param_dtype).itemsize
        )
    )
    masks = len({None, *windows}) * rows * length**2 if layout == "mask" else 0
    return [block(i, window) for i, window in enumerate(windows)], rotation * (
        2 if config.rope_local_theta else 1
    ) + masks


def rows_at_once(cfg: TrainConfig, config: ModelConfig, tokens: int, device: str) -> int:
    """Tokens whose logits the head makes at a time."""
    head: Any = SimpleNamespace(chunk_mib=cfg.loss.chunk_mib, vocab_size=config.vocab_size)
    return Head.rows_at_once(head, tokens, device)
