"""Losses of labels and of lists of documents, of transformers' classes for them."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_trainer.apps.prove.twins.twin_step import TwinStep

SCORED = 0
"""Kind of a document whose score is no mere yes or no."""


def class_losses(step: TwinStep) -> Iterator[Tensor]:
    """Yield each text's part of the mean loss of transformers' …ForSequenceClassification."""
    numbers, problem = step.described["label2id"], step.described["problem_type"]
    smoothing = step.choice.label_smoothing
    weight = label_weights(step)
    for one in step.documents:
        given = step.output(one).logits[0].double()
        names = one.label if isinstance(one.label, list) else [one.label]
        if problem == "regression":
            loss = (given - torch.tensor([float(name) for name in names])).square().mean()
        elif problem == "multi_label_classification":
            wanted = torch.zeros_like(given)
            for name in names:
                wanted[number_of(name, numbers)] = 1
            wanted = wanted * (1 - smoothing) + smoothing / 2
            loss = F.binary_cross_entropy_with_logits(given, wanted, weight)
        else:
            wanted = torch.tensor(number_of(names[0], numbers))
            loss = F.cross_entropy(
                given[None], wanted[None], weight, reduction="none", label_smoothing=smoothing
            ).sum()
        yield loss / len(step.documents)


def tag_losses(step: TwinStep) -> Iterator[Tensor]:
    """Yield each text's part of the mean loss of transformers' …ForTokenClassification."""
    numbers, weight = step.described["label2id"], label_weights(step)
    count = sum(len(one.label) for one in step.documents)
    for one in step.documents:
        assert one.own is not None
        given = step.output(one).logits[0, one.own > 0].double()
        wanted = torch.tensor([number_of(name, numbers) for name in one.label])
        losses = F.cross_entropy(
            given, wanted, weight, reduction="none", label_smoothing=step.choice.label_smoothing
        )
        yield losses.sum() / count


def number_of(name: Any, numbers: dict[str, int]) -> int:
    text = str(int(name)) if isinstance(name, float) else str(name)
    text = text.lower() if isinstance(name, bool) else text
    return numbers[text] if text in numbers else int(text)


def label_weights(step: TwinStep) -> Tensor | None:
    """Return the weight of each label, [labels] float64; None: all are 1."""
    chosen, numbers = step.choice.class_weights, step.described["label2id"]
    if chosen is None:
        return None
    weights = torch.ones(len(numbers), dtype=torch.float64)
    if isinstance(chosen, dict):
        for name, value in chosen.items():
            weights[numbers[str(name)]] = value
        return weights
    counts: Counter[int] = Counter()
    for store in step.stores:
        assert store.labels is not None
        for sample in range(len(store)):
            label = json.loads(store.labels.text(sample))
            names = label if isinstance(label, list) else [label]
            counts.update({number_of(name, numbers) for name in names})
    for number, count in counts.items():
        weights[number] = counts.total() / len(numbers) / count
    return weights


# --- lists of documents ---------------------------------------------------------------------------


def ranking_losses(step: TwinStep) -> Iterator[Tensor]:
    """Yield each list's part of the mean loss of ListNet, RankNet or cross-entropy."""
    starts = [i for i, one in enumerate(step.documents) if one.starts]
    for first, last in zip(starts, [*starts[1:], len(step.documents)], strict=True):
        every = step.documents[first:last]
        given = torch.stack([step.output(one).logits[0, 0].double() for one in every])
        wanted = torch.tensor([float(one.label) for one in every], dtype=torch.float64)
        yield RANKINGS[step.choice.ranking](given, wanted, every[0].kind) / len(starts)


def listwise(given: Tensor, wanted: Tensor, kind: int) -> Tensor:
    """Return the cross-entropy of Cao et al. 2007, with equal shares of good documents."""
    shares = wanted.softmax(0) if kind == SCORED else wanted / wanted.sum().clamp_min(1)
    return -(shares * given.log_softmax(0)).sum()


def pairwise(given: Tensor, wanted: Tensor, kind: int) -> Tensor:
    """Return the mean over pairs of Burges et al. 2005, equation 3."""
    pairs = [
        (a, b) for a in range(len(wanted)) for b in range(len(wanted)) if wanted[a] > wanted[b]
    ]
    losses = [F.softplus(given[b] - given[a]) for a, b in pairs]
    return torch.stack(losses).mean() if losses else 0 * given.sum()


def pointwise(given: Tensor, wanted: Tensor, kind: int) -> Tensor:
    return F.binary_cross_entropy_with_logits(given, wanted)


RANKINGS = {"listwise": listwise, "pairwise": pairwise, "pointwise": pointwise}
