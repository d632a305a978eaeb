"""The progress of a run: what a checkpoint holds besides tensors."""

import math
from dataclasses import dataclass, field, fields
from typing import Any

from fsdp_trainer.training.batches import StepPlan

OLD_NAMES = {"skipped_row_ranges": "left_out"}
"""Fields by the names that earlier versions stored them under."""
OLD_PENDING: dict[str | None, list[str]] = {
    None: [],
    "validation": ["validate", "sample"],
    "samples": ["sample"],
}
"""Pending work by what earlier versions stored as `cut_short`."""


@dataclass
class Progress:
    """The point that a run has reached.

    The order of the data is a function of `rows`, or when streaming of `streams`.

    step, rows, tokens, supervised_tokens: done so far.
    pending: work due after this step that a stop interrupted: `validate`, `sample`,
    `evaluate`.
    first_validation, last_validation: losses before the first step, and the last one; None: there
    was none, or it was not finite.
    best_loss: the lowest validation loss, after best_step; best_before: the same before that one.
    lower_loss: the last validation loss that counted as lower for train.early_stop; stale: how many
    validations have not been lower since.
    recent, spikes_in_a_row: the guard's window.
    skipped_row_ranges: [first, stop) of rows that rewinds jump over.
    segments: the mixtures that rows came from, one after another, see Mixture.state.
    rollouts: answers that steps to come are to learn from, one text a step, see answers.py.
    streams: a cursor of each stream, see data/stream.py; empty where they begin.
    """

    step: int = 0
    rows: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    first_validation: float | None = None
    last_validation: float | None = None
    best_step: int | None = None
    best_loss: float | None = None
    best_before: tuple[int | None, float | None] = (None, None)
    lower_loss: float | None = None
    stale: int = 0
    recent: list[list[float]] = field(default_factory=lambda: [[], []])
    spikes_in_a_row: int = 0
    skipped_row_ranges: list[list[int]] = field(default_factory=list)
    segments: list[dict[str, Any]] = field(default_factory=list)
    rewinds: int = 0
    pending: list[str] = field(default_factory=list)
    streams: list[list[int]] = field(default_factory=list)
    rollouts: list[str] = field(default_factory=list)

    @classmethod
    def from_stored(cls, stored: dict[str, Any]) -> "Progress":
        """Return what a checkpoint's trainer.json holds, also that of an earlier version."""
        stored = {"pending": OLD_PENDING[stored.get("cut_short")], **stored}
        stored |= {name: stored[old] for name, old in OLD_NAMES.items() if old in stored}
        return cls(**{f.name: stored[f.name] for f in fields(cls) if f.name in stored})

    @classmethod
    def for_data(cls, stored: dict[str, Any], data: str, validation: str | None) -> "Progress":
        """Return the same, without what belongs to other data than that of these fingerprints."""
        progress = cls.from_stored(stored)
        if stored["data"] != data:
            progress.streams = []
            progress.rollouts = []
        if stored.get("validation") != validation:
            progress.forget_validation()
        return progress

    def advance(self, plan: StepPlan) -> None:
        """Count a finished step."""
        self.step, self.rows = plan.step, plan.stop
        self.tokens += plan.tokens
        self.supervised_tokens += plan.supervised

    def validated(self, loss: float, delta: float) -> None:
        """Take note of a validation loss.

        It counts for train.early_stop if lower by more than `delta`; NaN is never lower. The one
        before the first step is only compared with: it has no checkpoint.
        """
        finite = loss if math.isfinite(loss) else None
        if self.step == 0:
            self.first_validation = finite
            return
        self.last_validation = finite
        self.stale += 1
        if not math.isfinite(loss):
            return
        if self.best_loss is None or loss < self.best_loss:
            self.best_before = self.best_step, self.best_loss
            self.best_step, self.best_loss = self.step, loss
        if self.lower_loss is None or loss < self.lower_loss - delta:
            self.lower_loss, self.stale = loss, 0

    def checkpoint_failed(self, step: int) -> None:
        """Go back to the best step before, if the checkpoint of the best one could not be
        written. step: -1: none failed."""
        if self.best_step == step:
            self.best_step, self.best_loss = self.best_before

    def forget_missing_best(self, steps: list[int]) -> None:
        """Forget the best step unless it has a checkpoint. steps: those that have one."""
        if self.best_step not in steps:
            self.best_step = self.best_loss = None

    def forget_validation(self) -> None:
        """Drop what another validation set gave, or what belongs to a checkpoint of another run."""
        self.best_step = self.best_loss = self.lower_loss = None
        self.first_validation = self.last_validation = None
        self.stale, self.pending = 0, []
