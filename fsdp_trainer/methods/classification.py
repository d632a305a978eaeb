"""Classification of texts, and regression: transformers' losses of …ForSequenceClassification."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_trainer.config.methods import ObjectiveChoice
from fsdp_trainer.data.store.stored_values import SampleColumns
from fsdp_trainer.data.store.token_store import TokenStore
from fsdp_trainer.errors import UserError
from fsdp_trainer.methods.document_step import DocumentForwardBackward, DocumentObjective
from fsdp_trainer.methods.labels import FEW, MULTI, REGRESSION, SINGLE, in_words, label_values
from fsdp_trainer.methods.method import Method, StepParts
from fsdp_trainer.methods.stored_columns import RunRows
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import MicroBatch
from fsdp_trainer.models.head import Objective, Scores
from fsdp_trainer.observe.step_log import finite_or_none
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.training.documents.document_sums import counted_once, document_numbers
from fsdp_trainer.training.metrics import MethodMetric, MicroBatchResult
from fsdp_trainer.training.setup.run_setup import RunSetup
from fsdp_trainer.training.step import ForwardBackward

MOST_CONFUSED, MOST_CURVES = 30, 64
"""Labels of which confusions are counted, and of which areas under curves are computed, at most."""
BINS, WIDEST = 600, 15.0
"""Scores from -WIDEST to WIDEST are counted in so many bins."""


def wanted_numbers(batch: MicroBatch, width: int) -> Tensor:
    """Return what the head is to learn of each document, [documents, width] float64."""
    if batch.documents.values is None:  # this rank has no data
        return torch.zeros(0, width, dtype=torch.float64, device=batch.weights.device)
    return batch.documents.values


# --- losses ---------------------------------------------------------------------------------------

Loss = Callable[[Tensor, Tensor, Tensor | None, float], Tensor]
"""Returns the loss of each document, [documents], of the head's numbers, what is wanted, the weight
of each label, and label smoothing."""


def cross_entropy(
    numbers: Tensor, wanted: Tensor, weight: Tensor | None, smoothing: float
) -> Tensor:
    targets = wanted[:, 0].long()
    return F.cross_entropy(numbers, targets, weight, reduction="none", label_smoothing=smoothing)


def binary_cross_entropy(
    numbers: Tensor, wanted: Tensor, weight: Tensor | None, smoothing: float
) -> Tensor:
    targets = wanted * (1 - smoothing) + smoothing / 2
    losses = F.binary_cross_entropy_with_logits(numbers, targets, weight, reduction="none")
    return losses.mean(1)


def squared_error(
    numbers: Tensor, wanted: Tensor, weight: Tensor | None, smoothing: float
) -> Tensor:
    return (numbers - wanted).square().mean(1)


LOSSES: dict[str, Loss] = {
    SINGLE: cross_entropy,
    MULTI: binary_cross_entropy,
    REGRESSION: squared_error,
}


@dataclass(frozen=True)
class LabelObjective(DocumentObjective):
    """The loss of labelled texts.

    problem: a key of LOSSES. weight: of each label, [labels] float64; None: all are 1.
    """

    problem: str
    smoothing: float
    weight: Tensor | None

    def losses(self, scores: Scores) -> Tensor:
        numbers = document_numbers(scores, self.batch, self.dims)
        wanted = wanted_numbers(self.batch, numbers.shape[1])
        return LOSSES[self.problem](numbers, wanted, self.weight, self.smoothing)


@dataclass(kw_only=True)
class LabelForwardBackward(DocumentForwardBackward):
    """Runs micro-batches of labelled texts. The reported loss is the objective's."""

    problem: str
    smoothing: float
    class_weight: Tensor | None = None

    def comparison(self, batch: MicroBatch, count: float | Tensor) -> Objective:
        return LabelObjective(
            batch, count, self.dims, self.problem, self.smoothing, self.class_weight
        )


# --- metrics --------------------------------------------------------------------------------------


class ClassMetrics:
    """The share of texts whose labels are all right, F1 over the labels, and the area under the
    ROC curve of two labels, or of many, the mean over them.

    Sums: number of texts, number of right ones; then for each label the number of texts that have
    it and are given it, that are given it, and that have it. Of one label of several at most
    MOST_CONFUSED, the number of texts for each pair of the label that they have and that they are
    given. For the curve of each label the numbers of texts without it and with it by the score.
    """

    keys: tuple[str, ...] = ("accuracy", "f1_macro", "f1_micro", "auc")
    of_tokens = False

    def __init__(self, labels: Sequence[str], problem: str, dims: Dims | None = None):
        self.names, self.labels = labels, len(labels)
        self.problem, self.dims = problem, dims
        count = self.labels
        pairs = count**2 if problem != MULTI and count <= MOST_CONFUSED else 0
        curves = {MULTI: count if count <= MOST_CURVES else 0, SINGLE: int(count == 2)}
        self.sizes = [2, *[count] * 3, pairs, 2 * BINS * curves.get(problem, 0)]
        self.size = sum(self.sizes)

    def part(self, result: MicroBatchResult) -> Tensor:
        """Return [size] float64. Collective: see answer_sums."""
        numbers = document_numbers(result.scores, result.batch, self.dims)
        wanted = wanted_numbers(result.batch, self.labels)
        if self.problem == MULTI:
            given, have = numbers > 0, wanted > 0
            right = (given == have).all(1)
            totals = torch.stack([given & have, given, have]).sum(1).flatten()
            counts = torch.stack([torch.ones_like(right).sum(), right.sum()])
            sums = torch.cat([counts, totals]).double()
        else:
            wanted = wanted[:, 0].long()
            sums = self.of_labels(numbers.argmax(1), wanted, torch.ones_like(wanted).bool())
        return counted_once(torch.cat([sums, self.of_curves(numbers, wanted)]), self.dims)

    def of_labels(self, given: Tensor, wanted: Tensor, counted: Tensor) -> Tensor:
        """Return the sums of all but the curves for one label of several, float64.

        given, wanted: [texts] int64. counted: False for what is no text.
        """
        right = (given == wanted) & counted
        each = ((wanted, right), (given, counted), (wanted, counted))
        parts = [torch.stack([counted.sum(), right.sum()]).double()]
        parts += [histogram(label, some, self.labels) for label, some in each]
        if self.sizes[-2]:
            parts.append(histogram(wanted * self.labels + given, counted, self.sizes[-2]))
        return torch.cat(parts)

    def of_curves(self, numbers: Tensor, wanted: Tensor) -> Tensor:
        """Return how many texts have each label and each score, [curves · 2 · BINS] float64."""
        if not self.sizes[-1]:
            return numbers.new_zeros(0, dtype=torch.float64)
        if self.problem == SINGLE:
            numbers, wanted = numbers[:, 1:] - numbers[:, :1], wanted[:, None]
        bins = ((numbers / WIDEST + 1) / 2 * BINS).clamp(0, BINS - 1).long()
        curves = torch.arange(numbers.shape[1], device=numbers.device)
        places = (curves * 2 + (wanted > 0)) * BINS + bins
        return histogram(places.flatten(), torch.ones_like(places).flatten(), self.sizes[-1])

    def split(self, sums: list[float]) -> list[list[float]]:
        """Return the sums in their parts, one for each of `sizes`."""
        ends = [*accumulate(self.sizes)]
        return [sums[end - size : end] for size, end in zip(self.sizes, ends, strict=True)]

    def written(self, sums: list[float]) -> dict[str, Any]:
        """Return the metrics; F1's mean is over the labels that a text has or is given."""
        (count, right), hits, given, have, _, curves = self.split(sums)
        if not count:
            return {}
        of_labels = [*zip(hits, map(sum, zip(given, have, strict=True)), strict=True)]
        each = [2 * both / either for both, either in of_labels if either]
        macro = sum(each) / len(each) if each else 0.0
        micro = 2 * sum(hits) / max(1, sum(given) + sum(have))
        areas = area_under(np.array(curves).reshape(-1, 2, BINS))
        area = {"auc": float(np.mean(areas))} if len(areas) else {}
        return {"accuracy": right / count, "f1_macro": macro, "f1_micro": micro, **area}

    def events(self, sums: list[float]) -> dict[str, dict[str, Any]]:
        """Return what a validation records beside its metrics: which labels are taken for which.

        Each row of `counts` is of the texts with one label, in the order of the labels.
        """
        pairs = np.array(self.split(sums)[-2], np.int64)
        if not pairs.any():
            return {}
        counts = pairs.reshape(self.labels, self.labels).tolist()
        return {"confusion": {"labels": [*self.names], "counts": counts}}


def histogram(places: Tensor, counted: Tensor, size: int) -> Tensor:
    """Return how many of these places are each number below `size`, [size] float64."""
    zeros = torch.zeros(size, dtype=torch.float64, device=places.device)
    return zeros.index_add(0, places, counted.double())


def area_under(counts: np.ndarray) -> np.ndarray:
    """Return the area under the ROC curve of each label that some texts have and others have not.

    counts: [labels, without it and with it, BINS], by the score. Equal ones count half.
    """
    without, with_it = counts[:, 0], counts[:, 1]
    pairs = without.sum(1) * with_it.sum(1)
    below = without.cumsum(1) - without / 2
    return ((with_it * below).sum(1) / pairs.clip(min=1))[pairs > 0]


class RegressionMetrics:
    """The mean absolute error, and the correlation of given and wanted numbers (Pearson's r).

    Sums: number of numbers, Σ |x - y|, Σ x, Σ y, Σ x², Σ y², Σ x · y.
    """

    keys: tuple[str, ...] = ("absolute_error", "correlation")
    of_tokens = False
    size = 7

    def __init__(self, dims: Dims | None = None):
        self.dims = dims

    def part(self, result: MicroBatchResult) -> Tensor:
        """Return [size] float64. Collective: see answer_sums."""
        numbers = document_numbers(result.scores, result.batch, self.dims)
        x, y = numbers.flatten(), wanted_numbers(result.batch, numbers.shape[1]).flatten()
        each = [torch.ones_like(x), (x - y).abs(), x, y, x * x, y * y, x * y]
        return counted_once(torch.stack(each).sum(1), self.dims)

    def written(self, sums: list[float]) -> dict[str, Any]:
        count, error, x, y, xx, yy, xy = sums
        if not count:
            return {}
        written = {"absolute_error": finite_or_none(error / count)}
        spread = (xx - x * x / count) * (yy - y * y / count)
        if spread > 0:
            written["correlation"] = finite_or_none((xy - x * y / count) / spread**0.5)
        return written


# --- the method -----------------------------------------------------------------------------------


class LabelMethod(Method):
    """Training on labelled texts."""

    objective_differs = True
    counted = "texts"
    """What has a label."""
    runs: type[LabelForwardBackward] = LabelForwardBackward

    def __init__(self, setup: RunSetup, rows: RunRows, checkpoint: Path | None):
        """See Method. Raises UserError for a label that the head does not have."""
        self.setup, config = setup, setup.config
        held_out = len(rows.validation.orders) if rows.validation else 0
        orders = [order for order, _ in rows.stored]
        first = len(orders) - held_out
        values = [
            self.given_values(order.store, "data.path" if i < first else "data.validation")
            for i, order in enumerate(orders)
        ]
        super().__init__(setup, rows.with_columns(map(self.as_columns, values)), checkpoint)
        self.counts: np.ndarray | None = None
        """The number of training texts with each label; None for numbers, and in a rehearsal."""
        self.weight: Tensor | None = None
        """The weight of each label, [labels] float64; None: all are 1."""
        if values:
            self.counts = label_counts(np.concatenate(values[:first]), config)
            self.weight = class_weight(self.choice, config, self.counts)
        elif self.choice.class_weights is not None:  # a rehearsal has no stores
            self.weight = torch.ones(config.scores, dtype=torch.float64)

    def given_values(self, store: TokenStore, key: str) -> np.ndarray:
        """Return the numbers of a store's labels. key: of the configuration that names the data."""
        return label_values(store, self.setup.config, key)

    def as_columns(self, values: np.ndarray) -> SampleColumns:
        return SampleColumns(label_values=values)

    def about(self) -> list[str]:
        """Return a line on the labels, and one on those that hardly any text has."""
        if self.counts is None:
            return []
        counts = self.counts.astype(int).tolist()
        shown, rare = in_words(dict(zip(self.setup.config.labels, counts, strict=True)))
        few = f"labels with fewer than {FEW} {self.counted} are hardly learnt: {rare}"
        return [f"labels {shown}", *([few] if rare else [])]

    def metric(self) -> MethodMetric:
        config, dims = self.setup.config, self.setup.dims
        if config.problem == REGRESSION:
            return RegressionMetrics(dims)
        return ClassMetrics(config.labels, config.problem, dims)

    def step(self, parts: StepParts) -> ForwardBackward:
        weight = None if self.weight is None else self.weight.to(self.setup.device)
        return self.runs(
            *parts,
            problem=self.setup.config.problem,
            smoothing=self.choice.label_smoothing,
            class_weight=weight,
        )


def label_counts(values: np.ndarray, config: ModelConfig) -> np.ndarray | None:
    """Return the number of texts, or words, with each label, [labels] float64; None for numbers.

    values: see label_values and token_labels.
    """
    if config.problem == REGRESSION:
        return None
    if config.problem == MULTI:
        return values.sum(0)
    numbers = values.reshape(len(values), -1)[:, 0].astype(int)
    return np.bincount(numbers, minlength=config.scores).astype(np.float64)


def class_weight(
    choice: ObjectiveChoice, config: ModelConfig, counts: np.ndarray | None
) -> Tensor | None:
    """Return the weight of each label, [labels] float64, of objective.class_weights; None: all 1.

    `balanced`: in inverse proportion to the number of texts with it, 1 for labels of equal numbers,
    and for one that no text has.
    counts: see label_counts. Raises UserError.
    """
    chosen, labels = choice.class_weights, config.labels
    if chosen is None:
        return None
    refuse = partial(UserError, "the weights cannot be used", f"objective.class_weights={chosen}")
    if counts is None:
        raise refuse("numbers have no classes to weigh: leave it out")
    if chosen == "balanced":
        weights = counts.sum() / (len(labels) * counts.clip(min=1))
        return torch.from_numpy(np.where(counts > 0, weights, 1.0))
    if not isinstance(chosen, dict) or {*chosen} - {*labels}:
        raise refuse(f"is neither balanced nor weights of labels, which are: {', '.join(labels)}")
    return torch.tensor([float(chosen.get(label, 1)) for label in labels], dtype=torch.float64)
