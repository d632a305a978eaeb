"""Saving of checkpoints during training.

If a checkpoint fails, training continues until the next one. Only the last one must succeed: it is
tried again.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fsdp_trainer.base import phases
from fsdp_trainer.checkpoint.store import CheckpointStore
from fsdp_trainer.config.durations import parse_duration
from fsdp_trainer.errors import RunFailed
from fsdp_trainer.observe.observer import Observer
from fsdp_trainer.observe.step_log import StepClock

LONGEST_PAUSE = 30.0
"""Maximum number of seconds between two attempts to write the last checkpoint."""


def pauses(patience: float) -> list[float]:
    """Return the seconds to wait before each new attempt to write the last checkpoint.

    They are 1, 2, 4 and so on, at most LONGEST_PAUSE, with the sum `patience`. They do not depend
    on a clock, so all ranks make the same number of attempts, which are collective.
    """
    listed: list[float] = []
    while sum(listed) < patience:
        listed.append(min(2.0 ** len(listed), LONGEST_PAUSE, patience - sum(listed)))
    return listed


@dataclass
class CheckpointManager:
    """Saves checkpoints and records failures. Its methods are collective."""

    store: CheckpointStore
    observer: Observer
    clock: StepClock
    newest: int
    """Step of the newest checkpoint, committed or in progress; -1: there is none."""
    complete: bool
    """True if no work is pending after the step of the newest checkpoint."""
    _before: tuple[int, bool] = (-1, False)
    _tries_again: bool = False
    _failure: str = ""

    def save(
        self,
        step: int,
        tensors: dict[str, Tensor],
        state: dict[str, Any],
        started: float,
        next_due: int | None,
    ) -> int:
        """Commit a checkpoint of `step`; with checkpoint.mode=async, only begin it.

        started: time.perf_counter() at the beginning of the save. next_due: step of the next
        checkpoint, None: there is none. Returns -1, or the step after recording a failure.
        """
        try:
            with self.clock.excluded():
                self.store.save(step, tensors, state, started)
        except RunFailed as error:
            self._record_failure(step, error, next_due)
            return step
        self._before = self.newest, self.complete
        self.newest, self.complete = step, not state["pending"]
        return -1

    def has(self, step: int, complete: bool) -> bool:
        """Return True if there is a checkpoint of `step`; complete: one without pending work."""
        return self.newest == step and (self.complete or not complete)

    def settle(self, step: int, next_due: int | None, report_wait: bool = False) -> int:
        """Wait for a checkpoint in progress.

        Returns -1, or its step after recording a failure. report_wait: record and print that
        training had to wait.
        """
        try:
            with self.clock.excluded():
                waited = self.store.wait()
        except RunFailed as error:
            failed = self.newest
            self.newest, self.complete = self._before
            self._record_failure(failed, error, next_due)
            return failed
        if waited and report_wait:
            self.observer.event("checkpoint_waited", step=step, seconds=round(waited, 3))
            self.observer.say(
                f"checkpoint: training waited {waited:.1f} s for the one before; "
                "a larger checkpoint.every would not"
            )
        return -1

    def save_until_committed(
        self, step: int, complete: bool, save_and_settle: Callable[[], None]
    ) -> None:
        """Save the last checkpoint, with new attempts after failures.

        complete: no work is pending, so that a checkpoint of `step` with pending work is replaced.
        Tries again for checkpoint.patience; with checkpoint.make_room, deletes the oldest
        checkpoint first. Raises RunFailed if all attempts fail.
        """
        save_and_settle()
        for pause in pauses(parse_duration(self.store.cfg.patience)):
            if self.has(step, complete):
                return
            if not self._tries_again:
                self._tries_again = True
                self._explain_patience()
            phases.enter("staging")  # the watchdog measures each attempt separately
            time.sleep(pause)
            save_and_settle()
        if self.has(step, complete):
            return
        stands = "There is no checkpoint"
        if self.newest >= 0:
            stands = f"The newest checkpoint is that of step {self.newest:,}"
        raise RunFailed(
            f"the last checkpoint, of step {step:,}, could not be written, again and again. "
            f"{stands}\n{self._failure}"
        )

    def _explain_patience(self) -> None:
        """Delete the oldest checkpoint if that is allowed, else print how to make room."""
        patience = self.store.cfg.patience
        oldest = self.store.droppable()
        if oldest and self.store.cfg.make_room:
            self.store.drop(oldest)
            self.observer.event("made_room", path=str(oldest))
            self.observer.say(f"deleted {oldest} to make room (checkpoint.make_room=true)")
            return
        room = f"e.g.  rm -r {oldest}" if oldest else "there is no older checkpoint to delete"
        self.observer.say(f"the last checkpoint is tried again for {patience}. Make room: {room}")

    def _record_failure(self, step: int, error: RunFailed, next_due: int | None) -> None:
        self._failure = error.args[0]
        goes_on = ""
        if next_due is not None:
            goes_on = f"\n       Training continues; the next is written after step {next_due:,}"
        self.observer.event("checkpoint_failed", step=step, error=self._failure)
        if not self._tries_again:
            self.observer.say(f"no checkpoint of step {step:,}: {self._failure}{goes_on}")
