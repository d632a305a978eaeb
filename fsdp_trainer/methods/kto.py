"""Training on answers labelled good or bad: KTO (Ethayarajh et al. 2024, arXiv 2402.01306).

In the data, each answer is followed by its prompt with a mismatched answer, one to another prompt.
The mean over a step of log(policy / reference) of the mismatched answers, at least 0, is the
baseline: good answers are trained to exceed it, and bad ones to stay below it. It is needed for the
step's gradients, so the micro-batches are computed once without gradients before.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsdp_trainer.base import phases
from fsdp_trainer.config.methods import ObjectiveChoice
from fsdp_trainer.data.tokens.samples import BAD, GOOD, MISMATCHED
from fsdp_trainer.methods.document_step import DocumentObjective
from fsdp_trainer.methods.method import StepParts
from fsdp_trainer.methods.preferences import PairForwardBackward, PreferenceMethod
from fsdp_trainer.models.decoder import MicroBatch
from fsdp_trainer.models.head import Objective, Scores
from fsdp_trainer.observe.step_log import finite_or_none
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.training.documents.document_sums import answer_sums, counted_once, sum_where
from fsdp_trainer.training.feed import StepBatches
from fsdp_trainer.training.metrics import MethodMetric, MetricWatch, MicroBatchResult
from fsdp_trainer.training.step import ForwardBackward

VERDICTS = ("good", "bad")
"""Names of the kinds of answers that are trained on, indexed by their numbers in the data."""
MEANS = ("reward", "log_probability", "answer_tokens")


@dataclass(frozen=True)
class KtoObjective(DocumentObjective):
    """The loss of answers. The batch has the reference's sums. count: without mismatched ones.

    baseline: scalar, see the module's docstring.
    """

    cfg: ObjectiveChoice
    baseline: Tensor

    def losses(self, scores: Scores) -> Tensor:
        gains = gains_of(scores.log_probability, self.batch, self.dims)
        ahead = self.cfg.beta * (gains - self.baseline)
        kinds = self.batch.documents.kinds
        if kinds is None:  # this rank has no data
            return ahead
        good = self.cfg.desirable_weight * torch.sigmoid(-ahead)
        bad = self.cfg.undesirable_weight * torch.sigmoid(ahead)
        return torch.where(kinds == GOOD, good, bad).masked_fill(kinds == MISMATCHED, 0.0)


def gains_of(log_probability: Tensor, batch: MicroBatch, dims: Dims | None) -> Tensor:
    """Return log(policy / reference) of each document, [documents] float64. Collective."""
    sums = answer_sums(log_probability, batch, dims)
    reference = batch.documents.reference
    return sums if reference is None else sums - reference


def mismatched_gains(log_probability: Tensor, batch: MicroBatch, dims: Dims | None) -> Tensor:
    """Return Σ log(policy / reference) of mismatched answers, and their number: [2] float64.

    Collective.
    """
    gains = gains_of(log_probability, batch, dims)
    if batch.documents.kinds is None:
        return gains.new_zeros(2)
    is_other = batch.documents.kinds == MISMATCHED
    return torch.stack([sum_where(gains, is_other), is_other.sum().double()])


@dataclass(kw_only=True)
class KtoForwardBackward(PairForwardBackward):
    """Runs micro-batches of good and bad answers. The reported loss is a mean over the answers."""

    baseline: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    def run(self, step: StepBatches, micro_batches: Iterable[MicroBatch]) -> tuple[Tensor, Tensor]:
        phases.enter("forward")
        batches = [self.reference(batch) for batch in micro_batches]
        with torch.no_grad():
            scores = (self.model(batch).scores for batch in batches)
            self._set_baseline(batches, scores)
        return super().run(step, batches)

    def scores(
        self, step: StepBatches, before: Callable[[], None]
    ) -> Iterator[tuple[MicroBatch, Scores]]:
        """Yield all scores after the baseline has been computed from them. See ForwardBackward."""
        every = [*super().scores(step, before)]
        self._set_baseline([batch for batch, _ in every], (scores for _, scores in every))
        yield from every

    def comparison(self, batch: MicroBatch, count: float | Tensor) -> Objective:
        baseline = self.baseline.to(batch.weights.device)
        return KtoObjective(batch, count, self.dims, self.choice, baseline)

    def _set_baseline(self, batches: list[MicroBatch], scores: Iterable[Scores]) -> None:
        """Set the baseline from these micro-batches. Collective.

        It is the mean gain, at least 0, of all ranks' mismatched answers.
        """
        sums = batches[0].weights.new_zeros(2, dtype=torch.float64)
        for batch, one in zip(batches, scores, strict=True):
            sums += counted_once(mismatched_gains(one.log_probability, batch, self.dims), self.dims)
        self.dims.sum_over_tokens(sums)
        self.baseline = (sums[0] / sums[1].clamp_min(1)).clamp_min(0)


class KtoMetrics:
    """The baseline, and mean rewards, log-probabilities and lengths of good and bad answers.

    Sums: the number, the reward, the log-probability and the number of tokens, each for good and
    for bad answers; then Σ log(policy / reference) of mismatched answers, and their number.
    """

    means = tuple(f"{name}_{verdict}" for name in MEANS for verdict in VERDICTS)
    keys: tuple[str, ...] = ("reward_margin", "baseline", *means)
    size = len(VERDICTS) * (1 + len(MEANS)) + 2
    of_tokens = False

    def __init__(self, cfg: ObjectiveChoice, dims: Dims | None = None):
        self.cfg, self.dims = cfg, dims

    def part(self, result: MicroBatchResult) -> Tensor:
        """Return [size] float64. Collective: see answer_sums."""
        batch, ones = result.batch, torch.ones_like(result.scores.log_probability)
        values = torch.stack([result.scores.log_probability, ones])
        policy, tokens = answer_sums(values, batch, self.dims)
        kinds, reference = batch.documents.kinds, batch.documents.reference
        if kinds is None:
            return policy.new_zeros(self.size)
        reference = torch.zeros_like(policy) if reference is None else reference
        gains = policy - reference
        values = torch.stack([torch.ones_like(policy), self.cfg.beta * gains, policy, tokens])
        sums = [sum_where(values, kinds == kind) for kind in (GOOD, BAD)]
        is_other = kinds == MISMATCHED
        other = torch.stack([sum_where(gains, is_other), is_other.sum().double()])
        return counted_once(torch.cat([torch.stack(sums, 1).flatten(), other]), self.dims)

    def written(self, sums: list[float]) -> dict[str, Any]:
        """Return the means, such as reward_good, of each kind of answer that occurs.

        The margin is only returned if both kinds occur.
        """
        *totals, gain, others = sums
        counts, totals = totals[: len(VERDICTS)], totals[len(VERDICTS) :]
        written: dict[str, Any] = {"baseline": max(0.0, gain / others) if others else 0.0}
        for place, (key, total) in enumerate(zip(self.means, totals, strict=True)):
            count = counts[place % len(VERDICTS)]
            if count:
                written[key] = total / count
        if all(counts):
            written["reward_margin"] = written["reward_good"] - written["reward_bad"]
        return {key: finite_or_none(value) for key, value in written.items()}


class KtoMethod(PreferenceMethod):
    def metric(self) -> MethodMetric:
        return KtoMetrics(self.choice, self.setup.dims)

    def watch(self) -> MetricWatch | None:
        return None

    def step(self, parts: StepParts) -> ForwardBackward:
        reference = self.reference(parts.model)
        return KtoForwardBackward(*parts, choice=self.choice, reference=reference)
