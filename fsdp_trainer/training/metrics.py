"""Metrics of a step: summed on the device over micro-batches and ranks, then written by name.

A new metric needs a class and a line in `step_metrics`; a user's metric is registered instead
(extensions.py).
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
from fsdp_trainer.models.mtp import LOGPROBS
from fsdp_trainer.observe.metric_groups import OWN_METRICS
from fsdp_trainer.observe.observer import Observer
from fsdp_trainer.observe.step_log import StepReport, finite_or_none

LEVELS = string.digits + string.ascii_lowercase


@dataclass(frozen=True)
class MicroBatchResult:
    """The result of the forward of one micro-batch.

    loss: its part of the reported loss, a scalar: Σ weight · negative log-likelihood, divided by
    the step's Σ weight (in validation: not divided).
    objective: the value of the objective, a scalar; in validation it is the loss.
    auxiliary: named values from the blocks, such as a load-balancing loss.
    """

    batch: MicroBatch
    scores: Scores
    loss: Tensor
    objective: Tensor
    auxiliary: dict[str, Tensor] = field(default_factory=dict)


class Metric(Protocol):
    """A metric computed from `size` sums over micro-batches and ranks."""

    size: int

    def part(self, result: MicroBatchResult) -> Tensor:
        """Return a micro-batch's addend, [size] or a scalar, without waiting for the device."""

    def written(self, sums: list[float]) -> dict[str, Any]:
        """Return the entries for metrics.jsonl, computed from the step's sums."""


class MethodMetric(Metric, Protocol):
    """A training method's own metrics, of compared answers or of a teacher.

    They are also written for a validation.
    """

    keys: tuple[str, ...]
    """The names of the entries that `written` returns."""
    of_tokens: bool
    """False if the method's loss is one of whole answers, and not a sum over tokens."""


class MetricWatch(Protocol):
    """Reviews the metrics of a training method, and warns of what its loss does not show."""

    def review(
        self, reports: Sequence[StepReport], lines: Sequence[dict[str, Any]], observer: Observer
    ) -> None:
        """Add steps, and warn if needed. lines: the entries for metrics.jsonl of each report."""


@dataclass
class StepTotal:
    """A scalar of MicroBatchResult, summed over the step: the loss or the objective."""

    name: str
    """The name of the field in MicroBatchResult and in metrics.jsonl."""
    is_written: bool = True
    size: int = 1

    def part(self, result: MicroBatchResult) -> Tensor:
        return getattr(result, self.name)

    def written(self, sums: list[float]) -> dict[str, Any]:
        """Return the sum; None (null) if it is not finite, in which case the step was skipped."""
        return {self.name: finite_or_none(sums[0])} if self.is_written else {}


class MtpLoss:
    """The loss of the MTP head, before its weight: it is part of the objective.

    Sums: Σ weight · loss of its predictions, Σ weight of the model's own.
    """

    size = 2

    def part(self, result: MicroBatchResult) -> Tensor:
        """Return [2] float32."""
        weights = result.batch.weights
        return torch.stack([-(result.auxiliary[LOGPROBS] * weights).sum(), weights.sum()])

    def written(self, sums: list[float]) -> dict[str, Any]:
        loss, weight = sums
        return {"mtp_loss": finite_or_none(loss / weight) if weight else None}


class LossBySource:
    """The mean loss of each data source.

    Sums: Σ weight · loss of each source, then Σ weight of each source.
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
        losses, weights = sums[: len(self.names)], sums[len(self.names) :]
        means = {
            name: finite_or_none(loss / weight)
            for name, loss, weight in zip(self.names, losses, weights, strict=True)
            if weight
        }
        return {"loss_by_source": means}


class BitsPerByte:
    """The loss in bits per byte of supervised text, comparable between tokenizers.

    Σ nats of the targets / (ln 2 · Σ bytes of the targets). Special tokens, which have no bytes,
    are left out of both sums; targets are not weighted. Sums: nats, bytes.
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
        # a token that is left out may have infinite nats: inf · 0 would be NaN
        return torch.stack([nats.masked_fill(sizes == 0, 0).sum(), sizes.sum()])

    def written(self, sums: list[float]) -> dict[str, Any]:
        nats, size = sums
        return {"bits_per_byte": finite_or_none(nats / (math.log(2) * size)) if size else None}


@dataclass
class AuxiliaryMean:
    """A named value from the blocks, averaged over the step's micro-batches."""

    name: str
    size: int = 2

    def part(self, result: MicroBatchResult) -> Tensor:
        """Return [2]: the value, and 1 to count the micro-batch."""
        value = result.auxiliary[self.name].double()
        return torch.stack([value, torch.ones_like(value)])

    def written(self, sums: list[float]) -> dict[str, Any]:
        return {self.name: finite_or_none(sums[0] / sums[1])}


@dataclass
class AuxiliaryTotal:
    """A named loss from the blocks, summed over the step's tokens."""

    name: str
    size: int = 1

    def part(self, result: MicroBatchResult) -> Tensor:
        return result.auxiliary[self.name]

    def written(self, sums: list[float]) -> dict[str, Any]:
        return {self.name: finite_or_none(sums[0])}


class ExpertLoad:
    """The number of tokens routed to each expert of each block."""

    def __init__(self, blocks: int, experts: int):
        self.shape = (blocks, experts)
        self.size = blocks * experts
        self.steps = 0
        """Number of steps that this process has written."""

    def part(self, result: MicroBatchResult) -> Tensor:
        """Return [blocks · experts]."""
        return result.auxiliary[LOAD].flatten()

    def written(self, sums: list[float]) -> dict[str, Any]:
        """Return metrics of the load.

        They are the largest load relative to an even load, the entropy of the load relative to the
        largest possible one, averaged over blocks, and the number of experts without a token.
        At steps 1 to 99, 100, 110, … 990, 1000, 1100 and so on, add the load of every expert.
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
    """Encode the load of each expert as one character in a text per block.

    The character counts quarters of an even load: 0 to 9, then a to z, where z means 8.75 times an
    even load or more. loads: [blocks, experts], relative to an even load.
    """
    levels = np.minimum(np.rint(4 * loads), len(LEVELS) - 1).astype(int)
    return ["".join(LEVELS[level] for level in block) for block in levels.tolist()]


class Metrics:
    """Metrics concatenated in one float64 tensor, so that one collective reduces them all."""

    def __init__(
        self,
        metrics: dict[str, Metric],
        device: torch.device,
        of_method: MethodMetric | None = None,
        of_user: Sequence[str] = (),
    ):
        """of_method: the training method's own one among `metrics`. of_user: names of the user's
        own ones."""
        self.metrics, self.device, self.of_method = metrics, device, of_method
        self.of_user = of_user
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
        for name, metric in self.metrics.items():
            sums[self._slices[name]] += metric.part(result)

    def add_auxiliary(self, sums: Tensor, auxiliary: dict[str, Tensor]) -> None:
        """Add the auxiliary values of a stage's blocks; their losses also count as objective."""
        for name, value in auxiliary.items():
            sums[self._slices[name]] += value.flatten()
            if name.endswith("_loss"):
                sums[self._slices["objective"]] += value

    def position(self, name: str) -> int:
        """Return the index in the sums of a metric's first number."""
        return self._slices[name].start

    def of(self, name: str, sums: Tensor) -> Tensor:
        return sums[self._slices[name]]

    def written(self, sums: list[float]) -> dict[str, Any]:
        """Return all metrics' entries for metrics.jsonl, computed from a step's sums.

        OWN_METRICS names those of the user's own metrics.
        """
        entries: dict[str, Any] = {}
        own: list[str] = []
        for name, metric in self.metrics.items():
            written = metric.written(sums[self._slices[name]])
            entries |= written
            own += written if name in self.of_user else ()
        return entries | {OWN_METRICS: own} if own else entries


def step_metrics(
    source_names: Sequence[str],
    objective_differs: bool,
    auxiliary_names: Sequence[str],
    device: torch.device,
    balance: Balance | None = None,
    of_method: MethodMetric | None = None,
    has_mtp: bool = False,
) -> Metrics:
    """Return the metrics of a training step.

    objective_differs: whether the objective is another number than the reported loss. of_method:
    the training method's own metrics. has_mtp: whether an MTP head is trained.
    """
    objective = StepTotal("objective", is_written=objective_differs)
    auxiliary: dict[str, Metric] = {name: AuxiliaryMean(name) for name in auxiliary_names}
    if balance is not None:
        objective.is_written = objective_differs or bool(balance.loss_names)
        auxiliary |= {name: AuxiliaryTotal(name) for name in balance.loss_names}
        auxiliary[LOAD] = ExpertLoad(*balance.load.shape)
    if has_mtp:
        auxiliary[LOGPROBS] = MtpLoss()
    registered = {name: build() for name, build in METRICS.items()}
    losses = loss_metrics(source_names, of_method)
    metrics = {"objective": objective, **losses, **auxiliary, **registered}
    return Metrics(metrics, device, of_method, [*registered])


def validation_metrics(
    source_names: Sequence[str], token_bytes: Tensor, of_method: MethodMetric | None = None
) -> Metrics:
    """Return the metrics of a validation, in which losses are not divided by Σ weight.

    token_bytes: [vocabulary] on the device, the number of bytes of each token.
    """
    metrics = loss_metrics(source_names, of_method)
    metrics["bits_per_byte"] = BitsPerByte(token_bytes)
    return Metrics(metrics, token_bytes.device, of_method)


def loss_metrics(source_names: Sequence[str], of_method: MethodMetric | None) -> dict[str, Metric]:
    metrics: dict[str, Metric] = {"loss": StepTotal("loss")}
    if of_method is not None:
        metrics["method"] = of_method
    if len(source_names) > 1 and (of_method is None or of_method.of_tokens):
        metrics["loss_by_source"] = LossBySource(source_names)
    return metrics
