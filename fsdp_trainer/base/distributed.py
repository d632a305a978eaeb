"""Small collectives, copies between devices and sizes of shards: helpers for all packages."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from fsdp_trainer.base.torch_private import local_shape_and_offset
from fsdp_trainer.errors import RunFailed

# torch 2.13 renamed them
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks of a group, on each of these ranks. Collective.

    group: None for all ranks. A process without other ranks gets its own value.
    """
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def run_on_all_ranks(
    what: str, work: Callable[[], Any], group: dist.ProcessGroup | None = None
) -> list[Any]:
    """Run `work` on every rank and return the results of all ranks. Collective.

    what: completes "cannot …" in the message. Raises RunFailed on all ranks if one raises OSError.
    """
    result = None
    failure = None
    try:
        result = work()
    except OSError as error:
        failure = f"cannot {what}: {error}"
    outcomes = gather((result, failure), group)
    failures = [f"rank {rank} {text}" for rank, (_, text) in enumerate(outcomes) if text]
    if failures:
        raise RunFailed("\n".join(failures))
    return [value for value, _ in outcomes]


def run_on_rank_0(
    what: str, work: Callable[[], Any], group: dist.ProcessGroup | None = None
) -> Any:
    """Run `work` on rank 0 and return its result on every rank. Collective.

    what: as for run_on_all_ranks. Raises RunFailed on all ranks if rank 0 raises OSError.
    """
    alone = work if dist.get_rank() == 0 else lambda: None
    return run_on_all_ranks(what, alone, group)[0]


def sum_in_order(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the sum over the ranks of a group, added one rank after the other. Collective.

    An element's sum depends only on the ranks' values; in an all-reduce, the order of addition also
    depends on the element's place in the tensor. For small tensors: each rank receives all ranks'
    tensors.
    """
    if not dist.is_initialized():
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    return sum(parts[1:], start=parts[0])


def to_device(array: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Copy an array to the device without making the host wait for the copy."""
    tensor = torch.as_tensor(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_device_of(tensor: Tensor, other: Tensor) -> Tensor:
    """Return `tensor` on the device of `other`, copied through pinned memory.

    Only a copy to the host makes the host wait, until the work queued so far on the tensor's stream
    is done.
    """
    if tensor.device == other.device:
        return tensor
    if other.device.type == "cuda":
        return to_device(tensor, other.device)
    on_host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    on_host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).record_event().synchronize()
    return on_host


def is_one(scalar: Tensor) -> bool:
    """Return True if a scalar is known to be 1 without waiting for a device."""
    return type(scalar) is Tensor and scalar.device.type == "cpu" and scalar.item() == 1


def replication_factor(parameter: Tensor, ranks: int) -> int:
    """Return how many of `ranks` ranks hold a copy of each element of a parameter."""
    if not isinstance(parameter, DTensor):
        return ranks
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return ranks // math.prod(size for size, placed in sizes if not placed.is_replicate())


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def place(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    # src_data_rank=None: nothing to send, since the weights are on the meta device
    placed = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    return nn.Parameter(placed, parameter.requires_grad)


def local_slice(tensor: Tensor) -> tuple[slice, ...]:
    """Return the part of the full tensor that this rank holds: one slice for each dimension.

    Every placement gives a rank one contiguous range of each dimension. This includes uneven shards
    and a dimension that two mesh dimensions shard. A plain tensor is held in full.
    """
    if not isinstance(tensor, DTensor):
        return whole_slice(tensor.shape)
    sizes, starts = local_shape_and_offset(tensor)
    return tuple(slice(start, start + n) for start, n in zip(starts, sizes, strict=True))


def whole_slice(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)
