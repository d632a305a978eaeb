"""The training loop.

It receives its parts already built, and does not depend on the model's architecture, its sharding
or the location of files.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_trainer.base import phases
from fsdp_trainer.base.distributed import to_device_of
from fsdp_trainer.checkpoint.frozen_weights import Base
from fsdp_trainer.checkpoint.state import optimizer_state, weights
from fsdp_trainer.config.paths import checkpoint_name
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.errors import RunFailed
from fsdp_trainer.methods.preferences import ChosenWatch
from fsdp_trainer.models.balance import LOAD
from fsdp_trainer.models.decoder import Decoder, MicroBatch
from fsdp_trainer.observe.observer import Observer
from fsdp_trainer.observe.profiler import Profiler
from fsdp_trainer.observe.step_log import StepLog, StepReport, finite_or_none
from fsdp_trainer.optim.optimizer_interface import TrainerOptimizer
from fsdp_trainer.optim.schedules import learning_rate, peak_learning_rate
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.parallelize import reshard
from fsdp_trainer.training.batches import StepPlan
from fsdp_trainer.training.compilations import CompilationLog
from fsdp_trainer.training.corruption import Corruption
from fsdp_trainer.training.data_source import DataSource, StoredRows
from fsdp_trainer.training.feed import Feed, StepBatches
from fsdp_trainer.training.garbage import collecting_garbage
from fsdp_trainer.training.gradients import clip_gradients
from fsdp_trainer.training.guard import Guard
from fsdp_trainer.training.metrics import MicroBatchResult, validation_metrics
from fsdp_trainer.training.progress import Progress
from fsdp_trainer.training.sample_prompts import Samples
from fsdp_trainer.training.saving import CheckpointManager
from fsdp_trainer.training.step import ForwardBackward, StepResult
from fsdp_trainer.training.stop import DataLost, Stop, StopSignals
from fsdp_trainer.training.task_evaluation import TrainingTasks, flat_metrics
from fsdp_trainer.training.weights import extra_state

Outcome = tuple[str, int]
"""The reason why training ended, and the exit code."""
SLOW_DISK = 200e6
"""Assumed write speed of each rank in bytes per second, until a checkpoint has been measured."""


class Rewind(Exception):
    """Raised on all ranks at the same line to rewind the run after a spike.

    args[0] is the StepPlan of the spike.
    """


@dataclass
class Trainer:
    """One rank's part of a run. `progress` is the point that it has reached."""

    cfg: TrainConfig
    model: Decoder
    dims: Dims
    optimizer: TrainerOptimizer
    forward_backward: ForwardBackward
    guard: Guard
    corruption: Corruption
    data: DataSource
    validation: StoredRows | None
    token_bytes: Tensor
    """[vocabulary] int64: number of bytes of each token."""
    samples: Samples
    tasks: TrainingTasks
    progress: Progress
    checkpoints: CheckpointManager
    dtypes: dict[str, str]
    """Number formats in which the weights were imported, for the export."""
    base: Base | None
    """Location of the frozen weights, which checkpoints do not hold; None: checkpoints hold all."""
    observer: Observer
    step_log: StepLog
    profiler: Profiler
    signals: StopSignals
    compilations: CompilationLog
    chosen_watch: ChosenWatch | None = None
    """None: the objective needs no such watch."""
    digests: dict[str, str | None] = field(default_factory=dict)
    """Digests of the weights of other models, by `reference` or `teacher`."""

    def fit(self) -> Outcome:
        """Train until the last step, or until all ranks agree to stop. Raises Rewind after a spike.

        Stop, Rewind and DataLost depend on all-reduced values only, so every rank raises them at
        the same line.
        """
        step_data = closing(self.data.open(self.progress, self.sync))
        with step_data as feed, collecting_garbage(self.cfg.train.gc_every) as collect:
            try:
                self.stop_if_agreed()
                with self.signals.limits.counting():
                    self.train(feed, collect)
                return self.finish()
            except Stop as stop:
                return self.leave(stop)
            except DataLost as lost:
                self.save_what_was_trained()
                raise lost.args[0] from None

    def train(self, feed: Feed, collect_garbage: Callable[[int], None]) -> None:
        """Run all remaining steps."""
        # work that a stop interrupted before this attempt, if this configuration still requires it
        self.progress.pending = [w for w in self.progress.pending if w in self.work_due()]
        if self.validates_first:
            self.validate()
        if self.progress.pending:
            self.after_step(collect_garbage)
        while not self.finished:
            self.profiler.before(self.progress.step + 1)
            phases.enter("data", self.progress.step + 1)
            step = feed.next_step(self.progress.step + 1)
            result = self.train_step(step)
            self.sync()
            self.progress.advance(step.plan)
            self.compilations.report(self.progress.step, "training")
            self.record(step.plan, result)
            self.observer.call("step", self.progress.step)
            self.progress.pending = self.work_due()
            self.signals.raise_if_agreed()
            self.after_step(collect_garbage)
            self.profiler.after(self.progress.step)

    def train_step(self, step: StepBatches) -> StepResult:
        """Run forward, backward, clipping and update of one step; do not wait for the device."""
        peak = peak_learning_rate(self.cfg.optim, self.cfg.batch)
        lr = learning_rate(self.cfg.schedule, peak, step.plan.step, self.total_steps)
        sums, worst = self.forward_backward.run(step, self.checked(step))
        phases.enter("clip")
        optim = self.cfg.optim
        loss_scale = self.forward_backward.loss_scale
        scale = loss_scale.scale if loss_scale else None
        limits = optim.grad_clip, optim.grad_clip_value
        grad_norm = clip_gradients(self.model, self.dims, *limits, scale)
        phases.enter("update")
        # judged on the optimizer's device: with CPU offload, it would otherwise read a copy of the
        # verdict that is not complete yet
        loss = sums[self.forward_backward.metrics.position("loss")]
        verdict = self.guard.judge(to_device_of(loss, grad_norm), grad_norm)
        self.optimizer.set_learning_rate(lr)
        self.optimizer.step_unless(verdict.skip)
        balance = self.model.balance
        if balance is not None and balance.bias_speed:
            counts = self.forward_backward.metrics.of(LOAD, sums)
            balance.move_biases(self.model.blocks(), counts, to_device_of(verdict.skip, counts))
        self.optimizer.zero_grad(set_to_none=True)
        if loss_scale:
            loss_scale.update(verdict.not_finite)
        used = torch.ones_like(grad_norm) if scale is None else scale
        return StepResult(lr, sums, worst, grad_norm, verdict, used)

    def checked(self, step: StepBatches) -> Iterator[MicroBatch]:
        """Yield the step's micro-batches.

        At steps that train.check_every selects, compute the first one twice before yielding it, and
        compare the results.
        """
        is_checked = self.corruption.is_due(step.plan.step)
        for batch in step:
            if is_checked:
                compute_separately = self.forward_backward.compute_separately
                compute = partial(compute_separately, step.plan, batch, self.optimizer)
                self.corruption.check_computation(step.plan.step, compute)
            is_checked = False
            yield batch

    def record(self, plan: StepPlan, result: StepResult) -> None:
        """Queue the step's metrics to be written at the next logging step."""
        judged = (result.grad_norm, *result.verdict[:4], result.scale)
        numbers = torch.stack([number.double() for number in judged])
        progress = self.progress
        now = round(time.time(), 3)
        report = StepReport(plan, result.lr, progress.tokens, progress.supervised_tokens, now)
        self.step_log.add(report, result.sums, to_device_of(numbers, result.sums), result.worst)

    # --- agreement of the ranks

    def sync(self) -> None:
        """Exchange the ranks' reasons to stop and their failures. Collective.

        If any rank has no data for the step, which has then changed nothing, raises DataLost, or
        the Stop that interrupted its wait.
        """
        phases.enter("agree")
        store = self.checkpoints.store
        agreement = self.signals.sync(self.seconds_to_stop(), store.failed)
        if agreement.save_failed:
            phases.enter("staging")  # other ranks may still be writing their part
            self.settle_save()
        if agreement.data_missing:
            self.signals.raise_data_error()
            self.signals.raise_if_agreed()
            raise AssertionError("a rank has no data, and none knows why")

    def stop_if_agreed(self) -> None:
        """Call `sync`, and raise Stop if any rank must stop. Collective."""
        self.sync()
        self.signals.raise_if_agreed()

    def sync_during(self, phase: str) -> None:
        """Raise Stop or DataLost if needed in a phase that can be interrupted, else re-enter it."""
        self.stop_if_agreed()
        phases.enter(phase)

    def seconds_to_stop(self) -> float:
        """Return an upper estimate of the seconds for the next step and a checkpoint after it.

        It is the longest step so far, plus 1.25 times the longest save so far (twice that with
        checkpoint.mode=async), plus two seconds.
        """
        seconds = self.checkpoints.store.longest_save
        if not seconds:
            size = sum(p.numel() * p.element_size() for p in self.model.whole.parameters())
            seconds = size * 3 / self.dims.ranks / SLOW_DISK
        saves = 2 if self.cfg.checkpoint.mode == "async" else 1  # one may already be in progress
        return self.step_log.longest_interval + 1.25 * saves * seconds + 2.0

    # --- work after a step

    def work_due(self) -> list[str]:
        """Return the names of the methods due after this step that a stop may interrupt."""
        train = self.cfg.train
        work = {
            "validate": (train.validate_every, self.validation),
            "sample": (train.validate_every, self.samples.prompts),
            "evaluate": (train.evaluate_every, self.tasks.names),
        }
        return [name for name, (every, wanted) in work.items() if wanted and self.is_due(every)]

    @property
    def validates_first(self) -> bool:
        """True if the model must be validated before its first step, as a baseline."""
        wanted = self.cfg.train.validate_first is not False
        return wanted and self.validation is not None and self.progress.step == 0

    def after_step(self, collect_garbage: Callable[[int], None]) -> None:
        """Do the work that is due after a step.

        After a stop in here, the remaining work is in progress.pending, and so in the checkpoint.
        """
        long = bool(self.progress.pending) or self.checkpoint_due
        while self.progress.pending:
            getattr(self, self.progress.pending[0])()
            self.progress.pending = self.progress.pending[1:]
        # the steps in a checkpoint must be logged before it is committed
        self.log(last=self.checkpoint_due)
        self.require_learning()
        collect_garbage(self.progress.step)
        if self.checkpoint_due:
            self.save()
        elif self.corruption.is_due(self.progress.step):
            self.check_copies()
        if long:
            self.stop_if_agreed()

    def is_due(self, every: int | None) -> bool:
        """Return True after each multiple of `every` steps, and always after the last step."""
        step = self.progress.step
        return step == self.total_steps or (every is not None and step % every == 0)

    @property
    def total_steps(self) -> int:
        """Total number of steps of the run."""
        return self.data.total_steps(self.progress)

    @property
    def finished(self) -> str | None:
        """The reason why training is complete, `finished` or `early_stop`; None if it is not."""
        patience = self.cfg.train.early_stop
        if patience is not None and self.progress.stale >= patience:
            return "early_stop"
        return "finished" if self.progress.step >= self.total_steps else None

    @property
    def checkpoint_due(self) -> bool:
        """True if a checkpoint is due after this step."""
        best = self.cfg.checkpoint.best and self.progress.best_step == self.progress.step
        return best or bool(self.finished) or self.is_due(self.cfg.checkpoint.every)

    @torch.no_grad()
    def validate(self) -> None:
        """Compute and record the mean loss over exactly the validation set.

        The result is the same for any number of ranks.
        """
        validation = self.validation
        assert validation
        figures = self.forward_backward.pair_figures
        metrics = validation_metrics(validation.source_names, self.token_bytes, figures)
        phases.enter("validation")
        sums = metrics.zeros()
        with self.step_log.clock.excluded() as seconds:
            try:
                with closing(validation.open_all()) as feed:
                    step = feed.next_step(1)
                    before = partial(self.sync_during, "validation")
                    for batch, scores in self.forward_backward.scores(step, before):
                        part = self.forward_backward.loss(batch, scores)
                        metrics.add(sums, MicroBatchResult(batch, scores, part, part))
            finally:
                reshard(self.model)
            self.dims.sum_over_tokens(sums)
            dist.broadcast(sums, 0)  # decisions depend on it: it must be bitwise equal on all ranks
            weight = self.forward_backward.weight(step.plan)
            loss = sums[metrics.position("loss")].item() / (weight or math.nan)
            self.progress.validated(loss, self.cfg.train.early_stop_delta)
            self.record_validation(loss, metrics.written(sums.tolist()), seconds())
        self.compilations.report(self.progress.step, "validation")

    def record_validation(self, loss: float, written: dict[str, Any], seconds: float) -> None:
        """Record the validation loss as an event and in the line of the last step."""
        progress, value = self.progress, finite_or_none(loss)
        lowest = progress.best_step, progress.best_loss
        by_source = written.get("loss_by_source") or {}
        bits = written["bits_per_byte"]
        self.observer.validated(progress.step, value, bits, lowest, by_source, seconds)
        line: dict[str, Any] = {"validation_loss": value, "validation_bits_per_byte": bits}
        if by_source:
            line["validation_loss_by_source"] = by_source
        figures = self.forward_backward.pair_figures
        names = figures.keys if figures is not None else ()
        line |= {f"validation_{name}": written[name] for name in names if name in written}
        self.add_to_line(line)

    def add_to_line(self, more: dict[str, Any]) -> None:
        """Add entries to the metrics line of the last step; there is no line for step 0.

        The line may be written already: a stop writes it before the work still due after the step.
        """
        step = self.progress.step
        if step and not self.step_log.annotate(more):
            self.observer.amend(step, more)

    def sample(self) -> None:
        """Record the model's current answers to train.sample_prompts."""
        phases.enter("samples")
        with self.step_log.clock.excluded():
            try:
                check = partial(self.sync_during, "samples")
                answers = self.samples.generate(self.model, check, self.forward_backward.decoder)
            finally:
                reshard(self.model)
            self.observer.sampled(self.progress.step, answers)

    def evaluate(self) -> None:
        """Record the model's current metrics on evaluation.tasks."""
        phases.enter("evaluation")
        with self.step_log.clock.excluded() as seconds:
            try:
                check = partial(self.sync_during, "evaluation")
                metrics = self.tasks.run(self.model, check, self.forward_backward.decoder)
            finally:
                reshard(self.model)
            self.observer.evaluated(self.progress.step, metrics, seconds())
            self.add_to_line({"tasks": flat_metrics(metrics)})

    def log(self, last: bool = False) -> None:
        """At logging steps, read and write the metrics of all steps since the last one. Collective.

        last: do it after any step. Raises Rewind.
        """
        phases.enter("log")
        if not last and not self.step_log.is_due(self.progress.step):
            return
        reports, seconds = self.step_log.read()
        if not reports:
            return
        phases.enter("log")
        metrics = self.forward_backward.metrics
        losses = [report.sums[metrics.position("loss")] for report in reports]
        with self.step_log.clock.excluded():
            spike = self.guard.review(reports, losses, self.data.suspects, self.observer)
            figures = [metrics.written(report.sums) for report in reports]
            if self.chosen_watch is not None:
                self.chosen_watch.review(reports, figures, self.observer)
            incomplete = not {"validate", "evaluate"}.isdisjoint(self.progress.pending)
            self.observer.write(reports, figures, seconds, self.total_steps, last, incomplete)
        if spike and self.cfg.train.on_spike == "rewind":
            raise Rewind(spike)

    def require_learning(self) -> None:
        """Raise RunFailed after train.max_skipped skipped steps in a row."""
        skipped = self.guard.skipped_in_a_row
        if skipped < self.cfg.train.max_skipped:
            return
        phases.enter("staging")
        self.settle_save()
        newest = self.checkpoints.newest
        good = self.checkpoints.store.folder / checkpoint_name(newest) if newest >= 0 else "none"
        raise RunFailed(
            f"the loss or gradient was not finite for {skipped} steps in a row, "
            f"up to step {self.progress.step}.\n"
            f"None of them changed the weights. The last good checkpoint: {good}. "
            "Try a lower optim.lr, more schedule.warmup_steps, or look at the data with  "
            "fsdp-trainer preview"
        )

    # --- checkpoints

    def save(self) -> None:
        """Commit a checkpoint of this step, unless there is one.

        A failure is recorded, and training continues.
        """
        progress = self.progress
        if self.checkpoints.has(progress.step, complete=not progress.pending):
            return
        if self.corruption.every:
            with self.step_log.clock.excluded():
                self.check_copies()
        phases.enter("staging")
        started = time.perf_counter()
        self.settle_save(report_wait=True)  # first: a failure may change which step is the best
        shares = self.data.shares(progress)
        if shares:
            self.observer.event("data", step=progress.step, sources=shares)
        state, step = self.state(), progress.step
        failed = self.checkpoints.save(step, self.tensors(), state, started, self.next_save)
        progress.checkpoint_failed(failed)

    def settle_save(self, report_wait: bool = False) -> None:
        """Wait for the checkpoint in progress, if there is one."""
        failed = self.checkpoints.settle(self.progress.step, self.next_save, report_wait)
        self.progress.checkpoint_failed(failed)

    def save_final(self) -> None:
        """Commit a checkpoint of this step, with new attempts after failures. Raises RunFailed."""

        def save_and_settle() -> None:
            self.save()
            self.settle_save()

        phases.enter("staging")  # allows as much time as a save
        progress = self.progress
        complete = not progress.pending
        self.checkpoints.save_until_committed(progress.step, complete, save_and_settle)
        self.signals.leaving = True

    @property
    def next_save(self) -> int | None:
        """The step after which the next checkpoint is due; None if this is the last one."""
        step, total = self.progress.step, self.total_steps
        every = self.cfg.checkpoint.every or total
        if self.signals.agreement.reason or step == total:
            return None
        return min(total, (step // every + 1) * every)

    def tensors(self) -> dict[str, Tensor]:
        """Return a checkpoint's tensors: weights, optimizer state, load of experts, loss scale."""
        tensors = weights(self.model) | optimizer_state(self.model, self.optimizer)
        return tensors | extra_state(self.model.balance, self.forward_backward.loss_scale)

    def state(self) -> dict[str, Any]:
        """Return the part of a checkpoint that is not tensors. Collective."""
        self.capture_state()
        return {
            **asdict(self.progress),
            "total_steps": self.total_steps,
            "dtypes": self.dtypes,
            "frozen": asdict(self.base) if self.base else None,
            "data": self.data.fingerprint,
            "validation": self.validation_fingerprint,
            **{name: digest for name, digest in self.digests.items() if digest},
        }

    @property
    def validation_fingerprint(self) -> str | None:
        """Fingerprint of the validation set; None if there is none."""
        return self.validation.fingerprint if self.validation else None

    def capture_state(self) -> None:
        """Copy the state of the guard and of the data source into `progress`. Collective."""
        progress = self.progress
        progress.recent, progress.spikes_in_a_row = self.guard.state()
        for name, value in self.data.state(progress).items():
            setattr(progress, name, value)

    def check_copies(self) -> None:
        """Raise RunFailed if copies of the same values no longer have equal bits on all ranks."""
        phases.enter("check")
        self.corruption.check_copies(self.progress.step, self.tensors())

    # --- end of training

    def finish(self) -> Outcome:
        """Save, and end the run after its last step or because of train.early_stop."""
        self.profiler.close()
        self.save_final()
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
        self.log(last=True)
        reason, step = stop.args[0], self.progress.step
        event = "signal" if reason.startswith("SIG") else reason
        self.observer.event(event, step=step, reason=reason)
        if self.finished and not self.progress.pending:
            return self.finish()
        if step:
            self.save_final()
        return reason, 75

    def save_what_was_trained(self) -> None:
        """Write the last metrics and a checkpoint before all ranks end with an error."""
        with suppress(Rewind):  # the error ends the run anyway
            self.log(last=True)
        if self.progress.step:
            self.save_final()
        self.signals.leaving = True
