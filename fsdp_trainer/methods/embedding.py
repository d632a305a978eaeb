"""Embeddings of texts for retrieval (Karpukhin et al. 2020), compared over all texts of a step.

Each micro-batch is computed twice, as in GradCache (Gao et al. 2021): first without gradients, for
the vectors of all texts of the step on all ranks and the gradient of their loss, and then with
gradients, which begin with those of its own vectors. So a step's memory is that of one micro-batch,
and its loss does not depend on what shares one.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdp_trainer.base import phases
from fsdp_trainer.base.distributed import to_device
from fsdp_trainer.config.methods import ObjectiveChoice
from fsdp_trainer.data.store.stored_values import SampleColumns
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.methods.contrast import RETRIEVAL, StepTexts, loss_of_texts, retrieval
from fsdp_trainer.methods.document_step import DocumentForwardBackward, DocumentObjective
from fsdp_trainer.methods.labels import text_values
from fsdp_trainer.methods.method import Method, StepParts
from fsdp_trainer.methods.stored_columns import RunRows
from fsdp_trainer.models.decoder import MicroBatch
from fsdp_trainer.models.head import Objective, Scores
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.training.documents.document_sums import counted_once, document_vectors
from fsdp_trainer.training.feed import StepBatches
from fsdp_trainer.training.metrics import MethodMetric, MicroBatchResult
from fsdp_trainer.training.setup.run_setup import RunSetup
from fsdp_trainer.training.step import ForwardBackward

GRADIENT, QUERIES = "gradient", "queries"
"""Columns of a micro-batch after the first pass: the gradient of each text's vector, [texts,
hidden], and of each query its share of the loss, then RETRIEVAL, [queries, 1 + metrics]."""


@dataclass(frozen=True)
class VectorObjective(DocumentObjective):
    """Σ vector · gradient, with the value of this micro-batch's share of the loss."""

    def losses(self, scores: Scores) -> Tensor:
        vectors = document_vectors(scores, self.batch, self.dims)
        columns = self.batch.columns
        if GRADIENT not in columns:  # computed by itself, to be compared with itself
            columns = {GRADIENT: torch.ones_like(vectors), QUERIES: vectors.new_zeros(0, 1)}
        value = (vectors * columns[GRADIENT]).sum()
        return value - value.detach() + columns[QUERIES][:, 0].sum()


@dataclass(kw_only=True)
class EmbeddingForwardBackward(DocumentForwardBackward):
    """Runs micro-batches of queries with their documents. The loss is a mean over the queries."""

    choice: ObjectiveChoice

    def run(self, step: StepBatches, micro_batches: Iterable[MicroBatch]) -> tuple[Tensor, Tensor]:
        """Compute all vectors and their gradient first, then run the step. See ForwardBackward."""
        phases.enter("forward")
        batches, vectors = [], []
        with torch.no_grad():
            for batch in micro_batches:
                vectors.append(self._vectors(batch, self.model(batch).scores))
                batches.append(with_media_on(batch, torch.device("cpu")))
        return super().run(step, self._compared(batches, vectors))

    def complete(self, batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch with its media, which wait on the host, on its device again."""
        return with_media_on(batch, batch.tokens.device)

    def scores(
        self, step: StepBatches, before: Callable[[], None]
    ) -> Iterator[tuple[MicroBatch, Scores]]:
        """Yield all scores after all texts have been compared. See ForwardBackward."""
        every = [*super().scores(step, before)]
        batches = [batch for batch, _ in every]
        vectors = [self._vectors(*each) for each in every]
        compared = self._compared(batches, vectors, with_gradient=False)
        yield from zip(compared, (scores for _, scores in every), strict=True)

    def comparison(self, batch: MicroBatch, count: float | Tensor) -> Objective:
        return VectorObjective(batch, count, self.dims)

    def loss(self, batch: MicroBatch, scores: Scores) -> Tensor:
        if QUERIES not in batch.columns:
            return scores.log_probability.sum()
        return counted_once(batch.columns[QUERIES][:, 0].sum(), self.dims)

    def _vectors(self, batch: MicroBatch, scores: Scores) -> Tensor:
        return document_vectors(scores, batch, self.dims)

    def _compared(
        self,
        batches: list[MicroBatch],
        vectors: list[Tensor],
        with_gradient: bool = True,
    ) -> list[MicroBatch]:
        """Return the micro-batches with the columns GRADIENT and QUERIES. Collective.

        vectors: of each micro-batch's texts.
        """
        own = torch.cat(vectors)
        about = torch.cat(
            [facts(batch, len(each)) for batch, each in zip(batches, vectors, strict=True)]
        )
        queries = sum(len(batch.documents.group_sizes) for batch in batches)
        first, count, every = self._of_all_ranks(torch.cat([own, about], 1), queries)
        leaf = every[:, :-3].detach().requires_grad_(with_gradient)
        kinds, scores, same = every[:, -3].long(), every[:, -2], every[:, -1]
        texts = StepTexts(leaf, kinds, scores, same, count)
        with torch.set_grad_enabled(with_gradient):
            loss = loss_of_texts(texts, self.choice)
        gradient = torch.zeros_like(leaf)
        if loss.requires_grad:  # not where no rank has data
            (gradient,) = torch.autograd.grad(loss, leaf)
        share = loss.detach() / texts.is_query.sum().clamp_min(1)
        values = retrieval(texts, self.choice)
        of_queries = torch.cat([share.expand(len(values), 1), values], 1)
        groups, place, compared = texts.groups, first, []
        for batch, each in zip(batches, vectors, strict=True):
            part = slice(place, place + len(each))
            own_queries = torch.nonzero_static(
                texts.is_query[part], size=len(batch.documents.group_sizes)
            )
            columns = {
                GRADIENT: gradient[part],
                QUERIES: of_queries[groups[part][own_queries[:, 0]]],
            }
            compared.append(replace(batch, columns=columns))
            place += len(each)
        return compared

    def _of_all_ranks(self, own: Tensor, queries: int) -> tuple[int, int, Tensor]:
        """Return the place of this rank's rows among those of all ranks, and all. Collective.

        queries: of this rank; those of all ranks are returned between the two.
        """
        reader, readers = self.dims.batch_rank, self.dims.batch_ranks
        own_counts = torch.zeros(readers, 2, dtype=own.dtype)
        counted = self.dims.is_first_of_context
        if reader is not None and counted:
            own_counts[reader, 0], own_counts[reader, 1] = len(own), queries
        counts = to_device(own_counts, own.device)
        self.dims.sum_over_tokens(counts)
        texts, of_queries = zip(*numbers_on_host(counts), strict=True)
        first = sum(texts[: reader or 0])
        every = own.new_zeros(sum(texts), own.shape[1])
        if counted:
            every[first : first + len(own)] = own
        self.dims.sum_over_tokens(every)
        return first, sum(of_queries), every


def with_media_on(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """Return a micro-batch whose media are on a device: those of a whole step may be large."""
    if batch.media is None:
        return batch
    arrays = {name: values.to(device) for name, values in batch.media.arrays.items()}
    return replace(batch, media=replace(batch.media, arrays=arrays))


def numbers_on_host(counts: Tensor) -> list[list[int]]:
    """Return whole numbers of a device, for which the host waits."""
    return counts.long().tolist()


def facts(batch: MicroBatch, count: int) -> Tensor:
    """Return the kind of each text, its score and its identity: [texts, 3] float64."""
    kinds, values = batch.documents.kinds, batch.documents.values
    if values is None or kinds is None:  # this rank has no data
        return torch.zeros(count, 3, dtype=torch.float64, device=batch.weights.device)
    return torch.cat([kinds[:, None].double(), values], 1)


class RetrievalMetrics:
    """Recall, mean reciprocal rank and NDCG of the queries' documents among all of the step.

    Sums: number of queries, then each of RETRIEVAL.
    """

    keys: tuple[str, ...] = RETRIEVAL
    size = 1 + len(RETRIEVAL)
    of_tokens = False

    def __init__(self, dims: Dims | None = None):
        self.dims = dims

    def part(self, result: MicroBatchResult) -> Tensor:
        """Return [size] float64."""
        queries = result.batch.columns[QUERIES].clone()
        queries[:, 0] = 1
        return counted_once(queries.sum(0), self.dims)

    def written(self, sums: list[float]) -> dict[str, Any]:
        count, *totals = sums
        return {name: total / count for name, total in zip(RETRIEVAL, totals, strict=True) if count}


class EmbeddingMethod(Method):
    """Training of embeddings."""

    objective_differs = True

    def __init__(self, setup: RunSetup, rows: RunRows, checkpoint: Path | None):
        """See Method. Raises UserError for data without the scores that the comparison needs."""
        stores = [order.store for order, _ in rows.stored]
        columns = [SampleColumns(label_values=values) for values in text_values(stores)]
        super().__init__(setup, rows.with_columns(columns), checkpoint)
        needs_scores = self.choice.comparison != "infonce"
        for store, column in zip(stores, columns, strict=True):
            values = column.label_values
            assert values is not None
            lacking = np.flatnonzero(np.isnan(values[:, 0]) & (np.asarray(store.kinds) > 0))
            if needs_scores and len(lacking):
                where = store.where(int(lacking[0]))
                reason = (
                    f"compares scores, and {where} has none.\nUse  objective.comparison=infonce"
                )
                what = f"objective.comparison={self.choice.comparison}"
                raise UserError("the data has no scores", [Problem(what, reason)])

    def metric(self) -> MethodMetric:
        return RetrievalMetrics(self.setup.dims)

    def step(self, parts: StepParts) -> ForwardBackward:
        return EmbeddingForwardBackward(*parts, choice=self.choice)
