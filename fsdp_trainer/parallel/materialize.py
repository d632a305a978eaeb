"""Storage and random weights for a sharded model."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.initialize import VOCABULARY, initialize


def allocate(model: Decoder, device: torch.device) -> None:
    """Give the meta parameters storage on `device`. Their content is undefined until drawn or read."""
    model.to_empty(device=device)


def draw_weights(model: Decoder, seed: int) -> None:
    """Fill a sharded model with the random weights that `seed` stands for; each rank draws only its own rows."""
    for name, parameter in _sharded(model):
        initialize(
            model.config,
            name,
            parameter.to_local(),
            _first_row(parameter),
            parameter.shape[1:].numel(),
            seed,
        )


@torch.no_grad()
def grow_vocabulary(model: Decoder, known: int) -> None:
    """Give the rows from `known` up to the vocabulary's size the mean of the known ones, and the padding behind it zeros. Collective.

    A new token that starts as the mean of all others is neither likely nor unlikely (Hewitt 2021).
    """
    for name, parameter in _sharded(model):
        if name in VOCABULARY:
            local, start = parameter.to_local(), _first_row(parameter)
            end_known, end = max(0, known - start), max(0, model.config.vocab_size - start)
            total = local[:end_known].sum(0, dtype=torch.float64)
            dist.all_reduce(total, group=parameter.device_mesh.get_group("shard"))
            local[end_known:end] = (total / known).to(local.dtype)
            local[end:] = 0


def _sharded(model: Decoder) -> Iterator[tuple[str, DTensor]]:
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        yield name, parameter


def _first_row(parameter: DTensor) -> int:
    """Which row of the whole this rank's part of a parameter begins with."""
    return compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )[1][0]
