"""Checkpoints of a run that trains: one that fails costs only itself and is tried again.

Only the last one must succeed.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fsdp_trainer import phases
from fsdp_trainer.checkpoint.store import CheckpointStore
from fsdp_trainer.config.units import parse_duration
from fsdp_trainer.errors import RunFailed
from fsdp_trainer.observe.observer import Observer
from fsdp_trainer.observe.step_log import StepClock

LONGEST_PAUSE = 30.0
"""Seconds between two attempts to write the last checkpoint, at most."""


def pauses(patience: float) -> list[float]:
    """Return the seconds before each attempt to write the last checkpoint again.

    1, 2, 4 and so on, `patience` in all: the same on every rank, whose attempts are collective.
    """
    listed: list[float] = []
    while sum(listed) < patience:
        listed.append(min(2.0 ** len(listed), LONGEST_PAUSE, patience - sum(listed)))
    return listed


@dataclass
class CheckpointManager:
    """Saves, and tells of what could not be saved. Its methods are collective."""

    store: CheckpointStore
    observer: Observer
    clock: StepClock
    newest: int
    """Step of the newest checkpoint, committed or on its way; -1: there is none."""
    complete: bool
    """True if that one has nothing pending."""
    _before: int = -1
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
        """Commit a checkpoint of `step`; with checkpoint.mode=async begin to.

        started: time.perf_counter() when it was decided on; next_due: the step of the next one.
        Returns the step if it failed, which is recorded, else -1.
        """
        try:
            with self.clock.excluded():
                self.store.save(step, tensors, state, started)
        except RunFailed as error:
            self._record_failure(step, error, next_due)
            return step
        self._before, self.newest, self.complete = self.newest, step, not state["pending"]
        return -1

    def has(self, step: int, complete: bool) -> bool:
        """Return whether there is a checkpoint of `step`; complete: one that has nothing
        pending."""
        return self.newest == step and (self.complete or not complete)

    def settle(self, step: int, next_due: int | None, report_wait: bool = False) -> int:
        """Wait until no checkpoint is on its way.

        Returns its step if it failed, which is recorded, else -1.

        report_wait: tell that training had to wait for it.
        """
        try:
            with self.clock.excluded():
                waited = self.store.wait()
        except RunFailed as error:
            failed, self.newest = self.newest, self._before
            self._record_failure(failed, error, next_due)
            return failed
        if waited and report_wait:
            self.observer.event("checkpoint_waited", step=step, seconds=round(waited, 3))
            self.observer.say(
                f"checkpoint: training waited {waited:.1f} s for the one before; "
                "a larger checkpoint.every would not"
            )
        return -1

    def save_until_committed(self, step: int, save_and_settle: Callable[[], None]) -> None:
        """Save the last checkpoint, also after failures.

        Tries again for as long as checkpoint.patience says, and with checkpoint.make_room deletes
        the oldest one first. Raises RunFailed when it fails again and again.
        """
        save_and_settle()
        for pause in pauses(parse_duration(self.store.cfg.patience)):
            if self.newest == step:
                return
            if not self._tries_again:
                self._tries_again = True
                self._explain_patience()
            phases.enter("staging")  # the watchdog counts each attempt by itself
            time.sleep(pause)
            save_and_settle()
        if self.newest == step:
            return
        stands = "There is no checkpoint"
        if self.newest >= 0:
            stands = f"The newest checkpoint is that of step {self.newest:,}"
        raise RunFailed(
            f"the last checkpoint, of step {step:,}, could not be written, again and again. "
            f"{stands}\n{self._failure}"
        )

    def _explain_patience(self) -> None:
        """Make room where the configuration allows it, and show what the run waits for."""
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
            goes_on = f"\n       Training goes on; the next is written after step {next_due:,}"
        self.observer.event("checkpoint_failed", step=step, error=self._failure)
        if not self._tries_again:
            self.observer.say(f"no checkpoint of step {step:,}: {self._failure}{goes_on}")
