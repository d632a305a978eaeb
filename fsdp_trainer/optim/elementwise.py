"""Optimizers in which the update of a number depends only on the gradients of that number."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from fsdp_trainer.base.compiled import compiled_if_possible
from fsdp_trainer.optim.compact import CompactOptimizer, MomentKind, NumberChunk

ALIGNED = 16
"""Numbers, of which a GPU reads several at a time."""


class ElementwiseOptimizer(CompactOptimizer):
    """A CompactOptimizer that updates one chunk after the other, each by itself."""

    _update_chunk: Callable[..., None] | None = None
    """`draw_and_update`, compiled; None: as it is."""

    def update(self, count: Tensor, skip: Tensor) -> None:
        """Update every parameter that has a gradient, chunk by chunk; with `skip`, none."""
        update = self._update_chunk or type(self).draw_and_update
        for group in self.param_groups:
            for parameter in group["params"]:
                for chunk in self.undrawn_chunks(parameter, skip):
                    update(self, chunk, group, count, self.grad_scale)

    def draw_and_update(
        self,
        chunk: NumberChunk,
        group: dict[str, Any],
        count: Tensor,
        divisor: Tensor | None,
    ) -> None:
        """Update a chunk of a parameter by itself. divisor: of its gradient, if any."""
        # to be known when it is compiled: only then many numbers are read at a time
        bool(chunk.weight.numel() % ALIGNED == 0)
        gradient = chunk.gradient.float()
        if divisor is not None:
            gradient = gradient / divisor
        self.update_chunk(chunk.drawn(count), gradient, group, count)

    def update_chunk(
        self, chunk: NumberChunk, gradient: Tensor, group: dict[str, Any], count: Tensor
    ) -> None:
        raise NotImplementedError


class CompactAdamW(ElementwiseOptimizer):
    """AdamW (Loshchilov & Hutter 2019). Group options: lr, betas, eps, weight_decay."""

    moments: ClassVar = {
        "exp_avg": MomentKind(signed=True, stochastic=False),
        "exp_avg_sq": MomentKind(signed=False, stochastic=True),
    }

    def fuse(self) -> None:
        """Update each chunk by one kernel, which draws the random bits and divides the gradients.

        Moments in 8 bits are updated as before.
        """
        if self.state_format != "8bit":
            what = "the update of weights and moments"
            device = self.count.device.type
            self._update_chunk = compiled_if_possible(type(self).draw_and_update, device, what)
            self.divides_gradients = all(p.dtype == torch.float32 for p in self.keys)

    def update_chunk(
        self, chunk: NumberChunk, gradient: Tensor, group: dict[str, Any], count: Tensor
    ) -> None:
        """Update the moments, and the weight by mean / √(mean square)."""
        mean, square = chunk.load("exp_avg"), chunk.load("exp_avg_sq")
        new, mean, square = adamw(chunk.weight.float(), gradient, mean, square, group, count)
        chunk.store("exp_avg", mean)
        chunk.store("exp_avg_sq", square)
        chunk.write(new)


def adamw(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    group: dict[str, Any],
    count: Tensor,
) -> tuple[Tensor, ...]:
    """Return the new weight, mean and mean square, float32, of any shape.

    count: number of this step, starting at 1; a scalar on the device.
    """
    beta1, beta2 = group["betas"]
    lr = group["lr"]
    # in float64: the first corrections would keep only four digits in float32
    bias1, bias2 = (1 - beta ** count.double() for beta in (beta1, beta2))
    mean = torch.lerp(mean, gradient, 1 - beta1)
    square = (square * beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (square / bias2).sqrt_().add_(group["eps"])
    step = (mean / root).mul_(lr / bias1)
    return (weight * (1 - lr * group["weight_decay"])).sub_(step), mean, square


class Lion(ElementwiseOptimizer):
    """Lion (Chen et al. 2023, arXiv 2302.06675). Group options: lr, betas, weight_decay."""

    moments: ClassVar = {"exp_avg": MomentKind(signed=True, stochastic=True)}

    def update_chunk(
        self, chunk: NumberChunk, gradient: Tensor, group: dict[str, Any], count: Tensor
    ) -> None:
        beta1, beta2 = group["betas"]
        mean = chunk.load("exp_avg")
        direction = torch.lerp(mean, gradient, 1 - beta1).sign_()
        decay = 1 - group["lr"] * group["weight_decay"]
        new = (chunk.weight.float() * decay).sub_(direction, alpha=group["lr"])
        chunk.store("exp_avg", torch.lerp(mean, gradient, 1 - beta2))
        chunk.write(new)


class Sgd(ElementwiseOptimizer):
    """Stochastic gradient descent. Group options: lr, momentum, nesterov, weight_decay.

    Momentum is as in torch: a sum of gradients that is multiplied by `momentum` in each step.
    Weight decay is decoupled from it.
    """

    moments: ClassVar = {"momentum_buffer": MomentKind(signed=True, stochastic=True)}

    def update_chunk(
        self, chunk: NumberChunk, gradient: Tensor, group: dict[str, Any], count: Tensor
    ) -> None:
        momentum = group["momentum"]
        total = chunk.load("momentum_buffer") * momentum + gradient
        direction = gradient + total * momentum if group["nesterov"] else total
        decay = 1 - group["lr"] * group["weight_decay"]
        new = (chunk.weight.float() * decay).sub_(direction, alpha=group["lr"])
        chunk.store("momentum_buffer", total)
        chunk.write(new)
