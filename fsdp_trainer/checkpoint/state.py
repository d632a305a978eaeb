"""The flat state dict that a checkpoint holds: `weights/NAME` and `optimizer/NAME/KEY`, DTensors as they are."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

WEIGHTS, OPTIMIZER = "weights/", "optimizer/"


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter once; a tied head is its embedding."""
    return {WEIGHTS + name: parameter.detach() for name, parameter in model.named_parameters()}


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """What the optimizer remembers of each parameter."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {f"{OPTIMIZER}{names[p]}/{key}": value for p, state in optimizer.state.items() for key, value in state.items()}


def stage(state: dict[str, Tensor], buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """A copy of `state` in host memory, complete when this returns: later steps do not change it.

    buffers: of the copy before, filled again; pinned where the state is on a GPU. Kept by the caller.
    """
    for name, tensor in state.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if name not in buffers:
            buffers[name] = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
        buffers[name].copy_(local, non_blocking=True)
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()

    def like(tensor: Tensor, buffer: Tensor) -> Tensor:
        # not DTensor.from_local, which would move the copy to the device of the mesh
        return DTensor(buffer, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else buffer

    return {name: like(tensor, buffers[name]) for name, tensor in state.items()}


def prepare_optimizer(model: nn.Module, optimizer: Optimizer, checkpoint: str) -> None:
    """Give a fresh optimizer empty state of the kind the checkpoint holds, to be loaded in place."""
    stored = stored_tensors(checkpoint)
    for name, parameter in model.named_parameters():
        prefix = f"{OPTIMIZER}{name}/"
        for full, shape in stored.items():
            if full.startswith(prefix):
                empty = torch.zeros_like(parameter) if shape == parameter.shape else torch.zeros(shape, device=parameter.device)
                optimizer.state[parameter][full.removeprefix(prefix)] = empty.detach()


def stored_tensors(checkpoint: str) -> dict[str, torch.Size]:
    """Name and shape of every tensor in a checkpoint."""
    metadata: dict[str, Any] = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {name: entry.size for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}
