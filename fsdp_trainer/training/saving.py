"""Checkpoints of a run that trains: one that fails costs itself alone and is tried again. Only the last one must succeed."""

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fsdp_trainer.checkpoint.store import CheckpointStore
from fsdp_trainer.errors import RunFailed
from fsdp_trainer.observe.observer import Observer
from fsdp_trainer.training.progress import Progress

PAUSES = (1.0, 2.0, 4.0)  # seconds before the last checkpoint is tried again


class Saves:
    """What was saved, and what could not be. Its methods are collective."""

    def __init__(self, store: CheckpointStore, observer: Observer):
        self.store, self.observer = store, observer
        self.newest = -1
        """Step of the newest checkpoint, committed or on its way; -1: there is none."""
        self._before = -1
        self._failure = ""

    def save(
        self,
        progress: Progress,
        tensors: dict[str, Tensor],
        state: Callable[[], dict[str, Any]],
        next_due: int | None,
    ) -> None:
        """Commit a checkpoint of this step, or with checkpoint.mode=async set out to. A failure is told, and when the `next_due` one is.

        state: asked when the one before is settled, which may change what was the best.
        """
        started = time.perf_counter()
        try:
            with self.observer.apart("checkpoint"):
                if waited := self.settle(progress, next_due):
                    self.observer.event(
                        "checkpoint_waited", step=progress.step, seconds=round(waited, 3)
                    )
                    self.observer.console.say(
                        f"checkpoint: training waited {waited:.1f} s for the one before; a larger checkpoint.every would not"
                    )
                self.store.save(progress.step, tensors, state(), started)
        except RunFailed as error:
            self._tell(progress, progress.step, error, next_due)
        else:
            self._before, self.newest = self.newest, progress.step

    def settle(self, progress: Progress, next_due: int | None) -> float:
        """The checkpoint on its way is committed, or has failed and is told of. Returns how many seconds that took."""
        try:
            return self.store.wait()
        except RunFailed as error:
            failed, self.newest = self.newest, self._before
            self._tell(progress, failed, error, next_due)
            return 0.0

    def insist(self, progress: Progress, save: Callable[[], None]) -> None:
        """`save` the last checkpoint, whatever it takes. Raises RunFailed when it fails again and again."""
        for pause in (*PAUSES, None):
            save()
            self.settle(progress, None)
            if self.newest == progress.step:
                return
            if pause is not None:
                time.sleep(pause)
        kept = (
            f"The newest checkpoint is that of step {self.newest:,}"
            if self.newest >= 0
            else "There is no checkpoint"
        )
        raise RunFailed(
            f"the last checkpoint, of step {progress.step:,}, could not be written, again and again. {kept}\n{self._failure}"
        )

    def _tell(self, progress: Progress, step: int, error: RunFailed, next_due: int | None) -> None:
        self._failure = error.args[0]
        if progress.best_step == step:
            progress.forget_best()
        goes_on = (
            ""
            if next_due is None
            else f"\n       Training goes on; the next is written after step {next_due:,}"
        )
        self.observer.event("checkpoint_failed", step=step, error=self._failure)
        self.observer.console.say(f"no checkpoint of step {step:,}: {self._failure}{goes_on}")
