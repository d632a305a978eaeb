"""Optimizers over sharded parameters, by optim.name."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from fsdp_trainer.config.formats import is_compact, moments_format
from fsdp_trainer.config.schema import Optim
from fsdp_trainer.optim.base import TrainerOptimizer
from fsdp_trainer.optim.compact import CompactAdamW


class TorchAdamW(TrainerOptimizer, AdamW):
    """torch's own AdamW, by its `fused` kernel or one operator at a time over all parameters."""

    def __init__(self, groups: list[dict[str, Any]], implementation: str, **defaults: Any):
        """implementation: `fused` or `foreach`; defaults: lr, betas, eps."""
        self.skips_on_device = implementation == "fused"
        kernel: dict[str, Any] = {implementation: True}
        super().__init__(groups, **kernel, **defaults)

    def empty_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return zero moments and a step count: on the device where the fused kernel reads it."""
        device = parameter.device if self.skips_on_device else None
        return {
            "step": torch.zeros((), device=device),
            "exp_avg": torch.zeros_like(parameter).detach(),
            "exp_avg_sq": torch.zeros_like(parameter).detach(),
        }


def build_optimizer(model: nn.Module, cfg: Optim, seed: int = 0) -> TrainerOptimizer:
    """Return the optimizer that optim.name asks for. seed: of stochastic rounding."""
    return OPTIMIZERS[cfg.name](parameter_groups(model, cfg), cfg, seed)


def parameter_groups(model: nn.Module, cfg: Optim) -> list[dict[str, Any]]:
    """Return the trained parameters with their names: matrices decay, norms and biases do not."""
    matrices: dict[str, Any] = {"params": [], "weight_decay": cfg.weight_decay}
    vectors: dict[str, Any] = {"params": [], "weight_decay": 0.0}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = matrices if parameter.ndim >= 2 else vectors
            group["params"].append((name, parameter))
    return [group for group in (matrices, vectors) if group["params"]]


def build_adamw(groups: list[dict[str, Any]], cfg: Optim, seed: int) -> TrainerOptimizer:
    """Return AdamW (Loshchilov & Hutter 2019), torch's own where it has the number formats."""
    options: dict[str, Any] = {"lr": cfg.lr, "betas": tuple(cfg.betas), "eps": cfg.eps}
    _, parameter = groups[0]["params"][0]
    dtype = str(parameter.dtype).removeprefix("torch.")
    if is_compact(cfg, dtype):
        stochastic = cfg.rounding == "stochastic"
        return CompactAdamW(groups, moments_format(cfg, dtype), stochastic, seed, **options)
    return TorchAdamW(groups, "foreach" if cfg.implementation == "foreach" else "fused", **options)


OPTIMIZERS = {"adamw": build_adamw}
"""By optim.name. A new one: a file, a line here, and a line in `footprint.FOOTPRINTS`."""
