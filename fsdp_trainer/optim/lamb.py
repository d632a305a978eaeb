"""LAMB (You et al. 2020, arXiv 1904.00962): AdamW with steps scaled to the norm of the matrix."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fsdp_trainer.optim.compact import MomentKind, NumberChunk
from fsdp_trainer.optim.footprint import is_matrix
from fsdp_trainer.optim.layerwise import LayerwiseOptimizer, norm_ratio, square_sum


class Lamb(LayerwiseOptimizer):
    """LAMB for matrices; vectors (norms and biases) are updated by AdamW.

    Group options: lr, betas, eps, weight_decay.
    """

    moments: ClassVar = {
        "exp_avg": MomentKind(signed=True, stochastic=False),
        "exp_avg_sq": MomentKind(signed=False, stochastic=True),
    }

    def squares(
        self, parameter: nn.Parameter, group: dict[str, Any], count: Tensor, skip: Tensor
    ) -> Tensor:
        """Update a parameter's moments; return Σ weight² and Σ update² of its part."""
        beta1, beta2 = group["betas"]
        sums = torch.zeros(2, dtype=torch.float64, device=self.count.device)
        for chunk in self.chunks(parameter, count, skip):
            gradient = chunk.gradient.float()
            mean = torch.lerp(chunk.load("exp_avg"), gradient, 1 - beta1)
            square = chunk.load("exp_avg_sq") * beta2
            chunk.store("exp_avg", mean)
            chunk.store("exp_avg_sq", square.addcmul_(gradient, gradient, value=1 - beta2))
            update = direction(chunk, group, count)
            sums += torch.stack([square_sum(chunk.weight), square_sum(update)])
        return sums

    def update_weight(
        self,
        name: str,
        parameter: nn.Parameter,
        group: dict[str, Any],
        norms: Tensor,
        count: Tensor,
        skip: Tensor,
    ) -> None:
        """Move a matrix by as much as its norm, and a vector by AdamW's step, times lr."""
        ratio = norm_ratio(*norms)
        for chunk in self.chunks(parameter, count, skip):
            update = direction(chunk, group, count)
            if is_matrix(name, parameter.ndim):
                update *= ratio
            chunk.write(torch.sub(chunk.weight.float(), update, alpha=group["lr"]))


def direction(chunk: NumberChunk, group: dict[str, Any], count: Tensor) -> Tensor:
    """Return AdamW's step including weight decay, for a learning rate of 1: float32."""
    bias1, bias2 = (1 - beta ** count.double() for beta in group["betas"])
    root = (chunk.load("exp_avg_sq") / bias2).sqrt_().add_(group["eps"])
    step = chunk.load("exp_avg") / bias1 / root
    return step.add_(chunk.weight.float(), alpha=group["weight_decay"])
