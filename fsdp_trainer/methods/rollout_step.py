"""Forward and backward of micro-batches of rewarded answers."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fsdp_trainer.base import phases
from fsdp_trainer.base.distributed import to_device_of
from fsdp_trainer.config.schema import ObjectiveChoice
from fsdp_trainer.methods.policy_gradient import REFERENCE, PolicyGradient, columns_of
from fsdp_trainer.models.adapters.adapters import without_adapters
from fsdp_trainer.models.decoder import Decoder, MicroBatch
from fsdp_trainer.training.batches import StepPlan
from fsdp_trainer.training.metrics import MicroBatchResult
from fsdp_trainer.training.step import ForwardBackward, shared_out


@dataclass(frozen=True)
class BaseTokens:
    """The reference of a model with adapters: the same model without them."""

    model: Decoder

    @torch.no_grad()
    def __call__(self, batch: MicroBatch) -> Tensor:
        """Return the log-probability of each target, [supervised]. Collective."""
        with without_adapters(self.model):
            return self.model(batch).scores.log_probability


@dataclass(kw_only=True)
class RolloutForwardBackward(ForwardBackward):
    """Runs micro-batches of answers. The reported loss is the objective's.

    reference: function for the reference's log-probabilities of targets; None without objective.kl.
    """

    choice: ObjectiveChoice
    reference: Callable[[MicroBatch], Tensor] | None = None

    def compute(self, plan: StepPlan, batch: MicroBatch) -> MicroBatchResult:
        """See ForwardBackward."""
        phases.enter("forward")
        batch = shared_out(batch, plan)
        if self.reference is not None:
            columns = {**(batch.columns or {}), REFERENCE: self.reference(batch)}
            batch = replace(batch, columns=columns)
        weights = batch.weights / (plan.weight or 1.0)
        scale = to_device_of(self.loss_scale.scale, weights) if self.loss_scale else 1.0
        on_server = self.choice.server is not None
        objective = PolicyGradient(weights, columns_of(batch), self.choice, on_server)
        value, scores, auxiliary = self.model(batch, replace(objective, weights=weights * scale))
        phases.enter("backward")
        value.backward()
        loss = objective(scores, slice(0, len(weights)))
        return MicroBatchResult(batch, scores, loss, value.detach() / scale, auxiliary)
