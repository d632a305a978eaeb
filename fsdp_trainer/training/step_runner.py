"""One step of training: forward, backward, clipping and update."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_trainer.base import phases
from fsdp_trainer.base.distributed import to_device_of
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.models.balance import LOAD
from fsdp_trainer.models.decoder import Decoder, MicroBatch
from fsdp_trainer.optim.optimizer_interface import TrainerOptimizer
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.training.feed import StepBatches
from fsdp_trainer.training.gradients import clip_divisor, clip_gradients
from fsdp_trainer.training.groups import ReplicaGroups
from fsdp_trainer.training.guard import Guard
from fsdp_trainer.training.step import ForwardBackward, StepResult


@dataclass
class StepRunner:
    """The parts of a run that a step needs, on one rank."""

    cfg: TrainConfig
    model: Decoder
    dims: Dims
    optimizer: TrainerOptimizer
    forward_backward: ForwardBackward
    guard: Guard
    groups: ReplicaGroups

    def train_step(
        self,
        step: StepBatches,
        micro_batches: Iterable[MicroBatch],
        lr: float,
        before_clip: Callable[[], None] = lambda: None,
    ) -> StepResult | None:
        """Run forward, backward, clipping and update of one step; do not wait for the device.

        Returns None, and changes nothing, if a group that shares the step was lost on the way.
        micro_batches: those of `step`. lr: learning rate. before_clip: called once the gradients
        are complete.
        """
        sums, worst = self.forward_backward.run(step, micro_batches)
        if not self.groups.sum_step(self.model, sums, worst, step.data_missing):
            self.optimizer.zero_grad(set_to_none=True)
            return None
        balance = self.model.balance
        if balance is not None:
            counts = self.forward_backward.metrics.of(LOAD, sums)
            balance.update(counts, step.plan.tokens)
        phases.enter("clip")
        before_clip()
        loss_scale = self.forward_backward.loss_scale
        scale = loss_scale.scale if loss_scale else None
        grad_norm = self.clip(scale)
        phases.enter("update")
        # judged on the optimizer's device: with CPU offload, it would otherwise read a copy of the
        # verdict that is not complete yet
        loss = sums[self.forward_backward.metrics.position("loss")]
        verdict = self.guard.judge(to_device_of(loss, grad_norm), grad_norm)
        self.optimizer.set_learning_rate(lr)
        self.optimizer.step_unless(verdict.skip)
        if balance is not None and balance.bias_speed:
            balance.move_biases(self.model.blocks(), counts, to_device_of(verdict.skip, counts))
        self.optimizer.zero_grad(set_to_none=True)
        if loss_scale:
            loss_scale.update(verdict.not_finite)
        used = torch.ones_like(grad_norm) if scale is None else scale
        return StepResult(lr, sums, worst, grad_norm, verdict, used)

    def clip(self, scale: Tensor | None) -> Tensor:
        """Clip the gradients, or let the update do so. Return their norm before. Collective.

        scale: see `clip_gradients`.
        """
        norm, value = self.cfg.optim.grad_clip, self.cfg.optim.grad_clip_value
        if norm is None or value is not None or not self.optimizer.divides_gradients:
            return clip_gradients(self.model, self.dims, norm, value, scale)
        before = clip_gradients(self.model, self.dims, None, None, scale)
        self.optimizer.divide_gradients(clip_divisor(before, norm))
        return before
