"""Forward and backward of a step's micro-batches, and what the ranks then know of it together."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsdp_trainer import phases
from fsdp_trainer.distributed import to_device_of
from fsdp_trainer.models.balance import LOAD
from fsdp_trainer.models.decoder import Decoder, DecoderOutput, MicroBatch
from fsdp_trainer.models.head import Objective, Scores
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.training.batches import StepPlan
from fsdp_trainer.training.feed import StepBatches
from fsdp_trainer.training.gradients import GradientSync
from fsdp_trainer.training.guard import (
    EmbeddingGradProbe,
    StepVerdict,
)
from fsdp_trainer.training.loss_scale import LossScale
from fsdp_trainer.training.metrics import AnswerFigures, Metrics, MicroBatchResult
from fsdp_trainer.training.objective import negative_log_likelihood


class StepResult(NamedTuple):
    """A step, on the device.

    sums, worst: see ForwardBackward.run. grad_norm: before clipping, a scalar where the gradients
    lie. scale: of the loss in this step, 1 where it has none.
    """

    lr: float
    sums: Tensor
    worst: Tensor
    grad_norm: Tensor
    verdict: StepVerdict
    scale: Tensor


@dataclass
class ForwardBackward:
    """Runs micro-batches one after another. A pipeline's schedule: see PipelineForwardBackward."""

    model: Decoder
    objective: Callable[[Tensor], Objective]
    """A function that makes the objective from a micro-batch's weights."""
    metrics: Metrics
    dims: Dims
    probe: EmbeddingGradProbe
    gradient_sync: GradientSync | None = None
    """None: a pipeline's stages see to it."""
    loss_scale: LossScale | None = None
    """None: the loss is minimised as it is."""
    pair_figures: AnswerFigures | None = None
    """None: neither answers nor a teacher are compared."""

    def run(self, step: StepBatches, micro_batches: Iterable[MicroBatch]) -> tuple[Tensor, Tensor]:
        """Leave the step's gradients sharded and summed over ranks. Collective.

        Returns what all ranks know then, on the device. sums: float64, of the step's metrics;
        worst: float64 [2, ranks], of each rank its highest mean loss of a micro-batch (inf: not
        finite), and which micro-batch that was.

        micro_batches: those of `step`. Where this rank lacked its rows the loss is NaN on every
        rank, and none updates its weights.
        """
        sums = self.metrics.zeros()
        losses: list[Tensor] = []
        for i, batch in enumerate(micro_batches):
            self._before_backward(last=i == step.count - 1)
            result = self.compute(step.plan, batch)
            self.metrics.add(sums, result)
            losses.append(self._own_loss(step.plan, result) + self._own_check())
            phases.enter("data")
        phases.enter("backward")  # it ends with what the ranks have in common
        return self._together(step, sums, torch.stack(losses))

    def _together(self, step: StepBatches, sums: Tensor, losses: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `run` does. Collective. losses: [micro-batches, 2], see `_own_loss`."""
        worst = sums.new_zeros(2, self.dims.batch_ranks)
        highest = self._mean_losses(losses).max(0)
        if self.dims.reads_first:  # one of those that read the same rows
            worst[:, self.dims.batch_rank] = torch.stack([x.double() for x in highest])
        if step.data_missing:
            sums[self.metrics.position("loss")] = torch.nan
        reduced = torch.cat([sums, worst.flatten()])
        self.dims.sum_over_tokens(reduced)
        if self.model.balance is not None:
            self.model.balance.update(self.metrics.of(LOAD, reduced), step.plan.tokens)
        return reduced[: len(sums)], reduced[len(sums) :]

    def compute(self, plan: StepPlan, batch: MicroBatch) -> MicroBatchResult:
        """Run forward and backward of one micro-batch."""
        phases.enter("forward")
        weights = batch.weights / (plan.weight or 1.0)  # a step may have no target
        batch = shared_out(batch, plan)
        scale = to_device_of(self.loss_scale.scale, weights) if self.loss_scale else None
        scaled = weights if scale is None else weights * scale
        value, scores, auxiliary = self.forward(batch, self.objective(scaled))
        phases.enter("backward")
        assert value is not None
        value.backward()
        loss = negative_log_likelihood(scores, weights)
        value = value.detach() if scale is None else value.detach() / scale
        return MicroBatchResult(batch, scores, loss, value, auxiliary)

    def scores(
        self, step: StepBatches, before: Callable[[], None]
    ) -> Iterator[tuple[MicroBatch, Scores]]:
        """Yield the scores of the step's micro-batches, without a gradient. Collective.

        before: called before each, on all ranks alike; may raise.
        """
        for batch in step:
            before()
            yield batch, self.forward(batch).scores

    def forward(self, batch: MicroBatch, objective: Objective | None = None) -> DecoderOutput:
        """Run the model on a micro-batch."""
        return self.model(batch, objective)

    @property
    def decoder(self) -> Any:
        """Return what continues prompts."""
        return self.model

    def compute_apart(
        self, plan: StepPlan, batch: MicroBatch, optimizer: Optimizer
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Compute a micro-batch before the step begins, for comparison, and leave no gradient
        behind.

        Returns the objective's value, the gradient of the embedding's output, and the parameters'.
        """
        self._before_backward(last=True)
        result = self.compute(plan, batch)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        optimizer.zero_grad(set_to_none=True)
        return result.objective, self.probe.pop(), gradients

    def _before_backward(self, last: bool) -> None:
        if self.gradient_sync is not None:
            self.gradient_sync.before(last)

    def loss(self, batch: MicroBatch, scores: Scores) -> Tensor:
        """Return a micro-batch's share of the reported loss, not divided: a scalar."""
        return negative_log_likelihood(scores, batch.weights)

    def weight(self, plan: StepPlan) -> float:
        """Return what the reported loss of a step is divided by."""
        return plan.weight

    def own_weight(self, batch: MicroBatch) -> Tensor:
        """Return a micro-batch's part of `weight`, a scalar."""
        return batch.weights.sum()

    def _own_loss(self, plan: StepPlan, result: MicroBatchResult) -> Tensor:
        """Return Σ weight · loss of the tokens on this rank, and Σ weight: float64."""
        loss = (result.loss * (self.weight(plan) or 1.0)).double()
        return torch.stack([loss, self.own_weight(result.batch).double()])

    def _own_check(self) -> Tensor | float:
        """Return 0; not finite where the last gradient of the embedding's output is not."""
        gradient = self.probe.pop()
        return 0.0 if gradient is None else 0 * gradient.sum(dtype=torch.float32).double()

    def _mean_losses(self, sums: Tensor) -> Tensor:
        """Return the mean loss of each micro-batch, over the ranks that share its rows.

        sums: [micro-batches, 2], see `_own_loss`. Infinite where it is not finite. Collective.
        """
        self.dims.sum_over_context(sums)
        self.dims.sum_over_stages(sums)
        tiny = torch.finfo(torch.float32).tiny
        means = sums[:, 0] / sums[:, 1].clamp_min(tiny)
        return means.nan_to_num(torch.inf, torch.inf, torch.inf)


def shared_out(batch: MicroBatch, plan: StepPlan) -> MicroBatch:
    """Return a micro-batch whose tokens have their share of the step's, where they are counted."""
    if batch.token_share is None:
        return batch
    return replace(batch, token_share=batch.token_share / max(plan.tokens, 1))
