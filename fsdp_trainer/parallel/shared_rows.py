"""The base of layouts whose ranks share rows: which ranks, and which tokens each of them has."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_trainer.distributed import to_device
from fsdp_trainer.models.attention import PackedAttention
from fsdp_trainer.models.document_calls import Lengths
from fsdp_trainer.parallel.deal import deal_tokens, token_costs

Gradients = tuple[Tensor | None, ...]


@dataclass(eq=False)
class ContextRanks:
    """The ranks that share this rank's rows, and the method by which they attend to them.

    shared: the subclass of SharedRows that is the method. rank: this one's place among `size`
    ranks. windows: of each block of the model, by which tokens are dealt.
    """

    shared: Any
    group: dist.ProcessGroup
    rank: int
    size: int
    windows: Sequence[int | None] = (None,)

    def layout(
        self, attention: str, lengths: Lengths, row: int, device: torch.device
    ) -> PackedAttention:
        """Return the layout of rows of which this rank holds a part. attention: of LAYOUTS."""
        return self.shared(attention, lengths, row, device, self)


class SharedRows(PackedAttention):
    """Base class of layouts whose queries, keys and values are a part of each row's tokens.

    parts: [ranks, rows, row / ranks] int64, the positions of each rank's tokens in each row.
    """

    def __init__(
        self, attention: str, lengths: Lengths, row: int, device: torch.device, ranks: ContextRanks
    ):
        """See PackedAttention. attention: a name of LAYOUTS, which computes."""
        self.attention = attention
        self.ranks = ranks
        self.parts = np.stack([self.deal(documents, row) for documents in lengths], 1)
        super().__init__(lengths, row, device)

    def deal(self, documents: list[int], row: int) -> np.ndarray:
        """[ranks, row / ranks] int64: the positions of each rank's tokens in one row."""
        return np.arange(row).reshape(self.ranks.size, -1)

    def own_positions(self) -> np.ndarray:
        """See PackedAttention."""
        return self.parts[self.ranks.rank]

    def document_lengths(self, positions: Tensor) -> Tensor:
        """[rows, row / ranks] int64: the length of each token's document."""
        whole = super().document_lengths(positions)
        return whole.gather(1, to_device(self.own_positions(), whole.device))


class DealtByCost(SharedRows):
    """Rows of which each rank has blocks of tokens that cost all ranks the same."""

    def deal(self, documents: list[int], row: int) -> np.ndarray:
        """See SharedRows: by the cost of attention."""
        costs = token_costs(documents, row, self.ranks.windows)
        return deal_tokens(costs, self.ranks.size)
