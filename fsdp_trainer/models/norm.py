"""The norm of all families."""

import torch
from torch import Tensor, nn

from fsdp_trainer.models.config import ModelConfig


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang & Sennrich 2019), with the mean square in float32.

    size: size of the last dimension; None: hidden_size. eps: added to the mean square; None:
    rms_norm_eps.
    """

    def __init__(self, config: ModelConfig, size: int | None = None, eps: float | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size or config.hidden_size))
        self.eps = config.rms_norm_eps if eps is None else eps
        self.offset = config.family_spec.norm_offset
        self.in_float32 = config.family_spec.norm_in_float32

    def forward(self, x: Tensor) -> Tensor:
        return self.normalize(x, self.weight)

    def normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x divided by its root mean square and multiplied by the weight: [..., size]."""
        scaled = x.float()
        scaled = scaled * torch.rsqrt(self.mean_square(scaled) + self.eps)
        if self.in_float32:
            return (scaled * (self.offset + weight.float())).to(x.dtype)
        return weight * scaled.to(x.dtype)

    def mean_square(self, x: Tensor) -> Tensor:
        return x.pow(2).mean(-1, keepdim=True)
