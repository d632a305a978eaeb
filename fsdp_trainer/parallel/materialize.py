"""Storage and random weights for a sharded model."""

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.initialize import initialize


def allocate(model: Decoder, device: torch.device) -> None:
    """Give the meta parameters storage on `device`. Their content is undefined until drawn or read."""
    model.to_empty(device=device)


def draw_weights(model: Decoder, seed: int) -> None:
    """Fill a sharded model with the random weights that `seed` stands for; each rank draws only its own rows."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
        row_elements = parameter.shape[1:].numel()
        initialize(name, parameter.to_local(), offset[0], row_elements, seed, model.config.initializer_range)
