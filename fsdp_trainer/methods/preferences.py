"""Training on preference pairs: dpo, ipo, simpo, orpo and reward.

Each loss is a function of six numbers per pair: for both answers, the log-probability under the
model, the log-probability under the reference, and the number of tokens. Sums and formulas are
computed in float64, so that packing and chunks do not affect the results.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_trainer.config.methods import ObjectiveChoice
from fsdp_trainer.methods.document_step import DocumentForwardBackward, DocumentObjective
from fsdp_trainer.methods.method import Method, StepParts
from fsdp_trainer.methods.stored_columns import ReferenceColumn, RunRows
from fsdp_trainer.models.adapters.adapters import without_adapters
from fsdp_trainer.models.decoder import Decoder, MicroBatch
from fsdp_trainer.models.head import Objective, Scores
from fsdp_trainer.observe.observer import Observer
from fsdp_trainer.observe.step_log import StepReport, finite_or_none
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.training.batches import Batches, BatchOptions, StepPlan
from fsdp_trainer.training.documents.document_sums import answer_sums, counted_once
from fsdp_trainer.training.metrics import MethodMetric, MetricWatch, MicroBatchResult
from fsdp_trainer.training.step import ForwardBackward

ANSWERS = ("chosen", "rejected")
"""The documents of a pair, in their order in the data."""
MEANS = ("reward", "log_probability", "answer_tokens")
"""Metrics of each answer, as means over the pairs."""
LEAST_PROBABILITY = 1e-12
"""Least probability of all other answers, in ORPO's odds."""
WINDOW = 20
"""Number of steps over which ChosenWatch averages before it compares."""


@dataclass(frozen=True)
class Pairs:
    """The pairs of a micro-batch.

    policy, reference: [pairs, 2] float64, Σ log-probability of the chosen and the rejected answer
    under each model, or of a reward model its score; zeros without a reference. tokens: [pairs, 2]
    float64, length of each answer.
    """

    policy: Tensor
    reference: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, scores: Scores, batch: MicroBatch, dims: Dims | None) -> "Pairs":
        values = scores.log_probability if scores.numbers is None else scores.numbers[:, 0]
        policy, tokens = answer_sums(torch.stack([values, torch.ones_like(values)]), batch, dims)
        reference = batch.documents.reference
        reference = torch.zeros_like(policy) if reference is None else reference
        return cls(*(part.view(-1, len(ANSWERS)) for part in (policy, reference, tokens)))

    @property
    def means(self) -> Tensor:
        return self.policy / self.tokens


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
    return pairs.policy


def advantage(values: Tensor) -> Tensor:
    """Return the chosen answer's value minus the rejected one's, [pairs]. values: [pairs, 2]."""
    return values[:, 0] - values[:, 1]


def preferred(logits: Tensor, smoothing: float) -> Tensor:
    """Return -log sigmoid of the logits, assuming a share `smoothing` of pairs is mislabelled."""
    right, wrong = -F.logsigmoid(logits), -F.logsigmoid(-logits)
    return right * (1 - smoothing) + wrong * smoothing if smoothing else right


def against_reference(pairs: Pairs, cfg: ObjectiveChoice) -> Tensor:
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
class PairObjective(DocumentObjective):
    """The loss of pairs. The batch has the reference's sums if there is a reference."""

    cfg: ObjectiveChoice

    def losses(self, scores: Scores) -> Tensor:
        pairs = Pairs.of(scores, self.batch, self.dims)
        losses = LOSSES[self.cfg.name][0](pairs, self.cfg)
        if self.cfg.sft_weight:
            losses = losses - self.cfg.sft_weight * pairs.means[:, 0]
        return losses


# --- steps ----------------------------------------------------------------------------------------


def no_reference(batch: MicroBatch) -> MicroBatch:
    return batch


def stored_reference(batch: MicroBatch) -> MicroBatch:
    """Return the batch unchanged: its rows were read with the reference's sums."""
    documents = batch.documents
    assert documents.reference is not None or not len(documents.groups)  # only padding
    return batch


@dataclass(frozen=True)
class BaseReference:
    """The reference of a model with adapters: the same model without them."""

    model: Decoder
    dims: Dims

    @torch.no_grad()
    def __call__(self, batch: MicroBatch) -> MicroBatch:
        """Run one forward and return the batch with the reference's sums. Collective.

        A batch that has them already is returned unchanged.
        """
        if batch.documents.reference is not None:
            return batch
        with without_adapters(self.model):
            scores = self.model(batch).scores
        sums = answer_sums(scores.log_probability, batch, self.dims)
        return replace(batch, document_targets=replace(batch.documents, reference=sums))


@dataclass(kw_only=True)
class PairForwardBackward(DocumentForwardBackward):
    """Runs micro-batches of pairs. The reported loss is the objective's, a mean over the pairs."""

    choice: ObjectiveChoice
    reference: Callable[[MicroBatch], MicroBatch] = field(default=no_reference)

    def complete(self, batch: MicroBatch) -> MicroBatch:
        return self.reference(batch)

    def comparison(self, batch: MicroBatch, count: float | Tensor) -> Objective:
        return PairObjective(batch, count, self.dims, self.choice)

    def weight(self, plan: StepPlan) -> float:
        return plan.documents / len(ANSWERS)

    def own_weight(self, batch: MicroBatch) -> Tensor:
        pairs = batch.weights.new_full((), len(batch.documents.groups) / len(ANSWERS))
        return counted_once(pairs, self.dims)


# --- metrics --------------------------------------------------------------------------------------


class PairMetrics:
    """The rewards, log-probabilities and lengths of both answers, as means over the step's pairs.

    Sums: number of pairs, number of pairs whose chosen answer has the higher reward, then the
    reward, the log-probability and the number of tokens, each for chosen and rejected answers.
    """

    means = tuple(f"{name}_{answer}" for name in MEANS for answer in ANSWERS)
    keys: tuple[str, ...] = ("reward_margin", "reward_accuracy", *means)
    size = 2 + len(means)
    of_tokens = False

    def __init__(self, cfg: ObjectiveChoice, dims: Dims | None = None):
        self.cfg, self.dims = cfg, dims

    def part(self, result: MicroBatchResult) -> Tensor:
        """Return [size] float64. Collective: see answer_sums."""
        pairs = Pairs.of(result.scores, result.batch, self.dims)
        rewards = LOSSES[self.cfg.name][1](pairs, self.cfg)
        right = (advantage(rewards) > 0).sum().double()
        totals = torch.stack([rewards, pairs.policy, pairs.tokens]).sum(1)
        count = torch.full_like(right, len(rewards))
        sums = torch.cat([torch.stack([count, right]), totals.flatten()])
        return counted_once(sums, self.dims)

    def written(self, sums: list[float]) -> dict[str, Any]:
        count, right, *totals = sums
        if not count:
            return {}
        means = {key: total / count for key, total in zip(self.means, totals, strict=True)}
        margin = means["reward_chosen"] - means["reward_rejected"]
        written = {"reward_margin": margin, "reward_accuracy": right / count, **means}
        if self.cfg.method.scores:
            written = {key: value for key, value in written.items() if key.startswith("reward")}
        return {key: finite_or_none(value) for key, value in written.items()}


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
        self, reports: Sequence[StepReport], lines: Sequence[dict[str, Any]], observer: Observer
    ) -> None:
        for report, written in zip(reports, lines, strict=True):
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


# --- the method -----------------------------------------------------------------------------------


class PreferenceMethod(Method):
    def load(self, model: Decoder, options: BatchOptions) -> tuple[RunRows, dict[str, str]]:
        """See Method. A reference that is stored reads all rows; `model` may keep its weights."""
        if self.second is None or self.second.mode != "stored":
            return self.rows, {}
        setup, batches = self.setup, partial(Batches, options=options)
        column = ReferenceColumn(
            setup.cfg, self.rows, setup.dims, setup.observer.say, model, batches
        )
        rows, digest = column.of_run(setup.model_setup.source, self.checkpoint)
        self.start_formats = column.start_formats
        return rows, {column.name: digest}

    def metric(self) -> MethodMetric:
        return PairMetrics(self.choice, self.setup.dims)

    def watch(self) -> MetricWatch | None:
        """See Method. A reward model makes no answers likely."""
        return None if self.choice.method.scores else ChosenWatch(self.second is not None)

    def step(self, parts: StepParts) -> ForwardBackward:
        reference = self.reference(parts.model)
        return PairForwardBackward(*parts, choice=self.choice, reference=reference)

    def reference(self, model: Decoder) -> Callable[[MicroBatch], MicroBatch]:
        """Return a function that adds the reference's sums to a micro-batch."""
        if self.second is None:
            return no_reference
        if self.second.mode == "base":
            return BaseReference(model, self.setup.dims)
        return stored_reference
