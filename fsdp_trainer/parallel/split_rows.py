"""Base classes of layouts for context parallelism: the ranks, and the tokens of each rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_trainer.base.distributed import to_device
from fsdp_trainer.models.attention import PackedAttention
from fsdp_trainer.models.document_calls import Lengths
from fsdp_trainer.parallel.balance_tokens import deal_tokens, token_costs

Gradients = tuple[Tensor | None, ...]


@dataclass(eq=False)
class ContextRanks:
    """The ranks that have parts of this rank's rows, and the method of attention over them.

    method: a subclass of SplitRows. rank: index of this rank among `size` ranks.
    windows: window of each block of the model, which determine the cost of tokens.
    """

    method: Any
    group: dist.ProcessGroup
    rank: int
    size: int
    windows: Sequence[int | None] = (None,)

    def layout(
        self, attention: str, lengths: Lengths, row: int, device: torch.device
    ) -> PackedAttention:
        """Return the layout of rows of which this rank has a part. attention: key of LAYOUTS."""
        return self.method(attention, lengths, row, device, self)


class SplitRows(PackedAttention):
    """Base class of layouts with queries, keys and values for a part of each row's tokens.

    parts: [ranks, rows, row / ranks] int64, the positions of each rank's tokens in each row.
    """

    def __init__(
        self, attention: str, lengths: Lengths, row: int, device: torch.device, ranks: ContextRanks
    ):
        """See PackedAttention. attention: key of LAYOUTS, the layout that computes attention."""
        self.attention = attention
        self.ranks = ranks
        self.parts = np.stack([self.deal(documents, row) for documents in lengths], 1)
        super().__init__(lengths, row, device)

    def deal(self, documents: list[int], row: int) -> np.ndarray:
        """Return the positions of each rank's tokens in one row: [ranks, row / ranks] int64."""
        return np.arange(row).reshape(self.ranks.size, -1)

    def local_positions(self) -> np.ndarray:
        return self.parts[self.ranks.rank]

    def document_lengths(self, positions: Tensor) -> Tensor:
        """Return the length of each own token's document: [rows, row / ranks] int64."""
        whole = super().document_lengths(positions)
        return whole.gather(1, to_device(self.local_positions(), whole.device))


class DealtByCost(SplitRows):
    """Base class of layouts that assign tokens to ranks so that attention costs are equal."""

    def deal(self, documents: list[int], row: int) -> np.ndarray:
        costs = token_costs(documents, row, self.ranks.windows)
        return deal_tokens(costs, self.ranks.size)


class TokenRuns(NamedTuple):
    """Runs of consecutive tokens of a document on this rank. Arrays are [runs] int64.

    place: index of the first token among this rank's tokens; size: number of tokens; position: flat
    position of the first token in the complete rows; start: position of the first token that it may
    see.
    """

    place: np.ndarray
    size: np.ndarray
    position: np.ndarray
    start: np.ndarray

    def at(self, index: np.ndarray) -> "TokenRuns":
        return TokenRuns(*(field[index] for field in self))


def find_runs(own: np.ndarray, lengths: Lengths, row: int, window: int | None) -> TokenRuns:
    """Return the runs of tokens at the positions `own`, without padding.

    No run is longer than the window. own: [rows, tokens] int64, ascending in each row.
    """
    runs = []
    for number, documents in enumerate(lengths):
        ends = np.cumsum(documents, dtype=np.int64)
        document = np.searchsorted(ends, own[number], side="right")
        last = np.flatnonzero((np.diff(own[number]) != 1) | (np.diff(document) != 0))
        firsts = np.concatenate([[0], last + 1])
        stops = np.concatenate([last + 1, [own.shape[1]]])
        for first, stop in zip(firsts.tolist(), stops.tolist(), strict=True):
            if document[first] == len(documents):
                continue  # padding
            start = int(ends[document[first]]) - documents[document[first]]
            step = window or row
            for begin in range(first, stop, step):
                position = int(own[number, begin])
                place = number * own.shape[1] + begin
                visible = max(start, position + 1 - step) + number * row
                size = min(step, stop - begin)
                runs.append((place, size, position + number * row, visible))
    return TokenRuns(*np.array(runs, np.int64).reshape(-1, 4).T)
