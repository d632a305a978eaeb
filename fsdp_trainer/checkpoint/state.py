"""The flat state dict that a checkpoint holds: `weights/NAME` and `optimizer/NAME/KEY`, DTensors as they are."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.optim.optimizers import empty_state

WEIGHTS, OPTIMIZER = "weights/", "optimizer/"


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter once; a tied head is its embedding."""
    return {
        WEIGHTS + name: plain(parameter.detach()) for name, parameter in model.named_parameters()
    }


def plain(weight: Tensor) -> Tensor:
    """Without the wrapper in which torchao casts a weight to float8 on its way into an all-gather; the memory is the same."""
    if not isinstance(weight, DTensor) or not hasattr(weight.to_local(), "_tensor"):
        return weight
    return DTensor(weight.to_local()._tensor, weight._spec, requires_grad=False)  # type: ignore[attr-defined]


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """What the optimizer remembers of each parameter."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{OPTIMIZER}{names[p]}/{key}": value
        for p, state in optimizer.state.items()
        for key, value in state.items()
    }


def prepare_optimizer(model: nn.Module, optimizer: Optimizer, checkpoint: str) -> None:
    """Give a fresh optimizer empty state, to be loaded in place, of each parameter that the checkpoint holds some of. Raises UserError."""
    stored = [
        full.removeprefix(OPTIMIZER).rpartition("/")
        for full in stored_tensors(checkpoint)
        if full.startswith(OPTIMIZER)
    ]
    kinds: dict[str, set[str]] = {}
    for name, _, kind in stored:
        kinds.setdefault(name, set()).add(kind)
    for name, parameter in model.named_parameters():
        if name not in kinds:
            continue
        state = empty_state(optimizer, parameter)
        if set(state) != kinds[name]:
            why = f"is kept as {', '.join(sorted(state))}, in the checkpoint as {', '.join(sorted(kinds[name]))}"
            why += f"\n8-bit moments cannot be turned into others, nor others into them. Keep optim.state_dtype, or start from the weights alone:  run.name=NEW model.init_from={checkpoint}"
            raise UserError(
                f"the optimizer's state is not that of {checkpoint}", [Problem(name, why)]
            )
        optimizer.state[parameter].update(state)


def stored_tensors(checkpoint: str) -> dict[str, torch.Size]:
    """Name and shape of every tensor in a checkpoint."""
    metadata: dict[str, Any] = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {
        name: entry.size
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
