"""Storage for a sharded model, and initial values that are computed from its weights."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_trainer.base.distributed import local_part, local_slice
from fsdp_trainer.models.adapters.adapter_spec import MAGNITUDE
from fsdp_trainer.models.adapters.adapters import adapted_layers, dense_rows
from fsdp_trainer.models.decoder import Decoder


def allocate(model: Decoder, device: torch.device, computing: torch.device | None = None) -> None:
    """Allocate the meta parameters on `device`, uninitialised, and buffers filled with zeros.

    computing: device of the buffers and the computation; None: `device`.
    """
    model.to_empty(device=device)
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.zeros_like(buffer, device=computing or device))
    model.fill_buffers()


@torch.no_grad()
def grow_vocabulary(model: Decoder, known: int) -> None:
    """Set the rows of new tokens, from `known` on, to the mean of the first `known`; padding to 0.

    A token that starts as the mean of all others is neither likely nor unlikely (Hewitt 2021).
    Collective.
    """
    for name, parameter in model.named_parameters():
        if name in model.config.names.vocabulary:
            local = local_part(parameter)
            first = local_slice(parameter)[0].start
            end_known = max(0, known - first)
            end = max(0, model.config.vocab_size - first)
            total = local[:end_known].sum(0, dtype=torch.float64)
            for group in groups_dividing(parameter, 0):
                dist.all_reduce(total, group=group)
            local[end_known:end] = (total / known).to(local.dtype)
            local[end:] = 0


@torch.no_grad()
def initialize_magnitudes(model: nn.Module) -> None:
    """Set DoRA's magnitudes to the row lengths of W, so that the adapted layer starts equal to W.

    Each rank sets those of its rows. The weights must be loaded. Collective.
    """
    for linear in adapted_layers(model).values():
        if hasattr(linear, MAGNITUDE):
            rows = dense_rows(linear, local_part(linear.weight)).float()
            # in float64, so that the float32 result does not depend on the sharding
            lengths = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
            for group in groups_dividing(linear.weight, 1):
                squares = lengths.square()
                dist.all_reduce(squares, group=group)
                lengths = squares.sqrt()
            local_part(linear.lora_magnitude_vector).copy_(lengths)


def groups_dividing(tensor: Tensor, dimension: int) -> list[dist.ProcessGroup]:
    if not isinstance(tensor, DTensor):
        return []
    # the dimension of a shard, strided or not; a replica has none
    divided = [getattr(placement, "dim", None) for placement in tensor.placements]
    mesh = tensor.device_mesh
    return [mesh.get_group(i) for i, dim in enumerate(divided) if dim == dimension]
