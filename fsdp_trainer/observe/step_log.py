"""Figures of steps, kept on the device until a logging step reads all of them at once."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsdp_trainer.base import phases

JUDGED = 6
"""Numbers of a step in addition to its metrics: see `judged` of StepLog.add."""


@dataclass
class StepReport:
    """The metrics of one step on the host.

    The fields from `sums` on are filled when the step log reads the device.

    plan: the step's StepPlan. extra: further entries of the step's line, such as its validation
    loss. sums: the sums of the step's metrics. loss_score, grad_norm_score: robust standard
    deviations above the median of recent steps. worst_losses, worst_micro_batches: for each rank,
    its highest mean loss of a micro-batch (inf: not finite), and the index of that micro-batch.
    """

    plan: Any
    lr: float
    tokens: int
    supervised_tokens: int
    time: float
    extra: dict[str, Any] = field(default_factory=dict)
    sums: list[float] = field(default_factory=list)
    grad_norm: float = 0.0
    not_finite: bool = False
    spike: bool = False
    loss_score: float = 0.0
    grad_norm_score: float = 0.0
    worst_losses: list[float] = field(default_factory=list)
    worst_micro_batches: list[float] = field(default_factory=list)
    loss_scale: float = 1.0


class StepClock:
    """Wall-clock seconds of training steps, without the time of excluded blocks."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    @contextmanager
    def excluded(self) -> Iterator[Callable[[], float]]:
        """Exclude the block's time.

        Yields a function that returns the seconds since the block began.
        """
        began = time.perf_counter()
        try:
            yield lambda: time.perf_counter() - began
        finally:
            self._since += time.perf_counter() - began

    def restart(self) -> float:
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        return seconds


@dataclass(eq=False)
class StepLog:
    """The steps since the last read. Only `read` waits for the device.

    every: steps between two reads. metrics_size: number of sums of a step's metrics.
    """

    every: int
    metrics_size: int
    clock: StepClock

    def __post_init__(self) -> None:
        self.longest_interval = 0.0
        """The most seconds of training between two reads, not counting the first interval, which
        includes compilation."""
        self._reads = 0
        self._pending: list[tuple[StepReport, Tensor]] = []

    def add(self, report: StepReport, sums: Tensor, judged: Tensor, worst: Tensor) -> None:
        """Add a step.

        sums: float64 [metrics_size]. judged: float64 [6], the gradient norm, not finite (0 or 1),
        spike (0 or 1), the loss's and the norm's scores, and the loss scale. worst: [2, ranks],
        the worst losses of all ranks and their micro-batches.
        """
        self._pending.append((report, torch.cat([sums, judged, worst.flatten()])))

    def annotate(self, extra: dict[str, Any]) -> bool:
        """Add entries to the line of the last step. Returns False if it has been read already."""
        if not self._pending:
            return False
        self._pending[-1][0].extra.update(extra)
        return True

    def is_due(self, step: int) -> bool:
        return step % self.every == 0

    def read(self) -> tuple[list[StepReport], float]:
        """Return the reports of all steps since the last read, and the mean seconds per step."""
        if not self._pending:
            return [], 0.0
        phases.enter("read")
        values = torch.stack([numbers for _, numbers in self._pending]).cpu().tolist()
        reports = [report for report, _ in self._pending]
        for report, numbers in zip(reports, values, strict=True):
            self._fill(report, numbers)
        self._pending = []
        seconds = self.clock.restart()
        if self._reads:
            self.longest_interval = max(self.longest_interval, seconds)
        self._reads += 1
        return reports, seconds / len(reports)

    def _fill(self, report: StepReport, numbers: list[float]) -> None:
        report.sums, rest = numbers[: self.metrics_size], numbers[self.metrics_size :]
        judged, worst = rest[:JUDGED], rest[JUDGED:]
        report.grad_norm, not_finite, spike, report.loss_score, report.grad_norm_score = judged[:5]
        report.loss_scale = judged[5]
        report.not_finite, report.spike = bool(not_finite), bool(spike)
        ranks = len(worst) // 2
        report.worst_losses = worst[:ranks]
        report.worst_micro_batches = worst[ranks:]


def finite_or_none(value: float) -> float | None:
    """Return the value, or None for NaN and infinity, which JSON cannot represent."""
    return value if math.isfinite(value) else None
