"""Causal attention over rows in which several documents lie side by side and must never see each other."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Layout:
    """Where the documents of a micro-batch lie, and how far a token looks back.

    lengths: for each row, its documents' lengths in order; what remains up to the row's end is padding. Held on the host.
    mask: [batch, 1, length, length] bool, True where a query may look; given instead where shapes must be fixed (compile).
    window: how many tokens a token sees, itself included; None: all before it.
    """

    lengths: list[list[int]] | None = None
    mask: Tensor | None = None
    window: int | None = None

    @classmethod
    def masked(cls, lengths: list[list[int]], row: int, device: torch.device) -> "Layout":
        """The same documents as a block mask. Each padded position looks at itself alone: an empty row of a softmax is NaN."""
        document = torch.stack([torch.repeat_interleave(torch.tensor([*lens, *[1] * (row - sum(lens))])) for lens in lengths]).to(device)
        return cls(mask=(document[:, None, :, None] == document[:, None, None, :]).tril())

    def within(self, window: int | None) -> "Layout":
        """The same documents, seen through a window."""
        if window is None or self.mask is None:
            return replace(self, window=window)
        return replace(self, mask=self.mask.triu(1 - window), window=window)


class Cache:
    """Keys and values, each [batch, tokens so far, kv heads, head_dim], of one block during generation.

    No dataclass: fully_shard hands a block copies of those, and what is appended would be lost.
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


def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float | None = None, softcap: float | None = None) -> Tensor:
    """[batch, length, heads, head_dim] of each document's causal attention. q: the same shape; k, v: with kv heads.

    scale: of the scores, 1 / √head_dim if None; softcap: scores s become softcap · tanh(s / softcap).
    With documents' lengths the cost grows with Σ length², with a mask with the row's length squared.
    """
    if layout.mask is not None:
        return _kernel(q, k, v, layout.mask, scale, softcap)
    if layout.lengths is None:
        return _causal(q, k, v, layout.window, scale, softcap)
    pieces = []
    for row, lengths in enumerate(layout.lengths):
        start = 0
        for length in lengths or [1]:  # an empty row: keys and values without a gradient would leave this rank's reduction shorter
            part = (slice(row, row + 1), slice(start, start + length))
            pieces.append(_causal(q[part], k[part], v[part], layout.window, scale, softcap)[0])
            start += length
        pieces.append(torch.zeros_like(q[row, start:]))
    return torch.cat(pieces).view(q.shape)


def _causal(q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float | None, softcap: float | None) -> Tensor:
    """One document a row; the queries are its last tokens. No mask where the kernel knows it itself."""
    new, total = q.shape[1], k.shape[1]
    windowed = window is not None and window < total
    if softcap is None and not windowed and new in (1, total):
        return _kernel(q, k, v, None, scale, None, is_causal=new == total)
    mask = torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new)
    return _kernel(q, k, v, mask.triu(total - new + 1 - window) if window is not None else mask, scale, softcap)


def _kernel(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, softcap: float | None, is_causal: bool = False
) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=grouped).transpose(1, 2)
    assert mask is not None
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (scale or q.shape[-1] ** -0.5)
    scores = (torch.tanh(scores / softcap) * softcap).masked_fill(~mask, float("-inf"))
    return (torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v).transpose(1, 2)
