"""Causal attention over rows that hold several documents, none of which may see another.

A layout (a subclass of `PackedAttention`) knows where the documents of a micro-batch lie and
computes attention over them. It builds what its kernel needs from document lengths that the host
knows: once per micro-batch and window, not once per block, and without waiting for the device.
`models/attention_choice.py` chooses the layout.
"""

from collections.abc import Callable
from copy import copy
from functools import lru_cache, partial
from inspect import signature
from typing import Any, Protocol, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_trainer.distributed import to_device
from fsdp_trainer.models.document_calls import Lengths, plan_calls
from fsdp_trainer.models.sdpa import PLAIN, Scoring, sdpa

PADDING_DOCUMENT = 128
"""Padding is computed as documents of at most this many tokens: its output must be finite."""


class Cache(Protocol):
    """Keys and values of one block during generation."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values, and return those that the new queries look at.

        All are [batch, tokens, kv heads, head_dim].
        """


class PackedAttention:
    """Base class of the layouts: documents, the window through which tokens see, and attention.

    lengths: for each row its documents' lengths in order; the rest of the row is padding.
    row: tokens in a row; window: how many tokens a token sees, itself included; None: all before.
    Not a dataclass: fully_shard may copy those on their way into a block.
    """

    def __init__(self, lengths: Lengths, row: int, device: torch.device):
        self.lengths = lengths
        self.row = row
        self.device = device
        self.window: int | None = None
        self.prepare()

    def prepare(self) -> None:
        """Make what `attend` needs, but for a window."""

    def with_window(self, window: int | None) -> Self:
        """Return the same documents seen through a window, ready for `attend`."""
        windowed = copy(self)
        windowed.window = window
        return windowed

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring = PLAIN) -> Tensor:
        """Return each document's causal attention, [batch, length, heads, head_dim], shaped as q.

        k, v: [batch, length, kv heads, head_dim]. Padded positions get finite numbers without a
        meaning.
        """
        raise NotImplementedError

    def own_positions(self) -> np.ndarray:
        """[rows, tokens] int64: the positions of each row whose tokens this process has."""
        return np.tile(np.arange(self.row), (len(self.lengths), 1))

    def document_lengths(self, positions: Tensor) -> Tensor:
        """[rows, row] int64: the length of each token's document; padding has length 1."""
        lengths = np.stack([np.repeat(row, row) for row in self.sizes(1)])
        return to_device(lengths, positions.device)

    def document_numbers(self, padding: int) -> Tensor:
        """[rows, row] int64: the number of each position's document in its row.

        padding: tokens that a document of padding has at most.
        """
        numbers = [np.repeat(np.arange(len(row)), row) for row in self.sizes(padding)]
        return to_device(np.stack(numbers), self.device)

    def sizes(self, padding: int) -> list[np.ndarray]:
        """Return for each row the lengths of its documents, and of those that padding is cut into.

        padding: tokens that a document of padding has at most.
        """
        sizes = []
        for documents in self.lengths:
            whole, rest = divmod(self.row - sum(documents), padding)
            padded = [*documents, *[padding] * whole, *filter(None, [rest])]
            sizes.append(np.array(padded, np.int64))
        return sizes


class OneDocument(PackedAttention):
    """Rows that are one document each, for inference.

    length: tokens of the document.
    """

    def __init__(self, length: int):
        self.length = length
        self.window = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring = PLAIN) -> Tensor:
        """See PackedAttention. Builds no mask where the kernel needs none."""
        if self.window is None or self.window >= self.length:
            return sdpa(q, k, v, None, scoring)
        mask = torch.ones(self.length, self.length, dtype=torch.bool, device=q.device)
        return sdpa(q, k, v, mask.tril().triu(1 - self.window), scoring)

    def document_lengths(self, positions: Tensor) -> Tensor:
        """[batch, length] int64: the length of the document."""
        return torch.full_like(positions, self.length)


class DocumentAttention(PackedAttention):
    """Documents of similar length share a kernel call.

    Cost grows with Σ length², or with Σ length · window.
    """

    def prepare(self) -> None:
        """See PackedAttention."""
        self.plan = plan_calls(self.lengths, self.row, self.window, self.device)

    def with_window(self, window: int | None) -> Self:
        """Return the same documents seen through a window, with its own calls."""
        if window == self.window:
            return self
        windowed = super().with_window(window)
        windowed.prepare()
        return windowed

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring = PLAIN) -> Tensor:
        """See PackedAttention."""
        plan = self.plan
        calls = self.plan.calls
        if plan.width is not None:
            padding = q.shape[1] - plan.width
            q, k, v = (x[:, : plan.width] for x in (q, k, v))
            out = sdpa(q, k, v, None, scoring)
            return F.pad(out, (0, 0, 0, 0, 0, padding))
        queries = _gather(q, plan.queries, [call.queries for call in calls])
        keys = _gather(k, plan.keys, [call.keys for call in calls])
        values = _gather(v, plan.keys, [call.keys for call in calls])
        results = [
            sdpa(*parts, call.mask, scoring).flatten(0, 1)
            for call, parts in zip(calls, zip(queries, keys, values, strict=True), strict=True)
        ]
        return torch.cat(results).index_select(0, plan.order).view(q.shape)


class MaskedAttention(PackedAttention):
    """One kernel call under a block mask: fixed shapes; cost grows with the row's length squared.

    mask: [rows, 1, row, row] bool, True where a query may look. Each padded position sees itself
    alone, since the softmax of an empty row is NaN.
    """

    def prepare(self) -> None:
        """See PackedAttention."""
        document = self.document_numbers(1)
        self.mask = (document[:, None, :, None] == document[:, None, None, :]).tril()

    def with_window(self, window: int | None) -> Self:
        """Return the same documents seen through a window. Call it on a layout without one."""
        windowed = super().with_window(window)
        windowed.mask = self.mask if window is None else self.mask.triu(1 - window)
        return windowed

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring = PLAIN) -> Tensor:
        """See PackedAttention."""
        return sdpa(q, k, v, self.mask, scoring)


class VarlenAttention(PackedAttention):
    """One call of `torch.nn.attention.varlen` over all documents: cost grows with Σ length².

    CUDA, 16-bit numbers, no softcap. ends: [documents + 1] int32, document boundaries over all
    rows. longest: a power of two or the row's length, not less than any document: a compiled block
    is specialised to it, so it must take few values.
    """

    def prepare(self) -> None:
        """See PackedAttention."""
        sizes = np.concatenate(self.sizes(PADDING_DOCUMENT))
        ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        self.ends = to_device(ends, self.device)
        power_of_two = 1 << int(sizes.max() - 1).bit_length()
        self.longest = min(self.row, power_of_two)
        self.kernel = _varlen()
        # compiled blocks: one graph for any number of documents
        torch._dynamo.maybe_mark_dynamic(self.ends, 0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring = PLAIN) -> Tensor:
        """See PackedAttention."""
        assert scoring.softcap is None, "attention_choice refuses it"
        assert scoring.sinks is None, "attention_choice refuses them"
        past = -1 if self.window is None else self.window - 1
        bounds = (self.ends, self.ends, self.longest, self.longest)
        flat = (x.flatten(0, 1) for x in (q, k, v))
        out = self.kernel(*flat, *bounds, scale=scoring.scale, window_size=(past, 0))
        return out.view(q.shape)


class FlexAttention(PackedAttention):
    """FlexAttention (Dong et al. 2024): a kernel compiled for these scores. CUDA.

    It skips blocks of 128 × 128 scores that are masked altogether.
    """

    def prepare(self) -> None:
        """See PackedAttention."""
        self.documents = self.document_numbers(PADDING_DOCUMENT)
        self.blocks: Any = None
        self.flex, self.compiled_flex, self.make_blocks, self.sums = _flex(self.device.type)

    def with_window(self, window: int | None) -> Self:
        """Return the same documents seen through a window, with its block mask."""
        windowed = super().with_window(window)
        (rows, row) = self.documents.shape
        visible = _flex_mask(self.documents, window)
        windowed.blocks = self.make_blocks(visible, rows, None, row, row, self.documents.device)
        return windowed

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring = PLAIN) -> Tensor:
        """See PackedAttention."""
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

    index: all positions. One index_select for all calls: the backward of each allocates a gradient
    of all rows.
    """
    rows = x.flatten(0, 1).index_select(0, index)
    parts = rows.split([call.size for call in positions])
    return [part.unflatten(0, call.shape) for part, call in zip(parts, positions, strict=True)]


@lru_cache
def _varlen() -> Callable[..., Any]:
    """Return torch's `varlen_attn` with grouped kv heads: before torch 2.12 it needs no option."""
    from torch.nn.attention.varlen import varlen_attn  # imports the compiler: 2 seconds

    if "enable_gqa" in signature(varlen_attn).parameters:
        return partial(varlen_attn, enable_gqa=True)
    return varlen_attn


@lru_cache
def _flex(device_type: str) -> tuple[Any, ...]:
    """Return `flex_attention` for compiled blocks, a compiled `flex_attention` for others,
    `create_block_mask`, and what asks for the logarithms of sums. On a CPU none is compiled."""
    # imports the compiler: 2 seconds
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    sums = AuxRequest(lse=True)
    if device_type == "cpu":
        return flex_attention, flex_attention, create_block_mask, sums
    compiled = partial(torch.compile, dynamic=False)
    return flex_attention, compiled(flex_attention), compiled(create_block_mask), sums


def _flex_mask(documents: Tensor, window: int | None) -> Callable[..., Tensor]:
    """Return FlexAttention's `mask_mod`: whether a query may look at a key."""

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = (documents[row, query] == documents[row, key]) & (key <= query)
        return same if window is None else same & (query - key < window)

    return visible


def _flex_softcap(cap: float) -> Callable[..., Tensor]:
    """Return FlexAttention's `score_mod` for a soft limit."""

    def limited(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return limited
