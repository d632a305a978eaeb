"""LARS (You et al. 2017, arXiv 1708.03888): momentum over steps scaled to each parameter's norm."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fsdp_trainer.optim.compact import MomentKind
from fsdp_trainer.optim.layerwise import LayerwiseOptimizer, norm_ratio, square_sum


class Lars(LayerwiseOptimizer):
    """LARS, algorithm 1 of the paper, for every parameter.

    The momentum sums steps that already have the learning rate of their time, unlike SGD's. Group
    options: lr, momentum, trust_coefficient, weight_decay.
    """

    moments: ClassVar = {"momentum_buffer": MomentKind(signed=True, stochastic=True)}

    def squares(
        self, parameter: nn.Parameter, group: dict[str, Any], count: Tensor, skip: Tensor
    ) -> Tensor:
        """Return Σ weight² and Σ gradient² of this rank's part of a parameter."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.count.device)
        for chunk in self.chunks(parameter, count, skip):
            sums += torch.stack([square_sum(chunk.weight), square_sum(chunk.gradient)])
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
        """Add the step to the momentum, and move the weight by the momentum."""
        weight_norm, gradient_norm = norms
        decay = group["weight_decay"]
        ratio = norm_ratio(weight_norm, gradient_norm + decay * weight_norm)
        rate = ratio * group["trust_coefficient"] * group["lr"]
        for chunk in self.chunks(parameter, count, skip):
            weight = chunk.weight.float()
            step = torch.add(chunk.gradient.float(), weight, alpha=decay).mul_(rate)
            total = chunk.load("momentum_buffer").mul(group["momentum"]).add_(step)
            chunk.store("momentum_buffer", total)
            chunk.write(weight - total)
