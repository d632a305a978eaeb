"""The division of a rank's optimizer states into files, and into parts that are updated together.

See docs/offload.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor, nn

from fsdp_trainer.base.distributed import local_part
from fsdp_trainer.checkpoint.formats.tensor_files import grouped
from fsdp_trainer.checkpoint.state import OPTIMIZER, WEIGHTS

FILE_BYTES = 2**30
"""A file has about as many bytes, or one parameter's."""
PART_BYTES = 2**27
"""A part has about as many bytes of weights and moments, or one parameter's."""
SLICED_BYTES = 2**30
"""A parameter with more bytes is updated in slices, which are parts of their own."""
QUANTUM = 2**18
"""Numbers of a slice are a multiple of it: every tensor's slice then is one of ALIGNED bytes."""


class Slice(NamedTuple):
    """Numbers of this rank's part of a parameter, from `first` to `last`, flat.

    room: bytes that count in a part. Those of a slice of a larger parameter fill one, since a
    parameter can be in memory with one of its slices only.
    """

    parameter: nn.Parameter
    first: int
    last: int
    room: int


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
        large = {
            f"{OPTIMIZER}{name}/{key}": tensor for key, tensor in state.items() if key != "step"
        }
        numbers = local_part(parameter).numel()
        return cls(parameter, numbers, {WEIGHTS + name: parameter, **large})

    @property
    def nbytes(self) -> int:
        return sum(local_part(tensor).nbytes for tensor in self.tensors.values())

    def slices(self, sliced: bool) -> Iterator[Slice]:
        """Yield the slices that are updated one after the other; one if the parameter is small.

        sliced: False for a single slice of any parameter.
        """
        if self.nbytes <= SLICED_BYTES or not sliced:
            yield Slice(self.parameter, 0, self.numbers, self.nbytes)
            return
        each = PART_BYTES * self.numbers // self.nbytes
        each = max(QUANTUM, each // QUANTUM * QUANTUM)
        for first in range(0, self.numbers, each):
            yield Slice(self.parameter, first, min(first + each, self.numbers), PART_BYTES)


def files_of(states: list[FiledStates]) -> list[list[FiledStates]]:
    return list(grouped(states, attrgetter("nbytes"), FILE_BYTES))


def parts_in_memory(named: dict[str, nn.Parameter], whole: bool) -> list[UpdatePart]:
    states = [FiledStates.of(name, parameter, {}) for name, parameter in named.items()]
    parts = list(parts_of_file(0, states, sliced=False))
    return [UpdatePart(0, [piece for part in parts for piece in part.slices])] if whole else parts


def parts_of_file(number: int, states: list[FiledStates], sliced: bool) -> Iterator[UpdatePart]:
    """Yield the parts of a file. sliced: True to slice large parameters."""
    slices = [piece for one in states for piece in one.slices(sliced)]
    for part in grouped(slices, attrgetter("room"), PART_BYTES):
        yield UpdatePart(number, part)
