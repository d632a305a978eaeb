"""Low-rank adapters of experts.

Each expert's matrix has its own A and B, stacked like the experts' matrices.
"""

from typing import Any

import torch
from torch import nn

from fsdp_trainer.models.adapters.adapter_spec import A, B
from fsdp_trainer.models.moe import Experts


def expert_matrices(model: nn.Module) -> dict[str, tuple[int, int, int]]:
    """Return the shape (experts, outputs, inputs) of each stacked matrix of experts, by name."""
    return {
        f"{name}.{matrix}": shape
        for name, module in model.named_modules()
        if isinstance(module, Experts)
        for matrix, shape in module.shapes.items()
    }


def adapt_experts(experts: Any, matrix: str, rank: int, scale: float, dtype: torch.dtype) -> None:
    count, outputs, inputs = experts.shapes[matrix]
    device = getattr(experts, matrix).device
    for name, shape in {A: (count, rank, inputs), B: (count, outputs, rank)}.items():
        if not hasattr(experts, name):
            matrices: Any = nn.Module()
            matrices.active_share = experts.active_share
            experts.add_module(name, matrices)
        parameter = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        getattr(experts, name).register_parameter(matrix, parameter)
    experts.lora_scales[matrix] = scale


def adapted_experts(model: nn.Module) -> dict[str, tuple[Experts, str]]:
    return {
        f"{name}.{matrix}": (module, matrix)
        for name, module in model.named_modules()
        if isinstance(module, Experts)
        for matrix in module.lora_scales
    }
