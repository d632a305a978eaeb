"""An optimizer that needs whole matrices: each is moved by its gradient over its largest stretch.

    fsdp-trainer +recipe=quickstart optim.name=spectral.py:SPECTRAL optim.lr=0.01

from this folder. It updates a matrix as a whole, so every rank gathers its gradient; a vector is
moved by the signs of its own. `whole_matrices` lets the planner and the checks of offloading know.
"""

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_trainer.config.parts.optimizers import OptimizerSpec
from fsdp_trainer.optim.optimizer_interface import TrainerOptimizer


class Spectral(TrainerOptimizer):
    """Momentum, divided by its spectral norm."""

    skips_on_device = False

    def empty_state(self, parameter):
        """Called before a checkpoint is loaded: what `step` keeps for a parameter, in zeros."""
        return {"momentum": torch.zeros_like(parameter)}

    @torch.no_grad()
    def step(self, closure=None):
        """Called once for each step with the gradients in `parameter.grad`, on every rank."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self.state[parameter] = self.empty_state(parameter)
                momentum = self.state[parameter]["momentum"]
                momentum.mul_(group["momentum"]).add_(parameter.grad)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(direction(momentum), alpha=-group["lr"])


def direction(momentum):
    """Return the update of a matrix, of a stack of them, or of a vector, where `momentum` lies."""
    if momentum.ndim < 2:
        return momentum.sign()
    is_sharded = isinstance(momentum, DTensor)
    whole = momentum.full_tensor() if is_sharded else momentum  # a collective: on every rank
    norm = torch.linalg.matrix_norm(whole.float(), 2)[..., None, None]
    update = (whole / norm.clamp(min=1e-12)).to(whole.dtype)
    if not is_sharded:
        return update
    return distribute_tensor(update, momentum.device_mesh, momentum.placements, src_data_rank=None)


def build(groups, cfg, seed, ranks):
    """Called once. groups: named parameters, with their weight decay; cfg: the keys of `optim`."""
    return Spectral(groups, {"lr": cfg.lr, "momentum": cfg.momentum})


SPECTRAL = OptimizerSpec(build, whole_matrices=True, highest_lr=1.0)
