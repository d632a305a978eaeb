"""Losses of embeddings, as functions of all texts of a step, and metrics of retrieval.

They are computed in float64 and in blocks of queries, so that neither the number of ranks nor the
memory of a step's similarities counts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_trainer.config.methods import ObjectiveChoice
from fsdp_trainer.data.records.labelled_texts import POSITIVE, QUERY

SIMILARITIES = 1 << 24
"""The most similarities of queries and documents in memory at a time."""
RETRIEVED = (1, 10)
"""The numbers k of documents in which recall@k looks."""
RETRIEVAL = (*(f"recall_{k}" for k in RETRIEVED), "mrr", "ndcg_10")
"""Metrics of each query."""


@dataclass(frozen=True)
class StepTexts:
    """All texts of a step, in groups of a query and its documents.

    vectors: [texts, hidden] float64. kinds: [texts] int64. scores: [texts] float64, a teacher's
    score of each document, or of a pair's similarity; NaN: none. same: [texts] float64, equal
    numbers for equal texts. count: of the queries, known to the host, which so need not wait.
    """

    vectors: Tensor
    kinds: Tensor
    scores: Tensor
    same: Tensor
    count: int

    @property
    def is_query(self) -> Tensor:
        return self.kinds == QUERY

    @property
    def queries(self) -> Tensor:
        """The places of the queries, [queries] int64."""
        return torch.nonzero_static(self.is_query, size=self.count)[:, 0]

    @property
    def documents(self) -> Tensor:
        """The places of the documents, [documents] int64."""
        return torch.nonzero_static(~self.is_query, size=len(self.kinds) - self.count)[:, 0]

    @property
    def groups(self) -> Tensor:
        """The number of each text's query, [texts] int64."""
        return self.is_query.cumsum(0) - 1

    def narrowed(self, width: int | None) -> "StepTexts":
        """Return the texts with the first numbers of their vectors, of length 1."""
        return replace(self, vectors=F.normalize(self.vectors[:, :width], dim=1))


@dataclass(frozen=True)
class QueryBlock:
    """Some of the queries and all documents of a step.

    similarity: [queries, documents]. positive: True for a query's own positive documents. masked:
    for documents that are not compared with it: others of its positives, and texts like them.
    """

    similarity: Tensor
    positive: Tensor
    masked: Tensor


def blocks(texts: StepTexts, choice: ObjectiveChoice) -> Iterator[QueryBlock]:
    """Yield all queries, with all documents, in blocks of bounded memory."""
    documents = texts.documents
    groups, same = texts.groups[documents], texts.same[documents]
    vectors, is_positive = texts.vectors[documents], texts.kinds[documents] == POSITIVE
    queries = texts.vectors[texts.queries]
    size = max(1, SIMILARITIES // max(1, len(vectors)))
    for first in range(0, len(queries), size):
        numbers = torch.arange(first, min(first + size, len(queries)), device=groups.device)
        own = groups == numbers[:, None]
        positive = own & is_positive
        similarity = queries[first : first + size] @ vectors.T
        yield QueryBlock(similarity, positive, ~own & _alike(positive, same, similarity, choice))


def _alike(positive: Tensor, same: Tensor, similarity: Tensor, choice: ObjectiveChoice) -> Tensor:
    """Return which documents are like a query's positive ones, [queries, documents] bool."""
    query, document = pairs_of(positive)
    pairs = torch.zeros_like(similarity)
    equal = (same[document][:, None] == same).to(pairs.dtype)
    alike = pairs.index_add(0, query, equal) > 0
    if choice.false_negatives is not None:
        lowest = similarity.detach().masked_fill(~positive, torch.inf).min(1, keepdim=True).values
        alike = alike | (similarity.detach() > lowest + choice.false_negatives)
    return alike


def places_of(chosen: Tensor) -> Tensor:
    return chosen.nonzero()[:, 0]


def pairs_of(chosen: Tensor) -> tuple[Tensor, ...]:
    return chosen.nonzero(as_tuple=True)


def less_alike(scores: Tensor) -> tuple[Tensor, ...]:
    """Return the numbers of pairs, and for each the number of one with a higher score."""
    return (scores[:, None] < scores).nonzero(as_tuple=True)


# --- losses, as sums over the queries -------------------------------------------------------------


def info_nce(texts: StepTexts, choice: ObjectiveChoice) -> Tensor:
    """Return Σ -log softmax of each query's positive document among all documents of the step.

    Of several positive documents it is the mean, each without the others. With
    objective.symmetric half of it is that of each positive document's query among all queries.
    """
    total = texts.vectors.new_zeros(())
    columns, masks, positives = [], [], []
    for block in blocks(texts, choice):
        logits = block.similarity / choice.temperature
        shared = block.masked | block.positive
        others = logits.masked_fill(shared, -torch.inf).logsumexp(1, keepdim=True)
        losses = torch.logaddexp(others, logits) - logits
        total = total + mean_of(losses, block.positive, 1).sum()
        if choice.symmetric:
            columns.append(logits)
            masks.append(block.masked)
            positives.append(block.positive)
    if not choice.symmetric:
        return total
    logits, masked, positive = map(torch.cat, (columns, masks, positives))
    own = places_of(positive.any(0))
    logits, masked, positive = (part[:, own] for part in (logits, masked, positive))
    every = logits.masked_fill(masked, -torch.inf).logsumexp(0)
    losses = (every - logits).masked_fill(~positive, 0)
    return (total + (losses / positive.sum(1, keepdim=True).clamp_min(1)).sum()) / 2


def mean_of(values: Tensor, chosen: Tensor, dim: int) -> Tensor:
    """Return the mean of the chosen values; 0 where none is chosen."""
    return values.masked_fill(~chosen, 0).sum(dim) / chosen.sum(dim).clamp_min(1)


def own_similarity(texts: StepTexts) -> tuple[Tensor, Tensor]:
    """Return the similarity of each document to its query, and the documents' numbers."""
    documents = texts.documents
    queries = texts.vectors[texts.queries][texts.groups[documents]]
    return (queries * texts.vectors[documents]).sum(1), documents


def cosent(texts: StepTexts, choice: ObjectiveChoice) -> Tensor:
    """Return CoSENT's loss of the step's pairs, times their number (Su 2022).

    log(1 + Σ exp((s_i - s_j) / temperature)) over all pairs i that are less alike than pairs j.
    """
    similarity, documents = own_similarity(texts)
    scores, logits = texts.scores[documents], similarity / choice.temperature
    differences = (logits[:, None] - logits)[less_alike(scores)]
    every = torch.cat([differences.new_zeros(1), differences]).logsumexp(0)
    return every * texts.count


def margin_mse(texts: StepTexts, choice: ObjectiveChoice) -> Tensor:
    """Return Σ over queries of the mean squared error of their margins (Hofstätter et al. 2020).

    A margin is the difference of a positive document's similarity and another's.
    """
    similarity, documents = own_similarity(texts)
    errors = similarity - texts.scores[documents]
    first = texts.kinds[documents] == POSITIVE
    first &= texts.groups[documents].diff(prepend=-texts.groups.new_ones(1)) > 0
    best, others = (
        torch.nonzero_static(part, size=size)[:, 0]
        for part, size in ((first, texts.count), (~first, len(documents) - texts.count))
    )
    margins = (errors[best][texts.groups[documents]] - errors)[others]
    return _mean_by_query(margins.square(), texts, documents[others])


def divergence(texts: StepTexts, choice: ObjectiveChoice) -> Tensor:
    """Return Σ over queries of KL(teacher ‖ model) over their own documents, by temperature."""
    similarity, documents = own_similarity(texts)
    groups = texts.groups[documents]
    ours = _log_softmax(similarity / choice.temperature, groups, texts.count)
    theirs = _log_softmax(texts.scores[documents], groups, texts.count)
    return (theirs.exp() * (theirs - ours)).sum()


def _log_softmax(values: Tensor, groups: Tensor, count: int) -> Tensor:
    """Return log-probabilities of values among those of the same group, of `count` groups."""
    largest = values.new_zeros(count).scatter_reduce(
        0, groups, values.detach(), "amax", include_self=False
    )[groups]
    sums = values.new_zeros(count).index_add(0, groups, (values - largest).exp())
    return values - largest - sums.log()[groups]


def _mean_by_query(values: Tensor, texts: StepTexts, documents: Tensor) -> Tensor:
    """Return Σ over queries of the mean of their documents' values."""
    groups, zeros = texts.groups[documents], values.new_zeros(texts.count)
    sums, counts = (zeros.index_add(0, groups, v) for v in (values, torch.ones_like(values)))
    return (sums / counts.clamp_min(1)).sum()


COMPARISONS: dict[str, Callable[[StepTexts, ObjectiveChoice], Tensor]] = {
    "infonce": info_nce,
    "cosent": cosent,
    "margin_mse": margin_mse,
    "kl": divergence,
}


def loss_of_texts(texts: StepTexts, choice: ObjectiveChoice) -> Tensor:
    """Return Σ loss over the queries of a step, the mean over objective.widths."""
    compare = COMPARISONS[choice.comparison]
    widths: list[int | None] = [*choice.widths] or [None]
    losses = [compare(texts.narrowed(width), choice) for width in widths]
    return torch.stack(losses).mean()


@torch.no_grad()
def retrieval(texts: StepTexts, choice: ObjectiveChoice) -> Tensor:
    """Return the metrics of RETRIEVAL for each query among all documents: [queries, metrics].

    A document counts as ahead of a positive one if it is more similar, and unlike all of them.
    """
    parts = [texts.vectors.new_zeros(0, len(RETRIEVAL))]
    for block in blocks(texts.narrowed(None), choice):
        order = block.similarity.masked_fill(block.masked, -torch.inf).argsort(1, descending=True)
        hits = block.positive.gather(1, order).double()
        count = hits.sum(1).clamp_min(1)
        places = torch.arange(1, hits.shape[1] + 1, device=hits.device)
        gains = 1 / (places[:10] + 1).double().log2()
        gained = (hits[:, :10] * gains).sum(1)
        best = gains.cumsum(0)[count.clamp_max(len(gains)).long() - 1]
        each = [hits[:, :k].sum(1) / count for k in RETRIEVED]
        parts.append(torch.stack([*each, (hits / places).amax(1), gained / best], 1))
    return torch.cat(parts)
