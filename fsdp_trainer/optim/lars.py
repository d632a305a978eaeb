"""LARS (You et al. 2017, arXiv 1708.03888): momentum over steps scaled to each parameter's norm."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from fsdp_trainer.optim.compact import MomentKind, NumberChunk
from fsdp_trainer.optim.layerwise import LayerwiseOptimizer, norm_ratio


class Lars(LayerwiseOptimizer):
    """LARS, algorithm 1 of the paper, for every parameter.

    The momentum sums steps that already have the learning rate of their time, unlike SGD's. Group
    options: lr, momentum, trust_coefficient, weight_decay.
    """

    moments: ClassVar = {"momentum_buffer": MomentKind(signed=True, stochastic=True)}

    def measured(self, chunk: NumberChunk, group: dict[str, Any], count: Tensor) -> Tensor:
        return chunk.gradient

    def rate(self, group: dict[str, Any], norms: Tensor, matrix: bool) -> Tensor:
        """Return the learning rate of a parameter: the same share of its norm for all of them."""
        weight_norm, gradient_norm = norms
        ratio = norm_ratio(weight_norm, gradient_norm + group["weight_decay"] * weight_norm)
        return ratio * group["trust_coefficient"] * group["lr"]

    def move(
        self, chunk: NumberChunk, group: dict[str, Any], count: Tensor, rate: Tensor | float
    ) -> None:
        weight = chunk.weight.float()
        step = torch.add(chunk.gradient.float(), weight, alpha=group["weight_decay"]).mul_(rate)
        total = chunk.load("momentum_buffer").mul(group["momentum"]).add_(step)
        chunk.store("momentum_buffer", total)
        chunk.write(weight - total)
