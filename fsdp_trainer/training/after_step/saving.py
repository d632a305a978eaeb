"""Saving of checkpoints during training.

If a checkpoint fails, training continues until the next one. Only the last one must succeed: it is
tried again.
"""

import time
from dataclasses import dataclass

from fsdp_trainer.base import phases
from fsdp_trainer.checkpoint.store import CheckpointStore
from fsdp_trainer.config.durations import parse_duration
from fsdp_trainer.errors import RunFailed
from fsdp_trainer.observe.observer import Observer
from fsdp_trainer.observe.step_log import StepClock
from fsdp_trainer.training.after_step.timetable import Timetable
from fsdp_trainer.training.after_step.train_state import TrainState
from fsdp_trainer.training.corruption import Corruption
from fsdp_trainer.training.groups import ReplicaGroups
from fsdp_trainer.training.progress import Progress
from fsdp_trainer.training.stopping.stop import StopSignals

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
class CopyCheck:
    """Compares the ranks' copies of the same weights and optimizer state. See AfterStep."""

    corruption: Corruption
    state: TrainState
    timetable: Timetable

    def due(self, progress: Progress) -> bool:
        """Return True at steps that train.check_every selects; a checkpoint checks by itself."""
        is_due = self.corruption.is_due(progress.step)
        return is_due and not self.timetable.checkpoint_due(progress)

    def run(self, progress: Progress) -> None:
        """Raise RunFailed if copies of the same values no longer have equal bits on all ranks."""
        phases.enter("check")
        self.corruption.check_copies(progress.step, self.state.tensors())


@dataclass
class CheckpointManager:
    """Saves checkpoints and records failures. Its methods are collective. See AfterStep."""

    store: CheckpointStore
    state: TrainState
    copies: CopyCheck
    observer: Observer
    clock: StepClock
    timetable: Timetable
    signals: StopSignals
    newest: int
    """Step of the newest checkpoint, committed or in progress; -1: there is none."""
    complete: bool
    """True if no work is pending after the step of the newest checkpoint."""
    groups: ReplicaGroups
    """Those that share the run: only the one that leads saves."""
    _before: tuple[int, bool] = (-1, False)
    _tries_again: bool = False
    _failure: str = ""

    def due(self, progress: Progress) -> bool:
        return self.timetable.checkpoint_due(progress)

    def run(self, progress: Progress) -> None:
        """Commit a checkpoint of this step, unless there is one.

        With checkpoint.mode=async, only begin it. A failure is recorded, and training continues.
        """
        if not self.groups.leads or self.has(progress.step, complete=not progress.pending):
            return
        if self.copies.corruption.every:
            with self.clock.excluded():
                self.copies.run(progress)
        phases.enter("staging")
        started = time.perf_counter()
        self.settle(progress, report_wait=True)  # first: a failure may change the best step
        if components := self.state.data.read_by_component(progress):
            self.observer.event("data", step=progress.step, sources=components)
        state, tensors = self.state.record(progress), self.state.tensors()
        try:
            with self.clock.excluded():
                self.store.save(progress.step, tensors, state, started, self.state.linked)
        except RunFailed as error:
            self._record_failure(progress.step, error, progress)
            return
        self._before = self.newest, self.complete
        self.newest, self.complete = progress.step, not state["pending"]

    def has(self, step: int, complete: bool) -> bool:
        """Return True if there is a checkpoint of `step`; complete: one without pending work."""
        return self.newest == step and (self.complete or not complete)

    def go_back_to(self, progress: Progress) -> None:
        self.newest, self.complete = progress.step, not progress.pending

    def settle(self, progress: Progress, report_wait: bool = False) -> None:
        """Wait for the checkpoint in progress, if there is one, and record its failure.

        report_wait: record and print that training had to wait.
        """
        try:
            with self.clock.excluded():
                waited = self.store.wait()
        except RunFailed as error:
            failed = self.newest
            self.newest, self.complete = self._before
            self._record_failure(failed, error, progress)
            return
        if waited and report_wait:
            self.observer.event("checkpoint_waited", step=progress.step, seconds=round(waited, 3))
            self.observer.say(
                f"checkpoint: training waited {waited:.1f} s for the one before; "
                "a larger checkpoint.every would not"
            )

    def save_final(self, progress: Progress) -> None:
        """Save the last checkpoint, with new attempts after failures.

        A checkpoint of this step with pending work is replaced if none is pending now. Tries again
        for checkpoint.patience; with checkpoint.make_room, deletes the oldest checkpoint first.
        Raises RunFailed if all attempts fail.
        """
        if not self.groups.leads:
            self.signals.leaving = True
            return
        complete = not progress.pending
        phases.enter("staging")  # allows as much time as a save
        self._save_and_settle(progress)
        for pause in pauses(parse_duration(self.store.cfg.patience)):
            if self.has(progress.step, complete):
                break
            if not self._tries_again:
                self._tries_again = True
                self._explain_patience()
            phases.enter("staging")  # the watchdog measures each attempt separately
            time.sleep(pause)
            self._save_and_settle(progress)
        if not self.has(progress.step, complete):
            stands = "There is no checkpoint"
            if self.newest >= 0:
                stands = f"The newest checkpoint is that of step {self.newest:,}"
            raise RunFailed(
                f"the last checkpoint, of step {progress.step:,}, could not be written, again and "
                f"again. {stands}\n{self._failure}"
            )
        self.signals.leaving = True

    def _save_and_settle(self, progress: Progress) -> None:
        self.run(progress)
        self.settle(progress)

    def _explain_patience(self) -> None:
        patience = self.store.cfg.patience
        oldest = self.store.droppable()
        if oldest and self.store.cfg.make_room:
            self.store.drop(oldest)
            self.observer.event("made_room", path=str(oldest))
            self.observer.say(f"deleted {oldest} to make room (checkpoint.make_room=true)")
            return
        room = f"e.g.  rm -r {oldest}" if oldest else "there is no older checkpoint to delete"
        self.observer.say(f"the last checkpoint is tried again for {patience}. Make room: {room}")

    def _record_failure(self, failed: int, error: RunFailed, progress: Progress) -> None:
        self._failure = error.args[0]
        goes_on = ""
        following = self.timetable.next_checkpoint(progress)
        if following is not None and not self.signals.agreement.reason:
            goes_on = f"\n       Training continues; the next is written after step {following:,}"
        self.observer.event("checkpoint_failed", step=failed, error=self._failure)
        if not self._tries_again:
            self.observer.say(f"no checkpoint of step {failed:,}: {self._failure}{goes_on}")
        progress.checkpoint_failed(failed)
