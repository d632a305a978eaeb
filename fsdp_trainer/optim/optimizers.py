"""Optimizers over sharded parameters, and a step that can be skipped without asking the device."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from fsdp_trainer.config.formats import is_compact, moments_format
from fsdp_trainer.config.schema import Optim
from fsdp_trainer.optim.compact import CompactAdamW


def build_optimizer(model: nn.Module, cfg: Optim, seed: int = 0) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2019); matrices decay, norms and biases do not. torch's own, where it has the number formats.

    seed: of stochastic rounding.
    """
    names = {
        parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    groups = [
        {"params": [p for p in names if p.ndim >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in names if p.ndim < 2], "weight_decay": 0.0},
    ]
    options: dict[str, Any] = {"lr": cfg.lr, "betas": (cfg.betas[0], cfg.betas[1]), "eps": cfg.eps}
    dtype = str(next(iter(names)).dtype).removeprefix("torch.")
    if is_compact(cfg, dtype):
        return CompactAdamW(
            groups, names, moments_format(cfg, dtype), cfg.rounding == "stochastic", seed, **options
        )
    if cfg.implementation == "foreach":
        return AdamW(groups, foreach=True, **options)
    return AdamW(groups, fused=True, **options)


def empty_state(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """What the optimizer remembers of a parameter, all zero: to be loaded in place."""
    if isinstance(optimizer, CompactAdamW):
        return optimizer.empty_state(parameter)
    moments = {name: torch.zeros_like(parameter).detach() for name in ("exp_avg", "exp_avg_sq")}
    return {
        "step": torch.zeros((), device=parameter.device if optimizer.defaults["fused"] else None),
        **moments,
    }


def step_unless(optimizer: Optimizer, not_finite: Tensor) -> None:
    """Update the weights, or leave weights, moments and step counts byte-equal where `not_finite` (bool scalar on the device) is true.

    An optimizer that reads `found_inf` on the device needs no host synchronisation; one that does not pays one.
    """
    if isinstance(optimizer, CompactAdamW) or optimizer.defaults["fused"]:
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.found_inf = not_finite.float()  # type: ignore[attr-defined]
        optimizer.step()
    elif not not_finite.item():
        optimizer.step()


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """For the coming step, in all groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr
