"""Conversion of experts' adapters on disk from PEFT's tensors to ours and back."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_trainer.checkpoint.formats.derived import PartCache, by_matrix
from fsdp_trainer.checkpoint.formats.tensor_files import TensorOnDisk, read_whole


@dataclass
class OurB(TensorOnDisk):
    """Our B [experts, out, rank], as a matrix of all rows, read from PEFT's [out, ranks · experts].

    source: PEFT's tensor. row: the first of our rows in it. first: the first of our ranks in it.
    whole: number of its ranks. cache: holds complete source tensors.
    """

    source: TensorOnDisk
    experts: int
    row: int
    first: int
    whole: int
    cache: PartCache

    def as_matrix(self) -> TensorOnDisk:
        return self

    def fill(self, rows: Tensor, first: int, last: int) -> None:
        rank = self.shape[1]
        height = self.shape[0] // self.experts
        out = self.source.shape[0]
        whole = self.cache.rows(self.source, 0, out).view(out, self.whole, self.experts)
        own = whole[self.row : self.row + height, self.first : self.first + rank]
        for expert, begin, end, place in by_matrix(first, last, height):
            rows[place] = own[begin:end, :, expert]


@dataclass
class PlacedStack:
    """Position of our stacked A or B in PEFT's tensor.

    rank: the first of PEFT's ranks that it has. row: the first of PEFT's rows that B has. factor:
    multiplies B.
    """

    tensor: TensorOnDisk
    rank: int
    row: int = 0
    factor: float = 1.0


@dataclass
class PeftA(TensorOnDisk):
    """PEFT's A, [experts · ranks, in]: for each expert the ranks of all parts."""

    ranks: int
    placed: list[PlacedStack]

    def fill(self, rows: Tensor, first: int, last: int) -> None:
        start, stop = first // self.ranks, -(-last // self.ranks)  # experts
        experts = torch.empty(stop - start, self.ranks, self.shape[1], dtype=self.dtype)
        for part in self.placed:
            own = part.tensor.shape[1]
            experts[:, part.rank : part.rank + own] = read_whole(part.tensor, start, stop)
        own_rows = experts.flatten(0, 1)[first - start * self.ranks : last - start * self.ranks]
        rows.copy_(own_rows)


@dataclass
class PeftB(TensorOnDisk):
    """PEFT's B, [out, ranks · experts]; 0 in a part's rows at another part's ranks.

    cache: holds complete source tensors, of which each row of B has a part.
    """

    experts: int
    placed: list[PlacedStack]
    cache: PartCache

    def fill(self, rows: Tensor, first: int, last: int) -> None:
        rows.zero_()
        by_rank = rows.view(last - first, -1, self.experts)
        for part in self.placed:
            _, out, rank = part.tensor.shape
            begin, end = max(first, part.row), min(last, part.row + out)
            if begin < end:
                stack = self.cache.rows(part.tensor, 0, self.experts)
                numbers = stack[:, begin - part.row : end - part.row].permute(1, 2, 0)
                into = by_rank[begin - first : end - first, part.rank : part.rank + rank]
                into.copy_(numbers * part.factor)
