"""Storage for a sharded model, and initial rows for new tokens."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp_trainer.base.distributed import local_part, local_slice
from fsdp_trainer.models.decoder import VOCABULARY, Decoder


def allocate(model: Decoder, device: torch.device, computing: torch.device | None = None) -> None:
    """Allocate the meta parameters on `device`, uninitialised, and buffers filled with zeros.

    computing: device of the buffers and the computation; None: `device`.
    """
    model.to_empty(device=device)
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.zeros_like(buffer, device=computing or device))


@torch.no_grad()
def grow_vocabulary(model: Decoder, known: int) -> None:
    """Set the rows of new tokens, from `known` on, to the mean of the first `known`; padding to 0.

    A token that starts as the mean of all others is neither likely nor unlikely (Hewitt 2021).
    Collective.
    """
    for name, parameter in model.named_parameters():
        if name in VOCABULARY:
            local = local_part(parameter)
            first = local_slice(parameter)[0].start
            end_known = max(0, known - first)
            end = max(0, model.config.vocab_size - first)
            total = local[:end_known].sum(0, dtype=torch.float64)
            sum_over_rows(total, parameter)
            local[end_known:end] = (total / known).to(local.dtype)
            local[end:] = 0


def sum_over_rows(total: torch.Tensor, parameter: torch.Tensor) -> None:
    """Sum in place over the ranks that hold different rows of the same columns. Collective."""
    if not isinstance(parameter, DTensor):
        return
    for dimension, placement in enumerate(parameter.placements):
        if getattr(placement, "dim", None) == 0:  # a shard of the rows, strided or not
            dist.all_reduce(total, group=parameter.device_mesh.get_group(dimension))
