"""Optimizers over sharded parameters, by optim.name."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from fsdp_trainer.config.formats import is_compact, moments_format, rounds
from fsdp_trainer.config.parts.optimizers import Optim
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.config import WeightNames
from fsdp_trainer.optim.elementwise import CompactAdamW, Lion, Sgd
from fsdp_trainer.optim.footprint import is_matrix
from fsdp_trainer.optim.lamb import Lamb
from fsdp_trainer.optim.lars import Lars
from fsdp_trainer.optim.muon import Muon
from fsdp_trainer.optim.optimizer_interface import TrainerOptimizer


class TorchAdamW(TrainerOptimizer, AdamW):
    """torch's AdamW, with its `fused` kernel or its `foreach` implementation."""

    def __init__(self, groups: list[dict[str, Any]], implementation: str, **defaults: Any):
        self.skips_on_device = implementation == "fused"
        kernel: dict[str, Any] = {implementation: True}
        super().__init__(groups, **kernel, **defaults)

    def fuse(self) -> None:
        (first, *_) = self.param_groups[0]["params"]
        self.divides_gradients = self.skips_on_device and first.dtype == torch.float32

    def _init_group(self, group: Any, *lists: list[Tensor]) -> bool:
        """Fill the lists that the kernel updates, with this rank's parts of them.

        Each number is updated by itself. With DTensors, torch would decide for each of them again
        where the result lies, which takes longer than the update of small ones.
        """
        has_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [
                each.to_local() if isinstance(each, DTensor) else each for each in tensors
            ]
        return has_complex

    def empty_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        device = parameter.device if self.skips_on_device else None
        return {
            "step": torch.zeros((), device=device),
            "exp_avg": torch.zeros_like(parameter).detach(),
            "exp_avg_sq": torch.zeros_like(parameter).detach(),
        }


def build_optimizer(
    model: nn.Module, cfg: Optim, seed: int = 0, ranks: dist.ProcessGroup | None = None
) -> TrainerOptimizer:
    """Return the optimizer of optim.name. Collective.

    seed: seed of stochastic rounding. ranks: group of the ranks that hold parts of the same
    parameters; None: all ranks. Raises UserError.
    """
    if cfg.spec.has_owners:
        # checked for the complete model, since a single pipeline stage may have no matrices
        require_matrices(getattr(model, "whole", model), cfg)
    optimizer: TrainerOptimizer = cfg.spec.builder()(parameter_groups(model, cfg), cfg, seed, ranks)
    return optimizer


def parameter_groups(model: nn.Module, cfg: Optim) -> list[dict[str, Any]]:
    """Return groups of trained parameters with names; norms and biases have no weight decay.

    `blocks` of a group is how the names of the parameters of blocks begin.
    """
    config = getattr(model, "config", None)
    blocks = (config.names if config else WeightNames()).blocks
    matrices: dict[str, Any] = {"params": [], "weight_decay": cfg.weight_decay, "blocks": blocks}
    vectors: dict[str, Any] = {"params": [], "weight_decay": 0.0, "blocks": blocks}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = matrices if is_matrix(name, parameter.ndim) else vectors
            group["params"].append((name, parameter))
    return [group for group in (matrices, vectors) if group["params"]]


def build_adamw(
    groups: list[dict[str, Any]], cfg: Optim, seed: int, ranks: dist.ProcessGroup | None = None
) -> TrainerOptimizer:
    options: dict[str, Any] = {"lr": cfg.lr, "betas": tuple(cfg.betas), "eps": cfg.eps}
    if is_compact(cfg, master_dtype(groups)):
        return CompactAdamW(groups, *formats(groups, cfg, seed), **options)
    return TorchAdamW(groups, "foreach" if cfg.implementation == "foreach" else "fused", **options)


def build_muon(
    groups: list[dict[str, Any]], cfg: Optim, seed: int, ranks: dist.ProcessGroup | None
) -> TrainerOptimizer:
    """Return Muon for the blocks' matrices and AdamW for the rest; AdamW if there are none."""
    matrices, others = of_muon(groups)
    if not matrices:
        return build_adamw(others, cfg, seed)
    adamw = build_adamw(others, cfg, seed) if others else None
    return Muon(matrices, adamw, cfg, *formats(groups, cfg, seed), ranks=ranks)


def require_matrices(model: nn.Module, cfg: Optim) -> None:
    """Raise UserError if Muon would have nothing to update. model: complete model."""
    matrices, _ = of_muon(parameter_groups(model, cfg))
    if not matrices:
        text = "train.freeze leaves no matrix of a block to train.\nUse  optim=adamw"
        raise UserError("there is nothing for Muon", "optim.name=muon", text)


def of_muon(groups: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    prefix = groups[0]["blocks"] if groups else ""
    return split(groups, lambda name, p: name.startswith(prefix) and is_for_muon(name, p))


def is_for_muon(name: str, parameter: Tensor) -> bool:
    """Return True if Muon updates a parameter of a block: a matrix or a stack of matrices.

    The filters of a convolution over time, [channels, 1, width], are vectors, and so is what has
    more dimensions (decays of Kimi-Linear). Embedding and head are matrices too, but their rows are
    updated separately.
    """
    is_filter = parameter.ndim == 3 and parameter.shape[1] == 1
    return is_matrix(name, parameter.ndim) and parameter.ndim <= 3 and not is_filter


def build_lion(
    groups: list[dict[str, Any]], cfg: Optim, seed: int, ranks: dist.ProcessGroup | None
) -> TrainerOptimizer:
    return Lion(groups, *formats(groups, cfg, seed), lr=cfg.lr, betas=tuple(cfg.betas))


def build_sgd(
    groups: list[dict[str, Any]], cfg: Optim, seed: int, ranks: dist.ProcessGroup | None
) -> TrainerOptimizer:
    options: dict[str, Any] = {"lr": cfg.lr, "momentum": cfg.momentum, "nesterov": cfg.nesterov}
    return Sgd(groups, *formats(groups, cfg, seed), **options)


def build_lamb(
    groups: list[dict[str, Any]], cfg: Optim, seed: int, ranks: dist.ProcessGroup | None
) -> TrainerOptimizer:
    options: dict[str, Any] = {"lr": cfg.lr, "betas": tuple(cfg.betas), "eps": cfg.eps}
    return Lamb(groups, *formats(groups, cfg, seed), ranks=ranks, **options)


def build_lars(
    groups: list[dict[str, Any]], cfg: Optim, seed: int, ranks: dist.ProcessGroup | None
) -> TrainerOptimizer:
    options = {name: getattr(cfg, name) for name in ("lr", "momentum", "trust_coefficient")}
    return Lars(groups, *formats(groups, cfg, seed), ranks=ranks, **options)


def split(
    groups: list[dict[str, Any]], belongs: Callable[[str, Tensor], bool]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    parts: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for group in groups:
        for part, wanted in zip(parts, (True, False), strict=True):
            chosen = [named for named in group["params"] if belongs(*named) == wanted]
            if chosen:
                part.append({**group, "params": chosen})
    return parts


def master_dtype(groups: list[dict[str, Any]]) -> str:
    _, parameter = groups[0]["params"][0]
    return str(parameter.dtype).removeprefix("torch.")


def formats(groups: list[dict[str, Any]], cfg: Optim, seed: int) -> tuple[str, bool, int]:
    dtype = master_dtype(groups)
    stochastic = cfg.rounding == "stochastic" and rounds(cfg, dtype)
    return moments_format(cfg, dtype), stochastic, seed
