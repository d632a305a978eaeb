"""Optimizers over sharded parameters, and a step that can be skipped without asking the device."""

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from fsdp_trainer.config.schema import Optim


def build_optimizer(model: nn.Module, cfg: Optim) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2019); matrices decay, norms and biases do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=cfg.lr, betas=(cfg.betas[0], cfg.betas[1]), eps=cfg.eps, fused=True)


def step_unless(optimizer: Optimizer, not_finite: Tensor) -> None:
    """Update the weights, or leave weights, moments and step counts byte-equal where `not_finite` (bool scalar on the device) is true.

    Fused AdamW reads `found_inf` on the device: no host synchronisation.
    """
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.found_inf = not_finite.float()  # type: ignore[attr-defined]
    optimizer.step()


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """For the coming step, in all groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr
