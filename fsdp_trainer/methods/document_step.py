"""Forward and backward of micro-batches whose loss is one of whole documents."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from fsdp_trainer.base import phases
from fsdp_trainer.base.distributed import to_device_of
from fsdp_trainer.models.decoder import MicroBatch
from fsdp_trainer.models.head import Objective, Scores
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.training.batches import StepPlan
from fsdp_trainer.training.documents.document_sums import counted_once
from fsdp_trainer.training.feed import StepBatches
from fsdp_trainer.training.metrics import MicroBatchResult
from fsdp_trainer.training.step import ForwardBackward, with_step_token_share


@dataclass(frozen=True)
class DocumentObjective:
    """Σ loss of a micro-batch's documents, or groups of them / count. The head calls it once.

    dims: None if every rank has complete rows; of ranks that split rows, only the first one has the
    value, and all have its gradient.
    """

    batch: MicroBatch
    count: float | Tensor
    dims: Dims | None
    needs_mean = False
    needs_all_tokens = True

    def losses(self, scores: Scores) -> Tensor:
        """Return the losses. scores: those of all tokens. Collective."""
        raise NotImplementedError

    def __call__(self, scores: Scores, tokens: slice) -> Tensor:
        return counted_once((self.losses(scores).sum() / self.count).float(), self.dims)


@dataclass
class DocumentForwardBackward(ForwardBackward):
    """Runs micro-batches of documents. The reported loss is the objective's, a mean over groups.

    Only the first document of each group in the data has a weight, which is 1, unless a subclass
    counts in another way.
    """

    def complete(self, batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch with all that the comparison needs. Collective."""
        return batch

    def comparison(self, batch: MicroBatch, count: float | Tensor) -> Objective:
        raise NotImplementedError

    def compute(self, plan: StepPlan, batch: MicroBatch) -> MicroBatchResult:
        phases.enter("forward")
        batch = self.complete(with_step_token_share(batch, plan))
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
        for batch in step:
            before()
            completed = self.complete(batch)
            yield completed, self.model(completed).scores

    def loss(self, batch: MicroBatch, scores: Scores) -> Tensor:
        return self.comparison(batch, 1.0)(scores, slice(0, len(batch.targets)))

    def own_weight(self, batch: MicroBatch) -> Tensor:
        last = batch.documents.groups[-1:]  # they are numbered from 0, in order
        return counted_once((last + 1).sum().to(batch.weights.dtype), self.dims)
