"""Logging of the steps: their metrics are queued on the device, and read at logging steps."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdp_trainer.base import phases
from fsdp_trainer.base.distributed import to_device_of
from fsdp_trainer.config.paths import checkpoint_name
from fsdp_trainer.errors import RunFailed
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.observe.observer import Observer
from fsdp_trainer.observe.step_log import StepClock, StepLog, StepReport
from fsdp_trainer.training.after_step.saving import CheckpointManager
from fsdp_trainer.training.after_step.timetable import Timetable
from fsdp_trainer.training.batches import StepPlan
from fsdp_trainer.training.broken_weights import broken_weights
from fsdp_trainer.training.data_source import DataSource
from fsdp_trainer.training.guard import Guard
from fsdp_trainer.training.metrics import Metrics, MetricWatch
from fsdp_trainer.training.progress import AMENDS_LINE, Progress
from fsdp_trainer.training.step import StepResult
from fsdp_trainer.training.stopping.stop import Rewind


@dataclass
class StepLogging:
    """Queues each step's metrics. When due, has them reviewed and written. See AfterStep."""

    step_log: StepLog
    metrics: Metrics
    guard: Guard
    data: DataSource
    observer: Observer
    timetable: Timetable
    rewinds: bool
    """True if a spike rewinds the run."""
    watch: MetricWatch | None
    """Reviews the training method's metrics; None: nothing does."""

    @property
    def clock(self) -> StepClock:
        return self.step_log.clock

    def add(self, plan: StepPlan, result: StepResult, progress: Progress) -> None:
        """Queue a step's metrics, without waiting for the device."""
        judged = (result.grad_norm, *result.verdict[:4], result.scale)
        numbers = torch.stack([number.double() for number in judged])
        now = round(time.time(), 3)
        report = StepReport(plan, result.lr, progress.tokens, progress.supervised_tokens, now)
        self.step_log.add(report, result.sums, to_device_of(numbers, result.sums), result.worst)

    def add_to_line(self, more: dict[str, Any], progress: Progress) -> None:
        """Add entries to the metrics line of the last step; there is no line for step 0.

        The line may be written already: a stop writes it before the work still due after the step.
        """
        step = progress.step
        if step and not self.step_log.annotate(more):
            self.observer.amend(step, more)

    def due(self, progress: Progress) -> bool:
        """Return True at logging steps.

        And before a checkpoint: the steps in it must be logged before it is committed.
        """
        return self.step_log.is_due(progress.step) or self.timetable.checkpoint_due(progress)

    def run(self, progress: Progress) -> None:
        self.write(progress, last=self.timetable.checkpoint_due(progress))

    def write(self, progress: Progress, last: bool) -> None:
        """Read and write the metrics of all steps since the last time. Collective. Raises Rewind.

        Called in the phase `log`. last: whether the console's line stays.
        """
        reports, seconds = self.step_log.read()
        if not reports:
            return
        phases.enter("log")
        losses = [report.sums[self.metrics.position("loss")] for report in reports]
        with self.clock.excluded():
            spike = self.guard.review(reports, losses, self.data.suspects, self.observer)
            lines = [self.metrics.written(report.sums) for report in reports]
            if self.watch is not None:
                self.watch.review(reports, lines, self.observer)
            total_steps = self.timetable.total_steps(progress)
            incomplete = not AMENDS_LINE.isdisjoint(progress.pending)
            self.observer.write(reports, lines, seconds, total_steps, last, incomplete)
        if spike and self.rewinds:
            raise Rewind(spike)


ADVICE = (
    "Try a lower optim.lr, more schedule.warmup_steps, or look at the data with  "
    "fsdp-trainer preview"
)
NO_STEP = "none of the {:,} steps changed a weight: the loss or gradient was never finite"
WERE_BROKEN = (
    "no step of {:,} changed a weight: the weights that training began from have numbers that are "
    "not finite.\n{}\nRead them again, from a copy that is whole"
)


@dataclass
class SkipLimit:
    """Ends a run that only skips steps. See AfterStep."""

    guard: Guard
    max_skipped: int
    checkpoints: CheckpointManager
    model: Decoder
    source: Path | None
    """The folder that the weights were read from; None: they were drawn."""

    def due(self, progress: Progress) -> bool:
        return self.guard.skipped_in_a_row >= self.max_skipped

    def has_learnt(self, progress: Progress) -> bool:
        steps = progress.step - progress.first_step
        return not steps or self.guard.skipped < steps

    def require_sound_weights(self, progress: Progress) -> None:
        """Raise RunFailed if no step can change weights that were broken from the start.

        Collective.
        """
        if not self.has_learnt(progress) and (broken := broken_weights(self.model, self.source)):
            raise RunFailed(WERE_BROKEN.format(progress.step, broken))

    def require_learnt(self, progress: Progress) -> None:
        """Raise RunFailed if a run that has ended has changed nothing. Collective."""
        self.require_sound_weights(progress)
        if not self.has_learnt(progress):
            raise RunFailed(NO_STEP.format(progress.step - progress.first_step) + f".\n{ADVICE}")

    def run(self, progress: Progress) -> None:
        phases.enter("staging")
        self.checkpoints.settle(progress)
        newest = self.checkpoints.newest
        self.require_sound_weights(progress)
        good = self.checkpoints.store.folder / checkpoint_name(newest) if newest >= 0 else "none"
        raise RunFailed(
            f"the loss or gradient was not finite for {self.guard.skipped_in_a_row} steps in a "
            f"row, up to step {progress.step}.\n"
            f"None of them changed the weights. The last good checkpoint: {good}. {ADVICE}"
        )
