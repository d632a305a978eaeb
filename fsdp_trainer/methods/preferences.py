"""Objectives that compare the two answers of a preference pair, and their metrics.

Each is a function of six numbers per pair: for both answers, the log-probability under the model,
the log-probability under the reference, and the number of tokens. Sums and formulas are computed in
float64, so that packing and chunks do not affect the results.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_trainer.config.rules.rules_objective import has_reference
from fsdp_trainer.config.schema import PAIRED, SCORED, ObjectiveChoice
from fsdp_trainer.models.decoder import MicroBatch
from fsdp_trainer.models.head import Scores
from fsdp_trainer.observe.observer import Observer
from fsdp_trainer.observe.step_log import StepReport, finite_or_none
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.training.metrics import MicroBatchResult

ANSWERS = ("chosen", "rejected")
"""The documents of a pair, in their order in the data."""
FIGURES = ("reward", "log_probability", "answer_tokens")
"""Metrics of each answer, as means over the pairs."""
LEAST_PROBABILITY = 1e-12
"""Least probability of all other answers, in ORPO's odds."""
WINDOW = 20
"""Number of steps over which ChosenWatch averages before it compares."""


@dataclass(frozen=True)
class Pairs:
    """The pairs of a micro-batch.

    policy, reference: [pairs, 2] float64, Σ log-probability of the chosen and the rejected answer
    under each model; zeros without a reference. tokens: [pairs, 2] float64, length of each answer.
    """

    policy: Tensor
    reference: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, log_probability: Tensor, batch: MicroBatch, dims: Dims | None) -> "Pairs":
        """Return the pairs of a micro-batch. Collective: see answer_sums.

        log_probability: [supervised], one per target of the batch.
        """
        ones = torch.ones_like(log_probability)
        policy, tokens = answer_sums(torch.stack([log_probability, ones]), batch, dims)
        reference = torch.zeros_like(policy) if batch.reference is None else batch.reference
        return cls(*(part.view(-1, len(ANSWERS)) for part in (policy, reference, tokens)))

    @property
    def means(self) -> Tensor:
        """The mean log-probability of each answer's tokens, [pairs, 2]."""
        return self.policy / self.tokens


def sums_by_document(values: Tensor, batch: MicroBatch) -> Tensor:
    """Return the sum of each document's values on this rank, [..., documents] float64.

    values: [..., supervised].
    """
    assert batch.documents is not None
    assert batch.groups is not None
    count = len(batch.groups)  # also the document number of padding
    zeros = torch.zeros(*values.shape[:-1], count + 1, dtype=torch.float64, device=values.device)
    return zeros.index_add(-1, batch.documents, values.double())[..., :count]


def answer_sums(values: Tensor, batch: MicroBatch, dims: Dims | None) -> Tensor:
    """Return the sum of each document's values, [..., documents] float64.

    Collective over the ranks that share rows, each of which has a part of the values and gets the
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
    """The sum over the ranks that share rows; each rank differentiates it by its own addend."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, dims: Dims) -> Tensor:
        total = values.clone()
        dims.sum_over_context(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def counted_once(value: Tensor, dims: Dims | None) -> Tensor:
    """Return a value that ranks sharing rows have in common as 0 on all but the first of them.

    A sum over ranks then counts it once. Its gradient is kept on all of them.
    """
    return value if dims is None or dims.is_first_of_context else value - value.detach()


# --- losses and rewards ---------------------------------------------------------------------------


def dpo(pairs: Pairs, cfg: ObjectiveChoice) -> Tensor:
    """Return DPO's loss (Rafailov et al. 2023, eq. 7).

    With label_smoothing it is the conservative form of Mitchell 2023.
    """
    gain = advantage(pairs.policy - pairs.reference)
    return preferred(cfg.beta * gain, cfg.label_smoothing)


def ipo(pairs: Pairs, cfg: ObjectiveChoice) -> Tensor:
    """Return IPO's loss (Azar et al. 2023, eq. 17), with means over tokens as in trl."""
    gain = advantage((pairs.policy - pairs.reference) / pairs.tokens)
    return (gain - 1 / (2 * cfg.beta)).square()


def simpo(pairs: Pairs, cfg: ObjectiveChoice) -> Tensor:
    """Return SimPO's loss (Meng et al. 2024, eq. 6)."""
    return preferred(cfg.beta * advantage(pairs.means) - cfg.gamma, cfg.label_smoothing)


def orpo(pairs: Pairs, cfg: ObjectiveChoice) -> Tensor:
    """Return ORPO's loss (Hong et al. 2024, eq. 7), except its first term: see sft_weight."""
    # float32 rounds the log-probability of a certain answer to 0, whose odds are infinite
    of_others = (-torch.expm1(pairs.means)).clamp_min(LEAST_PROBABILITY)
    log_odds = pairs.means - of_others.log()
    return cfg.beta * preferred(advantage(log_odds), 0.0)


def bradley_terry(pairs: Pairs, cfg: ObjectiveChoice) -> Tensor:
    """Return the loss of a reward model (Ouyang et al. 2022, eq. 1).

    It is low if the chosen answer's score is the higher one. center_weight pulls the scores to 0
    (Eisenstein et al. 2023, §2).
    """
    losses = preferred(advantage(pairs.policy), 0.0)
    return losses + cfg.center_weight * pairs.policy.sum(1).square()


def score(pairs: Pairs, cfg: ObjectiveChoice) -> Tensor:
    """Return the reward model's score of each answer, [pairs, 2], which `policy` holds."""
    return pairs.policy


def advantage(values: Tensor) -> Tensor:
    """Return the chosen answer's value minus the rejected one's, [pairs]. values: [pairs, 2]."""
    return values[:, 0] - values[:, 1]


def preferred(logits: Tensor, smoothing: float) -> Tensor:
    """Return -log sigmoid of the logits, assuming a share `smoothing` of pairs is mislabelled."""
    right, wrong = -F.logsigmoid(logits), -F.logsigmoid(-logits)
    return right * (1 - smoothing) + wrong * smoothing if smoothing else right


def against_reference(pairs: Pairs, cfg: ObjectiveChoice) -> Tensor:
    """Return β · log(policy / reference) of each answer, [pairs, 2]."""
    return cfg.beta * (pairs.policy - pairs.reference)


def mean_against_reference(pairs: Pairs, cfg: ObjectiveChoice) -> Tensor:
    """Return β · the mean of log(policy / reference) over each answer's tokens, [pairs, 2]."""
    return cfg.beta * (pairs.policy - pairs.reference) / pairs.tokens


def mean_alone(pairs: Pairs, cfg: ObjectiveChoice) -> Tensor:
    """Return β · the mean log-probability of each answer's tokens, [pairs, 2]."""
    return cfg.beta * pairs.means


Formula = Callable[[Pairs, ObjectiveChoice], Tensor]
LOSSES: dict[str, tuple[Formula, Formula]] = {
    "dpo": (dpo, against_reference),
    "ipo": (ipo, mean_against_reference),
    "simpo": (simpo, mean_alone),
    "orpo": (orpo, mean_alone),
    "reward": (bradley_terry, score),
}
"""The loss of each objective, [pairs], and the implicit reward of each answer, [pairs, 2]."""


@dataclass(frozen=True)
class PairObjective:
    """Σ loss of a micro-batch's pairs / count. The head calls it once.

    batch: micro-batch, with the reference's sums if there is a reference. count: number of pairs in
    the step. dims: None if every rank has complete rows; of ranks that share rows, only the first
    one has the value, and all have its gradient.
    """

    batch: MicroBatch
    cfg: ObjectiveChoice
    count: float | Tensor = 1.0
    dims: Dims | None = None
    needs_mean = False
    needs_all_tokens = True

    def __call__(self, scores: Scores, tokens: slice) -> Tensor:
        """Return the sum over all pairs. scores: those of all tokens."""
        pairs = Pairs.of(scores.log_probability, self.batch, self.dims)
        losses = LOSSES[self.cfg.name][0](pairs, self.cfg)
        if self.cfg.sft_weight:
            losses = losses - self.cfg.sft_weight * pairs.means[:, 0]
        return counted_once((losses.sum() / self.count).float(), self.dims)


# --- metrics --------------------------------------------------------------------------------------


class PairFigures:
    """The rewards, log-probabilities and lengths of both answers, as means over the step's pairs.

    Sums: number of pairs, number of pairs whose chosen answer has the higher reward, then the
    reward, the log-probability and the number of tokens, each for chosen and rejected answers.
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
        """Return the means, such as reward_chosen, and the rewards' margin and accuracy."""
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
    """Warns once if the chosen answers become less likely than they were.

    The loss also falls if both answers become less likely, the rejected ones more so. With a
    reference, the mean reward of the chosen answers over the newest WINDOW steps is compared with
    0. Without one, their mean log-probability per token is compared with that of the first WINDOW
    steps.
    """

    def __init__(self, has_reference: bool):
        self.has_reference = has_reference
        self._values: list[float] = []
        self._first: float | None = 0.0 if has_reference else None
        self._is_told = False

    def review(
        self, reports: Sequence[StepReport], figures: Sequence[dict[str, Any]], observer: Observer
    ) -> None:
        """Add steps and warn if needed. figures: for each report, the entries by PairFigures."""
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
    """Return the watch over an objective's chosen answers; None for an objective without one."""
    watched = cfg.name in PAIRED and cfg.name not in SCORED
    return ChosenWatch(has_reference(cfg)) if watched else None
