"""LAMB (You et al. 2020, arXiv 1904.00962): AdamW with steps scaled to the norm of the matrix."""

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_trainer.base.distributed import replication_factor, sum_in_order
from fsdp_trainer.optim.compact import CompactOptimizer, MomentKind, NumberChunk
from fsdp_trainer.optim.footprint import is_matrix


class Lamb(CompactOptimizer):
    """LAMB for matrices; vectors (norms and biases) are updated by AdamW.

    Group options: lr, betas, eps, weight_decay. Norms are computed over complete parameters,
    independent of sharding.
    ranks: group of the ranks that hold parts of the same parameters; None: all ranks.
    """

    moments: ClassVar = {
        "exp_avg": MomentKind(signed=True, stochastic=False),
        "exp_avg_sq": MomentKind(signed=False, stochastic=True),
    }

    def __init__(self, *args: Any, ranks: dist.ProcessGroup | None = None, **options: Any):
        """Create the optimizer. args, options: see CompactOptimizer."""
        super().__init__(*args, **options)
        self.ranks = ranks

    def update(self, count: Tensor, skip: Tensor) -> None:
        """Update all moments, then the weights by them. Collective."""
        named = [
            (name, parameter, group)
            for group in self.param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
        ]
        squares = torch.stack([self.update_moments(p, group, count, skip) for _, p, group in named])
        ranks = dist.get_world_size(self.ranks) if dist.is_initialized() else 1
        # in a fixed order, so that the two copies of a tied embedding get bitwise equal norms
        squares = sum_in_order(squares, self.ranks)
        for (name, parameter, group), sums in zip(named, squares, strict=True):
            ratio = trust_ratio(sums / replication_factor(parameter, ranks))
            for chunk in self.chunks(parameter, count, skip):
                update = direction(chunk, group, count)
                if is_matrix(name, parameter.ndim):
                    update *= ratio
                chunk.write(torch.sub(chunk.weight.float(), update, alpha=group["lr"]))

    def update_moments(
        self, parameter: nn.Parameter, group: dict[str, Any], count: Tensor, skip: Tensor
    ) -> Tensor:
        """Update a parameter's moments; return Σ weight² and Σ update² of its part: [2] float64."""
        beta1, beta2 = group["betas"]
        sums = torch.zeros(2, dtype=torch.float64, device=self.count.device)
        for chunk in self.chunks(parameter, count, skip):
            gradient = chunk.gradient.float()
            mean = torch.lerp(chunk.load("exp_avg"), gradient, 1 - beta1)
            square = chunk.load("exp_avg_sq") * beta2
            chunk.store("exp_avg", mean)
            chunk.store("exp_avg_sq", square.addcmul_(gradient, gradient, value=1 - beta2))
            update = direction(chunk, group, count)
            for i, numbers in enumerate((chunk.weight, update)):
                sums[i] += torch.linalg.vector_norm(numbers, dtype=torch.float64).square()
        return sums


def direction(chunk: NumberChunk, group: dict[str, Any], count: Tensor) -> Tensor:
    """Return AdamW's step including weight decay, for a learning rate of 1: float32."""
    bias1, bias2 = (1 - beta ** count.double() for beta in group["betas"])
    root = (chunk.load("exp_avg_sq") / bias2).sqrt_().add_(group["eps"])
    step = chunk.load("exp_avg") / bias1 / root
    return step.add_(chunk.weight.float(), alpha=group["weight_decay"])


def trust_ratio(squares: Tensor) -> Tensor:
    """Return ‖weight‖ / ‖update‖ from their squares, or 1 if either is 0: float32 scalar."""
    weight, update = squares.sqrt().unbind()
    usable = (weight > 0) & (update > 0)
    return torch.where(usable, weight / update, 1.0).float()
