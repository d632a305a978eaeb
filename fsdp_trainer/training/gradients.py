"""Gradient synchronisation, norm and clipping on sharded gradients."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from fsdp_trainer.parallel.parallelize import fsdp_modules


class GradientSync:
    """Decides, before each micro-batch, what its backward communicates."""

    def __init__(self, model: nn.Module, accumulate: str, replicated: bool):
        self.root, self.accumulate, self.replicated = fsdp_modules(model)[0], accumulate, replicated

    def before(self, last: bool) -> None:
        """last: whether the coming backward is the step's last."""
        if self.accumulate == "unsharded":
            self.root.set_requires_gradient_sync(last)
            self.root.set_is_last_backward(last)
        elif self.replicated:
            self.root.set_requires_all_reduce(last)


def clip_gradients(model: nn.Module, max_norm: float | None, max_value: float | None) -> Tensor:
    """Clip in place: every element to ±max_value, then the global norm to max_norm. Returns the global norm before both, a scalar on the device."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = _global_norm(parameters)
    limited = norm
    if max_value is not None:
        for p in parameters:
            _local(p.grad).clamp_(-max_value, max_value)
        limited = _global_norm(parameters)
    if max_norm is not None:
        clip_grads_with_norm_(parameters, max_norm, limited)
    return norm


def _global_norm(parameters: list[nn.Parameter]) -> Tensor:
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def any_not_finite(*scalars: Tensor) -> Tensor:
    """bool scalar on the device."""
    return ~torch.isfinite(torch.stack([s.float() for s in scalars])).all()
