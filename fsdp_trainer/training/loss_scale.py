"""The loss scale for training in float16 (Micikevicius et al. 2018, arXiv 1710.03740, §3.2).

Gradients below 6e-8 are 0 in float16. Therefore the loss is multiplied by a scale before backward,
and the gradients are divided by it in float32, after they have been summed over ranks.
"""

import torch
from torch import Tensor

from fsdp_trainer.config.schema import Precision

FACTOR = 2.0
"""Factor of each change: a power of two, so multiplying or dividing by it does not round."""
LARGEST = 2.0**24
"""Upper limit: beyond it, gradients that become representable are too small to matter."""


class LossScale:
    """A dynamic loss scale, kept on the device so that the host never waits for it.

    All ranks reach the same verdict on each step, so all have the same scale. numbers: [2] float32,
    the scale and the number of steps in a row with finite gradients.
    """

    def __init__(self, cfg: Precision, device: torch.device):
        self.growth_steps = cfg.loss_scale_steps
        self.numbers = torch.tensor([cfg.loss_scale, 0.0], device=device)

    @property
    def scale(self) -> Tensor:
        """A copy of the scale for the next step, a scalar; `update` does not change the copy."""
        return self.numbers[0].clone()

    def update(self, not_finite: Tensor) -> None:
        """Halve the scale after gradients that were not finite; double it after enough finite ones.

        not_finite: whether this step's gradients were not finite, a bool scalar on the device.
        """
        scale, steps = self.numbers.unbind()
        grows = steps + 1 >= self.growth_steps
        larger = torch.where(grows, scale * FACTOR, scale)
        scale = torch.where(not_finite, scale / FACTOR, larger).clamp(1.0, LARGEST)
        steps = torch.where(not_finite | grows, 0.0, steps + 1)
        self.numbers.copy_(torch.stack([scale, steps]))

    def state(self) -> dict[str, Tensor]:
        return {"loss_scale/numbers": self.numbers}


def new_loss_scale(cfg: Precision, device: torch.device) -> LossScale | None:
    """Return the initial loss scale of a run; None if the number format needs none."""
    return LossScale(cfg, device) if cfg.param_dtype == "float16" else None
