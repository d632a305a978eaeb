"""Reranking: a score of each document, which is read together with its query (a cross-encoder)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_trainer.config.methods import ObjectiveChoice
from fsdp_trainer.data.records.labelled_texts import SCORED
from fsdp_trainer.data.store.stored_values import SampleColumns
from fsdp_trainer.data.store.token_store import TokenStore
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.methods.classification import wanted_numbers
from fsdp_trainer.methods.document_step import DocumentForwardBackward, DocumentObjective
from fsdp_trainer.methods.labels import text_scores
from fsdp_trainer.methods.method import Method, StepParts
from fsdp_trainer.methods.stored_columns import RunRows
from fsdp_trainer.models.decoder import MicroBatch
from fsdp_trainer.models.head import Objective, Scores
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.training.documents.document_sums import (
    counted_once,
    document_numbers,
    sum_where,
)
from fsdp_trainer.training.metrics import MethodMetric, MicroBatchResult
from fsdp_trainer.training.setup.run_setup import RunSetup
from fsdp_trainer.training.step import ForwardBackward

FIRST = 10
"""Number of documents in which the metrics look."""


@dataclass(frozen=True)
class RankedLists:
    """The documents of a micro-batch, in a list for each query.

    numbers: [lists, longest] float64, the model's score of each document. wanted: the data's.
    shares: the probability of each that is wanted. exists: False behind the end of a list.
    """

    numbers: Tensor
    wanted: Tensor
    shares: Tensor
    exists: Tensor

    @classmethod
    def of(cls, scores: Scores, batch: MicroBatch, dims: Dims | None) -> "RankedLists":
        """Return the lists of a micro-batch. Collective: see answer_sums."""
        numbers = document_numbers(scores, batch, dims)[:, 0]
        wanted = wanted_numbers(batch, 1)[:, 0]
        kinds, groups = batch.documents.kinds, batch.documents.groups
        if kinds is None:
            kinds = torch.full_like(groups, SCORED)
        sizes = batch.documents.group_sizes
        count, longest = len(sizes), max(sizes, default=1)
        places = torch.arange(len(groups), device=groups.device)
        firsts = torch.searchsorted(groups, torch.arange(count, device=groups.device))
        inside = places - firsts[groups]

        def listed(values: Tensor, fill: float = 0.0) -> Tensor:
            rows = values.new_full((count, longest), fill)
            return rows.index_put((groups, inside), values)

        exists = listed(torch.ones_like(numbers)) > 0
        scored = listed((kinds == SCORED).double()) > 0
        relevance = listed(wanted)
        counted = relevance / relevance.sum(1, keepdim=True).clamp_min(1)
        by_score = relevance.masked_fill(~exists, -torch.inf).softmax(1)
        return cls(listed(numbers), relevance, torch.where(scored, by_score, counted), exists)


# --- losses, of each list -------------------------------------------------------------------------


def listwise(lists: RankedLists) -> Tensor:
    """Return the cross-entropy of the model's probabilities of the documents (ListNet).

    Those that are wanted are the softmax of the data's scores, or equal shares of positive ones.
    """
    logs = lists.numbers.masked_fill(~lists.exists, -torch.inf).log_softmax(1)
    return -(lists.shares * logs.masked_fill(~lists.exists, 0)).sum(1)


def pairwise(lists: RankedLists) -> Tensor:
    """Return the mean of -log sigmoid of better documents' scores minus worse ones' (RankNet)."""
    better = lists.wanted[:, :, None] > lists.wanted[:, None]
    better &= lists.exists[:, :, None] & lists.exists[:, None]
    losses = -F.logsigmoid(lists.numbers[:, :, None] - lists.numbers[:, None])
    return losses.masked_fill(~better, 0).sum((1, 2)) / better.sum((1, 2)).clamp_min(1)


def pointwise(lists: RankedLists) -> Tensor:
    """Return the mean of the cross-entropies of documents' sigmoids with scores from 0 to 1."""
    losses = F.binary_cross_entropy_with_logits(lists.numbers, lists.wanted, reduction="none")
    return losses.masked_fill(~lists.exists, 0).sum(1) / lists.exists.sum(1)


RANKINGS: dict[str, Callable[[RankedLists], Tensor]] = {
    "listwise": listwise,
    "pairwise": pairwise,
    "pointwise": pointwise,
}


@dataclass(frozen=True)
class RankingObjective(DocumentObjective):
    """The loss of lists. ranking: a key of RANKINGS."""

    ranking: str

    def losses(self, scores: Scores) -> Tensor:
        return RANKINGS[self.ranking](RankedLists.of(scores, self.batch, self.dims))


@dataclass(kw_only=True)
class RankingForwardBackward(DocumentForwardBackward):
    """Runs micro-batches of queries with lists of documents. The loss is a mean over the lists."""

    choice: ObjectiveChoice

    def comparison(self, batch: MicroBatch, count: float | Tensor) -> Objective:
        return RankingObjective(batch, count, self.dims, self.choice.ranking)


class RankingMetrics:
    """The rank metrics of lists: how near the wanted documents are to the first place.

    Sums: number of lists; lists whose best document is first; reciprocal rank of the best; NDCG of
    the first documents, with the data's scores as gains. A list without any gain is left out.
    """

    keys: tuple[str, ...] = ("recall_1", "mrr", "ndcg_10")
    size = 4
    of_tokens = False

    def __init__(self, dims: Dims | None = None):
        self.dims = dims

    def part(self, result: MicroBatchResult) -> Tensor:
        """Return [size] float64. Collective: see answer_sums."""
        lists = RankedLists.of(result.scores, result.batch, self.dims)
        order = lists.numbers.masked_fill(~lists.exists, -torch.inf).argsort(1, descending=True)
        gains = lists.wanted.clamp_min(0).gather(1, order)
        ideal = gains.sort(1, descending=True).values
        places = torch.arange(1, gains.shape[1] + 1, device=gains.device)
        discounts = (places <= FIRST) / (places + 1).double().log2()
        is_best = (gains == gains.amax(1, keepdim=True)).double()
        ndcg = (gains * discounts).sum(1) / (ideal * discounts).sum(1)
        each = [torch.ones_like(ndcg), is_best[:, 0], (is_best / places).amax(1), ndcg]
        has_gain = gains.amax(1) > 0
        return counted_once(sum_where(torch.stack(each), has_gain), self.dims)

    def written(self, sums: list[float]) -> dict[str, Any]:
        count, *totals = sums
        return {name: total / count for name, total in zip(self.keys, totals, strict=True) if count}


class RankingMethod(Method):
    """Training of rerankers."""

    objective_differs = True

    def __init__(self, setup: RunSetup, rows: RunRows, checkpoint: Path | None):
        """See Method. Raises UserError for data that objective.ranking learns nothing from."""
        stores = [order.store for order, _ in rows.stored]
        scores = [text_scores(store) for store in stores]
        columns = [SampleColumns(label_values=values[:, None]) for values in scores]
        super().__init__(setup, rows.with_columns(columns), checkpoint)
        # a rehearsal has no stores
        reason = why_not_ranked(self.choice.ranking, stores, scores) if stores else None
        if reason:
            what = f"objective.ranking={self.choice.ranking}"
            raise UserError("the data is not ranked so", [Problem(what, reason)])

    def metric(self) -> MethodMetric:
        return RankingMetrics(self.setup.dims)

    def step(self, parts: StepParts) -> ForwardBackward:
        return RankingForwardBackward(*parts, choice=self.choice)


def why_not_ranked(
    ranking: str, stores: Sequence[TokenStore], scores: Sequence[np.ndarray]
) -> str | None:
    """Return why a loss of RANKINGS does not suit scores of documents; None if it does."""
    if ranking != "pointwise":
        has_lists = any(store.group_starts is not None for store in stores)
        alone = "compares a query's documents, and each query has one"
        return None if has_lists else f"{alone}.\nUse  objective.ranking=pointwise"
    for store, values in zip(stores, scores, strict=True):
        outside = np.flatnonzero((values < 0) | (values > 1))
        if len(outside):
            first = int(outside[0])
            reason = f"needs scores from 0 to 1, and {store.where(first)} has {values[first]:g}"
            return f"{reason}.\nUse  objective.ranking=listwise  or  pairwise"
    return None
