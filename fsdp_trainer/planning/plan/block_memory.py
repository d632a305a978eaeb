"""The memory of a model's blocks and of its head in a micro-batch: each kind is traced once."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from fsdp_trainer.config.context_methods import attention_layout, context_method
from fsdp_trainer.config.schema import ActivationCheckpoint
from fsdp_trainer.models.attention_choice import AttentionContext, choose
from fsdp_trainer.models.head import Head, scratch_rows
from fsdp_trainer.parallel.activation_offload import SMALLEST
from fsdp_trainer.planning.plan.blocks import (
    Input,
    TracedPart,
    compiled_saving,
    fed_numbers,
    has_experts,
    remembered,
    trace_block,
    trace_of_rows,
)
from fsdp_trainer.planning.plan.fsdp_units import BlockKind
from fsdp_trainer.planning.plan.planned_model import PlannedModel
from fsdp_trainer.planning.plan.work import ATTENTION, visible_pairs

PINNED = 4 / 3
"""Host memory divided by the bytes moved there.

torch's allocator of pinned memory rounds each tensor up to a power of two. The mean surplus is a
third, if sizes are distributed evenly between two powers.
"""


def trace_blocks(
    model: PlannedModel, device: str, load: float = 1.0
) -> tuple[list[TracedPart], float]:
    """Return the memory of every block, and the bytes of rotations and masks that all use.

    load: rows that the experts of this rank get, divided by the number with even routing.
    """
    tracer = BlockTracer(model, device, load)
    return [tracer.block(i) for i in range(len(tracer.windows))], tracer.shared_bytes()


class BlockTracer:
    """Traces the blocks of one tensor rank's part of a model.

    windows: attention window of each block, None without one; attention: a name of
    `models.attention.LAYOUTS`.
    """

    def __init__(self, model: PlannedModel, device: str, load: float):
        self.model, self.device, self.load = model, device, load
        length = model.layout.row_tokens
        windows = model.part.shape.windows
        self.windows = [window if window and window < length else None for window in windows]
        self.attention = planned_attention(model, device)
        self._known: dict[tuple, TracedPart] = {}

    def block(self, i: int) -> TracedPart:
        recompute = self.model.checkpointing
        if recompute.mode == "budget":  # keeps no less
            return self._traced(i, "full")
        return self._traced(i, recompute.mode if i % recompute.every == 0 else "none")

    def shared_bytes(self) -> float:
        """Return the bytes of rotations and masks that all blocks use."""
        layout, config = self.model.layout, self.model.part.shape
        number = 4 if config.family_spec.rope_in_float32 else self.model.number
        rotation = 2 * layout.tokens * config.rotary_dim * number
        masks = 0
        if self.attention == "mask":
            masks = len({None, *self.windows}) * layout.tokens * layout.batch.seq_len
        return rotation * (2 if config.rope_local_theta else 1) + masks

    def _traced(self, i: int, mode: str) -> TracedPart:
        parts = self.model.own
        has_gradient = parts.input_has_gradient(i)
        key = (parts.kind_of[i], self.windows[i], has_gradient, mode)
        if key not in self._known:
            given = self._input(self.windows[i], has_gradient)
            traced = self._computed(parts.kinds[parts.kind_of[i]], given, mode)
            factor = self._row_pairs(self.model.part.shape.windows[i])
            work = {
                name: size * (factor if ATTENTION in name else 1.0)
                for name, size in traced.work.items()
            }
            self._known[key] = traced._replace(work=work)
        return self._known[key]

    def _row_pairs(self, window: int | None) -> float:
        """Return the operations of attention in a row's documents over those that were traced.

        Traced is one document as long as a rank's part of the row.
        """
        layout, documents = self.model.layout, self.model.documents
        length, own = layout.batch.seq_len, layout.row_tokens
        pairs = documents * visible_pairs(length / documents, window)
        return pairs * own / length / visible_pairs(own, window)

    def _input(self, window: int | None, has_gradient: bool) -> Input:
        layout = self.model.layout
        return Input(
            rows=layout.batch.micro_rows,
            length=layout.row_tokens,
            dtype=self.model.precision.param_dtype,
            attention=self.attention,
            window=window,
            has_gradient=has_gradient,
            tensor=layout.sharding.tensor,
            experts=layout.sharding.expert,
            load=self.load,
        )

    def _computed(self, kind: BlockKind, given: Input, mode: str) -> TracedPart:
        """Return the bytes of a kind of block as training computes it, which may be compiled."""
        model, config = self.model, self.model.part.shape
        saved = ActivationCheckpoint(mode=mode, save=model.checkpointing.save)
        traced = traced_rows(model, kind, given, saved)
        if given.tensor > 1:  # how many gathered tokens are held at once is the group's affair
            traced = traced._replace(forward=traced.saved)
        if model.compiled:
            adapted, fed = model.adapter.name != "none", fed_numbers(kind.block, config)
            traced = traced.less(compiled_saving(config, given, saved, traced, adapted, fed))
        return traced


def planned_attention(model: PlannedModel, device: str) -> str:
    layout, config = model.layout, model.part.shape
    context = AttentionContext(
        device=device,
        dtype=model.precision.param_dtype,
        head_dim=config.head_dim,
        softcap=config.attn_logit_softcapping is not None,
        sinks=config.family_spec.sinks,
        compiled=model.compiled,
        selective=model.checkpointing.mode == "selective",
    )
    method = context_method(layout.sharding, layout.batch.seq_len, model.part).method
    ranks = layout.sharding.context
    preferred = attention_layout(model.options, ranks, method, model.compiled)
    return choose(preferred, model.options.attention_kernel, context).layout


def traced_rows(
    model: PlannedModel, kind: BlockKind, given: Input, saved: ActivationCheckpoint
) -> TracedPart:
    """Return a block's bytes, traced only if they do not follow from other numbers of rows."""
    config = model.part.shape
    arguments = (kind.signature, model.adapter.name, replace(given, rows=0), saved)
    traces: dict[int, TracedPart] = remembered("block", config, arguments, dict)
    if given.rows in traces:
        return traces[given.rows]
    # experts get rows in portions: their memory is not linear in the number of rows
    by_others = None if has_experts(kind.block) else trace_of_rows(given.rows, traces)
    if by_others is None:
        by_others = traces[given.rows] = trace_block(kind.block, config, given, saved)
    return by_others


def moved_bytes(model: PlannedModel, traced: list[TracedPart], device: str) -> list[int]:
    """Return for each block the bytes that activation_checkpoint.offload moves to the host.

    Those of the last block stay on the device. On a CPU nothing is moved.
    """
    stream = model.layout.tokens * model.config.hidden_size * model.number
    moves = model.checkpointing.offload and device == "cuda" and stream >= SMALLEST
    return [*(block.saved if moves else 0 for block in traced[:-1]), 0]


def pinned_bytes(moved: float, stream: float) -> float:
    """Return the bytes of host memory for a block's moved bytes. stream: bytes of its input."""
    if moved <= stream:  # one tensor
        return 2 ** math.ceil(math.log2(moved)) if moved else 0.0
    return PINNED * moved


def logit_bytes(
    model: PlannedModel, device: str, compared: int = 0, differentiates: bool = True
) -> float:
    """Return the bytes of a chunk's logits in the head, on a rank of a tensor group.

    compared: bytes for each logit that is compared with a teacher's. differentiates: False for a
    head that computes scores alone.
    """
    config, number, columns = model.config, model.number, model.part.shape.vocab_size
    head: Any = SimpleNamespace(chunk_mib=model.chunk_mib, vocab_size=config.vocab_size)
    softcap, itemsize = config.final_logit_softcapping, 4 if compared else number
    rows = Head.rows_at_once(head, model.layout.tokens, device, itemsize)
    scratch = 0
    if not model.compiled and (number < 4 or softcap is not None):
        copies = 3 if softcap is not None and differentiates else 1  # with the cap's derivative
        scratch = 4 * copies * scratch_rows(rows, columns, device)
    return columns * (rows * (number + compared) + scratch)
