"""Sums over the tokens of each document, also where ranks split rows."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_trainer.models.decoder import MicroBatch
from fsdp_trainer.models.head import Scores
from fsdp_trainer.parallel.dims import Dims


def sums_by_document(values: Tensor, batch: MicroBatch) -> Tensor:
    """Return the sum of each document's values on this rank, [..., documents] float64.

    values: [..., supervised].
    """
    count = len(batch.documents.groups)  # also the document number of padding
    zeros = torch.zeros(*values.shape[:-1], count + 1, dtype=torch.float64, device=values.device)
    return zeros.index_add(-1, batch.documents.index, values.double())[..., :count]


def sum_where(values: Tensor, chosen: Tensor) -> Tensor:
    """Return the sum over some documents. values: [..., documents]; chosen: [documents] bool."""
    return values[..., chosen].sum(-1)


def answer_sums(values: Tensor, batch: MicroBatch, dims: Dims | None) -> Tensor:
    """Return the sum of each document's values, [..., documents] float64.

    Collective over the ranks that split rows, each of which has a part of the values and gets the
    gradient of its own part. dims: None if every rank has complete rows.
    """
    sums = sums_by_document(values, batch)
    if dims is None or dims.sizes["context"] == 1:
        return sums
    # a rank without data has no documents; to send equally many numbers, all pad to the number of
    # tokens in the rows
    room = batch.tokens.numel() * dims.sizes["context"] - sums.shape[-1]
    return _SumOverContext.apply(F.pad(sums, (0, room)), dims)[..., : sums.shape[-1]]


class _SumOverContext(torch.autograd.Function):
    """The sum over the ranks that split rows; each rank differentiates it by its own addend."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, dims: Dims) -> Tensor:
        total = values.clone()
        dims.sum_over_context(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def counted_once(value: Tensor, dims: Dims | None) -> Tensor:
    """Return a value that ranks splitting rows have in common as 0 on all but the first of them.

    A sum over ranks then counts it once. Its gradient is kept on all of them.
    """
    return value if dims is None or dims.is_first_of_context else value - value.detach()


def document_numbers(scores: Scores, batch: MicroBatch, dims: Dims | None) -> Tensor:
    """Return the head's numbers for each document, [documents, labels] float64. Collective."""
    assert scores.numbers is not None
    return answer_sums(scores.numbers.T, batch, dims).T


def document_vectors(scores: Scores, batch: MicroBatch, dims: Dims | None) -> Tensor:
    """Return the mean of each text's states that are read, [texts, hidden] float64. Collective."""
    assert scores.numbers is not None
    states = torch.cat([scores.numbers, torch.ones_like(scores.numbers[:, :1])], 1)
    sums = answer_sums(states.T, batch, dims).T
    return sums[:, :-1] / sums[:, -1:]
