"""The base of work after a step that only reads the model, such as a validation."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Generic, TypeVar

import torch

from fsdp_trainer.base import phases
from fsdp_trainer.parallel.parallelize import reshard
from fsdp_trainer.training.after_step.step_logging import StepLogging
from fsdp_trainer.training.after_step.stop_check import StopCheck
from fsdp_trainer.training.after_step.timetable import Timetable
from fsdp_trainer.training.progress import Progress
from fsdp_trainer.training.step import ForwardBackward

Computed = TypeVar("Computed")


@dataclass
class StoppableWork(ABC, Generic[Computed]):
    """Work after a step that has no effect on training, and that a stop may interrupt.

    If it is interrupted, its name stays in Progress.pending, and the resumed run does it first.
    """

    name: ClassVar[str]
    """Its name in Progress.pending, which checkpoints store."""
    phase: ClassVar[str]
    forward_backward: ForwardBackward
    timetable: Timetable
    stop_check: StopCheck
    log: StepLogging
    every: float | None
    """Steps between two times that it is due, or a share of all; None: only after the last one."""

    def due(self, progress: Progress) -> bool:
        """Return True if the work is due after the step that `progress` has reached."""
        return not progress.at_start and self.timetable.due(self.every, progress)

    @torch.no_grad()
    def run(self, progress: Progress) -> None:
        """Do the work, outside of the clock of training steps. Collective. Raises Stop."""
        phases.enter(self.phase)
        with self.log.clock.excluded() as seconds:
            try:
                computed = self.compute(partial(self.stop_check.within, self.phase, progress))
            finally:
                reshard(self.forward_backward.model)
            self.record(computed, progress, seconds)

    @abstractmethod
    def compute(self, check: Callable[[], None]) -> Computed:
        """Return what is to be recorded. Collective.

        check: to be called before each batch, on all ranks together; may raise.
        """

    @abstractmethod
    def record(self, computed: Computed, progress: Progress, seconds: Callable[[], float]) -> None:
        """Record the result. Collective. seconds: returns the seconds since the work began."""
