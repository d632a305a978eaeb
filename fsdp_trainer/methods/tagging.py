"""Labels of tokens: of words, as transformers' …ForTokenClassification, and of steps.

The loss is the mean cross-entropy of the step's labelled tokens, which is also TRL's of process
reward models.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_trainer.base.distributed import to_device
from fsdp_trainer.data.store.stored_values import SampleColumns
from fsdp_trainer.data.store.token_store import TokenStore
from fsdp_trainer.methods.classification import (
    ClassMetrics,
    LabelForwardBackward,
    LabelMethod,
    histogram,
)
from fsdp_trainer.methods.labels import token_labels
from fsdp_trainer.models.decoder import MicroBatch
from fsdp_trainer.models.head import Objective, Scores
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.training.documents.document_sums import counted_once
from fsdp_trainer.training.metrics import MethodMetric, MicroBatchResult

OUTSIDE = "O"
OF_ENTITY = re.compile(r"([BIESLU])-(.+)")
"""A label of a word in an entity: where in it, and its type. L and U are other names of E and S."""
BEGINS, CLOSES = "BSU", "ESLU"


@dataclass(frozen=True)
class TagObjective:
    """Σ cross-entropy of a micro-batch's labelled tokens / count.

    weight: of each label, [labels] float64; None: all are 1.
    """

    batch: MicroBatch
    smoothing: float = 0.0
    weight: Tensor | None = None
    count: float | Tensor = 1.0
    needs_mean = False
    needs_all_tokens = False

    def __call__(self, scores: Scores, tokens: slice) -> Tensor:
        """Return the sum over `tokens`. scores: those of these tokens."""
        assert scores.numbers is not None
        numbers, targets = scores.numbers.double(), self.batch.targets[tokens]
        losses = F.cross_entropy(
            numbers, targets, self.weight, reduction="none", label_smoothing=self.smoothing
        )
        return ((losses * self.batch.weights[tokens]).sum() / self.count).float()


@dataclass(kw_only=True)
class TagForwardBackward(LabelForwardBackward):
    """Runs micro-batches of texts with labelled tokens. The loss is a mean over the tokens."""

    def comparison(self, batch: MicroBatch, count: float | Tensor) -> Objective:
        return TagObjective(batch, self.smoothing, self.class_weight, count)

    def own_weight(self, batch: MicroBatch) -> Tensor:
        return batch.weights.sum()


# --- metrics --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EntityLabels:
    """The meaning of each label, [labels]: its entity's type, -1 outside of entities, and
    whether it is certainly the first, or the last, word of one."""

    types: list[str]
    kind: Tensor
    begins: Tensor
    closes: Tensor

    @classmethod
    def of(cls, labels: Sequence[str]) -> "EntityLabels | None":
        """Return the meaning of labels such as O, B-PER and I-PER; None for others."""
        parts = [OF_ENTITY.fullmatch(label) for label in labels if label != OUTSIDE]
        if not parts or None in parts:
            return None
        read = {label: OF_ENTITY.fullmatch(label) for label in labels}
        types = sorted({part[2] for part in parts if part})
        places = {name: i for i, name in enumerate(types)}
        kind = [-1 if part is None else places[part[2]] for part in read.values()]
        begins, closes = (
            [part is not None and part[1] in letters for part in read.values()]
            for letters in (BEGINS, CLOSES)
        )
        return cls(types, torch.tensor(kind), torch.tensor(begins), torch.tensor(closes))

    def entities(self, labels: Tensor, documents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return of each word whether an entity begins there, its type, and the entity's last word.

        labels, documents: [words] int64, the number of each word's label and of its text. As in
        conlleval, an entity goes on as long as the type is the same.
        """
        device = labels.device
        kind, begins, closes = (
            to_device(values, device)[labels] for values in (self.kind, self.begins, self.closes)
        )
        goes_on = (kind >= 0) & ~begins
        goes_on[:1] = False
        before = slice(None, -1)
        goes_on[1:] &= (kind[1:] == kind[before]) & ~closes[before]
        goes_on[1:] &= documents[1:] == documents[before]
        is_inside = kind >= 0
        is_last = is_inside & ~F.pad(goes_on[1:], (0, 1))
        places = torch.arange(len(labels), device=device)
        ends = torch.where(is_last, places, len(labels)).flip(0).cummin(0).values.flip(0)
        return is_inside & ~goes_on, kind, ends


class TagMetrics(ClassMetrics):
    """The share of words whose label is right, F1 over the labels, and over entities.

    Sums: those of ClassMetrics for words; then for each type of entity the number of those that are
    found, that are given, and that there are.
    """

    keys = (*ClassMetrics.keys, "entity_precision", "entity_recall", "entity_f1", "entity_f1_macro")
    of_tokens = True

    def __init__(self, labels: Sequence[str], problem: str, dims: Dims | None = None):
        super().__init__(labels, problem, dims)
        self.entities = EntityLabels.of(labels)
        self.of_words = self.size
        self.size += 3 * len(self.entities.types) if self.entities else 0

    def part(self, result: MicroBatchResult) -> Tensor:
        """Return [size] float64. Collective over the ranks that split rows."""
        batch, numbers = result.batch, result.scores.numbers
        assert numbers is not None
        given, wanted, is_labelled = numbers.argmax(1), batch.targets, batch.weights > 0
        sums = self.of_labels(given, wanted, is_labelled)
        return sums if self.entities is None else torch.cat([sums, self._of_entities(batch, given)])

    def _of_entities(self, batch: MicroBatch, given: Tensor) -> Tensor:
        """Return the sums over entities. given: the label of each labelled token."""
        assert self.entities
        given, wanted, documents, is_word = in_order(batch, given, self.dims)
        begins, kinds, ends = self.entities.entities(given, documents)
        begin, kind, end = self.entities.entities(wanted, documents)
        begins, begin = begins & is_word, begin & is_word
        hits = begins & begin & (kinds == kind) & (ends == end)
        each, count = ((kind, hits), (kinds, begins), (kind, begin)), len(self.entities.types)
        totals = [histogram(own.clamp_min(0), some, count) for own, some in each]
        return counted_once(torch.cat(totals), self.dims)

    def written(self, sums: list[float]) -> dict[str, Any]:
        """Return the metrics; F1's mean is over the labels, or types, that are there or given."""
        written = super().written(sums[: self.of_words])
        if not written or self.entities is None:
            return written
        count, own = len(self.entities.types), sums[self.of_words :]
        hits, given, have = (own[i * count :][:count] for i in range(3))
        both = [(2 * hit, a + b) for hit, a, b in zip(hits, given, have, strict=True) if a + b]
        right = sum(hits)
        return written | {
            "entity_precision": right / max(1, sum(given)),
            "entity_recall": right / max(1, sum(have)),
            "entity_f1": 2 * right / max(1, sum(given) + sum(have)),
            "entity_f1_macro": sum(hit / either for hit, either in both) / max(1, len(both)),
        }


def in_order(
    batch: MicroBatch, given: Tensor, dims: Dims | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the given and wanted labels of all words of the rows, in order, and their texts.

    The last value is False for what is no word. given: of the labelled tokens on this rank.
    Collective over the ranks that split rows.
    """
    documents, is_word = batch.documents.index, batch.weights > 0
    if dims is None or dims.sizes["context"] == 1:
        return given, batch.targets, documents, is_word
    layout, device = batch.layout, given.device
    firsts = [
        number * layout.row + np.cumsum([0, *lengths])[:-1]
        for number, lengths in enumerate(layout.lengths)
    ]
    begins = to_device(np.append(np.concatenate(firsts), 0).astype(np.int64), device)
    places = begins[documents] + batch.positions.flatten()[batch.index]
    values = torch.stack([given, batch.targets, documents, torch.ones_like(given)])
    room = len(layout.lengths) * layout.row
    every = torch.zeros(len(values), room, dtype=torch.float64, device=device)
    every.index_add_(1, places, values.double() * is_word)
    dims.sum_over_context(every)
    order = (every[-1] == 0).int().argsort(stable=True)
    *labels, words = every[:, order].long()
    return labels[0], labels[1], labels[2], words > 0


# --- the method -----------------------------------------------------------------------------------


class TagMethod(LabelMethod):
    """Training on texts with labelled tokens."""

    counted = "words"
    runs = TagForwardBackward

    def given_values(self, store: TokenStore, key: str) -> np.ndarray:
        return token_labels(store, self.setup.config, key)

    def as_columns(self, values: np.ndarray) -> SampleColumns:
        return SampleColumns(token_labels=values)

    def metric(self) -> MethodMetric:
        config = self.setup.config
        return TagMetrics(config.labels, config.problem, self.setup.dims)
