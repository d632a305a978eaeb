"""Causal attention over rows in which several documents lie side by side and must never see each other.

A `Layout` says where the documents of a micro-batch lie, and computes attention over them. It makes what its kernel needs once for each
micro-batch and window, from lengths that the host knows, so that no block makes it again and nothing waits for the device.
Which layout: `models/attention_choice.py`.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache, partial
from inspect import signature
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

Lengths = list[list[int]]
PADDING = 128  # padding is computed as documents of at most this length: outputs that nobody reads must still be finite
WASTE = 1.25  # documents share a call if, padded to the longest, they cost at most this much more than they must
CALL = 64**2  # what a call costs by itself, in the length² of a document
LENGTHS = {
    "cpu": 1,
    "cuda": 128,
}  # a call's are multiples of this: cuDNN plans anew, for 0.1 s, for each shape that it has not seen
QUERIES_AT_ONCE = 256  # of scores that are soft-capped


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Without a wait of the host."""
    tensor = torch.from_numpy(array)
    return (
        tensor.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else tensor.to(device)
    )


class Cache:
    """Keys and values, each [batch, tokens so far, kv heads, head_dim], of one block during generation.

    No dataclass: of those fully_shard may hand a block copies, and what is appended would be lost.
    """

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values so far, the new ones included."""
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat((self.keys, keys), 1), torch.cat((self.values, values), 1)
        self.keys, self.values = keys, values
        return keys, values


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: "Layout",
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """[batch, length, heads, head_dim] of each document's causal attention. q: the same shape; k, v: with kv heads.

    scale: of the scores, 1 / √head_dim if None; softcap: scores s become softcap · tanh(s / softcap).
    What stands at padded positions is finite and means nothing.
    """
    return layout.attend(q, k, v, scale, softcap)


class Layout:
    """Documents by their lengths: those of like length share a kernel call, so that cost grows with Σ length², or Σ length · window.

    lengths: for each row, its documents' lengths in order; what remains up to the row's end is padding. None: each row is one document,
    whose last tokens the queries are (a cache holds the others).
    window: how many tokens a token sees, itself included; None: all before it.

    No dataclass, for the same reason as Cache: the calls are planned at the first block.
    """

    def __init__(self, lengths: Lengths | None = None):
        self.lengths = lengths
        self.window: int | None = None
        self.plan: Plan | None = None

    @staticmethod
    def masked(lengths: Lengths, row: int, device: torch.device) -> "Masked":
        """The same documents as a block mask."""
        return Masked(lengths, row, device)

    @property
    def one_document(self) -> bool:
        """Whether each row is one document."""
        return self.lengths is None

    def within(self, window: int | None) -> "Layout":
        """The same documents, seen through a window."""
        seen = copy(self)
        seen.window, seen.plan = window, None
        return seen

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, softcap: float | None
    ) -> Tensor:
        """See `attend`."""
        if self.lengths is None:
            return _one_document(q, k, v, self.window, scale, softcap)
        if self.plan is None:
            self.plan = Plan.of(self.lengths, q.shape[1], self.window, q.device)
        if self.plan.width is not None:
            padding = q.shape[1] - self.plan.width
            q, k, v = (x[:, : self.plan.width] for x in (q, k, v))
            return F.pad(kernel(q, k, v, None, scale, softcap), (0, 0, 0, 0, 0, padding))
        plan = self.plan
        # taken at once: each taking would cost as much as the whole row in backward
        queries = (
            q.flatten(0, 1)
            .index_select(0, plan.queries)
            .split([call.queries.size for call in plan.calls])
        )
        keys, values = (
            x.flatten(0, 1)
            .index_select(0, plan.keys)
            .split([call.keys.size for call in plan.calls])
            for x in (k, v)
        )
        parts = []
        for call, *taken in zip(plan.calls, queries, keys, values, strict=True):
            shapes = (call.queries.shape, call.keys.shape, call.keys.shape)
            qs, ks, vs = (x.unflatten(0, shape) for x, shape in zip(taken, shapes, strict=True))
            parts.append(kernel(qs, ks, vs, call.mask, scale, softcap).flatten(0, 1))
        return torch.cat(parts).index_select(0, plan.order).view(q.shape)


class Masked(Layout):
    """One kernel call under a block mask: shapes are fixed, cost grows with the row's length squared.

    mask: [batch, 1, length, length] bool, True where a query may look. Each padded position looks at itself alone: an empty row of a
    softmax is NaN.
    """

    def __init__(self, lengths: Lengths, row: int, device: torch.device):
        super().__init__(lengths)
        document = to_device(_documents(lengths, row, padding=1), device)
        self.mask = (document[:, None, :, None] == document[:, None, None, :]).tril()

    def within(self, window: int | None) -> "Masked":
        """The same documents, seen through a window."""
        seen = copy(self)
        seen.window, seen.mask = window, self.mask if window is None else self.mask.triu(1 - window)
        return seen

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, softcap: float | None
    ) -> Tensor:
        """See `attend`."""
        return kernel(q, k, v, self.mask, scale, softcap)


class Varlen(Layout):
    """One kernel call over all documents (`torch.nn.attention.varlen`): cost grows with Σ length². CUDA, 16-bit numbers, no softcap.

    ends: [documents + 1] int32, where each begins and the last one ends, over all rows; longest: at least the longest one's length, one of
    few numbers, since a compiled block knows it.
    """

    def __init__(self, lengths: Lengths, row: int, device: torch.device):
        super().__init__(lengths)
        every = np.concatenate([_with_padding(lens, row, PADDING) for lens in lengths])
        self.ends = to_device(np.concatenate([[0], np.cumsum(every)]).astype(np.int32), device)
        self.longest = min(row, 1 << int(every.max() - 1).bit_length())
        self.kernel = _varlen()
        torch._dynamo.maybe_mark_dynamic(
            self.ends, 0
        )  # compiled blocks: one graph for any number of documents

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, softcap: float | None
    ) -> Tensor:
        """See `attend`."""
        assert softcap is None, "attention_choice refuses it"
        past = -1 if self.window is None else self.window - 1
        places = (self.ends, self.ends, self.longest, self.longest)
        flat = (x.flatten(0, 1) for x in (q, k, v))
        return self.kernel(*flat, *places, scale=scale, window_size=(past, 0)).view(q.shape)


class Flex(Layout):
    """FlexAttention (Dong et al. 2024): a kernel compiled for these scores, which passes over blocks of 128² that the mask empties. CUDA."""

    def __init__(self, lengths: Lengths, row: int, device: torch.device):
        super().__init__(lengths)
        self.documents = to_device(_documents(lengths, row, PADDING), device)
        self.blocks: Any = None
        self.flex, self.compiled_flex, self.make_blocks = _flex(device.type)

    def within(self, window: int | None) -> "Flex":
        """The same documents, seen through a window."""
        seen, (rows, row), device = copy(self), self.documents.shape, self.documents.device
        seen.window, seen.blocks = (
            window,
            self.make_blocks(_sees(self.documents, window), rows, None, row, row, device),
        )
        return seen

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, softcap: float | None
    ) -> Tensor:
        """See `attend`."""
        flex = self.flex if torch.compiler.is_compiling() else self.compiled_flex
        change, grouped = None if softcap is None else _softcap(softcap), q.shape[2] != k.shape[2]
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return flex(
            q, k, v, score_mod=change, block_mask=self.blocks, scale=scale, enable_gqa=grouped
        ).transpose(1, 2)


LAYOUTS: dict[str, Callable[[Lengths, int, torch.device], Layout]] = {
    "documents": lambda lengths, row, device: Layout(lengths),
    "mask": Masked,
    "varlen": Varlen,
    "flex": Flex,
}


# --- documents: which of them share a call -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """What one kernel call computes: of each of n pieces of documents, queries and the keys that they may look at.

    queries: [n, longest] and keys: [n, longest or more] int64, positions in the flattened micro-batch; a shorter piece repeats its end.
    mask: [queries, keys] bool; None: causal, keys are queries. Repeated ends come after what any true query looks at.
    """

    queries: np.ndarray
    keys: np.ndarray
    mask: Tensor | None


@dataclass(frozen=True)
class Plan:
    """The calls of a micro-batch. queries, keys: int64, those of all calls; order: [batch · length] int64, where in their results each
    position's is.

    width: where each row begins with its only document and all are about as long, their length: nothing need be moved.
    """

    calls: Sequence[Call]
    queries: Tensor
    keys: Tensor
    order: Tensor
    width: int | None

    @classmethod
    def of(cls, lengths: Lengths, row: int, window: int | None, device: torch.device) -> "Plan":
        """A document longer than the window is cut into pieces of its length: the first is causal, a later one also sees the one before."""
        spans = [
            (i * row + sum(lens[:j]), n)
            for i, lens in enumerate(lengths)
            for j, n in enumerate(lens)
        ]
        # an empty micro-batch: keys and values without a gradient would leave this rank's reduction shorter
        starts, sizes = np.array(spans or [(0, 1)], np.int64).T
        span = min(window or row, row)
        firsts = (starts, np.minimum(sizes, span))
        later = [
            (start + at, min(span, n - at))
            for start, n in zip(starts, sizes, strict=True)
            for at in range(span, n, span)
        ]
        step = LENGTHS[device.type]
        order, done = np.zeros(len(lengths) * row, np.int64), 0
        calls: list[Call] = []
        for (begin, size), before in (
            (firsts, 0),
            (np.array(later, np.int64).reshape(-1, 2).T, span),
        ):
            for group in _alike(size):
                width = min(-(-int(size[group].max()) // step) * step, span)
                queries = _positions(begin[group], size[group], width)
                true = np.arange(width) < size[group][:, None]
                order[queries[true]] = done + np.flatnonzero(true)
                done += true.size
                if before:
                    keys = _positions(begin[group] - before, size[group] + before, width + before)
                    mask = (
                        torch.ones(width, width + before, dtype=torch.bool, device=device)
                        .triu(1)
                        .tril(before)
                    )
                    calls.append(Call(queries, keys, mask))
                else:
                    calls.append(Call(queries, queries, None))
        in_place = (
            len(calls) == 1
            and len(spans) == len(lengths)
            and all(len(lens) == 1 for lens in lengths)
        )
        indices = [
            np.concatenate([x.ravel() for x in every])
            for every in zip(*((c.queries, c.keys) for c in calls), strict=True)
        ]
        all_queries, all_keys, order_there = (to_device(x, device) for x in (*indices, order))
        return cls(
            calls,
            all_queries,
            all_keys,
            order_there,
            calls[0].queries.shape[1] if in_place else None,
        )


def _alike(sizes: np.ndarray) -> list[np.ndarray]:
    """Indices of pieces that share a call, longest first."""
    groups: list[list[int]] = []
    longest = least = 0
    for i in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[i])
        if groups and (len(groups[-1]) + 1) * longest**2 <= WASTE * (least + size**2) + CALL:
            groups[-1].append(i)
            least += size**2
        else:
            groups.append([i])
            longest, least = size, size**2
    return [np.array(group) for group in groups]


def _positions(starts: np.ndarray, sizes: np.ndarray, width: int) -> np.ndarray:
    """[pieces, width] int64; a shorter piece repeats its end."""
    return starts[:, None] + np.minimum(np.arange(width), sizes[:, None] - 1)


def _with_padding(lengths: list[int], row: int, at_most: int) -> np.ndarray:
    """Of all documents in a row, those of padding too."""
    whole, rest = divmod(row - sum(lengths), at_most)
    return np.array([*lengths, *[at_most] * whole, *([rest] if rest else [])], np.int64)


def _documents(lengths: Lengths, row: int, padding: int) -> np.ndarray:
    """[rows, row] int64: the number of each position's document in its row."""
    sizes = [_with_padding(lens, row, padding) for lens in lengths]
    return np.stack([np.repeat(np.arange(len(n)), n) for n in sizes])


# --- kernels -----------------------------------------------------------------------------------------------------------------------


def _one_document(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float | None, softcap: float | None
) -> Tensor:
    """The queries are the last tokens of a row that is one document. No mask where the kernel knows it itself."""
    new, total = q.shape[1], k.shape[1]
    if not (window is not None and window < total) and new in (1, total):
        return kernel(q, k, v, None, scale, softcap, is_causal=new == total)
    mask = torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new)
    return kernel(
        q, k, v, mask.triu(total - new + 1 - window) if window is not None else mask, scale, softcap
    )


def kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None = None,
    softcap: float | None = None,
    is_causal: bool = True,
) -> Tensor:
    """`scaled_dot_product_attention` of [batch, length, heads, head_dim]; with a soft limit on scores, which it has not, our own.

    is_causal: without a mask, whether a query looks only at keys up to its own place.
    """
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if softcap is not None:
        return Softcapped.apply(
            q, k, v, mask, is_causal and mask is None, scale or q.shape[-1] ** -0.5, softcap
        ).transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.is_cuda and (mask is not None or q.dtype == torch.float32):
        # the only fused kernel for these (memory-efficient) takes as many kv heads as heads; the unfused one would hold all scores
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        grouped = False
    causal = is_causal and mask is None
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped
    ).transpose(1, 2)


class Softcapped(torch.autograd.Function):
    """Attention with scores cap · tanh(s / cap) (Gemma 2), by chunks of queries; backward computes a chunk's scores again.

    What exists at once is [batch, heads, chunk, keys], and between forward and backward nothing of that size.
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
        """q: [batch, heads, queries, head_dim]; k, v: [batch, kv heads, keys, head_dim]; mask: bool, its last two [queries, keys]."""
        ctx.save_for_backward(q, k, v, mask)
        ctx.causal, ctx.scale, ctx.cap = causal, scale, cap
        parts = []
        for start, stop, keys in _chunks(q.shape[2], k.shape[2], causal):
            _, probability = _capped(
                _by_kv_head(q[:, :, start:stop], k),
                k[:, :, :keys],
                mask,
                start,
                keys,
                causal,
                scale,
                cap,
            )
            parts.append(
                (probability.to(q.dtype) @ v[:, :, :keys])
                .unflatten(2, (-1, stop - start))
                .flatten(1, 2)
            )
        return torch.cat(parts, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:
        """Of q, k and v; sums over chunks in float32."""
        q, k, v, mask = ctx.saved_tensors
        dq, dk, dv = (
            [],
            torch.zeros_like(k, dtype=torch.float32),
            torch.zeros_like(v, dtype=torch.float32),
        )
        for start, stop, keys in _chunks(q.shape[2], k.shape[2], ctx.causal):
            seen, part = k[:, :, :keys], _by_kv_head(q[:, :, start:stop], k)
            ratio, probability = _capped(
                part, seen, mask, start, keys, ctx.causal, ctx.scale, ctx.cap
            )
            out = _by_kv_head(grad[:, :, start:stop], k)
            wanted = (out @ v[:, :, :keys].transpose(2, 3)).float()
            slope = probability * (wanted - (probability * wanted).sum(-1, keepdim=True))
            slope = (slope * (1 - ratio * ratio) * ctx.scale).to(q.dtype)
            dq.append((slope @ seen).unflatten(2, (-1, stop - start)).flatten(1, 2))
            dk[:, :, :keys] += slope.transpose(2, 3) @ part
            dv[:, :, :keys] += probability.to(q.dtype).transpose(2, 3) @ out
        return torch.cat(dq, 2), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def _chunks(queries: int, keys: int, causal: bool) -> list[tuple[int, int, int]]:
    """(first query, last one + 1, keys that they may look at)."""
    cuts = [
        (start, min(start + QUERIES_AT_ONCE, queries))
        for start in range(0, queries, QUERIES_AT_ONCE)
    ]
    return [(start, stop, stop if causal else keys) for start, stop in cuts]


def _by_kv_head(q: Tensor, k: Tensor) -> Tensor:
    """[batch, kv heads, heads of a kv head · queries, head_dim]."""
    return q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)


def _capped(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    start: int,
    keys: int,
    causal: bool,
    scale: float,
    cap: float,
) -> tuple[Tensor, Tensor]:
    """tanh(scores / cap) and the probabilities, float32 [batch, kv heads, heads of a kv head · queries, keys]."""
    ratio = torch.tanh((q @ k.transpose(2, 3)).float() * (scale / cap))
    if causal:
        stop = keys
        mask = torch.ones(stop - start, keys, dtype=torch.bool, device=q.device).tril(start)
    elif mask is not None:
        # the last chunk may be shorter
        mask = mask[..., start : start + QUERIES_AT_ONCE, :]
    scores = ratio * cap
    if mask is not None:
        queries = mask.shape[-2]
        hidden = ~(
            mask if mask.dim() == 2 else mask.unsqueeze(2)
        )  # of [batch, 1, queries, keys]: a dimension for the heads of a kv head
        scores = scores.unflatten(2, (-1, queries)).masked_fill(hidden, float("-inf")).flatten(2, 3)
    return ratio, torch.softmax(scores, -1)


@lru_cache
def _varlen() -> Callable[..., Any]:
    """`varlen_attn`, which takes fewer kv heads unasked before torch 2.12."""
    from torch.nn.attention.varlen import varlen_attn  # imports the compiler: 2 seconds

    return (
        partial(varlen_attn, enable_gqa=True)
        if "enable_gqa" in signature(varlen_attn).parameters
        else varlen_attn
    )


@lru_cache
def _flex(device_type: str) -> tuple[Callable[..., Any], ...]:
    """`flex_attention` as it is, for compiled blocks; compiled by itself; and `create_block_mask`. On a CPU nothing is compiled."""
    from torch.nn.attention.flex_attention import (
        create_block_mask,
        flex_attention,
    )  # imports the compiler: 2 seconds

    if device_type == "cpu":
        return flex_attention, flex_attention, create_block_mask
    return (
        flex_attention,
        torch.compile(flex_attention, dynamic=False),
        torch.compile(create_block_mask, dynamic=False),
    )


def _sees(
    documents: Tensor, window: int | None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Whether a query may look at a key, as FlexAttention asks."""

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = (documents[row, query] == documents[row, key]) & (key <= query)
        return same if window is None else same & (query - key < window)

    return sees


def _softcap(cap: float) -> Callable[..., Tensor]:
    """A change of scores, as FlexAttention asks for it."""

    def change(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return change
