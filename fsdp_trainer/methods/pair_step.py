"""Forward and backward of micro-batches of preference pairs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fsdp_trainer.base import phases
from fsdp_trainer.base.distributed import to_device_of
from fsdp_trainer.config.schema import ObjectiveChoice
from fsdp_trainer.methods.preferences import (
    ANSWERS,
    PairObjective,
    answer_sums,
    counted_once,
)
from fsdp_trainer.models.adapters.adapters import without_adapters
from fsdp_trainer.models.decoder import Decoder, MicroBatch
from fsdp_trainer.models.head import Objective, Scores
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.training.batches import StepPlan
from fsdp_trainer.training.feed import StepBatches
from fsdp_trainer.training.metrics import MicroBatchResult
from fsdp_trainer.training.step import ForwardBackward, shared_out


def no_reference(batch: MicroBatch) -> MicroBatch:
    """Return the batch unchanged: the objective has no reference."""
    return batch


def stored_reference(batch: MicroBatch) -> MicroBatch:
    """Return the batch unchanged: its rows were read with the reference's sums."""
    assert batch.groups is not None
    assert batch.reference is not None or not len(batch.groups)  # only padding
    return batch


@dataclass(frozen=True)
class BaseReference:
    """The reference of a model with adapters: the same model without them."""

    model: Decoder
    dims: Dims

    @torch.no_grad()
    def __call__(self, batch: MicroBatch) -> MicroBatch:
        """Run one forward and return the batch with the reference's sums. Collective.

        A batch that has them already is returned unchanged.
        """
        if batch.reference is not None:
            return batch
        with without_adapters(self.model):
            scores = self.model(batch).scores
        sums = answer_sums(scores.log_probability, batch, self.dims)
        return replace(batch, reference=sums)


@dataclass(kw_only=True)
class PairForwardBackward(ForwardBackward):
    """Runs micro-batches of pairs. The reported loss is the objective's, a mean over the pairs."""

    choice: ObjectiveChoice
    reference: Callable[[MicroBatch], MicroBatch] = field(default=no_reference)

    def compute(self, plan: StepPlan, batch: MicroBatch) -> MicroBatchResult:
        """See ForwardBackward."""
        phases.enter("forward")
        batch = self.reference(shared_out(batch, plan))
        count = self.weight(plan) or 1.0
        scale = to_device_of(self.loss_scale.scale, batch.weights) if self.loss_scale else 1.0
        scaled = self.comparison(batch, count / scale)
        value, scores, auxiliary = self.model(batch, scaled)
        phases.enter("backward")
        value.backward()
        loss = self.loss(batch, scores) / count
        return MicroBatchResult(batch, scores, loss, value.detach() / scale, auxiliary)

    def scores(
        self, step: StepBatches, before: Callable[[], None]
    ) -> Iterator[tuple[MicroBatch, Scores]]:
        """See ForwardBackward."""
        for batch in step:
            before()
            with_reference = self.reference(batch)
            yield with_reference, self.model(with_reference).scores

    def loss(self, batch: MicroBatch, scores: Scores) -> Tensor:
        """See ForwardBackward."""
        return self.comparison(batch, 1.0)(scores, slice(0, len(batch.targets)))

    def comparison(self, batch: MicroBatch, count: float | Tensor) -> Objective:
        """Return the objective of a micro-batch, Σ loss / count."""
        return PairObjective(batch, self.choice, count, self.dims)

    def weight(self, plan: StepPlan) -> float:
        """Return the number of pairs in the step. See ForwardBackward."""
        return plan.documents / len(ANSWERS)

    def own_weight(self, batch: MicroBatch) -> Tensor:
        """See ForwardBackward."""
        assert batch.groups is not None
        pairs = batch.weights.new_full((), len(batch.groups) / len(ANSWERS))
        return counted_once(pairs, self.dims)
