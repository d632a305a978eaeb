"""The outer optimizer of groups of ranks that train by themselves between two averages.

DiLoCo: Douillard et al. 2023, arXiv:2311.08105; averaging parts of the model at different steps:
Streaming DiLoCo, Douillard et al. 2025, arXiv:2501.18512.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from fsdp_trainer.base.distributed import local_part
from fsdp_trainer.config.schema import Replicas

OUTER = "outer/"
MOMENTUM = "outer_momentum/"
"""Beginnings of the tensors' names in a checkpoint."""


class OuterStep:
    """The outer weights, equal in all groups, and their momentum; sharded like the model's weights.

    The outer gradient of a group is the outer weights minus its own. The outer step is SGD with
    Nesterov momentum on the mean of the groups' outer gradients, as of torch.optim.SGD.
    """

    def __init__(self, cfg: Replicas, parameters: dict[str, nn.Parameter]):
        """parameters: the trained ones, by name. `begin` or a checkpoint gives the first state."""
        self.lr, self.momentum, self.mixing = cfg.outer_lr, cfg.outer_momentum, cfg.mixing
        self.parameters = parameters
        self.weights = {name: torch.zeros_like(p.detach()) for name, p in parameters.items()}
        self.buffers = {name: torch.zeros_like(p.detach()) for name, p in parameters.items()}
        sizes = [local_part(p).numel() for p in parameters.values()]
        self.fragments = cut_evenly(list(parameters), sizes, cfg.fragments)
        """Names of the parameters of each part of the model."""

    def state(self) -> dict[str, Tensor]:
        return {f"{OUTER}{name}": tensor for name, tensor in self.weights.items()} | {
            f"{MOMENTUM}{name}": tensor for name, tensor in self.buffers.items()
        }

    @torch.no_grad()
    def begin(self) -> None:
        for name, parameter in self.parameters.items():
            local_part(self.weights[name]).copy_(local_part(parameter))
            local_part(self.buffers[name]).zero_()

    @torch.no_grad()
    def reset_model(self) -> None:
        for name, parameter in self.parameters.items():
            local_part(parameter).copy_(local_part(self.weights[name]))

    @torch.no_grad()
    def gradients(self, fragment: int) -> list[Tensor]:
        """Return this rank's parts of the outer gradient of a part of the model, in new memory."""
        return [
            local_part(self.weights[name]) - local_part(self.parameters[name])
            for name in self.fragments[fragment]
        ]

    @torch.no_grad()
    def step(self, fragment: int, gradients: list[Tensor]) -> None:
        """Update the outer weights of a part of the model, and the model's weights from them.

        gradients: the means over the groups of `gradients`, which are overwritten. The model keeps
        the share `mixing` of its own weights.
        """
        names = self.fragments[fragment]
        outer = [local_part(self.weights[name]) for name in names]
        buffers = [local_part(self.buffers[name]) for name in names]
        torch._foreach_mul_(buffers, self.momentum)
        torch._foreach_add_(buffers, gradients)
        torch._foreach_add_(gradients, buffers, alpha=self.momentum)
        torch._foreach_add_(outer, gradients, alpha=-self.lr)
        for name, weight in zip(names, outer, strict=True):
            local_part(self.parameters[name]).lerp_(weight, 1 - self.mixing)


def cut_evenly(names: Sequence[str], sizes: Sequence[int], count: int) -> list[list[str]]:
    total = sum(sizes)
    lists: list[list[str]] = [[] for _ in range(count)]
    for name, size, end in zip(names, sizes, accumulate(sizes), strict=True):
        lists[min(count - 1, int((end - size / 2) * count / total))].append(name)
    return lists
