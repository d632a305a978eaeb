"""The dense feed-forward of a block."""

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_trainer.config.parts.own_parts import part_named
from fsdp_trainer.models.config import ModelConfig

gelu_tanh = partial(F.gelu, approximate="tanh")


class MLP(nn.Module):
    """Gated feed-forward (Shazeer 2020). inner: inner width; None: intermediate_size."""

    def __init__(self, config: ModelConfig, inner: int | None = None):
        super().__init__()
        width = config.hidden_size
        inner = inner or config.intermediate_size
        bias = config.mlp_bias
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.activation = part_named("activation", config.hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
