"""Cache of keys and values for rows that grow by one token at a time, and attention over it.

All rows end in the same column: a shorter row begins further right, and a mask hides the columns
before it. A new token is therefore written to the same column of every row.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fsdp_trainer.base.distributed import to_device
from fsdp_trainer.models.attention import DocumentAttention, PackedAttention
from fsdp_trainer.models.sdpa import PLAIN, Scoring, sdpa


class KeyValueCache:
    """The cache of all blocks. `blocks` is passed to the model.

    names: of the blocks. lengths: number of cached tokens of each row. capacity: number of columns.
    starts: [rows] int64, each row's first column. end: the number of filled columns.
    """

    def __init__(
        self, names: Sequence[str], lengths: Sequence[int], capacity: int, device: torch.device
    ):
        self.device = device
        self.capacity = capacity
        self.end = max(lengths)
        self.starts = self.end - np.array(lengths, np.int64)
        self.blocks = {name: BlockCache(self) for name in names}

    def expect_prompts(self, starts: Sequence[int]) -> None:
        """Let each block expect the packed prompts. starts: index of each row's first token."""
        columns = self.prompt_columns(starts)
        for block in self.blocks.values():
            block.expect(columns)

    def prompt_columns(self, starts: Sequence[int]) -> Tensor:
        """Return the index of the packed token in each column of each row: flat int64.

        starts: index of each row's first token in the packed prompts. Columns before a row repeat
        its first token, because even masked values must be finite.
        """
        columns = np.arange(self.end) - self.starts[:, None]
        places = np.array(starts, np.int64)[:, None] + columns.clip(min=0)
        return to_device(places.ravel(), self.device)

    def next_layout(self) -> "NextTokens":
        """Return the layout of one more token in each row, and count its column as filled."""
        self.end += 1
        assert self.end <= self.capacity
        return NextTokens(self.starts, self.end, self.device)

    def keep(self, rows: Sequence[int]) -> None:
        self.starts = self.starts[rows]
        first = int(self.starts.min())
        self.starts = self.starts - first
        for block in self.blocks.values():
            block.keep(to_device(np.array(rows, np.int64), self.device), first, self.end)
        self.end -= first
        self.capacity -= first


class BlockCache:
    """Keys and values of one block, each [rows, kv heads, capacity, head_dim].

    columns: index of the packed prompt token in each column, while prompts are expected; None:
    a new token is expected, which fills the last column.
    """

    def __init__(self, cache: KeyValueCache):
        self.cache = cache
        self.columns: Tensor | None = None
        self.keys = self.values = torch.empty(0)

    def expect(self, columns: Tensor) -> None:
        self.columns = columns

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See Cache. Prompts are packed, [1, tokens, …], and attend only to themselves."""
        if self.columns is not None:
            self.keys = self.filled(k[0], self.columns)
            self.values = self.filled(v[0], self.columns)
            self.columns = None
            return k, v
        end = self.cache.end
        self.keys[:, :, end - 1] = k[:, 0]
        self.values[:, :, end - 1] = v[:, 0]
        return self.keys[:, :, :end].transpose(1, 2), self.values[:, :, :end].transpose(1, 2)

    def filled(self, prompts: Tensor, columns: Tensor) -> Tensor:
        rows = len(self.cache.starts)
        _, heads, size = prompts.shape
        stored = prompts.new_empty(rows, heads, self.cache.capacity, size)
        placed = prompts.index_select(0, columns).view(rows, -1, heads, size)
        stored[:, :, : self.cache.end] = placed.transpose(1, 2)
        return stored

    def clear(self, end: int) -> None:
        self.keys[:, :, end:] = 0
        self.values[:, :, end:] = 0

    def keep(self, rows: Tensor, first: int, end: int) -> None:
        for name in ("keys", "values"):
            old = getattr(self, name)
            smaller = old.new_empty(len(rows), old.shape[1], old.shape[2] - first, old.shape[3])
            smaller[:, :, : end - first] = old[:, :, first:end].index_select(0, rows)
            setattr(self, name, smaller)


class Prompts(DocumentAttention):
    """Prompts packed into one row, none of which sees another."""

    def __init__(self, lengths: list[int], device: torch.device):
        super().__init__([lengths], sum(lengths), device)

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scoring: Scoring
    ) -> Tensor:
        """See DocumentAttention. cuDNN, which plans each new length, is not tried first."""
        return sdpa(q, k, v, mask, scoring)


class NextTokens(PackedAttention):
    """One new token in each row, which attends to the row's cached tokens and to itself.

    starts: [rows], each row's first column. keys: number of filled columns, with the new token's.
    """

    def __init__(self, starts: np.ndarray, keys: int, device: torch.device):
        self.window = None
        self.keys = keys
        self.row_lengths = to_device(keys - starts, device)[:, None]
        self.mask = None
        if starts.any():
            visible = np.arange(keys) >= starts[:, None]
            self.mask = to_device(visible, device)[:, None, None]

    @property
    def positions(self) -> Tensor:
        """[rows, 1] int64: the new tokens' positions in their rows."""
        return self.row_lengths - 1

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring = PLAIN) -> Tensor:
        first = 0 if self.window is None else max(0, self.keys - self.window)
        mask = None if self.mask is None else self.mask[..., first:]
        return attend_to_cached(q, k[:, first:], v[:, first:], mask, scoring)

    def document_lengths(self, positions: Tensor) -> Tensor:
        """[rows, 1] int64: the length of each row so far."""
        return self.row_lengths


def attend_to_cached(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scoring: Scoring
) -> Tensor:
    """Return the attention of one query in each row, [rows, 1, heads, head_dim], as q.

    k, v: [rows, columns, kv heads, head_dim]. mask: [rows, 1, 1, columns], visible columns.
    The heads that share keys become queries of one head, so that no kernel repeats the keys.
    """
    grouped = q[:, 0].unflatten(1, (k.shape[2], -1)).transpose(1, 2)
    if scoring.sinks is not None:
        scoring = scoring._replace(sinks=scoring.sinks.unflatten(0, (k.shape[2], -1)))
    out = sdpa(grouped, k, v, mask, scoring, is_causal=False)
    return out.transpose(1, 2).reshape(q.shape)
