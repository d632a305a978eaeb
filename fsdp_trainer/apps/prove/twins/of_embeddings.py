"""Losses of embeddings by their formulas, over all texts of a step, one query after another."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_trainer.apps.prove.twins.twin_step import TwinDocument, TwinStep

QUERY, POSITIVE = range(2)
"""Kinds of texts; others are no answers to their query."""


@dataclass(frozen=True)
class StepLists:
    """All texts of a step by number. similarity: of each two, [texts, texts].

    scores: a teacher's, [texts]. lists: each query with its documents; good: those that answer it.
    tokens: of each text. margin: by which a likely answer is more similar than the least similar
    answer; None: none is left out.
    """

    similarity: Tensor
    scores: Tensor
    lists: dict[int, list[int]]
    good: dict[int, list[int]]
    tokens: list[list[int]]
    temperature: float
    symmetric: bool
    margin: float | None = None

    def is_like_answer(self, text: int, query: int) -> bool:
        """Return True for a text with the words of an answer to the query, or a likely answer."""
        answers, similar = self.good[query], self.similarity[query]
        if any(self.tokens[text] == self.tokens[one] for one in answers):
            return True
        likely = torch.inf if self.margin is None else float(similar[answers].min()) + self.margin
        return float(similar[text]) > likely


def embedding_losses(step: TwinStep) -> Iterator[Tensor]:
    """Yield the mean over the queries, and over the widths of embeddings."""
    cfg, every = step.choice, step.documents
    vectors = torch.stack([vector_of(step, one) for one in every])
    starts = [i for i, one in enumerate(every) if one.kind == QUERY]
    ends = [*starts[1:], len(every)]
    lists = {first: [*range(first + 1, last)] for first, last in zip(starts, ends, strict=True)}
    good = {q: [i for i in own if every[i].kind == POSITIVE] for q, own in lists.items()}
    scores = torch.tensor([float(one.label) for one in every], dtype=torch.float64)
    losses = []
    for width in [*cfg.widths] or [vectors.shape[1]]:
        cut = F.normalize(vectors[:, :width], dim=1)
        texts = StepLists(
            cut @ cut.T, scores, lists, good, [one.tokens.tolist() for one in every],
            cfg.temperature, cfg.symmetric, cfg.false_negatives,
        )  # fmt: skip
        losses.append(torch.stack(COMPARED[cfg.comparison](texts)).mean())
    yield torch.stack(losses).mean()


def vector_of(step: TwinStep, document: TwinDocument) -> Tensor:
    """Return the embedding of a text by the pooling of its folder, [hidden] float64."""
    states = step.output(document).last_hidden_state[0].double()
    return {"last": states[-1], "cls": states[0], "mean": states.mean(0)}[step.pooling]


def infonce(texts: StepLists) -> list[Tensor]:
    """Return the loss of each query (van den Oord et al. 2018, equation 4) among all documents.

    Half of it is that of its answers among all queries, if it is symmetric, as in CLIP.
    """
    logits, every = texts.similarity / texts.temperature, [*texts.lists]
    documents = [text for own in texts.lists.values() for text in own]
    losses = []
    for query, own in texts.lists.items():
        others = [text for text in documents if text not in own]
        others = [text for text in others if not texts.is_like_answer(text, query)]
        others += [text for text in own if text not in texts.good[query]]
        each = []
        for answer in texts.good[query]:
            given = [logits[query, [answer, *others]]]
            if texts.symmetric:
                queries = [q for q in every if q == query or not texts.is_like_answer(answer, q)]
                given.append(logits[queries, answer])
            each += [(one.logsumexp(0) - logits[query, answer]) / len(given) for one in given]
        losses.append(torch.stack(each).sum() / len(texts.good[query]))
    return losses


def cosent(texts: StepLists) -> list[Tensor]:
    """Return log(1 + Σ exp(difference)) over pairs in the wrong order (Su 2022)."""
    pairs = [(query, text) for query, own in texts.lists.items() for text in own]
    wrong = [torch.zeros((), dtype=torch.float64)]
    for a in pairs:
        less = [b for b in pairs if texts.scores[a[1]] < texts.scores[b[1]]]
        wrong += [(texts.similarity[a] - texts.similarity[b]) / texts.temperature for b in less]
    return [torch.stack(wrong).logsumexp(0)]


def margin_mse(texts: StepLists) -> list[Tensor]:
    """Return each query's mean of errors of margins (Hofstätter et al. 2020, equation 5)."""
    errors = {q: texts.similarity[q, own] - texts.scores[own] for q, own in texts.lists.items()}
    first = {q: texts.lists[q].index(texts.good[q][0]) for q in errors}
    every = [(each[first[q]] - each).square().sum() for q, each in errors.items()]
    return [
        one / max(1, len(own) - 1) for one, own in zip(every, texts.lists.values(), strict=True)
    ]


def divergence(texts: StepLists) -> list[Tensor]:
    """Return KL(teacher ‖ model) over each query's documents."""
    losses = []
    for query, own in texts.lists.items():
        ours = (texts.similarity[query, own] / texts.temperature).log_softmax(0)
        theirs = texts.scores[own].log_softmax(0)
        losses.append((theirs.exp() * (theirs - ours)).sum())
    return losses


COMPARED: dict[str, Callable[[StepLists], list[Tensor]]] = {
    "infonce": infonce, "cosent": cosent, "margin_mse": margin_mse, "kl": divergence,
}  # fmt: skip
