"""The step loop. It receives built parts and knows nothing of models, sharding or files."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.profiler import record_function

from fsdp_trainer.checkpoint.state import optimizer_state, weights
from fsdp_trainer.checkpoint.store import CheckpointStore
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.errors import RunFailed
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.observe.observer import Observer
from fsdp_trainer.observe.profiler import Profiler
from fsdp_trainer.optim.optimizers import set_learning_rate, step_unless
from fsdp_trainer.optim.schedules import learning_rate, peak_learning_rate
from fsdp_trainer.parallel.parallelize import reshard
from fsdp_trainer.training.batches import Batches, StepPlan
from fsdp_trainer.training.gradients import GradientSync, any_not_finite, clip_gradients
from fsdp_trainer.training.objective import cross_entropy
from fsdp_trainer.training.samples import Samples
from fsdp_trainer.training.stop import StopRequests

Outcome = tuple[str, int]
"""Why training ended, and the exit code."""


@dataclass
class Progress:
    """All there is to know about where a run stands: the data order is a function of `rows`."""

    step: int = 0
    rows: int = 0
    tokens: int = 0
    supervised_tokens: int = 0

    def advance(self, plan: StepPlan) -> None:
        """Count a finished step."""
        self.step, self.rows = plan.step, plan.stop
        self.tokens += plan.tokens
        self.supervised_tokens += plan.supervised


@dataclass
class Trainer:
    """One rank's part of a run. total_steps: in all; last_row: where the data ends for a run counted in epochs."""

    cfg: TrainConfig
    model: Decoder
    optimizer: Optimizer
    gradient_sync: GradientSync
    batches: Batches
    validation: Batches | None
    samples: Samples
    progress: Progress
    total_steps: int
    last_row: int | None
    checkpoints: CheckpointStore
    dtypes: dict[str, str]  # number formats in which the weights were imported, for the export
    observer: Observer
    profiler: Profiler
    stop: StopRequests
    saved: int = -1  # step of the newest checkpoint

    def fit(self) -> Outcome:
        """Train until the last step, a signal or a time limit. Every line here happens in this order, once per step."""
        steps = self.batches.steps(self.cfg.batch.rows, self.last_row, self.progress.step, self.progress.rows)
        peak = peak_learning_rate(self.cfg.optim, self.cfg.batch)
        while self.progress.step < self.total_steps:
            plan = next(steps)
            self.profiler.before(plan.step)
            lr = learning_rate(self.cfg.schedule, peak, plan.step, self.total_steps)
            loss = self.forward_backward(plan)
            grad_norm = self.clip()
            not_finite = self.update(lr, loss, grad_norm)
            self.progress.advance(plan)
            self.observer.step(plan, self.progress, lr, loss, grad_norm, not_finite)
            self.profiler.after(plan.step)
            if self.due(self.cfg.train.validate_every):
                self.validate()
                self.sample()
            # what a checkpoint holds must be on record before it is committed
            self.observer.write_if_due(plan.step, last=self.due(self.cfg.checkpoint.every))
            self.stop_if_nothing_is_learnt()
            if self.due(self.cfg.checkpoint.every):
                self.save()
            if reason := self.stop.agreed():
                return self.stop_in_order(reason)
        return self.finish()

    @record_function("forward_backward")
    def forward_backward(self, plan: StepPlan) -> Tensor:
        """All micro-batches of a step. Gradients end up sharded and summed; returns the step's loss over all ranks, a scalar on the device."""
        total = torch.zeros((), device=self.batches.device)
        count = self.batches.count(plan)
        for i, batch in enumerate(self.batches.micro_batches(plan), 1):
            self.gradient_sync.before(last=i == count)
            loss = cross_entropy(self.model(batch), batch.weights) / plan.weight
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        return total

    @record_function("clip")
    def clip(self) -> Tensor:
        """Clip the gradients; returns their global norm before, a scalar on the device (offloaded gradients lie on the host)."""
        return clip_gradients(self.model, self.cfg.optim.grad_clip, self.cfg.optim.grad_clip_value).to(self.batches.device)

    @record_function("update")
    def update(self, lr: float, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """One optimizer step, or none on any rank if a number is not finite; returns which, a bool scalar on the device."""
        not_finite = any_not_finite(loss, grad_norm)
        set_learning_rate(self.optimizer, lr)
        step_unless(self.optimizer, not_finite)
        self.optimizer.zero_grad(set_to_none=True)
        return not_finite

    def due(self, every: int | None) -> bool:
        """Whether something that happens every so many steps, and at the end, happens after this one."""
        return self.progress.step == self.total_steps or (every is not None and self.progress.step % every == 0)

    @torch.no_grad()
    def validate(self) -> None:
        """Mean loss over exactly the validation set: the same figure for every number of ranks."""
        if self.validation is None:
            return
        with self.observer.apart("validation"):
            plan = next(self.validation.steps(self.validation.order.rows_per_epoch, None))
            total = torch.zeros((), device=self.batches.device, dtype=torch.float64)
            for batch in self.validation.micro_batches(plan):
                total += cross_entropy(self.model(batch), batch.weights)
            reshard(self.model)
            dist.all_reduce(total)
            self.observer.validated(self.progress.step, float(total) / plan.weight)

    def sample(self) -> None:
        """What the model says to train.sample_prompts now."""
        if self.samples.prompts:
            with self.observer.apart("samples"):
                self.observer.sampled(self.progress.step, self.samples.take(self.model))
                reshard(self.model)

    def save(self) -> None:
        """Commit a checkpoint, unless this step has one."""
        if self.saved == self.progress.step:
            return
        with self.observer.apart("checkpoint"):
            state = weights(self.model) | optimizer_state(self.model, self.optimizer)
            path = self.checkpoints.save(self.progress.step, state, self.state())
        self.saved = self.progress.step
        self.observer.event("checkpoint", step=self.saved, path=str(path))

    def state(self) -> dict[str, Any]:
        """What a checkpoint remembers besides tensors."""
        data = self.batches.order.store.fingerprint
        return {**asdict(self.progress), "total_steps": self.total_steps, "dtypes": self.dtypes, "data": data}

    def stop_if_nothing_is_learnt(self) -> None:
        """Raise RunFailed after train.max_skipped skipped steps in a row; known where the observer has read the device."""
        if self.observer.skipped_in_a_row >= self.cfg.train.max_skipped:
            raise RunFailed(
                f"the loss or gradient was not finite for {self.observer.skipped_in_a_row} steps in a row, up to step {self.progress.step}.\n"
                f"Nothing was learnt from them. The last good checkpoint is that of step {self.saved if self.saved >= 0 else 'none'}. Try a lower optim.lr, "
                "more schedule.warmup_steps, or look at the data with  fsdp-trainer preview"
            )

    def stop_in_order(self, reason: str) -> Outcome:
        """Leave so that the same command goes on from here."""
        self.observer.event("signal" if reason.startswith("SIG") else reason, step=self.progress.step, reason=reason)
        if self.progress.step >= self.total_steps:
            return self.finish()
        self.observer.write_if_due(self.progress.step, last=True)
        self.save()
        return reason, 75

    def finish(self) -> Outcome:
        """The end of the data or of the steps."""
        self.save()
        return "finished", 0
