"""Causal attention over rows in which several documents lie side by side and must never see each other."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Layout:
    """Where the documents of a micro-batch lie.

    lengths: for each row, its documents' lengths in order; what remains up to the row's end is padding. Held on the host.
    mask: [batch, 1, length, length] bool, True where a query may look; given instead where shapes must be fixed (compile).
    """

    lengths: list[list[int]] | None = None
    mask: Tensor | None = None

    @classmethod
    def masked(cls, lengths: list[list[int]], row: int, device: torch.device) -> "Layout":
        """The same documents as a block mask. Each padded position looks at itself alone: an empty row of a softmax is NaN."""
        document = torch.stack([torch.repeat_interleave(torch.tensor([*lens, *[1] * (row - sum(lens))])) for lens in lengths]).to(device)
        return cls(mask=(document[:, None, :, None] == document[:, None, None, :]).tril())


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


def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """[batch, length, heads, head_dim] of each document's causal attention. q: the same shape; k, v: with kv heads.

    With documents' lengths the cost grows with Σ length², with a mask with the row's length squared.
    """
    if layout.mask is not None:
        return _kernel(q, k, v, attn_mask=layout.mask)
    if layout.lengths is None:
        return _kernel(q, k, v, is_causal=q.shape[1] == k.shape[1])  # one document a row; a single new token sees all before it
    pieces = []
    for row, lengths in enumerate(layout.lengths):
        start = 0
        for length in lengths or [1]:  # an empty row: keys and values without a gradient would leave this rank's reduction shorter
            document = slice(start, start + length)
            pieces.append(_kernel(q[row : row + 1, document], k[row : row + 1, document], v[row : row + 1, document], is_causal=True)[0])
            start += length
        pieces.append(torch.zeros_like(q[row, start:]))
    return torch.cat(pieces).view(q.shape)


def _kernel(q: Tensor, k: Tensor, v: Tensor, **mask) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **mask).transpose(1, 2)
