"""Bytes that an optimizer holds, by optim.name, for the planner and the memory check. No torch."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fsdp_trainer.config.formats import is_compact, moments_format
from fsdp_trainer.config.schema import Optim

BLOCK = 256  # numbers that share a scale in 8 bits, at most
MIN_BLOCK = 64  # a scale for fewer numbers would cost more than it saves
NUMBER_BYTES = {"float32": 4, "bfloat16": 2}
CHUNKS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Numbers that CompactAdamW updates at a time: few for the CPU's caches, many for few launches."""
COMPACT_UPDATE_BYTES = 44
"""For each number that CompactAdamW updates at a time: at most, over its formats, as measured."""


class Footprint(NamedTuple):
    """state_bytes, update_bytes: as the functions of these names below, of one optimizer."""

    state_bytes: Callable[[Optim, str, Sequence[int] | None], float]
    update_bytes: Callable[[Optim, str, str, float, float], float]


def state_bytes(optim: Optim, master_dtype: str, shape: Sequence[int] | None = None) -> float:
    """Return bytes of state for each number of a parameter of `shape`; None: of a large one."""
    return FOOTPRINTS[optim.name].state_bytes(optim, master_dtype, shape)


def update_bytes(
    optim: Optim, master_dtype: str, device_type: str, largest: float, gradients: float
) -> float:
    """Return bytes that a rank needs for a moment in an update.

    largest: numbers of its largest parameter; gradients: bytes of all its gradients.
    """
    return FOOTPRINTS[optim.name].update_bytes(optim, master_dtype, device_type, largest, gradients)


def block_size(shape: Sequence[int]) -> int:
    """Return how many numbers of a parameter share a scale in 8 bits; 1: it stays in float32.

    It is the largest power of two that divides a row, so that a block never crosses rows.
    """
    row = shape[-1] if len(shape) > 1 else 0
    block = min(row & -row, BLOCK)
    return block if block >= MIN_BLOCK else 1


def adamw_state_bytes(optim: Optim, master_dtype: str, shape: Sequence[int] | None) -> float:
    """Return the bytes of both moments; codes of 8 bits have a float32 scale for each block."""
    moments = moments_format(optim, master_dtype)
    if moments != "8bit":
        return 2 * NUMBER_BYTES[moments]
    block = BLOCK if shape is None else block_size(shape)
    return 2 * (1 + 4 / block) if block > 1 else 2 * NUMBER_BYTES["float32"]


def adamw_update_bytes(
    optim: Optim, master_dtype: str, device_type: str, largest: float, gradients: float
) -> float:
    """Return the bytes of what the arithmetic needs; torch's fused kernel needs nothing."""
    if is_compact(optim, master_dtype):
        return COMPACT_UPDATE_BYTES * min(CHUNKS[device_type], largest)
    return gradients if optim.implementation == "foreach" else 0.0


FOOTPRINTS = {"adamw": Footprint(adamw_state_bytes, adamw_update_bytes)}
