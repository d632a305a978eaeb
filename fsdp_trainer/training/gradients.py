"""Gradient synchronisation, norm and clipping on sharded gradients."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float | None, max_value: float | None) -> Tensor:
    """Clip in place: every element to ±max_value, then the global norm to max_norm. Collective.

    Returns the global norm before both, a float32 scalar where the gradients lie, the same on every rank.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    copies = _copies(gradients[0])
    parts = [
        g.to_local() if isinstance(g, DTensor) else g for g in gradients
    ]  # operators on DTensors cost the host ten times as much
    norm = limited = _global_norm(parts, copies)
    if max_value is not None:
        torch._foreach_clamp_min_(parts, -max_value)
        torch._foreach_clamp_max_(parts, max_value)
        limited = _global_norm(parts, copies)
    if max_norm is not None:
        share = (max_norm / (limited + 1e-6)).clamp(
            max=1.0
        )  # as torch.nn.utils.clip_grad_norm_ has it
        torch._foreach_mul_(parts, share.to(parts[0].dtype))
    return norm


def _global_norm(parts: list[Tensor], copies: int) -> Tensor:
    """Of what all ranks hold together. copies: how many ranks hold each part.

    Summed over the whole world, not over one group of shards, and over replicas too: so it is the same on every rank to the last bit, and a number
    that is not finite on one rank alone is known to all.
    """
    squares = torch.stack(torch._foreach_norm(parts, 2, torch.float32)).double().square().sum()
    if _world() > 1:
        dist.all_reduce(squares)
        squares /= copies
    return squares.sqrt().float()


def _copies(gradient: Tensor) -> int:
    """How many ranks hold each part of a gradient: 1, or with replication as many as there are replicas."""
    if not isinstance(gradient, DTensor):
        return _world()
    sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement.is_replicate())


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def any_not_finite(*scalars: Tensor) -> Tensor:
    """bool scalar on the device."""
    return ~torch.isfinite(torch.stack([s.float() for s in scalars])).all()


def beside(tensor: Tensor, other: Tensor) -> Tensor:
    """`tensor` on the device of `other`, through pinned memory. Only towards the host does the host wait, and only for this number."""
    if tensor.device == other.device:
        return tensor
    if other.device.type == "cuda":
        return tensor.pin_memory().to(other.device, non_blocking=True)
    on_host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    on_host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).record_event().synchronize()
    return on_host
