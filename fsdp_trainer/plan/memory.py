"""How much memory a rank takes at each moment of a step: a closed form, from blocks traced once and the order in which FSDP2 works."""

import math
from collections import deque
from typing import Any, NamedTuple

import torch

from fsdp_trainer.config.formats import moments_format
from fsdp_trainer.config.schema import ActivationCheckpoint, TrainConfig
from fsdp_trainer.models.attention_choice import Situation, choose
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.head import Head
from fsdp_trainer.optim.eight_bit import block_of
from fsdp_trainer.parallel.fit import keeps_gathered
from fsdp_trainer.plan.blocks import Input, Traced, remembered, shapes, trace_block, trace_norm

CATEGORIES = ("parameters", "gradients", "optimizer", "gathered", "communication", "activations", "logits", "allowance")


class Moment(NamedTuple):
    """when: in a step, for people. bytes: what one rank holds then, by category (all of `CATEGORIES`).

    gathered: whole parameters of units, and whole gradients that are not yet reduced; communication: messages; activations: with what an
    operator needs for a moment; logits: what the head makes.
    """

    when: str
    bytes: dict[str, float]

    @property
    def total(self) -> float:
        """Bytes."""
        return sum(self.bytes.values())


class Memory(NamedTuple):
    """moments: of each phase of a step the one at which most is held. host: bytes of the host's memory, where the device is a GPU."""

    moments: tuple[Moment, ...]
    host: float

    @property
    def peak(self) -> Moment:
        """The moment at which most is held."""
        return max(self.moments, key=lambda moment: moment.total)


class Unit(NamedTuple):
    """What `fully_shard` gathers and reduces together. Counts of numbers; padded: to equal shards."""

    padded: int
    whole: int

    @classmethod
    def of(cls, weights: list[torch.Size], group: int) -> "Unit":
        """group: ranks that share a unit out, each parameter by its rows."""
        padded = sum(-(-shape[0] // group) * group * shape[1:].numel() for shape in weights)
        return cls(padded, sum(shape.numel() for shape in weights))

    def __add__(self, other: Any) -> "Unit":
        return Unit(self.padded + other.padded, self.whole + other.whole)


class Step:
    """Moments as they come; of each phase the one at which most is held stays."""

    def __init__(self, **always: float):
        self.always, self.phases = always, {}  # type: ignore[var-annotated]

    def at(self, phase: str, when: str, **held: float) -> None:
        """held: bytes by category, besides what is held always."""
        total = sum(held.values())
        if phase not in self.phases or total > self.phases[phase][0]:
            self.phases[phase] = total, when, held

    def moments(self, allowance: Any) -> tuple[Moment, ...]:
        """allowance: of the bytes that are held besides it."""
        found = []
        for total, when, held in self.phases.values():
            extra = allowance(total + sum(self.always.values()))
            parts = {**held, "allowance": extra}
            found.append(Moment(when, {name: self.always.get(name, 0) + parts.get(name, 0) for name in CATEGORIES}))
        return tuple(found)


def memory(cfg: TrainConfig, config: ModelConfig, world: int, device: str = "cuda") -> Memory:
    """Of one rank of `world` in a step of training, every token supervised. device: cuda or cpu."""
    sharding, precision = cfg.sharding, cfg.precision
    compute, reduce, master = (getattr(torch, getattr(precision, f"{kind}_dtype")).itemsize for kind in ("param", "reduce", "master"))
    group = {"fsdp": world, "hsdp": max(1, world // sharding.replicas), "ddp": 1}[sharding.strategy]
    weights = remembered(shapes, config)
    table = [torch.Size((config.embedding_rows, config.hidden_size))]
    block, embedding = Unit.of(weights, group), Unit.of(table, group)
    ends = Unit.of([torch.Size((config.hidden_size,))], group) + (Unit(0, 0) if config.tie_word_embeddings else embedding)
    count = config.num_hidden_layers
    sizes = [min(sharding.blocks_per_unit, count - i) for i in range(0, count, sharding.blocks_per_unit)]
    padded = block.padded * count + embedding.padded + ends.padded
    moments = moment_bytes(cfg, [*weights * count, *table * (1 if config.tie_word_embeddings else 2)], group)
    states = {"parameters": padded / group * master, "optimizer": moments}
    again = math.ceil(cfg.batch.rows / (cfg.batch.micro_rows * world)) > 1
    offload = sharding.cpu_offload and device == "cuda"

    step = Step(**({} if offload else states))
    traced, shared = trace_blocks(cfg, config, device)
    tokens = cfg.batch.micro_rows * cfg.batch.seq_len
    norm: Traced = remembered(trace_norm, config, tokens, precision.param_dtype)
    stream = tokens * config.hidden_size * compute
    message = compute if group > 1 else 0  # a gathered unit arrives in one message, which is then copied out
    reshard, tied = not keeps_gathered(sharding), config.tie_word_embeddings
    held = padded / group * master if again and not offload else 0.0

    # forward
    first = embedding + ends if tied else embedding
    step.at(
        "forward",
        "embedding",
        gradients=held,
        gathered=first.padded * compute,
        communication=first.padded * message,
        activations=shared + stream,
    )
    open_ = first.padded * compute if tied or not reshard else 0
    kept, done = float(shared), 0
    for i, size in enumerate(sizes):
        mine, ahead = size * block.padded, sum(sizes[i + 1 : i + 1 + sharding.prefetch]) * block.padded
        for _ in range(size):
            now = {
                "gathered": open_ + mine * compute,
                "communication": (mine + ahead) * message,
                "activations": kept + traced[done].forward,
            }
            step.at("forward", f"forward of block {done + 1}", gradients=held, **now)
            kept += traced[done].kept
            done += 1
        if not reshard:
            open_ += mine * compute

    # head
    last = sizes[-1] * block.padded
    rows = Head.rows_at_once(_head(cfg, config), tokens, device)
    room = rows * config.vocab_size * (compute + (4 if compute < 4 else 0) + (8 if config.final_logit_softcapping else 0))
    room += config.vocab_size * config.hidden_size * compute if compute < 4 and device == "cpu" else 0
    slope = config.embedding_rows * config.hidden_size * 4 + stream
    gathered = open_ + (0 if tied else ends.padded * compute)
    inputs = stream + (stream if compute < 4 else 0)
    step.at("head", "head and loss", gradients=held, gathered=gathered, communication=(last if tied else ends.padded) * message,
            activations=kept + norm.kept + inputs, logits=slope + room)  # fmt: skip
    ahead = last * message if reshard else 0
    new = ends.whole * compute if not tied else config.embedding_rows * config.hidden_size * compute
    step.at("head", "backward of the head", gradients=held, gathered=gathered + (new if compute < 4 else 0), communication=ahead,
            activations=kept + norm.kept, logits=slope)  # fmt: skip
    flying: deque[float] = deque()
    pending = new if tied else 0.0
    gathered = open_

    def reduced(unit: Unit, whole: float, gathered: float, ahead: float, activations: float, when: str) -> None:
        """A unit's gradients become a message, which stays until the next unit's."""
        nonlocal held
        while len(flying) >= sharding.reduce_scatter_buffers:
            flying.popleft()
        flying.append(unit.padded * reduce)
        step.at("backward", when, gradients=held, gathered=gathered + whole, communication=ahead + sum(flying), activations=activations)
        if not again and not offload:
            held += unit.padded / group * master

    if not tied:
        reduced(ends, new, gathered, ahead, kept + stream, "reduction of the head's gradient")

    # backward
    for i in reversed(range(len(sizes))):
        size = sizes[i]
        mine = size * block.padded
        if not reshard:
            gathered -= mine * compute
        fetched = sum(sizes[max(0, i - max(1, sharding.prefetch)) : i]) * block.padded * message if reshard else 0
        whole = 0.0
        for _ in range(size):
            done -= 1
            kept -= traced[done].kept
            backward = traced[done].backward - traced[done].gradients
            step.at("backward", f"backward of block {done + 1}", gradients=held, gathered=gathered + pending + mine * compute + whole + traced[done].gradients,
                    communication=fetched + sum(flying), activations=kept + backward)  # fmt: skip
            whole += block.whole * compute
        reduced(Unit(mine, 0), whole, gathered + pending, fetched, kept + stream, f"reduction of block {done + 1}'s gradient")
    new = embedding.whole * compute
    step.at(
        "backward",
        "backward of the embedding",
        gradients=held,
        gathered=gathered + pending + new,
        communication=sum(flying),
        activations=kept + stream,
    )
    reduced(first, new + (ends.whole * compute if tied else 0), 0, 0, shared + stream, "reduction of the embedding's gradient")
    step.at("update", "optimizer step", gradients=0 if offload else padded / group * master)
    return Memory(step.moments(lambda held: 0), sum(states.values()) + padded / group * master if offload else 0.0)


def moment_bytes(cfg: TrainConfig, weights: list[torch.Size], group: int) -> float:
    """Of both moments on the rank that has most rows."""
    kind, size = moments_format(cfg.optim, cfg.precision.master_dtype), 0.0
    for shape in weights:
        block = block_of(shape) if kind == "8bit" else None
        each = 1 + 4 / block if block else 2 if kind == "bfloat16" else 4
        size += 2 * each * -(-shape[0] // group) * shape[1:].numel()
    return size


def trace_blocks(cfg: TrainConfig, config: ModelConfig, device: str) -> tuple[list[Traced], float]:
    """Of every block, and bytes that all blocks share: rotations and masks."""
    length, rows, precision = cfg.batch.seq_len, cfg.batch.micro_rows, cfg.precision
    windows = [window if window and window < length else None for window in config.windows]
    layout = choose(cfg.model.attention, cfg.model.attention_kernel, Situation(
        device=device, dtype=precision.param_dtype, head_dim=config.head_dim, softcap=config.attn_logit_softcapping is not None, windowed=any(windows),
        compiled=cfg.compile.enabled, selective=cfg.activation_checkpoint.mode == "selective")).layout  # fmt: skip
    recompute = cfg.activation_checkpoint
    found = []
    for i, window in enumerate(windows):
        mode = recompute.mode if i % recompute.every == 0 else "none"
        of = Input(rows, length, precision.param_dtype, "varlen" if layout == "flex" else layout, window if layout != "varlen" else None)
        found.append(remembered(trace_block, config, of, ActivationCheckpoint(mode=mode, save=recompute.save)))
    rope = 2 * rows * length * config.rotary_dim * (4 if config.form.rope_in_float32 else getattr(torch, precision.param_dtype).itemsize)
    masks = len({None, *windows}) * rows * length**2 if layout == "mask" else 0
    return found, rope * (2 if config.rope_local_theta else 1) + masks


def _head(cfg: TrainConfig, config: ModelConfig) -> Any:
    head = Head.__new__(Head)
    head.__dict__.update(vocab_size=config.vocab_size, chunk_mib=cfg.loss.chunk_mib)
    return head
