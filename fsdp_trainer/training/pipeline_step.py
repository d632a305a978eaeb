"""Forward and backward of a step's micro-batches by a pipeline's schedule."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsdp_trainer.base import phases
from fsdp_trainer.base.distributed import to_device_of
from fsdp_trainer.models.decoder import MicroBatch
from fsdp_trainer.models.head import Scores
from fsdp_trainer.parallel.pipeline import Pipeline
from fsdp_trainer.training.batches import StepPlan
from fsdp_trainer.training.feed import StepBatches
from fsdp_trainer.training.loss import negative_log_likelihood
from fsdp_trainer.training.metrics import MicroBatchResult
from fsdp_trainer.training.step import ForwardBackward, with_step_token_share


@dataclass(kw_only=True)
class PipelineForwardBackward(ForwardBackward):
    """Runs all micro-batches of a step through the stages of a pipeline.

    The ranks of the last stage have the losses, and those of the first one have the gradient of the
    embedding's output.
    """

    pipeline: Pipeline
    checks: dict[int, Tensor | float] = field(default_factory=dict)
    """Result of `_own_check` for each micro-batch whose backward has ended, by its number."""

    def __post_init__(self) -> None:
        self.pipeline.after_backward = self._check

    def _check(self, number: int) -> None:
        self.checks[number] = self._own_check()

    def run(self, step: StepBatches, micro_batches: Iterable[MicroBatch]) -> tuple[Tensor, Tensor]:
        batches = self._with_empty(step, list(micro_batches))
        results = self._train(step.plan, batches)[: step.count]
        phases.enter("backward")
        sums = self.metrics.zeros()
        losses = sums.new_zeros(step.count, 2)
        for values in self.pipeline.pop_auxiliary():
            self.metrics.add_auxiliary(sums, values)
        for i, result in enumerate(results):
            self.metrics.add(sums, result)
            losses[i] = self._own_loss(step.plan, result)
        for i in range(step.count):
            losses[i] += self.checks.get(i, 0.0)
        return self._reduce(step, sums, losses)

    def _with_empty(self, step: StepBatches, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Append empty micro-batches up to the number that the schedule needs."""
        missing = self.pipeline.count - len(batches)
        return batches + [step.empty() for _ in range(missing)]

    def _train(self, plan: StepPlan, batches: list[MicroBatch]) -> list[MicroBatchResult]:
        self.checks.clear()
        weights = [batch.weights / (plan.weight or 1.0) for batch in batches]
        batches = [with_step_token_share(batch, plan) for batch in batches]
        scale = to_device_of(self.loss_scale.scale, weights[0]) if self.loss_scale else None
        scaled = weights if scale is None else [each * scale for each in weights]
        computed = self.pipeline.train(batches, [self.objective(each) for each in scaled])
        if scale is not None:
            computed = [(value / scale, scores) for value, scores in computed]
        balance = self.model.balance
        # zeros, since the values of each stage are added up by `run`
        auxiliary = balance.zeros() if balance else {}
        return [
            MicroBatchResult(batch, scores, negative_log_likelihood(scores, own), value, auxiliary)
            for batch, own, (value, scores) in zip(batches, weights, computed, strict=False)
        ]

    def scores(
        self, step: StepBatches, before: Callable[[], None]
    ) -> Iterator[tuple[MicroBatch, Scores]]:
        """See ForwardBackward. A rank without the last stage yields nothing."""
        following = iter(step)
        while batches := list(islice(following, self.pipeline.count)):
            before()
            scores = self.pipeline.score(self._with_empty(step, batches))
            yield from zip(batches, scores, strict=False)

    @property
    def decoder(self) -> Any:
        return self.pipeline

    def compute_separately(
        self, plan: StepPlan, batch: MicroBatch, optimizer: Optimizer
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """See ForwardBackward.

        Other micro-batches, of weight 0, fill the schedule. Each rank returns the gradients of its
        own stages' parameters, and no gradient of the embedding's output.
        """
        share = batch.token_share
        others = replace(
            batch,
            weights=torch.zeros_like(batch.weights),
            token_share=None if share is None else torch.zeros_like(share),
        )
        results = self._train(plan, [batch] + [others] * (self.pipeline.count - 1))
        self.pipeline.pop_auxiliary()
        value = results[0].objective if results else batch.weights.new_zeros(())
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        optimizer.zero_grad(set_to_none=True)
        return value, None, gradients
