"""The training loop: `fit` runs `run_steps`, which runs StepRunner.train_step for each step.

It receives its parts already built, and does not depend on the model's architecture, its sharding
or the location of files. docs/architecture.md shows the loop and what it calls on one page.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from fsdp_trainer.base import phases
from fsdp_trainer.models.decoder import MicroBatch
from fsdp_trainer.observe.observer import Observer
from fsdp_trainer.observe.profiler import Profiler
from fsdp_trainer.optim.schedules import learning_rate, peak_learning_rate, warmup_steps
from fsdp_trainer.training.after_step.garbage import GarbageCollection
from fsdp_trainer.training.after_step.saving import CheckpointManager
from fsdp_trainer.training.after_step.step_logging import SkipLimit, StepLogging
from fsdp_trainer.training.after_step.stop_check import StopCheck
from fsdp_trainer.training.after_step.stoppable import StoppableWork
from fsdp_trainer.training.after_step.timetable import AfterStep, Timetable
from fsdp_trainer.training.compilations import CompilationLog
from fsdp_trainer.training.corruption import Corruption
from fsdp_trainer.training.data_source import DataSource
from fsdp_trainer.training.feed import StepBatches
from fsdp_trainer.training.groups import SharedSteps
from fsdp_trainer.training.progress import Progress
from fsdp_trainer.training.step_runner import StepRunner
from fsdp_trainer.training.stopping.stop import DataLost, Rewind, Stop, StopSignals

Outcome = tuple[str, int]
"""The reason why training ended, and the exit code."""


@dataclass
class Trainer:
    """One rank's part of a run. `progress` is the point that it has reached."""

    runner: StepRunner
    corruption: Corruption
    data: DataSource
    progress: Progress
    timetable: Timetable
    stoppable: Sequence[StoppableWork[Any]]
    """Work after a step that a stop may interrupt, in order: validation, samples, evaluation."""
    after_step: Sequence[AfterStep]
    """Work after that, in order: logging, garbage collection, checks, checkpoint."""
    log: StepLogging
    garbage: GarbageCollection
    checkpoints: CheckpointManager
    stop_check: StopCheck
    skip_limit: SkipLimit
    signals: StopSignals
    observer: Observer
    profiler: Profiler
    compilations: CompilationLog

    def fit(self) -> Outcome:
        """Train until the last step, or until all ranks agree to stop. Raises Rewind after a spike.

        Stop, Rewind and DataLost depend on all-reduced values only, so every rank raises them at
        the same line.
        """
        leave_together = partial(self.stop_check.sync, self.progress)
        check_stop = self.stop_check.stop_if_agreed
        shared = closing(
            SharedSteps(self.data, self.runner.groups, self.progress, leave_together, check_stop)
        )
        with shared as steps, self.garbage.at_fixed_steps():
            try:
                self.stop_check.stop_if_agreed(self.progress)
                with self.signals.limits.counting():
                    self.run_steps(steps)
                return self.finish()
            except Stop as stop:
                return self.leave(stop)
            except DataLost as lost:
                self.save_what_was_trained()
                raise lost.args[0] from None

    def run_steps(self, steps: SharedSteps) -> None:
        progress, groups = self.progress, self.runner.groups
        self.run_pending()
        while not self.finished:
            self.profiler.before(progress.step + 1)
            phases.enter("data", progress.step + 1)
            step = steps.next_step(progress)
            micro_batches, rate = self.checked(step), self.rate_of_step(step.plan.step)
            show = partial(self.observer.call, "gradients", step.plan.step)
            result = self.runner.train_step(step, micro_batches, rate, show)
            self.stop_check.sync(progress)
            if result is None:
                continue  # the groups that are left compute all of its rows
            progress.advance(step.plan.whole)
            self.compilations.report(progress.step, "training")
            self.log.add(step.plan, result, progress)
            self.observer.call("step", progress.step)
            if groups.exchange_due(progress):
                self.log.write(progress, last=False)  # another group may lead from here on
                groups.exchange(progress)
            progress.pending = [work.name for work in self.stoppable if work.due(progress)]
            self.signals.raise_if_agreed()
            self.run_after_step()
            self.profiler.after(progress.step)

    def rate_of_step(self, step: int) -> float:
        cfg = self.runner.cfg
        peak = peak_learning_rate(cfg.optim, cfg.batch)
        steps = self.timetable.total_steps(self.progress)
        if self.progress.warmup_steps is None:
            self.progress.settle_warm_up(warmup_steps(cfg.schedule, steps))
        return learning_rate(cfg.schedule, peak, step, steps, self.progress.warmup_steps)

    def checked(self, step: StepBatches) -> Iterator[MicroBatch]:
        """Yield the step's micro-batches.

        At steps that train.check_every selects, compute the first one twice before yielding it, and
        compare the results.
        """
        is_checked = self.corruption.is_due(step.plan.step)
        for batch in step:
            if is_checked:
                compute_separately = self.runner.forward_backward.compute_separately
                compute = partial(compute_separately, step.plan, batch, self.runner.optimizer)
                self.corruption.check_computation(step.plan.step, compute)
            is_checked = False
            yield batch

    # --- work after a step

    def run_pending(self) -> None:
        """Do the work that a stop interrupted, if this configuration still requires it.

        Before the first step of a run, do the work that is due there: a validation, as a baseline.
        """
        progress = self.progress
        due = [work for work in self.stoppable if work.due(progress)]
        progress.pending = [name for name in progress.pending if name in [w.name for w in due]]
        if progress.at_start:
            for work in due:
                work.run(progress)
        if progress.pending:
            self.run_after_step()

    def run_after_step(self) -> None:
        """Do the work that is due after a step.

        After a stop in here, the remaining work is in progress.pending, and so in the checkpoint.
        """
        progress = self.progress
        is_long = bool(progress.pending) or self.checkpoints.due(progress)
        for work in self.stoppable:
            if work.name in progress.pending:
                work.run(progress)
                progress.pending = [name for name in progress.pending if name != work.name]
        phases.enter("log")
        for other in self.after_step:
            if other.due(progress):
                other.run(progress)
        if is_long:
            self.stop_check.stop_if_agreed(progress)

    @property
    def finished(self) -> str | None:
        return self.timetable.finished(self.progress)

    def continue_from(self, progress: Progress) -> None:
        self.progress = progress
        self.runner.guard.load(progress)
        self.checkpoints.go_back_to(progress)

    # --- end of training

    def finish(self) -> Outcome:
        """Save, and end the run after its last step or because of train.early_stop."""
        self.profiler.close()
        self.checkpoints.save_final(self.progress)
        reason, progress = self.finished, self.progress
        assert reason
        if reason == "early_stop":
            best = {"best_step": progress.best_step, "best_loss": progress.best_loss}
            self.observer.event(reason, step=progress.step, **best)
        return reason, 0

    def leave(self, stop: Stop) -> Outcome:
        """Save, so that the same command resumes from here.

        Raises RunFailed if saving fails, and Rewind.
        """
        self.profiler.close()
        phases.enter("log")
        self.log.write(self.progress, last=True)
        reason, step = stop.args[0], self.progress.step
        event = "signal" if reason.startswith("SIG") else reason
        self.observer.event(event, step=step, reason=reason)
        if self.finished and not self.progress.pending:
            return self.finish()
        if not self.progress.at_start:
            self.checkpoints.save_final(self.progress)
        return reason, 75

    def save_what_was_trained(self) -> None:
        """Write the last metrics and a checkpoint before all ranks end with an error."""
        phases.enter("log")
        with suppress(Rewind):  # the error ends the run anyway
            self.log.write(self.progress, last=True)
        if not self.progress.at_start:
            self.checkpoints.save_final(self.progress)
        self.signals.leaving = True
