"""Objectives that compare the two answers of a preference pair, and what is reported of them.

All of them are functions of six numbers a pair: the log-probability of each answer under the model
and under the reference, and its tokens. Sums and formulas are in float64, so that neither packing
nor chunks show.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_trainer.config.rules_objective import has_reference
from fsdp_trainer.config.schema import PAIRED, SCORED, ObjectiveChoice
from fsdp_trainer.models.decoder import MicroBatch
from fsdp_trainer.models.head import Scores
from fsdp_trainer.observe.observer import Observer
from fsdp_trainer.observe.step_log import StepReport, finite_or_none
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.training.metrics import MicroBatchResult

ANSWERS = ("chosen", "rejected")
"""The documents of a pair, in the order of the data."""
FIGURES = ("reward", "log_probability", "answer_tokens")
"""Figures of each answer, as means over the pairs."""
WINDOW = 20
"""Steps over which the chosen answers' log-probability is averaged before anything is said."""


@dataclass(frozen=True)
class Pairs:
    """The pairs of a micro-batch.

    policy, reference: [pairs, 2] float64, Σ log-probability of the chosen and the rejected answer;
    reference is 0 without one. tokens: [pairs, 2] float64, those of each answer.
    """

    policy: Tensor
    reference: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, log_probability: Tensor, batch: MicroBatch, dims: Dims | None) -> "Pairs":
        """log_probability: [supervised], of the batch's targets. Collective: see answer_sums."""
        ones = torch.ones_like(log_probability)
        policy, tokens = answer_sums(torch.stack([log_probability, ones]), batch, dims)
        reference = torch.zeros_like(policy) if batch.reference is None else batch.reference
        return cls(*(part.view(-1, len(ANSWERS)) for part in (policy, reference, tokens)))

    @property
    def means(self) -> Tensor:
        """Return the mean log-probability of an answer's tokens, [pairs, 2]."""
        return self.policy / self.tokens


def sums_by_document(values: Tensor, batch: MicroBatch) -> Tensor:
    """Return the sum of each document's values on this rank, [..., documents] float64.

    values: [..., supervised].
    """
    assert batch.documents is not None
    assert batch.groups is not None
    count = len(batch.groups)  # padding has this number
    zeros = torch.zeros(*values.shape[:-1], count + 1, dtype=torch.float64, device=values.device)
    return zeros.index_add(-1, batch.documents, values.double())[..., :count]


def answer_sums(values: Tensor, batch: MicroBatch, dims: Dims | None) -> Tensor:
    """Return the sum of each document's values, [..., documents] float64.

    Collective over the ranks that share rows, each of which has some of the values; its gradient
    is that of its own ones. dims: None where every rank has whole rows.
    """
    sums = sums_by_document(values, batch)
    if dims is None or dims.sizes["context"] == 1:
        return sums
    # a rank that lacks its rows has no documents: all send as many numbers as rows have tokens
    room = batch.tokens.numel() * dims.sizes["context"] - sums.shape[-1]
    return _SumOverContext.apply(F.pad(sums, (0, room)), dims)[..., : sums.shape[-1]]


class _SumOverContext(torch.autograd.Function):
    """The sum over the ranks that share rows, which each differentiates by its own part."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, dims: Dims) -> Tensor:
        total = values.clone()
        dims.sum_over_context(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def counted_once(value: Tensor, dims: Dims | None) -> Tensor:
    """Return a value that ranks which share rows have in common: 0 on all but the first of them.

    Its gradient is the same on all.
    """
    return value if dims is None or dims.is_first_of_context else value - value.detach()


# --- losses and rewards ---------------------------------------------------------------------------


def dpo(pairs: Pairs, cfg: ObjectiveChoice) -> Tensor:
    """Rafailov et al. 2023, eq. 7; with label_smoothing the conservative form of Mitchell 2023."""
    gain = advantage(pairs.policy - pairs.reference)
    return preferred(cfg.beta * gain, cfg.label_smoothing)


def ipo(pairs: Pairs, cfg: ObjectiveChoice) -> Tensor:
    """Azar et al. 2023, eq. 17, of means over an answer's tokens, as trl has it."""
    gain = advantage((pairs.policy - pairs.reference) / pairs.tokens)
    return (gain - 1 / (2 * cfg.beta)).square()


def simpo(pairs: Pairs, cfg: ObjectiveChoice) -> Tensor:
    """Meng et al. 2024, eq. 6."""
    return preferred(cfg.beta * advantage(pairs.means) - cfg.gamma, cfg.label_smoothing)


def orpo(pairs: Pairs, cfg: ObjectiveChoice) -> Tensor:
    """Hong et al. 2024, eq. 7, without its first term, which is sft_weight's."""
    log_odds = pairs.means - torch.log(-torch.expm1(pairs.means))
    return cfg.beta * preferred(advantage(log_odds), 0.0)


def bradley_terry(pairs: Pairs, cfg: ObjectiveChoice) -> Tensor:
    """The chosen answer's score is the higher one (Ouyang et al. 2022, eq. 1).

    With center_weight scores are drawn to 0 (Eisenstein et al. 2023, §2).
    """
    losses = preferred(advantage(pairs.policy), 0.0)
    return losses + cfg.center_weight * pairs.policy.sum(1).square()


def score(pairs: Pairs, cfg: ObjectiveChoice) -> Tensor:
    """Return the score of each answer, [pairs, 2]: the only number that a reward model gives."""
    return pairs.policy


def advantage(values: Tensor) -> Tensor:
    """Return by how much the chosen answer is ahead, [pairs]. values: [pairs, 2]."""
    return values[:, 0] - values[:, 1]


def preferred(logits: Tensor, smoothing: float) -> Tensor:
    """Return -log sigmoid of the logits, where a share `smoothing` of the pairs is mislabelled."""
    right, wrong = -F.logsigmoid(logits), -F.logsigmoid(-logits)
    return right * (1 - smoothing) + wrong * smoothing if smoothing else right


def against_reference(pairs: Pairs, cfg: ObjectiveChoice) -> Tensor:
    """Return β · log(policy / reference) of each answer, [pairs, 2]."""
    return cfg.beta * (pairs.policy - pairs.reference)


def mean_against_reference(pairs: Pairs, cfg: ObjectiveChoice) -> Tensor:
    """Return β · the mean over its tokens of log(policy / reference), [pairs, 2]."""
    return cfg.beta * (pairs.policy - pairs.reference) / pairs.tokens


def mean_alone(pairs: Pairs, cfg: ObjectiveChoice) -> Tensor:
    """Return β · the mean log-probability of an answer's tokens, [pairs, 2]."""
    return cfg.beta * pairs.means


Formula = Callable[[Pairs, ObjectiveChoice], Tensor]
LOSSES: dict[str, tuple[Formula, Formula]] = {
    "dpo": (dpo, against_reference),
    "ipo": (ipo, mean_against_reference),
    "simpo": (simpo, mean_alone),
    "orpo": (orpo, mean_alone),
    "reward": (bradley_terry, score),
}
"""The loss of each objective, [pairs], and the reward of an answer that it implies, [pairs, 2]."""


@dataclass(frozen=True)
class PairObjective:
    """Σ loss of a micro-batch's pairs / count. The head calls it, once.

    batch: with the sums of its reference, where there is one. count: the pairs of the whole step.
    dims: of ranks that may share rows; the first of them has the value, all its gradient.
    """

    batch: MicroBatch
    cfg: ObjectiveChoice
    count: float | Tensor = 1.0
    dims: Dims | None = None
    needs_mean = False
    needs_all_tokens = True

    def __call__(self, scores: Scores, tokens: slice) -> Tensor:
        """Return the sum over all pairs. scores: of all tokens."""
        pairs = Pairs.of(scores.log_probability, self.batch, self.dims)
        losses = LOSSES[self.cfg.name][0](pairs, self.cfg)
        if self.cfg.sft_weight:
            losses = losses - self.cfg.sft_weight * pairs.means[:, 0]
        return counted_once((losses.sum() / self.count).float(), self.dims)


# --- what is reported -----------------------------------------------------------------------------


class PairFigures:
    """The rewards, log-probabilities and lengths of both answers, as means over the step's pairs.

    Sums: pairs, pairs whose chosen answer has the higher reward, then of chosen and rejected
    answers the reward, the log-probability and the tokens.
    """

    means = tuple(f"{name}_{answer}" for name in FIGURES for answer in ANSWERS)
    keys = ("reward_margin", "reward_accuracy", *means)
    size = 2 + len(means)

    def __init__(self, cfg: ObjectiveChoice, dims: Dims | None = None):
        self.cfg, self.dims = cfg, dims

    def part(self, result: MicroBatchResult) -> Tensor:
        """Return [size] float64. Collective: see answer_sums."""
        pairs = Pairs.of(result.scores.log_probability, result.batch, self.dims)
        rewards = LOSSES[self.cfg.name][1](pairs, self.cfg)
        right = (advantage(rewards) > 0).sum().double()
        figures = torch.stack([rewards, pairs.policy, pairs.tokens]).sum(1)
        count = torch.full_like(right, len(rewards))
        sums = torch.cat([torch.stack([count, right]), figures.flatten()])
        return counted_once(sums, self.dims)

    def written(self, sums: list[float]) -> dict[str, Any]:
        """Return the means, such as reward_chosen, and the margin and accuracy of the rewards."""
        count, right, *totals = sums
        if not count:
            return {}
        means = {key: total / count for key, total in zip(self.means, totals, strict=True)}
        margin = means["reward_chosen"] - means["reward_rejected"]
        figures = {"reward_margin": margin, "reward_accuracy": right / count, **means}
        if self.cfg.name in SCORED:
            figures = {key: value for key, value in figures.items() if key.startswith("reward")}
        return {key: finite_or_none(value) for key, value in figures.items()}


class ChosenWatch:
    """Says once when the chosen answers have become less likely than they were.

    That both answers lose, the rejected ones more, lowers the loss too. The first WINDOW steps are
    compared with the newest: by the reward where there is a reference, which every pair brings with
    it, else by the log-probability of a token, which differs from pair to pair.
    """

    def __init__(self, has_reference: bool):
        self.has_reference = has_reference
        self._values: list[float] = []
        self._first: float | None = 0.0 if has_reference else None
        self._is_told = False

    def review(
        self, reports: Sequence[StepReport], figures: Sequence[dict[str, Any]], observer: Observer
    ) -> None:
        """Take note of the steps' figures. figures: of each report, as PairFigures writes them."""
        for report, written in zip(reports, figures, strict=True):
            value = self._value(written)
            if value is not None and math.isfinite(value):
                self._values = [*self._values, value][-WINDOW:]
            if len(self._values) == WINDOW and not self._is_told:
                self._compare(report.plan.step, observer)

    def _value(self, written: dict[str, Any]) -> float | None:
        if self.has_reference:
            return written.get("reward_chosen")
        total, tokens = written.get("log_probability_chosen"), written.get("answer_tokens_chosen")
        return total / tokens if total is not None and tokens else None

    def _compare(self, step: int, observer: Observer) -> None:
        mean = sum(self._values) / WINDOW
        if self._first is None:
            self._first = mean
        if mean >= self._first:
            return
        self._is_told = True
        than = "under the reference" if self.has_reference else f"in the first {WINDOW} steps"
        observer.event("chosen_less_likely", step=step)
        observer.say(
            f"warning: up to step {step} the chosen answers have become less likely than {than}: "
            "the loss falls because the rejected ones lose more.\n"
            "  objective.sft_weight=0.1  keeps them likely; a lower optim.lr or a higher "
            "objective.beta changes the model less"
        )


def chosen_watch(cfg: ObjectiveChoice) -> ChosenWatch | None:
    """Return the watch over an objective's chosen answers; None for one without pairs."""
    watched = cfg.name in PAIRED and cfg.name not in SCORED
    return ChosenWatch(has_reference(cfg)) if watched else None
