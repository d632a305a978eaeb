"""Synchronisation, norm and clipping of sharded gradients."""

from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_trainer.base.distributed import is_one, local_part, to_device_of
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.parallelize import fsdp_modules
from fsdp_trainer.parallel.pipeline import copies_in_stages


class GradientSync:
    """Sets, before each micro-batch, which collectives its backward runs."""

    def __init__(self, model: nn.Module, accumulate: str, replicated: bool):
        self.root, self.accumulate, self.replicated = fsdp_modules(model)[0], accumulate, replicated

    def before(self, last: bool) -> None:
        """Set FSDP's flags for the coming backward. last: whether it is the last of the step."""
        if self.accumulate == "unsharded":
            self.root.set_requires_gradient_sync(last)
            self.root.set_is_last_backward(last)
        elif self.replicated:
            self.root.set_requires_all_reduce(last)


@torch.no_grad()
def sum_copied_gradients(model: nn.Module, dims: Dims) -> None:
    """Broadcast the gradients of parameters that a tensor group holds copies of. Collective.

    These gradients are summed in the tensor group first, then each of its ranks sums over other
    ranks, in an order that the backend chooses for each group: without the broadcast, copies could
    differ by rounding and drift apart.
    """
    group = dims.group("tensor")
    if group is None:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None and is_copied_in_tensor_group(parameter):
            part = local_part(parameter.grad)
            by_dtype.setdefault(part.dtype, []).append(part)
    for parts in by_dtype.values():
        together = torch.cat([part.reshape(-1) for part in parts])
        dist.broadcast(together, group=group, group_src=0)
        sizes = [part.numel() for part in parts]
        pairs = zip(together.split(sizes), parts, strict=True)
        torch._foreach_copy_(parts, [values.view_as(part) for values, part in pairs])


def is_copied_in_tensor_group(parameter: Tensor) -> bool:
    if not isinstance(parameter, DTensor):
        return True
    names = parameter.device_mesh.mesh_dim_names or ()
    return "tensor" in names and parameter.placements[names.index("tensor")].is_replicate()


@torch.no_grad()
def clip_gradients(
    model: Any,
    dims: Dims,
    max_norm: float | None,
    max_value: float | None,
    scale: Tensor | None = None,
) -> Tensor:
    """Clip in place: every element to ±max_value, then the global norm to max_norm. Collective.

    Returns the global norm before clipping: a float32 scalar on the gradients' device, the same on
    every rank. scale: the loss scale, by which all gradients are divided first.
    """
    sum_copied_gradients(model, dims)
    parts: dict[int, list[Tensor]] = {}  # by replication factor
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            # operations on DTensors would take the host ten times as long
            part = local_part(parameter.grad)
            factor = dims.replication_factor(parameter) * copies_in_stages(name, model)
            parts.setdefault(factor, []).append(part)
    all_parts = list(chain(*parts.values()))
    if scale is not None:
        torch._foreach_mul_(all_parts, to_device_of(1 / scale, all_parts[0]))
    norm = clipped_norm = global_norm(parts, dims)
    if max_value is not None:
        torch._foreach_clamp_min_(all_parts, -max_value)
        torch._foreach_clamp_max_(all_parts, max_value)
        clipped_norm = global_norm(parts, dims)
    if max_norm is not None:
        # as in torch.nn.utils.clip_grad_norm_
        coefficient = (max_norm / (clipped_norm + 1e-6)).clamp(max=1.0)
        if not is_one(coefficient):
            torch._foreach_mul_(all_parts, coefficient.to(all_parts[0].dtype))
    return norm


def clip_divisor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the number by which the update divides the gradients, in place of clipping them."""
    return ((norm + 1e-6) / max_norm).clamp(min=1.0)


def global_norm(parts: dict[int, list[Tensor]], dims: Dims) -> Tensor:
    """Return the 2-norm over all ranks' tensors, float32. Collective.

    parts: this rank's tensors by replication factor, which divides their squares: the sum is over
    all ranks, replicas included. So the norm is the same on every rank to the last bit, and a value
    that is not finite on any rank is known to all.
    """
    squares = [
        torch.stack(torch._foreach_norm(tensors, 2, torch.float32)).double().square().sum() / factor
        for factor, tensors in parts.items()
    ]
    total = torch.stack(squares).sum()
    dims.sum_over_all(total)
    return total.sqrt().float()
