"""LAMB (You et al. 2020, arXiv 1904.00962): AdamW with steps scaled to the norm of the matrix."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from fsdp_trainer.optim.compact import MomentKind, NumberChunk
from fsdp_trainer.optim.layerwise import LayerwiseOptimizer, norm_ratio


class Lamb(LayerwiseOptimizer):
    """LAMB for matrices; vectors (norms and biases) are updated by AdamW.

    Group options: lr, betas, eps, weight_decay.
    """

    moments: ClassVar = {
        "exp_avg": MomentKind(signed=True, stochastic=False),
        "exp_avg_sq": MomentKind(signed=False, stochastic=True),
    }

    def measured(self, chunk: NumberChunk, group: dict[str, Any], count: Tensor) -> Tensor:
        """Update the moments, and return AdamW's step."""
        beta1, beta2 = group["betas"]
        gradient = chunk.gradient.float()
        mean = torch.lerp(chunk.load("exp_avg"), gradient, 1 - beta1)
        square = chunk.load("exp_avg_sq") * beta2
        chunk.store("exp_avg", mean)
        chunk.store("exp_avg_sq", square.addcmul_(gradient, gradient, value=1 - beta2))
        return direction(chunk, group, count)

    def rate(self, group: dict[str, Any], norms: Tensor, matrix: bool) -> Tensor | float:
        """Return ‖weight‖ / ‖step‖ of a matrix, and 1 for a vector."""
        return norm_ratio(*norms) if matrix else 1.0

    def move(
        self, chunk: NumberChunk, group: dict[str, Any], count: Tensor, rate: Tensor | float
    ) -> None:
        update = direction(chunk, group, count).mul_(rate)
        chunk.write(torch.sub(chunk.weight.float(), update, alpha=group["lr"]))


def direction(chunk: NumberChunk, group: dict[str, Any], count: Tensor) -> Tensor:
    """Return AdamW's step including weight decay, for a learning rate of 1: float32."""
    bias1, bias2 = (1 - beta ** count.double() for beta in group["betas"])
    root = (chunk.load("exp_avg_sq") / bias2).sqrt_().add_(group["eps"])
    step = chunk.load("exp_avg") / bias1 / root
    return step.add_(chunk.weight.float(), alpha=group["weight_decay"])
