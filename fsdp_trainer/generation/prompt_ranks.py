"""Agreement between ranks that generate with one sharded model: each forward is collective."""

import torch
import torch.distributed as dist
from torch import Tensor


class OneRank:
    """Decisions of one process, or of ranks whose models are independent of each other.

    Those of other ranks, which must be the same on all, are subclasses.
    """

    def tokens(self, chosen: Tensor) -> Tensor:
        """Return the next token of each row: [rows] int64. chosen: this rank's choice."""
        return chosen

    def most(self, number: int) -> int:
        """Return the largest of all ranks' numbers."""
        return number


class SamePrompts(OneRank):
    """Ranks that all continue the same prompts, with rank 0's tokens.

    Ranks with different tokens would stop at different times and wait for each other forever.
    """

    def tokens(self, chosen: Tensor) -> Tensor:
        """See OneRank. Collective."""
        chosen = chosen.contiguous()
        dist.broadcast(chosen, 0)
        return chosen


class OwnPrompts(OneRank):
    """Ranks that continue their own prompts. A rank that is done runs on until all are."""

    def __init__(self, device: torch.device):
        self.device = device

    def most(self, number: int) -> int:
        """See OneRank. Collective."""
        largest = torch.tensor(number, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)
