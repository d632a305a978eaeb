"""Agreement between ranks that generate with one sharded model: each forward is collective."""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks(Protocol):
    """Decisions that must be the same on all ranks."""

    def tokens(self, chosen: Tensor) -> Tensor:
        """Return the next token of each row: [rows] int64. chosen: this rank's choice."""

    def most(self, number: int) -> int:
        """Return the largest of all ranks' numbers."""


class OneRank:
    """One process, or ranks whose models are independent of each other."""

    def tokens(self, chosen: Tensor) -> Tensor:
        return chosen

    def most(self, number: int) -> int:
        return number


class SamePrompts(OneRank):
    """Ranks that all continue the same prompts, with rank 0's tokens.

    Ranks with different tokens would stop at different times and wait for each other forever.
    """

    def tokens(self, chosen: Tensor) -> Tensor:
        """See Ranks. Collective."""
        chosen = chosen.contiguous()
        dist.broadcast(chosen, 0)
        return chosen


class OwnPrompts(OneRank):
    """Ranks that continue their own prompts. A rank that is done runs on until all are."""

    def __init__(self, device: torch.device):
        self.device = device

    def most(self, number: int) -> int:
        """See Ranks. Collective."""
        largest = torch.tensor(number, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)
