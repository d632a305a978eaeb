"""Optimizers that compute in float32 and store weights or moments in fewer bits."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_trainer.base.distributed import local_part, local_slice
from fsdp_trainer.base.torch_private import dtensor_like
from fsdp_trainer.config.formats import block_size
from fsdp_trainer.errors import UserError
from fsdp_trainer.optim.eight_bit import decode, encode
from fsdp_trainer.optim.footprint import CHUNKS
from fsdp_trainer.optim.optimizer_interface import TrainerOptimizer
from fsdp_trainer.optim.stochastic_rounding import (
    element_numbers,
    key_of,
    random_bits,
    round_to_bfloat16,
)


class MomentKind(NamedTuple):
    """Properties of a moment (a running mean).

    signed: it may be negative. stochastic: in bfloat16 it is rounded like weights; otherwise to
    nearest, which is enough for a moment that changes in large steps.
    """

    signed: bool
    stochastic: bool


class NumberPlace(NamedTuple):
    """The key of a parameter's random bits, and arguments of `element_numbers`."""

    key: tuple[int, int]
    part: tuple[slice, ...]
    shape: torch.Size
    start: int


@dataclass
class NumberChunk:
    """Numbers of a parameter that are updated together; tensors are [blocks, block].

    numbers: slice of the parameter's blocks on this rank. place: where they are in the parameter;
    None: they are rounded to nearest. With `skip`, writes change no bit. bits: see `drawn`.
    """

    numbers: slice
    weight: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    moments: dict[str, MomentKind]
    place: NumberPlace | None
    skip: Tensor
    bits: Tensor | None = None

    def drawn(self, count: Tensor) -> "NumberChunk":
        if self.place is None:
            return self
        key, part, shape, start = self.place
        own = self.weight.numel(), self.weight.device
        elements = element_numbers(part, shape, start, *own)
        bits = random_bits(key, count, elements.view_as(self.weight))
        return NumberChunk(
            self.numbers,
            self.weight,
            self.gradient,
            self.state,
            self.moments,
            self.place,
            self.skip,
            bits,
        )

    def load(self, name: str) -> Tensor:
        if name in self.state:
            return self.state[name].float()
        codes, scale = self.state[f"{name}_codes"], self.state[f"{name}_scale"]
        return decode(codes, scale, self.moments[name].signed)

    def store(self, name: str, moment: Tensor) -> None:
        """Write a moment in its storage format. Must be called before `write`."""
        kind = self.moments[name]
        if name in self.state:
            bits = self.bits >> 16 if kind.stochastic and self.bits is not None else None
            new = rounded(moment, self.state[name].dtype, bits)
            write_unless(self.skip, self.state[name], new)
            return
        codes, scale = encode(moment, kind.signed)
        write_unless(self.skip, self.state[f"{name}_codes"], codes)
        write_unless(self.skip, self.state[f"{name}_scale"], scale)

    def write(self, new: Tensor) -> None:
        write_unless(self.skip, self.weight, rounded(new, self.weight.dtype, self.bits))


class CompactOptimizer(TrainerOptimizer):
    """Base class for float32 or bfloat16 weights with moments in float32, bfloat16 or 8 bits.

    bfloat16 numbers are rounded stochastically or to nearest. The random bits depend on seed, step,
    parameter and element, so that sharding and restarts do not change them. All parameters share
    one step count, and should have a gradient in each step.
    """

    skips_on_device = True
    moments: ClassVar[dict[str, MomentKind]]
    """Kinds of the moments by name."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        state_format: str,
        stochastic: bool,
        seed: int,
        **defaults: Any,
    ):
        """Create the optimizer; states are created in the first step.

        groups: parameter groups with names; state_format: float32, bfloat16 or 8bit; stochastic:
        True for stochastic rounding; defaults: lr and other group options.
        """
        super().__init__(groups, {"weight_decay": 0.0, **defaults})
        self.state_format = state_format
        self.stochastic = stochastic
        self.keys = {
            parameter: key_of(seed, name)
            for group in self.param_groups
            for parameter, name in zip(group["params"], group["param_names"], strict=True)
        }
        self.count = torch.zeros((), device=next(iter(self.keys)).device)
        for parameter in self.keys:
            require_whole_blocks(parameter, self.block(parameter))

    @property
    def updates_slices(self) -> bool:
        """False if random bits depend on the places of a parameter's numbers."""
        return not self.stochastic

    def block(self, parameter: nn.Parameter) -> int:
        """Return how many numbers of a moment share a scale; 1: it has no scale."""
        return block_size(parameter.shape) if self.state_format == "8bit" else 1

    def empty_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        block = self.block(parameter)
        dtype = torch.bfloat16 if self.state_format == "bfloat16" else torch.float32
        formats = {"": (dtype, 1)}
        if block > 1:
            formats = {"_codes": (torch.uint8, 1), "_scale": (torch.float32, block)}
        return {"step": self.count} | {
            name + suffix: zeros_like_part(parameter, *format_)
            for name in self.moments
            for suffix, format_ in formats.items()
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter, or none if `found_inf` is not 0."""
        found_inf = torch.zeros(()) if self.found_inf is None else self.found_inf
        skip = found_inf.to(self.count.device) != 0
        count = self.count + 1
        self.update(count, skip)
        write_unless(skip, self.count, count)

    def update(self, count: Tensor, skip: Tensor) -> None:
        """Update every parameter that has a gradient; with `skip`, none.

        count: number of this step, starting at 1; a scalar on the device.
        """
        raise NotImplementedError

    def chunks(self, parameter: nn.Parameter, count: Tensor, skip: Tensor) -> Iterator[NumberChunk]:
        """Yield the chunks of this rank's part of a parameter; none if it has no gradient."""
        for chunk in self.undrawn_chunks(parameter, skip):
            yield chunk.drawn(count)

    def undrawn_chunks(self, parameter: nn.Parameter, skip: Tensor) -> Iterator[NumberChunk]:
        if parameter.grad is None:
            return
        if not self.state[parameter]:
            self.state[parameter] = self.empty_state(parameter)
        block = self.block(parameter)
        part = local_slice(parameter)
        weights = local_part(parameter).view(-1, block)
        gradients = local_part(parameter.grad).reshape(-1, block)
        state = {
            name: local_part(tensor).view(-1, 1 if name.endswith("_scale") else block)
            for name, tensor in self.state[parameter].items()
            if name.startswith(tuple(self.moments))
        }
        size = CHUNKS[weights.device.type] // block
        for start in range(0, len(weights), size):
            numbers = slice(start, start + size)
            place = None
            if self.stochastic:
                place = NumberPlace(self.keys[parameter], part, parameter.shape, start * block)
            tensors = (
                weights[numbers],
                gradients[numbers],
                {n: t[numbers] for n, t in state.items()},
            )
            yield NumberChunk(numbers, *tensors, self.moments, place, skip)


def rounded(numbers: Tensor, dtype: torch.dtype, bits: Tensor | None) -> Tensor:
    if dtype == torch.bfloat16 and bits is not None:
        return round_to_bfloat16(numbers, bits)
    return numbers.to(dtype)


def write_unless(skip: Tensor, old: Tensor, new: Tensor) -> None:
    torch.where(skip, old, new, out=old)


def require_whole_blocks(parameter: Tensor, block: int) -> None:
    """Raise UserError if this rank's columns contain an incomplete block."""
    columns = local_part(parameter).shape[-1]
    if columns % block:
        cut = f"column shards of {columns} numbers would cut blocks of {block}"
        raise UserError(
            "8-bit moments do not fit this sharding",
            "optim.state_dtype=8bit",
            f"{cut}.\nUse  optim.state_dtype=bfloat16",
        )


def zeros_like_part(parameter: Tensor, dtype: torch.dtype, block: int = 1) -> Tensor:
    require_whole_blocks(parameter, block)
    local = local_part(parameter)
    *rows, columns = local.shape
    zeros = torch.zeros(*rows, columns // block, dtype=dtype, device=local.device)
    if not isinstance(parameter, DTensor):
        return zeros
    *rows, columns = parameter.shape
    return dtensor_like(parameter, zeros, torch.Size((*rows, columns // block)))
