"""Causal attention over rows that hold several documents, none of which may see another.

A layout (a subclass of `PackedAttention`) knows where the documents of a micro-batch lie and
computes attention over them. It builds what its kernel needs from document lengths that the host
knows: once per micro-batch and window, not once per block, and without waiting for the device.
`models/attention_choice.py` chooses the layout.
"""

from collections.abc import Callable, Iterator
from copy import copy
from functools import lru_cache, partial
from inspect import signature
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

Lengths = list[list[int]]
PADDING_DOCUMENT = 128
"""Padding is computed as documents of at most this many tokens: its output must be finite."""
PADDING_WASTE_LIMIT = 1.25
"""Documents share a call if padding them to the longest costs at most this factor."""
CALL_COST = 64**2
"""The fixed cost of a kernel call, in units of length² of a document."""
LENGTH_MULTIPLE = {"cpu": 1, "cuda": 128}
"""Lengths of a call are multiples of this: cuDNN plans 0.1 s for each shape that is new to it."""
SOFTCAP_QUERIES = 256
"""Queries whose soft-capped scores exist at the same time."""


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to the device; the host does not wait for the copy."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Cache:
    """Keys and values of one block during generation, each [batch, tokens, kv heads, head_dim].

    Not a dataclass: fully_shard may copy those on their way into a block, and lose what is added.
    """

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return 0 if self.keys is None else self.keys.shape[1]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add new keys and values, and return all of them."""
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat((self.keys, keys), 1), torch.cat((self.values, values), 1)
        self.keys, self.values = keys, values
        return keys, values


class PackedAttention:
    """Base class of the layouts: documents, the window through which tokens see, and attention.

    lengths: for each row its documents' lengths in order; the rest of the row is padding.
    row: tokens in a row; window: how many tokens a token sees, itself included; None: all before.
    Not a dataclass, for the same reason as Cache.
    """

    def __init__(self, lengths: Lengths, row: int, device: torch.device):
        self.lengths, self.row, self.device = lengths, row, device
        self.window: int | None = None

    def with_window(self, window: int | None) -> Self:
        """Return the same documents seen through a window, ready for `attend`."""
        windowed = copy(self)
        windowed.window = window
        return windowed

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Return each document's causal attention, [batch, length, heads, head_dim], shaped as q.

        k, v: [batch, length, kv heads, head_dim]. scale: of the scores, 1 / √head_dim if None.
        softcap: scores s become softcap · tanh(s / softcap). Padded positions get finite numbers
        without a meaning.
        """
        raise NotImplementedError

    def document_lengths(self, positions: Tensor) -> Tensor:
        """[rows, row] int64: the length of each token's document; padding has length 1."""
        sizes = [_with_padding(row, self.row, 1) for row in self.lengths]
        lengths = np.stack([np.repeat(row, row) for row in sizes])
        return to_device(lengths, positions.device)


class OneDocument(PackedAttention):
    """Rows that are one document each, for inference: the queries are its last tokens.

    length: tokens of the document so far, those in a cache included.
    """

    def __init__(self, length: int):
        self.length, self.window = length, None

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """See PackedAttention. Builds no mask where the kernel needs none."""
        queries, keys = q.shape[1], k.shape[1]
        windowed = self.window is not None and self.window < keys
        if not windowed and queries in (1, keys):
            return sdpa(q, k, v, None, scale, softcap, is_causal=queries == keys)
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        if self.window is not None:
            mask = mask.triu(keys - queries + 1 - self.window)
        return sdpa(q, k, v, mask, scale, softcap)

    def document_lengths(self, positions: Tensor) -> Tensor:
        """[batch, new tokens] int64: the length of the document."""
        return torch.full_like(positions, self.length)


class DocumentAttention(PackedAttention):
    """Documents of similar length share a kernel call.

    Cost grows with Σ length², or with Σ length · window.
    """

    def __init__(self, lengths: Lengths, row: int, device: torch.device):
        super().__init__(lengths, row, device)
        self.plan = plan_calls(lengths, row, None, device)

    def with_window(self, window: int | None) -> Self:
        """Return the same documents seen through a window, with its own calls."""
        if window == self.window:
            return self
        windowed = super().with_window(window)
        windowed.plan = plan_calls(self.lengths, self.row, window, self.device)
        return windowed

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """See PackedAttention."""
        plan = self.plan
        if plan.width is not None:
            padding = q.shape[1] - plan.width
            q, k, v = (x[:, : plan.width] for x in (q, k, v))
            return F.pad(sdpa(q, k, v, None, scale, softcap), (0, 0, 0, 0, 0, padding))
        # one index_select for all calls: the backward of each allocates a gradient of all rows
        queries, keys, values = (
            x.flatten(0, 1).index_select(0, index).split(sizes)
            for x, index, sizes in (
                (q, plan.queries, [call.queries.size for call in plan.calls]),
                (k, plan.keys, [call.keys.size for call in plan.calls]),
                (v, plan.keys, [call.keys.size for call in plan.calls]),
            )
        )
        results = [
            sdpa(
                call_q.unflatten(0, call.queries.shape),
                call_k.unflatten(0, call.keys.shape),
                call_v.unflatten(0, call.keys.shape),
                call.mask,
                scale,
                softcap,
            ).flatten(0, 1)
            for call, call_q, call_k, call_v in zip(plan.calls, queries, keys, values, strict=True)
        ]
        return torch.cat(results).index_select(0, plan.order).view(q.shape)


class MaskedAttention(PackedAttention):
    """One kernel call under a block mask: fixed shapes; cost grows with the row's length squared.

    mask: [rows, 1, row, row] bool, True where a query may look. Each padded position sees itself
    alone, since the softmax of an empty row is NaN.
    """

    def __init__(self, lengths: Lengths, row: int, device: torch.device):
        super().__init__(lengths, row, device)
        document = to_device(_document_ids(lengths, row, padding=1), device)
        self.mask = (document[:, None, :, None] == document[:, None, None, :]).tril()

    def with_window(self, window: int | None) -> Self:
        """Return the same documents seen through a window. Call it on a layout without one."""
        windowed = super().with_window(window)
        windowed.mask = self.mask if window is None else self.mask.triu(1 - window)
        return windowed

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """See PackedAttention."""
        return sdpa(q, k, v, self.mask, scale, softcap)


class VarlenAttention(PackedAttention):
    """One call of `torch.nn.attention.varlen` over all documents: cost grows with Σ length².

    CUDA, 16-bit numbers, no softcap. ends: [documents + 1] int32, document boundaries over all
    rows. longest: a power of two or the row's length, not less than any document: a compiled block
    is specialised to it, so it must take few values.
    """

    def __init__(self, lengths: Lengths, row: int, device: torch.device):
        super().__init__(lengths, row, device)
        sizes = np.concatenate([_with_padding(part, row, PADDING_DOCUMENT) for part in lengths])
        self.ends = to_device(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32), device)
        self.longest = min(row, 1 << int(sizes.max() - 1).bit_length())
        self.kernel = _varlen()
        # compiled blocks: one graph for any number of documents
        torch._dynamo.maybe_mark_dynamic(self.ends, 0)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """See PackedAttention."""
        assert softcap is None, "attention_choice refuses it"
        past = -1 if self.window is None else self.window - 1
        bounds = (self.ends, self.ends, self.longest, self.longest)
        flat = (x.flatten(0, 1) for x in (q, k, v))
        return self.kernel(*flat, *bounds, scale=scale, window_size=(past, 0)).view(q.shape)


class FlexAttention(PackedAttention):
    """FlexAttention (Dong et al. 2024): a kernel compiled for these scores. CUDA.

    It skips blocks of 128 × 128 scores that are masked altogether.
    """

    def __init__(self, lengths: Lengths, row: int, device: torch.device):
        super().__init__(lengths, row, device)
        self.documents = to_device(_document_ids(lengths, row, PADDING_DOCUMENT), device)
        self.blocks: Any = None
        self.flex, self.compiled_flex, self.make_blocks = _flex(device.type)

    def with_window(self, window: int | None) -> Self:
        """Return the same documents seen through a window, with its block mask."""
        windowed, (rows, row) = super().with_window(window), self.documents.shape
        visible = _flex_mask(self.documents, window)
        windowed.blocks = self.make_blocks(visible, rows, None, row, row, self.documents.device)
        return windowed

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """See PackedAttention."""
        flex = self.flex if torch.compiler.is_compiling() else self.compiled_flex
        out = flex(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            score_mod=None if softcap is None else _flex_softcap(softcap),
            block_mask=self.blocks,
            scale=scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return out.transpose(1, 2)


LAYOUTS: dict[str, Callable[[Lengths, int, torch.device], PackedAttention]] = {
    "documents": DocumentAttention,
    "mask": MaskedAttention,
    "varlen": VarlenAttention,
    "flex": FlexAttention,
}


# --- DocumentAttention: which documents share a call ----------------------------------------------


class KernelCall(NamedTuple):
    """One kernel call over n pieces of documents: their queries and the keys that they may see.

    queries: [n, longest] and keys: [n, longest or more] int64, positions in the flattened
    micro-batch. A shorter piece repeats its last position, behind all that its queries look at.
    mask: [queries, keys] bool; None: causal, keys are queries.
    """

    queries: np.ndarray
    keys: np.ndarray
    mask: Tensor | None


class CallPlan(NamedTuple):
    """All kernel calls of a micro-batch.

    queries, keys: int64, those of all calls, one after the other. order: [rows · row] int64, where
    in the concatenated results each position's result is. width: if every row begins with its only
    document and all are about as long, that length: nothing need be gathered; else None.
    """

    calls: list[KernelCall]
    queries: Tensor
    keys: Tensor
    order: Tensor
    width: int | None


def plan_calls(lengths: Lengths, row: int, window: int | None, device: torch.device) -> CallPlan:
    """Group documents into kernel calls.

    A document longer than the window is cut into pieces of the window's length: the first piece is
    causal, each later one also sees the piece before it.
    """
    spans = [
        (i * row + sum(n[:j]), size) for i, n in enumerate(lengths) for j, size in enumerate(n)
    ]
    # an empty micro-batch computes one token, so that keys and values get gradients: without them
    # this rank's gradient reduction would have fewer entries than the other ranks'
    starts, sizes = np.array(spans or [(0, 1)], np.int64).T
    span = min(window or row, row)
    later = [
        (start + offset, min(span, size - offset))
        for start, size in zip(starts, sizes, strict=True)
        for offset in range(span, size, span)
    ]
    later_starts, later_sizes = np.array(later, np.int64).reshape(-1, 2).T
    multiple = LENGTH_MULTIPLE[device.type]
    order, computed = np.zeros(len(lengths) * row, np.int64), 0
    calls: list[KernelCall] = []
    for begins, counts, before in (
        (starts, np.minimum(sizes, span), 0),
        (later_starts, later_sizes, span),
    ):
        for group in _group_by_length(counts):
            begin, count = begins[group], counts[group]
            width = min(-(-int(count.max()) // multiple) * multiple, span)
            queries = keys = _positions(begin, count, width)
            mask = None
            if before:
                keys = _positions(begin - before, count + before, width + before)
                mask = torch.ones(queries.shape[1], keys.shape[1], dtype=torch.bool, device=device)
                mask = mask.triu(1).tril(before)
            calls.append(KernelCall(queries, keys, mask))
            real = np.arange(width) < count[:, None]
            order[queries[real]] = computed + np.flatnonzero(real)
            computed += real.size
    one_per_row = len(calls) == 1 and len(spans) == len(lengths) and all(map(len, lengths))
    flat_queries = np.concatenate([call.queries.ravel() for call in calls])
    flat_keys = np.concatenate([call.keys.ravel() for call in calls])
    return CallPlan(
        calls,
        to_device(flat_queries, device),
        to_device(flat_keys, device),
        to_device(order, device),
        calls[0].queries.shape[1] if one_per_row else None,
    )


def _group_by_length(sizes: np.ndarray) -> list[np.ndarray]:
    """Return groups of indices of pieces that share a call, longest first."""
    groups: list[list[int]] = []
    longest = needed = 0
    for i in np.argsort(-sizes, kind="stable").tolist():
        cost = int(sizes[i]) ** 2
        padded = (len(groups[-1]) + 1) * longest**2 if groups else 0
        if groups and padded <= PADDING_WASTE_LIMIT * (needed + cost) + CALL_COST:
            groups[-1].append(i)
            needed += cost
        else:
            groups.append([i])
            longest, needed = int(sizes[i]), cost
    return [np.array(group) for group in groups]


def _positions(starts: np.ndarray, sizes: np.ndarray, width: int) -> np.ndarray:
    """[pieces, width] int64: each piece's positions; a shorter piece repeats its last one."""
    return starts[:, None] + np.minimum(np.arange(width), sizes[:, None] - 1)


def _with_padding(lengths: list[int], row: int, longest: int) -> np.ndarray:
    """Return the documents' lengths and those that the row's padding is cut into."""
    whole, rest = divmod(row - sum(lengths), longest)
    return np.array([*lengths, *[longest] * whole, *([rest] if rest else [])], np.int64)


def _document_ids(lengths: Lengths, row: int, padding: int) -> np.ndarray:
    """[rows, row] int64: the number of each position's document in its row."""
    sizes = [_with_padding(part, row, padding) for part in lengths]
    return np.stack([np.repeat(np.arange(len(n)), n) for n in sizes])


# --- kernels --------------------------------------------------------------------------------------


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None = None,
    softcap: float | None = None,
    is_causal: bool = True,
) -> Tensor:
    """Call torch's `scaled_dot_product_attention` on [batch, length, heads, head_dim].

    With a soft limit on scores, which torch's does not have, our own function computes it.
    is_causal: without a mask, whether a query sees only keys up to its own position.
    """
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    causal = is_causal and mask is None
    if softcap is not None:
        scale = scale or q.shape[-1] ** -0.5
        return SoftcappedAttention.apply(q, k, v, mask, causal, scale, softcap).transpose(1, 2)
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and q.is_cuda and (mask is not None or q.dtype == torch.float32):
        # the only fused kernel for these (memory-efficient) takes as many kv heads as heads; the
        # unfused one would hold all scores
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped
    ).transpose(1, 2)


class SoftcappedAttention(torch.autograd.Function):
    """Attention with scores cap · tanh(s / cap) (Gemma 2), in chunks of queries.

    Backward computes a chunk's scores again: [batch, heads, chunk, keys] exist at the same time,
    and nothing of that size between forward and backward.
    q: [batch, heads, queries, head_dim]; k, v: [batch, kv heads, keys, head_dim];
    mask: bool, its last two dimensions are [queries, keys].
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float,
        cap: float,
    ) -> Tensor:
        """Return the attention, shaped as q."""
        ctx.save_for_backward(q, k, v, mask)
        ctx.options = causal, scale, cap
        results = []
        for rows, keys, _, _, probability in _softcapped_chunks(q, k, mask, causal, scale, cap):
            out = probability.to(q.dtype) @ v[:, :, keys]
            results.append(_ungroup(out, rows))
        return torch.cat(results, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:
        """Return the gradients of q, k and v; sums over chunks are taken in float32."""
        q, k, v, mask = ctx.saved_tensors
        causal, scale, cap = ctx.options
        grad_q = []
        grad_k, grad_v = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
        for rows, keys, q_rows, tanh, probability in _softcapped_chunks(
            q, k, mask, causal, scale, cap
        ):
            grad_out = _by_kv_head(grad[:, :, rows], k)
            grad_probability = (grad_out @ v[:, :, keys].transpose(2, 3)).float()
            mean = (probability * grad_probability).sum(-1, keepdim=True)
            grad_score = probability * (grad_probability - mean)
            grad_score = (grad_score * (1 - tanh * tanh) * scale).to(q.dtype)
            grad_q.append(_ungroup(grad_score @ k[:, :, keys], rows))
            grad_k[:, :, keys] += grad_score.transpose(2, 3) @ q_rows
            grad_v[:, :, keys] += probability.to(q.dtype).transpose(2, 3) @ grad_out
        return torch.cat(grad_q, 2), grad_k.to(k.dtype), grad_v.to(v.dtype), *[None] * 4


def _softcapped_chunks(
    q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float, cap: float
) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor]]:
    """Yield for each chunk of queries: its rows, the keys that they may see, the queries by kv
    head, tanh(scores / cap) and the probabilities, both float32 [batch, kv heads, heads of a kv
    head · queries, keys]."""
    for start in range(0, q.shape[2], SOFTCAP_QUERIES):
        rows = slice(start, min(start + SOFTCAP_QUERIES, q.shape[2]))
        keys = slice(0, rows.stop if causal else k.shape[2])
        q_rows = _by_kv_head(q[:, :, rows], k)
        tanh = torch.tanh((q_rows @ k[:, :, keys].transpose(2, 3)).float() * (scale / cap))
        scores = tanh * cap
        visible = None if mask is None else mask[..., rows, :]
        if causal:
            shape = rows.stop - start, keys.stop
            visible = torch.ones(shape, dtype=torch.bool, device=q.device).tril(start)
        if visible is not None:
            hidden = ~visible
            if hidden.dim() > 2:  # [batch, 1, queries, keys]: a dimension for a kv head's heads
                hidden = hidden.unsqueeze(2)
            scores = scores.unflatten(2, (-1, hidden.shape[-2]))
            scores = scores.masked_fill(hidden, float("-inf")).flatten(2, 3)
        yield rows, keys, q_rows, tanh, torch.softmax(scores, -1)


def _by_kv_head(q: Tensor, k: Tensor) -> Tensor:
    """[batch, kv heads, heads of a kv head · queries, head_dim]."""
    return q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)


def _ungroup(x: Tensor, rows: slice) -> Tensor:
    """Undo `_by_kv_head`: [batch, heads, queries, head_dim]."""
    return x.unflatten(2, (-1, rows.stop - rows.start)).flatten(1, 2)


@lru_cache
def _varlen() -> Callable[..., Any]:
    """Return torch's `varlen_attn` with grouped kv heads: before torch 2.12 it needs no option."""
    from torch.nn.attention.varlen import varlen_attn  # imports the compiler: 2 seconds

    if "enable_gqa" in signature(varlen_attn).parameters:
        return partial(varlen_attn, enable_gqa=True)
    return varlen_attn


@lru_cache
def _flex(device_type: str) -> tuple[Callable[..., Any], ...]:
    """Return `flex_attention` for compiled blocks, a compiled `flex_attention` for others, and
    `create_block_mask`. On a CPU none is compiled."""
    # imports the compiler: 2 seconds
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if device_type == "cpu":
        return flex_attention, flex_attention, create_block_mask
    compiled = partial(torch.compile, dynamic=False)
    return flex_attention, compiled(flex_attention), compiled(create_block_mask)


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
