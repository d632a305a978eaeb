"""Named values of a step: summed on the device over micro-batches and ranks, then written by name.

A new metric is a class and a line in `step_metrics`; a user's own is registered (extensions.py).
"""

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fsdp_trainer.extensions import METRICS
from fsdp_trainer.models.balance import LOAD, Balance
from fsdp_trainer.models.decoder import MicroBatch
from fsdp_trainer.models.head import Scores
from fsdp_trainer.observe.step_log import finite_or_none

LEVELS = string.digits + string.ascii_lowercase


@dataclass(frozen=True)
class MicroBatchResult:
    """The result of one forward.

    loss: its share of the reported loss, a scalar: Σ weight · negative log-likelihood, divided by
    the Σ weight of the whole step (in validation: not divided).
    objective: its value, a scalar; in validation nothing is minimised, and it is the loss.
    auxiliary: named scalars of the blocks, such as a load-balancing loss.
    """

    batch: MicroBatch
    scores: Scores
    loss: Tensor
    objective: Tensor
    auxiliary: dict[str, Tensor] = field(default_factory=dict)


class Metric(Protocol):
    """`size` numbers that are sums over micro-batches and ranks."""

    size: int

    def part(self, result: MicroBatchResult) -> Tensor:
        """Return what a micro-batch adds, [size] or a scalar, without a wait for the device."""

    def written(self, sums: list[float]) -> dict[str, Any]:
        """Return what metrics.jsonl says of the whole step's sums."""


class AnswerFigures(Metric, Protocol):
    """Figures of answers that are compared; those of a validation are written too."""

    keys: tuple[str, ...]
    """The names under which `written` has them."""


@dataclass
class StepTotal:
    """A scalar of MicroBatchResult, summed over the step: its loss, or its objective."""

    name: str
    """The name of the field, also in metrics.jsonl."""
    is_written: bool = True
    size: int = 1

    def part(self, result: MicroBatchResult) -> Tensor:
        """Return the micro-batch's share."""
        return getattr(result, self.name)

    def written(self, sums: list[float]) -> dict[str, Any]:
        """Return the sum; null is a step that was skipped because it was not finite."""
        return {self.name: finite_or_none(sums[0])} if self.is_written else {}


class LossBySource:
    """The mean loss of each data source.

    Sums: Σ weight · loss of every source, then Σ weight of every source.
    """

    def __init__(self, names: Sequence[str]):
        self.names, self.size = names, 2 * len(names)

    def part(self, result: MicroBatchResult) -> Tensor:
        """Return [2 × sources] float32."""
        weights, sources = result.batch.weights, result.batch.sources
        assert sources is not None
        values = torch.stack([-(result.scores.log_probability * weights), weights])
        sums = values.new_zeros(2, len(self.names)).index_add_(1, sources, values)
        return sums.flatten()

    def written(self, sums: list[float]) -> dict[str, Any]:
        """Return `loss_by_source`: the mean loss of each source that has any weight."""
        losses, weights = sums[: len(self.names)], sums[len(self.names) :]
        means = {
            name: finite_or_none(loss / weight)
            for name, loss, weight in zip(self.names, losses, weights, strict=True)
            if weight
        }
        return {"loss_by_source": means}


class TeacherFigures:
    """The divergence of teacher and student, and the teacher's own loss on the same targets.

    Sums: Σ weight, Σ weight · divergence, Σ weight · the teacher's negative log-likelihood.
    """

    keys: tuple[str, ...] = ("kl", "teacher_loss")
    size = 3

    def part(self, result: MicroBatchResult) -> Tensor:
        """Return [3] float64."""
        scores, weights = result.scores, result.batch.weights.double()
        assert scores.divergence is not None
        assert scores.teacher_log_probability is not None
        values = torch.stack(
            [torch.ones_like(weights), scores.divergence, -scores.teacher_log_probability]
        )
        return (values * weights).sum(1)

    def written(self, sums: list[float]) -> dict[str, Any]:
        """Return both means."""
        weight, *totals = sums
        means = [total / weight for total in totals] if weight else []
        return {key: finite_or_none(mean) for key, mean in zip(self.keys, means, strict=False)}


class BitsPerByte:
    """The loss in bits for each byte of supervised text: comparable between tokenizers.

    Σ nats of the targets / (ln 2 · their bytes). Special tokens, which have no bytes, are left out
    of both, and weights do not count. Sums: nats, bytes.
    """

    size = 2

    def __init__(self, token_bytes: Tensor):
        """token_bytes: [vocabulary] on the device."""
        self.token_bytes = token_bytes

    def part(self, result: MicroBatchResult) -> Tensor:
        """Return [2] float64."""
        batch = result.batch
        sizes = self.token_bytes[batch.targets].double() * (batch.weights > 0)
        nats = -result.scores.log_probability.double()
        # a logit of -inf must not turn what is left out into NaN
        return torch.stack([nats.masked_fill(sizes == 0, 0).sum(), sizes.sum()])

    def written(self, sums: list[float]) -> dict[str, Any]:
        """Return `bits_per_byte`; null where it is not finite or no text is supervised."""
        nats, size = sums
        return {"bits_per_byte": finite_or_none(nats / (math.log(2) * size)) if size else None}


@dataclass
class AuxiliaryMean:
    """A named value of the blocks, as a mean over the step's micro-batches."""

    name: str
    size: int = 2

    def part(self, result: MicroBatchResult) -> Tensor:
        """Return [2]: the value, and 1 for the micro-batch that it is from."""
        value = result.auxiliary[self.name].double()
        return torch.stack([value, torch.ones_like(value)])

    def written(self, sums: list[float]) -> dict[str, Any]:
        """Return the mean under its name."""
        return {self.name: finite_or_none(sums[0] / sums[1])}


@dataclass
class AuxiliaryTotal:
    """A named loss of the blocks that is a sum over the step's tokens."""

    name: str
    size: int = 1

    def part(self, result: MicroBatchResult) -> Tensor:
        """Return the micro-batch's share."""
        return result.auxiliary[self.name]

    def written(self, sums: list[float]) -> dict[str, Any]:
        """Return the sum under its name."""
        return {self.name: finite_or_none(sums[0])}


class ExpertLoad:
    """The tokens at each expert of each block."""

    def __init__(self, blocks: int, experts: int):
        self.shape = (blocks, experts)
        self.size = blocks * experts
        self.steps = 0
        """Written by this process."""

    def part(self, result: MicroBatchResult) -> Tensor:
        """Return [blocks · experts]."""
        return result.auxiliary[LOAD].flatten()

    def written(self, sums: list[float]) -> dict[str, Any]:
        """Return the largest load over the even one, the entropy of the load as a share of the
        largest that there is, as a mean over the blocks, and the experts without a token.

        At steps 1 to 99, 100, 110, … 990, 1000, 1100 and so on also the load of every expert.
        """
        self.steps += 1
        counts = np.array(sums).reshape(self.shape)
        total = counts.sum(1, keepdims=True)
        if not total.all():
            return {}
        shares = counts / total
        logs = np.log(np.where(shares > 0, shares, 1))
        entropy = -(shares * logs).sum(1).mean() / np.log(max(2, self.shape[1]))
        digits = len(str(self.steps))
        has_all = self.steps % 10 ** max(0, digits - 2) == 0
        return {
            "expert_load_max": float(shares.max() * self.shape[1]),
            "expert_load_entropy": float(entropy),
            "experts_unused": int((counts == 0).sum()),
            **({"expert_load": in_quarters(shares * self.shape[1])} if has_all else {}),
        }


def in_quarters(loads: np.ndarray) -> list[str]:
    """Return a text for each block, a digit or letter for each expert: its load in quarters of the
    even one, 0 to 9, then a to z, which is 8.75 times the even one or more.

    loads: [blocks, experts], over the even one.
    """
    levels = np.minimum(np.rint(4 * loads), len(LEVELS) - 1).astype(int)
    return ["".join(LEVELS[level] for level in block) for block in levels.tolist()]


class Metrics:
    """Metrics side by side in one float64 tensor, so that one collective reduces them all."""

    def __init__(self, metrics: dict[str, Metric], device: torch.device):
        self.metrics, self.device = metrics, device
        ends = [*accumulate(metric.size for metric in metrics.values())]
        self.size = ends[-1]
        self._slices = {
            name: slice(end - metric.size, end)
            for (name, metric), end in zip(metrics.items(), ends, strict=True)
        }

    def zeros(self) -> Tensor:
        """Return [size] float64 zeros."""
        return torch.zeros(self.size, device=self.device, dtype=torch.float64)

    def add(self, sums: Tensor, result: MicroBatchResult) -> None:
        """Add a micro-batch's part of every metric to `sums`."""
        for name, metric in self.metrics.items():
            sums[self._slices[name]] += metric.part(result)

    def add_auxiliary(self, sums: Tensor, auxiliary: dict[str, Tensor]) -> None:
        """Add the auxiliary values of a stage's blocks, and their losses to the objective."""
        for name, value in auxiliary.items():
            sums[self._slices[name]] += value.flatten()
            if name.endswith("_loss"):
                sums[self._slices["objective"]] += value

    def position(self, name: str) -> int:
        """Return where in the sums the first number of a metric is."""
        return self._slices[name].start

    def of(self, name: str, sums: Tensor) -> Tensor:
        """Return a metric's part of the sums."""
        return sums[self._slices[name]]

    def written(self, sums: list[float]) -> dict[str, Any]:
        """Return all that metrics.jsonl says of a step's sums."""
        lines = (metric.written(sums[self._slices[name]]) for name, metric in self.metrics.items())
        return {key: value for line in lines for key, value in line.items()}


def step_metrics(
    source_names: Sequence[str],
    objective_differs: bool,
    auxiliary_names: Sequence[str],
    device: torch.device,
    balance: Balance | None = None,
    pairs: Metric | None = None,
    answers: Metric | None = None,
) -> Metrics:
    """Return the metrics of a training step.

    objective_differs: whether what is minimised is another figure than the loss. pairs: figures of
    preference pairs; answers: of the model's own answers.
    """
    objective = StepTotal("objective", is_written=objective_differs)
    auxiliary: dict[str, Metric] = {name: AuxiliaryMean(name) for name in auxiliary_names}
    if balance is not None:
        objective.is_written = objective_differs or bool(balance.loss_names)
        auxiliary |= {name: AuxiliaryTotal(name) for name in balance.loss_names}
        auxiliary[LOAD] = ExpertLoad(*balance.load.shape)
    registered = {name: build() for name, build in METRICS.items()}
    losses = loss_metrics(source_names, pairs)
    if answers is not None:
        losses["rollouts"] = answers
    metrics = {"objective": objective, **losses, **auxiliary, **registered}
    return Metrics(metrics, device)


def validation_metrics(
    source_names: Sequence[str], token_bytes: Tensor, pairs: Metric | None = None
) -> Metrics:
    """Return the metrics of a validation, whose weights are not divided.

    token_bytes: [vocabulary] on the device, the bytes of each token.
    """
    metrics = loss_metrics(source_names, pairs)
    metrics["bits_per_byte"] = BitsPerByte(token_bytes)
    return Metrics(metrics, token_bytes.device)


def loss_metrics(source_names: Sequence[str], pairs: Metric | None = None) -> dict[str, Metric]:
    """Return the loss, and that of each source where there are several; of pairs their figures."""
    metrics: dict[str, Metric] = {"loss": StepTotal("loss")}
    if pairs is not None:
        metrics["pairs"] = pairs
        if not isinstance(pairs, TeacherFigures):  # their loss is no sum over tokens
            return metrics
    if len(source_names) > 1:
        metrics["loss_by_source"] = LossBySource(source_names)
    return metrics
