"""The progress of a run: the part of a checkpoint that is not tensors."""

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.training.batches import StepPlan

VALIDATE, SAMPLE, EVALUATE = "validate", "sample", "evaluate"
"""Names of work in Progress.pending. They are part of the file format: checkpoints store them."""
AMENDS_LINE = {VALIDATE, EVALUATE}
"""The work that adds entries to the metrics line of its step."""
OLD_NAMES = {"skipped_row_ranges": "left_out"}
"""Names of fields in checkpoints of earlier versions."""
OLD_PENDING: dict[str | None, list[str]] = {
    None: [],
    "validation": [VALIDATE, SAMPLE],
    "samples": [SAMPLE],
}
"""Pending work, by the value of `cut_short` in checkpoints of earlier versions."""


@dataclass
class Progress:
    """The point that a run has reached.

    The order of the data is a function of `rows`, or when streaming of `streams`.

    step, rows, tokens, supervised_tokens: numbers trained on so far.
    first_step: the step after which the run begins; not 0 if it continues another tool's.
    warmup_steps: number of steps of the warm-up, settled by the first step, so that a resume with
    more steps keeps the rates of the steps before; None: not settled yet.
    pending: work that is due after this step and not done yet, by name: VALIDATE, SAMPLE, EVALUATE.
    A checkpoint has the work that a stop interrupted.
    first_validation, last_validation: loss of the validation before the first step, and of the last
    one; None: there was none, or it was not finite.
    best_loss: the lowest validation loss, reached after best_step; best_before: step and loss of
    the best one before it.
    lower_loss: the last validation loss that counted as lower for train.early_stop; stale: number
    of validations since then.
    recent, spikes_in_a_row, skipped: state of the guard, see Guard.state.
    skipped_row_ranges: ranges [first, stop) of rows that rewinds skip.
    segments: the mixtures that rows came from, in order, see Mixture.state.
    rewinds: number of rewinds so far. taken_back: number of steps that they took back.
    rollouts: answers already made for future steps, one text per step, see answers.py.
    streams: cursor of each stream, see row_stream.py; empty: all are at their beginning.
    """

    step: int = 0
    first_step: int = 0
    warmup_steps: int | None = None
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
    skipped: int = 0
    skipped_row_ranges: list[list[int]] = field(default_factory=list)
    segments: list[Json] = field(default_factory=list)
    rewinds: int = 0
    taken_back: int = 0
    pending: list[str] = field(default_factory=list)
    streams: list[list[int]] = field(default_factory=list)
    rollouts: list[str] = field(default_factory=list)

    @classmethod
    def from_stored(cls, stored: Json) -> "Progress":
        """Return the progress in a checkpoint's trainer.json, also of an earlier version.

        Raises UserError for a field of another form.
        """
        cut_short = stored.get("cut_short")
        if cut_short not in [*OLD_PENDING]:  # compared, as it may not be hashable
            raise _damaged({"cut_short": cut_short})
        stored = {"pending": OLD_PENDING[cut_short], **stored}
        stored |= {name: stored[old] for name, old in OLD_NAMES.items() if old in stored}
        own = {f.name: stored[f.name] for f in fields(cls) if f.name in stored}
        empty = asdict(cls())
        odd = {name: value for name, value in own.items() if not _is_like(empty[name], value)}
        if odd:
            raise _damaged(odd)
        return cls(**own)

    @classmethod
    def for_data(cls, stored: Json, data: str, validation: str | None) -> "Progress":
        """Return the stored progress, without the parts that belong to other data.

        data, validation: fingerprints of the current data and validation set.
        """
        progress = cls.from_stored(stored)
        if stored.get("data") != data:
            progress.streams = []
            progress.rollouts = []
        if stored.get("validation") != validation:
            progress.forget_validation()
        return progress

    def take_over(self, other: "Progress") -> None:
        for f in fields(self):
            setattr(self, f.name, getattr(other, f.name))

    @property
    def at_start(self) -> bool:
        return self.step == self.first_step

    @property
    def steps_done(self) -> int:
        """Number of steps done, those included that a rewind took back. It never falls."""
        return self.step + self.taken_back

    def settle_warm_up(self, steps: int | None) -> None:
        """Set the number of warm-up steps; None: the first step that is trained will."""
        self.warmup_steps = steps

    def advance(self, plan: StepPlan) -> None:
        self.step, self.rows = plan.step, plan.stop
        self.tokens += plan.tokens
        self.supervised_tokens += plan.supervised

    def validated(self, loss: float, delta: float) -> None:
        """Record a validation loss.

        It counts as lower for train.early_stop if it is lower by more than `delta`; NaN never is.
        The validation before the first step is only kept for comparison: it has no checkpoint.
        """
        finite = loss if math.isfinite(loss) else None
        if self.at_start:
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
        """Restore the previous best step if the checkpoint of the best one could not be written.

        step: step of the checkpoint that failed; -1: none.
        """
        if self.best_step == step:
            self.best_step, self.best_loss = self.best_before

    def forget_missing_best(self, steps: list[int]) -> None:
        """Forget the best step unless it has a checkpoint. steps: steps of all checkpoints."""
        if self.best_step not in steps:
            self.best_step = self.best_loss = None

    def forget_validation(self) -> None:
        """Drop validation results and pending work: they are from another validation set or run."""
        self.best_step = self.best_loss = self.lower_loss = None
        self.first_validation = self.last_validation = None
        self.stale, self.pending = 0, []


def _damaged(odd: Json) -> UserError:
    reason = "is not what a run writes there"
    problems = [Problem(f"{k} in trainer.json", f"{v!s:.80} {reason}") for k, v in odd.items()]
    return UserError("the checkpoint is damaged", problems)


def _is_like(empty: Any, value: Any) -> bool:
    """Return True if a value from JSON has the form of a field that is `empty` at the start."""
    if isinstance(empty, int):
        return type(value) is int and value >= 0
    if empty is None:
        return value is None or type(value) in (int, float)
    return isinstance(value, list | tuple) and (isinstance(empty, list) or len(value) == len(empty))
