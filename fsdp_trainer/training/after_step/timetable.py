"""Work after a step: what a thing must have to be in the trainer's lists, and when it is due.

The trainer runs the step. All other work (validation, logging, checkpoints …) is an object in one
of its two lists: see StoppableWork and AfterStep.
"""

from dataclasses import dataclass
from typing import Protocol

from fsdp_trainer.config.schema import Checkpoint
from fsdp_trainer.optim.schedules import steps_between
from fsdp_trainer.training.data_source import DataSource
from fsdp_trainer.training.progress import Progress


class AfterStep(Protocol):
    """Work that the trainer does after each step at which it is due."""

    def due(self, progress: Progress) -> bool:
        """Return True if the work is due after the step that `progress` has reached."""

    def run(self, progress: Progress) -> None:
        """Do the work. Collective."""


@dataclass
class Timetable:
    """The length of a run, and the steps after which work is due."""

    data: DataSource
    checkpoint: Checkpoint
    early_stop: int | None
    """Number of validations in a row without a lower loss that end the run; None: none do."""

    def total_steps(self, progress: Progress) -> int:
        return self.data.total_steps(progress)

    def finished(self, progress: Progress) -> str | None:
        """Return why training is complete, `finished` or `early_stop`; None if it is not."""
        if self.early_stop is not None and progress.stale >= self.early_stop:
            return "early_stop"
        return "finished" if progress.step >= self.total_steps(progress) else None

    def due(self, every: float | None, progress: Progress) -> bool:
        """Return True after each multiple of `every` steps, and always after the last step.

        every: as train.validate_every.
        """
        step, total = progress.step, self.total_steps(progress)
        between = steps_between(every, total)
        return step == total or (between is not None and step % between == 0)

    def checkpoint_due(self, progress: Progress) -> bool:
        best = self.checkpoint.best and progress.best_step == progress.step
        return best or bool(self.finished(progress)) or self.due(self.checkpoint.every, progress)

    def next_checkpoint(self, progress: Progress) -> int | None:
        step, total = progress.step, self.total_steps(progress)
        every = steps_between(self.checkpoint.every, total) or total
        return None if step == total else min(total, (step // every + 1) * every)
