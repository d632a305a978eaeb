"""The base of optimizers whose step of a parameter depends on norms of the whole parameter."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_trainer.base.distributed import replication_factor, sum_in_order
from fsdp_trainer.optim.compact import CompactOptimizer, NumberChunk
from fsdp_trainer.optim.footprint import is_matrix


class LayerwiseOptimizer(CompactOptimizer):
    """A CompactOptimizer that sums squares over complete parameters, however they are sharded.

    ranks: group of the ranks that hold parts of the same parameters; None: all ranks.
    """

    def __init__(self, *args: Any, ranks: dist.ProcessGroup | None = None, **options: Any):
        super().__init__(*args, **options)
        self.ranks = ranks

    def update(self, count: Tensor, skip: Tensor) -> None:
        """Sum each parameter's squares over its parts, then update its weights. Collective."""
        named = list(self.named())
        squares = torch.stack([self._squares(p, group, count, skip) for _, p, group in named])
        ranks = dist.get_world_size(self.ranks) if dist.is_initialized() else 1
        # in a fixed order, so that the two copies of a tied embedding get bitwise equal norms
        squares = sum_in_order(squares, self.ranks)
        for (name, parameter, group), sums in zip(named, squares, strict=True):
            norms = (sums / replication_factor(parameter, ranks)).sqrt()
            rate = self.rate(group, norms, is_matrix(name, parameter.ndim))
            for chunk in self.chunks(parameter, count, skip):
                self.move(chunk, group, count, rate)

    def named(self) -> Iterator[tuple[str, nn.Parameter, dict[str, Any]]]:
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                yield name, parameter, group

    def _squares(
        self, parameter: nn.Parameter, group: dict[str, Any], count: Tensor, skip: Tensor
    ) -> Tensor:
        """Return Σ weight² and Σ measured² of this rank's part of a parameter: [2] float64."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.count.device)
        for chunk in self.chunks(parameter, count, skip):
            measured = self.measured(chunk, group, count)
            sums += torch.stack([square_sum(chunk.weight), square_sum(measured)])
        return sums

    def measured(self, chunk: NumberChunk, group: dict[str, Any], count: Tensor) -> Tensor:
        """Return the numbers whose norm is needed beside the weight's."""
        raise NotImplementedError

    def rate(self, group: dict[str, Any], norms: Tensor, matrix: bool) -> Tensor | float:
        """Return the factor on a parameter's step. norms: of its weight and of what is measured."""
        raise NotImplementedError

    def move(
        self, chunk: NumberChunk, group: dict[str, Any], count: Tensor, rate: Tensor | float
    ) -> None:
        """Update the weights of a chunk. rate: what `rate` returned for the parameter."""
        raise NotImplementedError


def square_sum(numbers: Tensor) -> Tensor:
    return torch.linalg.vector_norm(numbers, dtype=torch.float64).square()


def norm_ratio(weight: Tensor, update: Tensor) -> Tensor:
    """Return ‖weight‖ / ‖update‖, or 1 if either is 0: float32 scalar. The arguments are norms."""
    usable = (weight > 0) & (update > 0)
    return torch.where(usable, weight / update, 1.0).float()
