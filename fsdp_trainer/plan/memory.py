"""The memory of a rank at each moment of a step.

Follows the order in which FSDP2 gathers, computes and reduces. Each kind of block is traced once.
"""

import math
from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp_trainer.config.context_methods import attention_layout, context_method
from fsdp_trainer.config.dimensions import (
    batch_ranks,
    dimension_sizes,
    expert_sizes,
    fsdp_ranks,
    own_length,
)
from fsdp_trainer.config.pipeline_schedules import schedule_of
from fsdp_trainer.config.schema import ActivationCheckpoint, TrainConfig
from fsdp_trainer.models.attention_choice import AttentionContext, choose
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.head import Head
from fsdp_trainer.optim.footprint import Update, update_bytes
from fsdp_trainer.parallel.activation_offload import SMALLEST
from fsdp_trainer.parallel.memory_check import keeps_gathered
from fsdp_trainer.plan.blocks import (
    Input,
    PartTrace,
    TracedPart,
    compiled_saving,
    fed_numbers,
    has_experts,
    remembered,
    trace_block,
    trace_norm,
    trace_of_rows,
    with_repeated_keys,
)
from fsdp_trainer.plan.fsdp_units import (
    BlockKind,
    FsdpUnit,
    ModelParts,
    model_parts,
    signature_of,
    sum_of,
)
from fsdp_trainer.plan.pipeline_stages import (
    StageShare,
    fetched_units,
    matrices_of,
    reduces_once,
    stage_ranks,
    stage_shares,
    units_of,
)
from fsdp_trainer.plan.rank_part import others_keys, share_of_rank
from fsdp_trainer.plan.second_model import (
    COMPARED_BYTES,
    PlannedTeacher,
    compares_logits,
    hidden_bytes,
    teacher_of,
    teacher_units,
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
"""Bytes of a process without its tensors.

cuda: context, NCCL's channels and cuBLAS's workspaces, assumed; cpu: Python with torch, measured.
"""
ROUNDING = {"cuda": 0.03, "cpu": 0.02}
"""Share of the tensors' bytes that the allocator loses to fragmentation; on a GPU assumed."""

PINNED = 4 / 3
"""Host memory divided by the bytes moved there.

torch's allocator of pinned memory rounds each tensor up to a power of two. The mean surplus is a
third, if sizes are distributed evenly between two powers.
"""


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
    for offloaded tensors.
    """

    moments: tuple[Moment, ...]
    host: float

    @property
    def peak(self) -> Moment:
        """The moment with most bytes."""
        return max(self.moments, key=lambda moment: moment.total)


def memory(
    cfg: TrainConfig, config: ModelConfig, world: int, device: str = "cuda", load: float = 1.0
) -> Memory:
    """Return the memory of the rank that needs most, in a step whose tokens are all supervised.

    world: number of ranks; device: cuda or cpu; load: rows that the experts of this rank get,
    divided by the number with even routing.

    Compiled blocks keep the tensors that torch's partitioner would keep. The memory with
    activation_checkpoint=budget is interpolated between none and full.
    """
    shares = stage_shares(cfg, config, world)
    steps = [Step(cfg, config, world, device, share, load) for share in shares]
    for step in steps:
        step.forward()
        step.head()
        step.backward()
        step.update()
    moments = [moment for step in steps for moment in step.moments()]
    phases = dict.fromkeys(moment.phase for moment in moments)
    largest = [
        max((m for m in moments if m.phase == phase), key=lambda moment: moment.total)
        for phase in PHASES
        if phase in phases
    ]
    return Memory(tuple(largest), max(step.host for step in steps))


class Step:
    """The last micro-batch of a step, and the update.

    These attributes are in bytes, and change from moment to moment. gradients: sharded gradients,
    or the unsharded ones that are reduced once a step; gathered: unsharded parameters that stay
    gathered; waiting: unsharded gradients not yet copied into a message; kept: activations kept for
    backward; flying: messages of gradients under way.
    """

    def __init__(
        self,
        cfg: TrainConfig,
        config: ModelConfig,
        world: int,
        device: str,
        share: StageShare,
        load: float,
    ):
        self.cfg, self.device = cfg, device
        sharding, precision = cfg.sharding, cfg.precision
        self.compute, self.reduce, self.master = (
            getattr(torch, dtype).itemsize
            for dtype in (precision.param_dtype, precision.reduce_dtype, precision.master_dtype)
        )
        sizes = dimension_sizes(sharding, world)
        self.group = fsdp_ranks(sizes)
        self.expert_shards = expert_sizes(sharding, world)["eshard"]
        self.ranks, self.matrices = stage_ranks(cfg, world), matrix_numbers(share, cfg, config)
        self.teacher = teacher_of(cfg, config)
        """The teacher, or a reference model in memory; None without either."""
        config = self.config = share_of_rank(config, sizes["tensor"])
        self.reshard, self.share = not keeps_gathered(sharding), share
        self.parts = model_parts(config, cfg)
        model = units_of(share, cfg, config, self.group)
        self.tied = model.tied
        fetched = fetched_units(model, cfg)
        self.staged = model.all.gathered - fetched.all.gathered
        """Bytes that stay gathered from the first micro-batch of the step."""
        self.first, self.last, self.blocks = fetched.first, fetched.last, fetched.blocks
        count, size = len(self.blocks), sharding.blocks_per_unit
        self.sizes = [min(size, count - i) for i in range(0, count, size)]  # blocks of each unit
        self.units = [sum_of(self.blocks[i : i + size]) for i in range(0, count, size)]
        traced, shared = trace_blocks(cfg, config, device, load)
        self.traced = share.of(traced)
        self.backward_from = share.is_first * self.parts.backward_from
        self.tokens = cfg.batch.micro_rows * own_length(sharding, cfg.batch.seq_len)
        self.hidden = self.tokens * config.hidden_size * self.compute
        """Bytes of the hidden states of all tokens in the head; `stream`: between blocks."""
        self.stream = self.hidden / sizes["tensor"]
        self.moved = moved_bytes(cfg, config, self.traced, device)
        """Bytes of each block that are in host memory between its forward and its backward."""
        self.crossing = 0.0  # bytes of `moved` on the device, while they are copied out or back
        self.norm = norm_traced(self.parts, self.tokens, precision.param_dtype)

        whole = model.all
        self.trained = whole.own
        """Size of the trained shards of this rank, in numbers."""
        offload = sharding.cpu_offload and device == "cuda"
        states = {
            "parameters": self.trained * self.master + whole.frozen,
            "optimizer": whole.state,
        }
        self.host = sum(states.values()) + self.trained * self.master if offload else 0.0
        self.host += sum(pinned_bytes(moved, self.stream) for moved in self.moved)
        self.always = {} if offload else states
        self.stored = 0 if offload else self.master  # bytes of a number of a sharded gradient
        # True if other micro-batches came before this one
        self.later = cfg.batch.rows > cfg.batch.micro_rows * batch_ranks(sizes)
        self.whole = self.later and reduces_once(cfg)
        self.replicated = sizes["replicate"] > 1
        before = (
            whole.trained * self.reduce
            if self.whole
            else self.trained * (self.reduce if self.replicated else self.stored)
        )
        self.gradients = float(before) if self.later else 0.0
        self.most_sharded = self.trained * self.stored
        self.sharded = 0.0 if self.whole else self.gradients  # sharded part of the gradients
        self.gathered, self.waiting = self.staged, 0.0
        self.kept = float(shared) + self._pipeline_activations(share, shared)
        self.flying: deque[float] = deque()
        # messages between replicas: they stay until the end of backward if the gradient is a cast
        # copy of them
        self.reduced = 0.0
        self.most_fetched = 0.0
        self._add_teacher(offload)
        self.phases: dict[str, tuple[float, str, dict[str, float], float]] = {}
        """The largest moment of each phase: total, when, bytes by category, and idle bytes.

        Idle bytes are in the pools of CUDA streams. The largest message of parameters is
        subtracted, since `moments` adds it everywhere.
        """

    def _add_teacher(self, offload: bool) -> None:
        """Add the shards of a teacher, and the units of it that always stay gathered.

        offload: True if states are in host memory.
        """
        self.of_teacher = {"gathered": 0.0, "activations": 0.0}
        """Bytes of the teacher at this moment, without its shards."""
        if self.teacher is None:
            return
        units = self.teacher_units = teacher_units(self.teacher, self.group)
        self.of_teacher["gathered"] = units.gathered * units.stays
        if offload:
            self.host += units.states
        else:
            self.always["parameters"] += units.states

    def _pipeline_activations(self, share: StageShare, shared: float) -> float:
        """Return the bytes of activations of a pipeline's forwards that wait for their backward.

        Each forward keeps the activations of its blocks, and its output. In addition there are one
        input being received and one output being sent.
        """
        if self.cfg.sharding.pipeline == 1:
            return 0.0
        stages = schedule_of(self.cfg.sharding).stages
        saved = sum(block.saved for block in self.traced) / stages
        return share.waiting * (saved + shared + self.stream) + 2 * self.stream

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
        """Record a moment, if it is the largest of its phase.

        gathered: bytes in addition to those that stay gathered; fetched, sent: messages of
        parameters and of gradients.
        """
        held = {
            "gradients": self.gradients,
            "gathered": self.gathered + self.waiting + gathered + self.of_teacher["gathered"],
            "communication": fetched + sent + sum(self.flying) + self.reduced,
            "activations": activations + self.crossing + self.of_teacher["activations"],
            "logits": logits,
        }
        self.most_fetched = max(self.most_fetched, fetched)
        # CUDA's allocator reuses a freed block only on the same stream. Messages of parameters
        # have their own stream, and so have reduced gradients (`foreach_reduce` of torch's FSDP2),
        # which zero_grad frees before the next forward
        on_gpu = self.device == "cuda"
        idle = max(0.0, self.most_sharded - self.sharded) - fetched if on_gpu else 0.0
        total = sum(held.values()) + idle
        if phase not in self.phases or total > self.phases[phase][0]:
            self.phases[phase] = total, when, held, idle

    def moments(self) -> tuple[Moment, ...]:
        """Return the largest moment of each phase."""
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
        """Return the bytes of the message that gathers units; 0 if one rank holds them."""
        experts = sum(unit.experts for unit in units)
        others = sum(unit.gathered for unit in units) - experts
        return others * (self.group > 1) + experts * (self.expert_shards > 1)

    def gloo_copy(self, message: float) -> float:
        """Return the bytes of the temporary copy that gloo makes of a message; 0 on a GPU."""
        return message if self.device == "cpu" and self.group > 1 else 0.0

    def forward(self) -> None:
        """Record the moments of the forward of the embedding and the blocks.

        A unit's message stays until the next unit's is copied out: FSDP2's `wait_for_unshard` keeps
        the previous one in a local variable until it returns.
        """
        self.teacher_forward()
        mine = self.first.gathered
        self.at("forward", "embedding", self.kept + self.stream, mine, self.message(self.first))
        if self.tied or not self.reshard:
            self.gathered += mine
        done, before = 0, self.message(self.first)
        for i, unit in enumerate(self.units):
            mine, own = unit.gathered, self.message(unit)
            fetched = own + self.message(*self.units[i + 1 : i + 1 + self.cfg.sharding.prefetch])
            self.at(
                "forward",
                f"gathering before block {done + 1}",
                self.kept + self.stream,
                mine,
                fetched,
                max(before, self.gloo_copy(own)),
            )
            before = own
            for _ in range(self.sizes[i]):
                self.at(
                    "forward",
                    f"forward of block {done + 1}",
                    self.kept + self.traced[done].forward,
                    mine,
                    fetched,
                )
                self.crossing = self.moved[done]
                self.kept += self.traced[done].saved - self.moved[done]
                done += 1
            self.gathered += 0 if self.reshard else mine

    def teacher_forward(self) -> None:
        """Record the moments of the teacher's forward.

        A teacher leaves its head gathered, and its hidden states. A reference model computes its
        own logits and leaves nothing.
        """
        if self.teacher is None:
            return
        config, cfg = self.teacher.config, self.teacher.cfg
        units, hidden = self.teacher_units, hidden_bytes(self.teacher)
        [*_, block], shared = trace_blocks(
            cfg, share_of_rank(config, cfg.sharding.tensor), self.device
        )
        is_freed = not units.stays
        message = self.message(units.block)
        self.at(
            "forward",
            f"the {self.teacher.name}'s forward",
            self.kept + shared + block.forward,
            is_freed * (units.block.gathered + units.first.gathered * config.tie_word_embeddings),
            is_freed * 2 * message,
            is_freed * self.gloo_copy(message),
        )
        end, before = f"the end of the {self.teacher.name}'s forward", self.kept + shared
        if not self.teacher.compares:
            logits = self._logits_of(self.teacher)
            mine = is_freed * units.last.gathered
            self.at("forward", end, before + 2 * hidden, mine, logits=logits)
            return
        self.of_teacher["gathered"] += is_freed * units.last.gathered
        self.of_teacher["activations"] = hidden
        self.at("forward", end, before + 2 * hidden)

    def head(self) -> None:
        """Record the moments of final norm, head and loss, forward and backward.

        The gradients are computed together with the logits, the weight's gradient in float32.
        Backward returns scaled copies of them.
        """
        if not self.share.is_last:
            return
        phase, half = "head and loss", self.compute < 4
        if not self.tied:
            self._gather_head()
        mine = 0 if self.tied else self.last.gathered
        trained = self.trained_table(self.parts.head)
        slopes = trained * 4 + self.hidden
        inputs = self.hidden * (2 if half else 1)  # in float32 the norm keeps its input
        before = self.kept + self.norm.saved
        fetched = self.message(self.units[-1] if self.tied else self.last)
        logits = slopes + self._logits(trained)
        self.at(phase, "head and loss", before + inputs, mine, fetched, logits=logits)
        fetched = self.message(self.units[-1]) if self.reshard else 0.0
        whole = trained * self.compute
        copied = whole if half else 0
        if self._compares:  # the teacher's head is freed when the student's forward ends
            is_freed = not self.teacher_units.stays
            self.of_teacher["gathered"] -= is_freed * self.teacher_units.last.gathered
            self.of_teacher["activations"] = 0.0
        self.at(phase, "backward of the head", before, mine + copied, fetched, logits=slopes)
        if self.tied:
            self.waiting = whole
        else:
            self._send(self.last, whole, fetched, "head")

    def _gather_head(self) -> None:
        """Record the moment in which the head's own unit is gathered."""
        when, activations = "gathering before the head", self.kept + self.stream
        message, before = self.message(self.last), self.message(self.units[-1])
        self.at("head and loss", when, activations, self.last.gathered, message, before)

    def _logits(self, trained: int) -> float:
        """Return the bytes of a chunk's logits. trained: size of the head's matrix, 0 if frozen."""
        config, half = self.config, self.compute < 4
        rows = rows_at_once(self.cfg, config, self.tokens, self.device)
        each = self.compute + (4 if half else 0) + (8 if config.final_logit_softcapping else 0)
        copy = trained * self.compute if half and self.device == "cpu" else 0
        compared = COMPARED_BYTES if compares_logits(self.cfg) else 0
        return rows * config.vocab_size * (each + compared) + copy

    @property
    def _compares(self) -> bool:
        """True if a chunk's logits are compared with those of a teacher in memory."""
        return self.teacher is not None and self.teacher.compares

    def _logits_of(self, reference: PlannedTeacher) -> float:
        """Return the bytes of a chunk's logits in the head of a reference, without gradients."""
        config, half = reference.config, self.compute < 4
        rows = rows_at_once(self.cfg, config, self.tokens, self.device)
        each = self.compute + (4 if half else 0) + (4 if config.final_logit_softcapping else 0)
        return rows * config.vocab_size * each / self.cfg.sharding.tensor

    def backward(self) -> None:
        """Record the moments of backward of the blocks, last ones first, and of the embedding."""
        done = len(self.traced)
        for i, unit in reversed([*enumerate(self.units)]):
            if done <= self.backward_from:
                break  # nothing before this block is trained
            mine, whole = unit.gathered, 0.0
            fetched = (
                self.message(*self.units[max(0, i - max(1, self.cfg.sharding.prefetch)) : i])
                if self.reshard
                else 0.0
            )
            self.gathered -= 0 if self.reshard else mine
            copied = self.gloo_copy(self.message(self.units[i - 1])) if i and self.reshard else 0.0
            self.at(
                "backward",
                f"gathering before block {done} goes back",
                self.kept + self.stream,
                mine,
                fetched + copied,
            )
            for _ in range(self.sizes[i]):
                traced = self.traced[done - 1]
                self.kept -= traced.saved - self.moved[done - 1]
                self.crossing = self.moved[done - 2] if done > 1 else 0.0
                activations = self.kept + traced.backward - traced.gradients
                self.at(
                    "backward",
                    f"backward of block {done}",
                    activations,
                    mine + whole + traced.gradients,
                    fetched,
                )
                whole += self.blocks[done - 1].trained * self.compute
                done -= 1
            self._send(unit, whole, fetched, f"block {done + 1}")
        embedding = self.trained_table(self.parts.embedding) if self.share.is_first else 0
        whole = embedding * self.compute
        self.at("backward", "backward of the embedding", self.kept + self.stream, whole)
        self.gathered, self.waiting = self.staged, 0.0
        self._send(self.first, whole, 0.0, "embedding")

    def trained_table(self, table: Tensor) -> int:
        """Return the size of the embedding's or the head's matrix, 0 if it is frozen."""
        return table.numel() if table.requires_grad else 0

    def _send(self, unit: FsdpUnit, whole: float, fetched: float, name: str) -> None:
        """Record the moments in which a unit's gradients are reduced to this rank's shard.

        whole: bytes of the unsharded gradients, which are copied into a message. Messages stay
        until later units send theirs (sharding.reduce_scatter_buffers); fetched: bytes of messages
        of parameters; name: of the unit.
        """
        phase = "head and loss" if name == "head" else "backward"
        when = f"reduction of the gradient of {name}"
        if not unit.trained:
            return  # the previous message stays until the next one
        while len(self.flying) >= self.cfg.sharding.reduce_scatter_buffers:
            self.flying.popleft()
        numbers = unit.trained_padded
        message, out = numbers * self.reduce, unit.own * self.reduce
        self.flying.append(message)
        self.at(phase, when, self.kept + self.stream, 0 if self.whole else whole, fetched)
        self.gradients -= unit.trained * self.reduce if self.whole else 0
        # a single rank sends nothing, but FSDP2 still makes a copy, divided by 1.0
        again = message if self.group == 1 else self.gloo_copy(message)
        self.at(phase, when, self.kept + self.stream, 0, fetched, again + out)
        if self.replicated and self.reduce != self.master:
            self.reduced += out
        if self.whole or not self.later:
            self.gradients += unit.own * self.stored
            self.sharded += unit.own * self.stored

    def update(self) -> None:
        """Record the moment of the optimizer's step."""
        self.flying.clear()
        self.gathered, self.kept = 0.0, 0.0
        self.reduced, self.gradients = 0.0, self.trained * self.stored
        self.sharded = self.gradients
        units = (self.first, self.last, *self.blocks)
        largest = max(unit.own for unit in units)
        update = Update(
            self.device, largest, self.gradients, *self.matrices, self.ranks, self.group
        )
        needs = update_bytes(self.cfg.optim, self.cfg.precision.master_dtype, update)
        self.at("update", "optimizer step", needs)


def matrix_numbers(share: StageShare, cfg: TrainConfig, config: ModelConfig) -> tuple[int, int]:
    """Return the size of the largest trained matrix of a rank's blocks, and the sum of all."""
    shapes = matrices_of(share, cfg, config)
    return max((rows * columns for _, rows, columns in shapes), default=0), sum(
        map(math.prod, shapes)
    )


def moved_bytes(
    cfg: TrainConfig, config: ModelConfig, traced: list[TracedPart], device: str
) -> list[int]:
    """Return for each block the bytes that activation_checkpoint.offload moves to the host.

    Those of the last block stay on the device. On a CPU nothing is moved.
    """
    itemsize = getattr(torch, cfg.precision.param_dtype).itemsize
    tokens = cfg.batch.micro_rows * own_length(cfg.sharding, cfg.batch.seq_len)
    stream = tokens * config.hidden_size * itemsize
    moves = cfg.activation_checkpoint.offload and device == "cuda" and stream >= SMALLEST
    return [*(block.saved if moves else 0 for block in traced[:-1]), 0]


def pinned_bytes(moved: float, stream: float) -> float:
    """Return the bytes of host memory for a block's moved bytes. stream: bytes of its input."""
    if moved <= stream:  # one tensor
        return 2 ** math.ceil(math.log2(moved)) if moved else 0.0
    return PINNED * moved


def trace_blocks(
    cfg: TrainConfig, config: ModelConfig, device: str, load: float = 1.0
) -> tuple[list[TracedPart], float]:
    """Return the memory of every block, and the bytes of rotations and masks that all share.

    load: rows that the experts of this rank get, divided by the number with even routing.
    """
    length, rows, precision, recompute = (
        own_length(cfg.sharding, cfg.batch.seq_len),
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
        sinks=config.family_spec.sinks,
        windowed=any(windows),
        compiled=cfg.compile.enabled,
        selective=recompute.mode == "selective",
    )
    method = context_method(cfg, config).method
    preferred = attention_layout(cfg, method, cfg.compile.enabled)
    layout = choose(preferred, cfg.model.attention_kernel, context).layout
    parts = model_parts(config, cfg)
    known: dict[tuple, TracedPart] = {}

    def trace(i: int, mode: str) -> TracedPart:
        has_gradient = parts.input_has_gradient(i)
        key = (parts.kind_of[i], windows[i], has_gradient, mode)
        if key not in known:
            is_gpu = device == "cuda"
            given = Input(
                rows,
                length,
                precision.param_dtype,
                layout,
                is_gpu,
                windows[i],
                has_gradient,
                cfg.sharding.tensor,
                cfg.sharding.expert,
                load,
            )
            known[key] = _traced(parts.kinds[parts.kind_of[i]], given, mode)
        return known[key]

    def _traced(kind: BlockKind, given: Input, mode: str) -> TracedPart:
        saved = ActivationCheckpoint(mode=mode, save=recompute.save)
        traced = with_repeated_keys(
            traced_rows(cfg, config, kind, given, saved), config, given, saved
        )
        if cfg.compile.enabled:
            ranks = kind.counts.ranks
            fed = fed_numbers(kind.block, config)
            traced = traced.less(compiled_saving(config, given, saved, traced, ranks, fed))
        return with_others_keys(cfg, config, traced, mode)

    def block(i: int) -> TracedPart:
        if recompute.mode == "budget":
            none, full = trace(i, "none"), trace(i, "full")
            return TracedPart(
                *(round(f + recompute.budget * (n - f)) for n, f in zip(none, full, strict=True))
            )
        return trace(i, recompute.mode if i % recompute.every == 0 else "none")

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
    masks = len({None, *windows}) * rows * length * cfg.batch.seq_len if layout == "mask" else 0
    return [block(i) for i in range(len(windows))], rotation * (
        2 if config.rope_local_theta else 1
    ) + masks


def traced_rows(
    cfg: TrainConfig,
    config: ModelConfig,
    kind: BlockKind,
    given: Input,
    saved: ActivationCheckpoint,
) -> TracedPart:
    """Return a block's bytes, traced only if they do not follow from other numbers of rows."""
    arguments = (kind.signature, cfg.adapter.name, replace(given, rows=0), saved)
    traces: dict[int, PartTrace] = remembered("block", config, arguments, dict)
    if given.rows in traces:
        return traces[given.rows].part()
    # experts get rows in portions: their memory is not linear in the number of rows
    by_others = None if has_experts(kind.block) else trace_of_rows(given.rows, traces)
    if by_others:
        return by_others.part()
    traces[given.rows] = trace_block(kind.block, config, given, saved)
    return traces[given.rows].part()


def with_others_keys(
    cfg: TrainConfig, config: ModelConfig, traced: TracedPart, mode: str
) -> TracedPart:
    """Add to a block's bytes the keys and values that it gets from ranks that share its rows.

    config: the part of the model on one rank of a tensor group.
    """
    itemsize = getattr(torch, cfg.precision.param_dtype).itemsize
    more = others_keys(cfg, config, itemsize)
    return traced._replace(
        forward=traced.forward + more.forward,
        backward=traced.backward + more.backward,
        saved=traced.saved + more.saved * (mode != "full"),
    )


def norm_traced(parts: ModelParts, tokens: int, dtype: str) -> TracedPart:
    """Return the memory of the norm before the head."""
    norm, config = parts.norm, parts.model.config
    arguments = (signature_of(norm), tokens, dtype)
    traced: TracedPart = remembered(
        "norm", config, arguments, lambda: trace_norm(norm, config, tokens, dtype)
    )
    return traced


def rows_at_once(cfg: TrainConfig, config: ModelConfig, tokens: int, device: str) -> int:
    """Return the number of tokens whose logits the head computes at a time."""
    head: Any = SimpleNamespace(chunk_mib=cfg.loss.chunk_mib, vocab_size=config.vocab_size)
    return Head.rows_at_once(head, tokens, device)
