"""The division of a rank's optimizer states into files, and into parts that are updated together.

See docs/offload.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from fsdp_trainer.base.torch_private import local_tensor
from fsdp_trainer.checkpoint.state import OPTIMIZER, WEIGHTS
from fsdp_trainer.optim.optimizer_interface import TrainerOptimizer

FILE_BYTES = 2**30
"""A file has about as many bytes, or one parameter's."""
PART_BYTES = 2**27
"""A part has about as many bytes of weights and moments, or one parameter's."""
SLICED_BYTES = 2**30
"""A parameter with more bytes is updated in slices, which are parts of their own."""
QUANTUM = 2**18
"""Numbers of a slice are a multiple of it: every tensor's slice then is one of ALIGNED bytes."""


class Slice(NamedTuple):
    """Numbers of this rank's part of a parameter, from `first` to `last`, flat."""

    parameter: nn.Parameter
    first: int
    last: int


class UpdatePart(NamedTuple):
    """Slices of parameters that are updated together. file: number of the file that holds them."""

    file: int
    slices: list[Slice]


@dataclass(frozen=True)
class FiledStates:
    """This rank's numbers of a parameter and of its optimizer state, by name in a checkpoint.

    numbers: how many numbers of the parameter this rank has; tensors: all that have as many, or one
    for each block of them. Step counts are not among them.
    """

    parameter: nn.Parameter
    numbers: int
    tensors: dict[str, Any]

    @classmethod
    def of(cls, name: str, parameter: nn.Parameter, state: dict[str, Tensor]) -> "FiledStates":
        """Return the states of a parameter. name: the parameter's; state: of the optimizer."""
        large = {
            f"{OPTIMIZER}{name}/{key}": tensor for key, tensor in state.items() if key != "step"
        }
        numbers = local_tensor(parameter).numel()
        return cls(parameter, numbers, {WEIGHTS + name: parameter, **large})

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(local_tensor(tensor).nbytes for tensor in self.tensors.values())

    def slices(self) -> Iterator[Slice]:
        """Yield the slices that are updated one after the other; one if the parameter is small."""
        if self.nbytes <= SLICED_BYTES:
            yield Slice(self.parameter, 0, self.numbers)
            return
        each = PART_BYTES * self.numbers // self.nbytes
        each = max(QUANTUM, each // QUANTUM * QUANTUM)
        for first in range(0, self.numbers, each):
            yield Slice(self.parameter, first, min(first + each, self.numbers))


def files_of(states: list[FiledStates]) -> list[list[FiledStates]]:
    """Return the states in the order given, divided into files."""
    files: list[list[FiledStates]] = []
    size = FILE_BYTES
    for one in states:
        if size + one.nbytes > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(one)
        size += one.nbytes
    return files


def parts_in_memory(named: dict[str, nn.Parameter], whole: bool) -> list[UpdatePart]:
    """Return parts of parameters by name. whole: True for a single part."""
    states = [FiledStates.of(name, parameter, {}) for name, parameter in named.items()]
    if whole:
        return [UpdatePart(0, [Slice(one.parameter, 0, one.numbers) for one in states])]
    return list(parts_of_file(0, states))


def parts_of_file(number: int, states: list[FiledStates]) -> Iterator[UpdatePart]:
    """Yield the parts of a file."""
    slices: list[Slice] = []
    size = 0
    for one in states:
        pieces = list(one.slices())
        if slices and (len(pieces) > 1 or size + one.nbytes > PART_BYTES):
            yield UpdatePart(number, slices)
            slices, size = [], 0
        if len(pieces) > 1:
            yield from (UpdatePart(number, [piece]) for piece in pieces)
            continue
        slices += pieces
        size += one.nbytes
    if slices:
        yield UpdatePart(number, slices)


def states_of(named: dict[str, nn.Parameter], optimizer: TrainerOptimizer) -> list[FiledStates]:
    """Return the states of trained parameters. named: by name; their states must exist."""
    return [FiledStates.of(name, p, optimizer.state[p]) for name, p in named.items()]
