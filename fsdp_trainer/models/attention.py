"""Attention over packed rows, in which documents do not attend to each other.

A layout (a subclass of `PackedAttention`) knows the positions of the documents of a micro-batch
and computes attention over them. It prepares the inputs of its kernel from document lengths on
the host: once per micro-batch and window, not once per block, and without waiting for the device.
`models/attention_choice.py` chooses the layout.
"""

from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from functools import lru_cache, partial
from inspect import signature
from typing import Any, Protocol, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from fsdp_trainer.base.distributed import to_device
from fsdp_trainer.models.attention_kernels import order_without_masks
from fsdp_trainer.models.document_calls import Lengths, plan_calls
from fsdp_trainer.models.sdpa import PLAIN, Scoring, sdpa

WHOLE_SHARE = 0.6
"""cuDNN computes a full row 1.7 to 2.3 times as fast as FlashAttention 2 on Hopper (published).
It is faster if Σ length² of the documents is more than this share of the cost of full rows."""
PADDING_DOCUMENT = 128
"""Padding is computed as documents of up to this many tokens, so that its output is finite."""


class Cache(Protocol):
    """Keys and values of one block during generation."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values, and return all that the new queries attend to.

        All [batch, tokens, kv heads, head_dim].
        """


class PackedAttention:
    """Base class of the layouts: documents, an optional window, and the attention over them.

    causal: False if tokens also attend to later ones of their document.
    lengths: for each row its documents' lengths in order; the rest of the row is padding.
    row: tokens per row; window: number of tokens that a token sees, including itself; None: all
    preceding ones.
    Not a dataclass, since fully_shard may copy dataclasses among a block's inputs.
    """

    causal = True
    _in_both_directions: "PackedAttention | None" = None

    def __init__(self, lengths: Lengths, row: int, device: torch.device):
        self.lengths = lengths
        self.row = row
        self.device = device
        self.window: int | None = None
        self.prepare()

    def prepare(self) -> None:
        """Prepare the inputs of `attend` that do not depend on a window."""

    def in_both_directions(self) -> "PackedAttention":
        """Return a layout of the same documents whose tokens attend to all of their document.

        Only for a layout without a window. Prepared once.
        """
        if self._in_both_directions is None:
            turned = copy(self)
            turned.causal = False
            turned.prepare()
            self._in_both_directions = turned
        return self._in_both_directions

    def with_window(self, window: int | None) -> Self:
        windowed = copy(self)
        windowed.window = window
        return windowed

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring = PLAIN) -> Tensor:
        """Return attention within each document, [batch, length, heads, head_dim], as q.

        k, v: [batch, length, kv heads, head_dim]. Padded positions get finite, meaningless
        numbers.
        """
        raise NotImplementedError

    def local_positions(self) -> np.ndarray:
        """Return the row positions whose tokens this process holds: [rows, tokens] int64."""
        return np.tile(np.arange(self.row), (len(self.lengths), 1))

    def document_lengths(self, positions: Tensor) -> Tensor:
        """Return the length of each token's document: [rows, row] int64; 1 for padding."""
        lengths = np.stack([np.repeat(row, row) for row in self.sizes(1)])
        return to_device(lengths, positions.device)

    def document_numbers(self, padding: int) -> np.ndarray:
        """Return each position's document within its row: [rows, row] int64.

        padding: most tokens in a document of padding.
        """
        return np.stack([np.repeat(np.arange(len(row)), row) for row in self.sizes(padding)])

    def is_whole(self) -> bool:
        """Return True if each row is one document at most, and nearly all of the rows is theirs."""
        needed = sum(size * size for documents in self.lengths for size in documents)
        whole = len(self.lengths) * self.row**2
        return all(len(row) <= 1 for row in self.lengths) and needed >= WHOLE_SHARE * whole

    def sizes(self, padding: int) -> list[np.ndarray]:
        """Return for each row the lengths of its documents, then of documents of padding.

        padding: most tokens in one of these.
        """
        sizes = []
        for documents in self.lengths:
            whole, rest = divmod(self.row - sum(documents), padding)
            padded = [*documents, *[padding] * whole, *filter(None, [rest])]
            sizes.append(np.array(padded, np.int64))
        return sizes


class OneDocument(PackedAttention):
    """Rows with one document each, for inference.

    length: number of tokens of the document.
    """

    def __init__(self, length: int):
        self.length = length
        self.window = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring = PLAIN) -> Tensor:
        """See PackedAttention. Builds a mask only if the window is shorter than the document."""
        if self.window is None or self.window >= self.length:
            return sdpa(q, k, v, None, scoring, self.causal)
        mask = torch.ones(self.length, self.length, dtype=torch.bool, device=q.device)
        return sdpa(q, k, v, mask.tril().triu(1 - self.window), scoring)

    def document_lengths(self, positions: Tensor) -> Tensor:
        return torch.full_like(positions, self.length)


class DocumentAttention(PackedAttention):
    """Attention with one kernel call for each group of documents of similar length.

    Cost grows with Σ length², or with Σ length · window.
    """

    def prepare(self) -> None:
        self.plan = plan_calls(self.lengths, self.row, self.window, self.device, self.causal)

    def with_window(self, window: int | None) -> Self:
        if window == self.window:
            return self
        windowed = super().with_window(window)
        windowed.prepare()
        return windowed

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring = PLAIN) -> Tensor:
        plan = self.plan
        calls = self.plan.calls
        if plan.width is not None:
            padding = q.shape[1] - plan.width
            q, k, v = (x[:, : plan.width] for x in (q, k, v))
            out = self.call(q, k, v, None, scoring)
            return F.pad(out, (0, 0, 0, 0, 0, padding)) if padding else out
        queries = _gather(q, plan.queries, [call.queries for call in calls])
        keys = _gather(k, plan.keys, [call.keys for call in calls])
        values = _gather(v, plan.keys, [call.keys for call in calls])
        results = [
            self.call(*parts, call.mask, scoring).flatten(0, 1)
            for call, parts in zip(calls, zip(queries, keys, values, strict=True), strict=True)
        ]
        return torch.cat(results).index_select(0, plan.order).view(q.shape)

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scoring: Scoring
    ) -> Tensor:
        return _ordered_sdpa(q, k, v, mask, scoring, self.causal)


class MaskedAttention(PackedAttention):
    """Attention with one masked kernel call: fixed shapes, cost grows with the row's length².

    mask: [rows, 1, row, row] bool, True where a query may attend to a key. Each padded position
    sees only itself, since the softmax of an empty row is NaN.
    """

    def prepare(self) -> None:
        document = to_device(self.document_numbers(1), self.device)
        same = document[:, None, :, None] == document[:, None, None, :]
        self.mask = same.tril() if self.causal else same

    def with_window(self, window: int | None) -> Self:
        """Return a layout with this window. Must be called on a layout without a window."""
        windowed = super().with_window(window)
        windowed.mask = self.mask if window is None else self.mask.triu(1 - window)
        return windowed

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring = PLAIN) -> Tensor:
        return sdpa(q, k, v, self.mask, scoring)


class VarlenAttention(PackedAttention):
    """Attention with one call of `torch.nn.attention.varlen`: cost grows with Σ length².

    A micro-batch of nearly whole rows (see `is_whole`) is computed by cuDNN instead, where it was
    chosen: a compiled block has a graph for either.
    Requires CUDA, 16-bit numbers and no softcap. ends: [documents + 1] int32, document boundaries
    over all rows. longest: [upper bound of the documents' lengths, 0], a power of two or the
    row's length; the kernel is slower with a larger one. It is the size of an empty tensor, which
    can be marked: with a plain number each block would be compiled again when it first differs.
    """

    def prepare(self) -> None:
        sizes = np.concatenate(self.sizes(PADDING_DOCUMENT))
        ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        self.ends = to_device(ends, self.device)
        power_of_two = 1 << int(sizes.max() - 1).bit_length()
        self.longest = torch.empty(min(self.row, power_of_two), 0, device=self.device)
        self.kernel = _varlen()
        are_full = all(documents == [self.row] for documents in self.lengths)
        self.whole = self.is_whole() if self.causal else are_full
        # one graph of a compiled block for any number and length of documents
        torch._dynamo.maybe_mark_dynamic(self.ends, 0)
        torch._dynamo.maybe_mark_dynamic(self.longest, 0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring = PLAIN) -> Tensor:
        assert scoring.softcap is None, "attention_choice refuses it"
        assert scoring.sinks is None, "attention_choice refuses them"
        if order_without_masks() and self.whole and self.window is None:
            return _ordered_sdpa(q, k, v, None, scoring, self.causal)
        past = -1 if self.window is None else self.window - 1
        longest = self.longest.shape[0]
        bounds = (self.ends, self.ends, longest, longest)
        flat = (x.flatten(0, 1) for x in (q, k, v))
        sees = (past, 0 if self.causal else past)
        out = self.kernel(*flat, *bounds, scale=scoring.scale, window_size=sees)
        return out.view(q.shape)


class FlexAttention(PackedAttention):
    """Attention with FlexAttention (Dong et al. 2024), a kernel compiled for these scores.

    Requires CUDA. Skips blocks of 128 × 128 scores that are completely masked.
    """

    def prepare(self) -> None:
        self.documents = to_device(self.document_numbers(PADDING_DOCUMENT), self.device)
        self.blocks: Any = None
        self.flex, self.compiled_flex, self.make_blocks, self.sums = _flex(self.device.type)

    def with_window(self, window: int | None) -> Self:
        windowed = super().with_window(window)
        (rows, row) = self.documents.shape
        visible = _flex_mask(self.documents, window, self.causal)
        windowed.blocks = self.make_blocks(visible, rows, None, row, row, self.documents.device)
        return windowed

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring = PLAIN) -> Tensor:
        flex = self.flex if torch.compiler.is_compiling() else self.compiled_flex
        sinks = scoring.sinks
        out = flex(
            *(x.transpose(1, 2) for x in (q, k, v)),
            score_mod=None if scoring.softcap is None else _flex_softcap(scoring.softcap),
            block_mask=self.blocks,
            scale=scoring.scale,
            enable_gqa=q.shape[2] != k.shape[2],
            return_aux=None if sinks is None else self.sums,
        )
        if sinks is None:
            return out.transpose(1, 2)
        out, sums = out
        share = torch.sigmoid(sums.lse - sinks.float()[:, None])
        return (out * share.unsqueeze(-1)).to(q.dtype).transpose(1, 2)


LAYOUTS: dict[str, type[PackedAttention]] = {
    "documents": DocumentAttention,
    "mask": MaskedAttention,
    "varlen": VarlenAttention,
    "flex": FlexAttention,
}


def _gather(x: Tensor, index: Tensor, positions: list[np.ndarray]) -> list[Tensor]:
    """Return the part of `x` at the positions of each call: [pieces, width, heads, head_dim].

    A single index_select for all calls, since the backward of each allocates a gradient for all
    rows.
    """
    rows = x.flatten(0, 1).index_select(0, index)
    parts = rows.split([call.size for call in positions])
    return [part.unflatten(0, call.shape) for part, call in zip(parts, positions, strict=True)]


def _ordered_sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scoring: Scoring, causal: bool
) -> Tensor:
    """Call `sdpa`; without a mask, kernels are tried in the order for such calls."""
    order = [] if mask is not None else order_without_masks()
    with sdpa_kernel(order, set_priority=True) if order else nullcontext():
        return sdpa(q, k, v, mask, scoring, causal)


@lru_cache
def _varlen() -> Callable[..., Any]:
    """Return torch's `varlen_attn` with grouped kv heads, an option since torch 2.12."""
    from torch.nn.attention.varlen import varlen_attn  # imports the compiler: 2 seconds

    if "enable_gqa" in signature(varlen_attn).parameters:
        return partial(varlen_attn, enable_gqa=True)
    return varlen_attn


@lru_cache
def _flex(device_type: str) -> tuple[Any, ...]:
    """Return FlexAttention's functions and a request for the log-sum-exps, uncompiled on a CPU.

    `flex_attention` for compiled blocks, a compiled `flex_attention` for other blocks,
    `create_block_mask`, and the request.
    """
    # imports the compiler: 2 seconds
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    sums = AuxRequest(lse=True)
    if device_type == "cpu":
        return flex_attention, flex_attention, create_block_mask, sums
    compiled = partial(torch.compile, dynamic=False)
    return flex_attention, compiled(flex_attention), compiled(create_block_mask), sums


def _flex_mask(documents: Tensor, window: int | None, causal: bool) -> Callable[..., Tensor]:
    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = documents[row, query] == documents[row, key]
        same = same & (key <= query) if causal else same
        return same if window is None else same & (query - key < window)

    return visible


def _flex_softcap(cap: float) -> Callable[..., Tensor]:
    def limited(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return limited
