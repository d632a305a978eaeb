"""Forward and backward of a step's micro-batches, and the reduction of its metrics over ranks."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsdp_trainer.base import phases
from fsdp_trainer.base.distributed import to_device_of
from fsdp_trainer.models.decoder import Decoder, DecoderOutput, MicroBatch
from fsdp_trainer.models.head import Objective, Scores
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.training.batches import StepPlan
from fsdp_trainer.training.feed import StepBatches
from fsdp_trainer.training.gradients import GradientSync
from fsdp_trainer.training.guard import EmbeddingGradProbe, StepVerdict
from fsdp_trainer.training.loss import negative_log_likelihood
from fsdp_trainer.training.loss_scale import LossScale
from fsdp_trainer.training.metrics import Metrics, MicroBatchResult


class StepResult(NamedTuple):
    """The result of a step; its tensors are on the device.

    sums, worst: see ForwardBackward.run. grad_norm: gradient norm before clipping, a scalar on the
    gradients' device. scale: loss scale used in this step, 1 if there is none.
    """

    lr: float
    sums: Tensor
    worst: Tensor
    grad_norm: Tensor
    verdict: StepVerdict
    scale: Tensor


@dataclass
class ForwardBackward:
    """Runs micro-batches one after another. For a pipeline, see PipelineForwardBackward."""

    model: Decoder
    objective: Callable[[Tensor], Objective]
    """A function that makes the objective from a micro-batch's weights."""
    metrics: Metrics
    dims: Dims
    probe: EmbeddingGradProbe
    gradient_sync: GradientSync | None = None
    """None: the pipeline synchronises the gradients."""
    loss_scale: LossScale | None = None
    """None: the loss is not scaled."""

    def run(self, step: StepBatches, micro_batches: Iterable[MicroBatch]) -> tuple[Tensor, Tensor]:
        """Compute the step's gradients, sharded and summed over ranks. Collective.

        Returns (sums, worst), equal on all ranks of this group and on the device. sums: float64,
        the sums of the step's metrics. worst: float64 [2, ranks], for each rank of any group the
        highest mean loss of a micro-batch (inf: not finite) and the index of that micro-batch; 0
        for those of other groups.

        micro_batches: those of `step`. If rows are missing on any rank, the loss is NaN on every
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
        phases.enter("backward")  # the reduction over ranks counts as part of it
        return self._reduce(step, sums, torch.stack(losses))

    def _reduce(self, step: StepBatches, sums: Tensor, losses: Tensor) -> tuple[Tensor, Tensor]:
        """Reduce over ranks; return the result of `run`. Collective.

        losses: [micro-batches, 2], see `_own_loss`.
        """
        reader, readers = step.reader
        worst = sums.new_zeros(2, readers)
        highest = self._mean_losses(losses).max(0)
        if self.dims.reads_first and reader is not None:  # one of those that read the same rows
            worst[:, reader] = torch.stack([x.double() for x in highest])
        if step.data_missing:
            sums[self.metrics.position("loss")] = torch.nan
        reduced = torch.cat([sums, worst.flatten()])
        self.dims.sum_over_tokens(reduced)
        return reduced[: len(sums)], reduced[len(sums) :]

    def compute(self, plan: StepPlan, batch: MicroBatch) -> MicroBatchResult:
        """Run forward and backward of one micro-batch."""
        phases.enter("forward")
        weights = batch.weights / (plan.weight or 1.0)  # a step may have no targets
        batch = with_step_token_share(batch, plan)
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

        before: called before each, on all ranks together; may raise.
        """
        for batch in step:
            before()
            yield batch, self.forward(batch).scores

    def forward(self, batch: MicroBatch, objective: Objective | None = None) -> DecoderOutput:
        return self.model(batch, objective)

    @property
    def decoder(self) -> Any:
        """Return the object that computes logits for generation."""
        return self.model

    def compute_separately(
        self, plan: StepPlan, batch: MicroBatch, optimizer: Optimizer
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Compute a micro-batch separately from the step, for comparison, and clear its gradients.

        Returns the objective's value, the gradient of the embedding's output, and the gradients of
        the parameters.
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
        """Return a micro-batch's addend to the loss before division by `weight`, a scalar."""
        return negative_log_likelihood(scores, batch.weights)

    def weight(self, plan: StepPlan) -> float:
        """Return the divisor of the reported loss of a step."""
        return plan.weight

    def own_weight(self, batch: MicroBatch) -> Tensor:
        """Return a micro-batch's part of `weight`, a scalar."""
        return batch.weights.sum()

    def _own_loss(self, plan: StepPlan, result: MicroBatchResult) -> Tensor:
        """Return [2] float64: Σ weight · loss of the tokens on this rank, and Σ weight."""
        loss = (result.loss * (self.weight(plan) or 1.0)).double()
        return torch.stack([loss, self.own_weight(result.batch).double()])

    def _own_check(self) -> Tensor | float:
        """Return 0, or NaN if the last gradient of the embedding's output is not finite."""
        gradient = self.probe.pop()
        return 0.0 if gradient is None else 0 * gradient.sum(dtype=torch.float32).double()

    def _mean_losses(self, sums: Tensor) -> Tensor:
        """Return the mean loss of each micro-batch over the ranks that split its rows. Collective.

        sums: [micro-batches, 2], see `_own_loss`. A mean that is not finite is returned as inf.
        """
        self.dims.sum_over_context(sums)
        self.dims.sum_over_stages(sums)
        tiny = torch.finfo(torch.float32).tiny
        means = sums[:, 0] / sums[:, 1].clamp_min(tiny)
        return means.nan_to_num(torch.inf, torch.inf, torch.inf)


def with_step_token_share(batch: MicroBatch, plan: StepPlan) -> MicroBatch:
    if batch.token_share is None:
        return batch
    return replace(batch, token_share=batch.token_share / max(plan.tokens, 1))
