"""The loss scale of a training in float16 (Micikevicius et al. 2018, arXiv 1710.03740, §3.2).

Gradients below 6e-8 are 0 in float16. So the loss is multiplied by a scale before backward, and
gradients are divided by it in float32, after they were summed over ranks.
"""

import torch
from torch import Tensor

from fsdp_trainer.config.schema import Precision

FACTOR = 2.0
"""A power of two: to multiply by it and to divide by it rounds nothing."""
LARGEST = 2.0**24
"""Above it the smallest number of float16 is no longer a gradient that counts."""


class LossScale:
    """A scale that follows the gradients, on the device: the host waits for nothing.

    All ranks judge a step alike, so all have the same scale. numbers: [2] float32, the scale and
    the steps in a row whose gradients were finite.
    """

    def __init__(self, cfg: Precision, device: torch.device):
        """device: where gradients lie."""
        self.growth_steps = cfg.loss_scale_steps
        self.numbers = torch.tensor([cfg.loss_scale, 0.0], device=device)

    @property
    def scale(self) -> Tensor:
        """The scale of the coming step: a scalar that `update` does not change."""
        return self.numbers[0].clone()

    def update(self, not_finite: Tensor) -> None:
        """Halve the scale after a step whose gradients were not finite; double it after enough
        others. not_finite: bool scalar on the device."""
        scale, steps = self.numbers.unbind()
        grows = steps + 1 >= self.growth_steps
        larger = torch.where(grows, scale * FACTOR, scale)
        scale = torch.where(not_finite, scale / FACTOR, larger).clamp(1.0, LARGEST)
        steps = torch.where(not_finite | grows, 0.0, steps + 1)
        self.numbers.copy_(torch.stack([scale, steps]))

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds, by name."""
        return {"loss_scale/numbers": self.numbers}


def new_loss_scale(cfg: Precision, device: torch.device) -> LossScale | None:
    """Return the scale of a run's start; None: the number format needs none."""
    return LossScale(cfg, device) if cfg.param_dtype == "float16" else None
