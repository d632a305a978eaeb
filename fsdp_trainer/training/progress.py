"""Where a run stands: what a checkpoint remembers besides tensors, and what a resume goes on from."""

import math
from dataclasses import dataclass, field
from typing import Any

from fsdp_trainer.training.batches import StepPlan


@dataclass
class Progress:
    """All there is to know about where a run stands: the data order is a function of `rows`, or with data.streaming of `streams`.

    best_loss: the lowest validation loss, after best_step; lower_loss: the last one that counted as lower for train.early_stop;
    stale: how many in a row have not, since. recent, spikes_in_a_row: the guard's window; left_out: [first, stop) of rows that rewinds jump over.
    segments: the mixtures that the rows came from, one after another, see Mixture.state; the last one as of this checkpoint.
    best_before: what was the best before that; cut_short: what a stop kept this step from, `validation` or `samples`; a resume begins with it.
    streams: a cursor of each stream, see data/stream.py, as of this checkpoint; empty where they begin.
    """

    step: int = 0
    rows: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    best_step: int | None = None
    best_loss: float | None = None
    best_before: tuple[int | None, float | None] = (None, None)
    lower_loss: float | None = None
    stale: int = 0
    recent: list[list[float]] = field(default_factory=lambda: [[], []])
    spikes_in_a_row: int = 0
    left_out: list[list[int]] = field(default_factory=list)
    segments: list[dict[str, Any]] = field(default_factory=list)
    rewinds: int = 0
    cut_short: str | None = None
    streams: list[list[int]] = field(default_factory=list)

    def advance(self, plan: StepPlan) -> None:
        """Count a finished step."""
        self.step, self.rows = plan.step, plan.stop
        self.tokens += plan.tokens
        self.supervised_tokens += plan.supervised

    def validated(self, loss: float, delta: float) -> None:
        """Take note of a validation loss, which must be lower by more than `delta` to count for train.early_stop. NaN never is."""
        self.stale += 1
        if not math.isfinite(loss):
            return
        if self.best_loss is None or loss < self.best_loss:
            self.best_before = self.best_step, self.best_loss
            self.best_step, self.best_loss = self.step, loss
        if self.lower_loss is None or loss < self.lower_loss - delta:
            self.lower_loss, self.stale = loss, 0

    def forget_best(self) -> None:
        """There is no checkpoint of the best step: what was the best before it is it again."""
        self.best_step, self.best_loss = self.best_before

    def forget_validation(self) -> None:
        """What another data set gave, or what belongs to a checkpoint that is not there, is no measure."""
        self.best_step = self.best_loss = self.lower_loss = self.cut_short = None
        self.stale = 0
