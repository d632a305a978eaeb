"""The flat state dict of a checkpoint: `weights/NAME` and `optimizer/NAME/KEY`."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_trainer.base.torch_private import dtensor_like
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.decoder import stored_buffers
from fsdp_trainer.optim.optimizer_interface import TrainerOptimizer

WEIGHTS = "weights/"
OPTIMIZER = "optimizer/"


def stored_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that a training checkpoint holds: the trained ones, by name.

    A tied head is stored once, as the embedding. Frozen weights are read from their origin
    (`checkpoint.base`).
    """
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def stored_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that a training checkpoint holds, and all buffers, by name.

    All code that writes or checks weights of a checkpoint uses this function. Buffers are few
    numbers, which training may change without a gradient.
    """
    return {**stored_parameters(model), **stored_buffers(model)}


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a checkpoint; they share the model's memory."""
    return {WEIGHTS + name: plain(w.detach()) for name, w in stored_weights(model).items()}


def plain(weight: Tensor) -> Tensor:
    """Return a weight without torchao's wrapper; the memory is the same.

    The wrapper casts it to float8 on its way into an all-gather.
    """
    if not isinstance(weight, DTensor) or not hasattr(weight.to_local(), "_tensor"):
        return weight
    local: Any = weight.to_local()
    return dtensor_like(weight, local._tensor, weight.shape)


def optimizer_state(model: nn.Module, optimizer: TrainerOptimizer) -> dict[str, Tensor]:
    return {
        f"{OPTIMIZER}{name}/{key}": value
        for name, parameter in stored_parameters(model).items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def parameter_of(name: str) -> str:
    """Return the parameter that a weight or an optimizer state of a checkpoint belongs to."""
    if name.startswith(OPTIMIZER):
        return name.removeprefix(OPTIMIZER).rpartition("/")[0]
    return name.removeprefix(WEIGHTS)


def prepare_optimizer(
    model: nn.Module, optimizer: TrainerOptimizer, names: Iterable[str], source: str
) -> None:
    """Give a new optimizer empty state for each parameter whose state is among `names`.

    The state is then loaded in place. names: of the tensors of a checkpoint. Raises UserError if
    `source`, where they come from, keeps it in another number format.
    """
    optimizer.begin_load()
    stored: dict[str, set[str]] = defaultdict(set)
    for full in names:
        if full.startswith(OPTIMIZER):
            name, _, key = full.removeprefix(OPTIMIZER).rpartition("/")
            stored[name].add(key)
    for name, parameter in stored_parameters(model).items():
        if name not in stored:
            continue
        state = optimizer.empty_state(parameter)
        if state.keys() != stored[name]:
            here, there = (", ".join(sorted(keys)) for keys in (state, stored[name]))
            text = f"""is kept as {here}, in the checkpoint as {there}
8-bit moments cannot be turned into others, nor others into them. Keep optim.state_dtype, or start
from the weights alone:  run.name=NEW model.init_from={source}"""
            raise UserError(f"the optimizer's state is not that of {source}", name, text)
        optimizer.state[parameter].update(state)
