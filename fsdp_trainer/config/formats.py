"""Number formats that follow from several keys. Imports no torch."""

from collections.abc import Sequence

from fsdp_trainer.config.parts.optimizers import Optim

BLOCK = 256  # most elements of an 8-bit moment that share a scale
MIN_BLOCK = 64  # a scale for fewer elements would cost more than it saves
FOUR_BIT_BLOCK = 64  # elements of a 4-bit matrix that share a scale


def block_size(shape: Sequence[int]) -> int:
    """Return the number of elements of an 8-bit moment that share a scale; 1: it stays in float32.

    It is the largest power of two, at most BLOCK, that divides a row, so that no block crosses
    rows. shape: of the parameter.
    """
    row = shape[-1] if len(shape) > 1 else 0
    block = min(row & -row, BLOCK)
    return block if block >= MIN_BLOCK else 1


def moments_format(optim: Optim, master_dtype: str) -> str:
    return optim.state_dtype or master_dtype


def rounds(optim: Optim, master_dtype: str) -> bool:
    """Return True if an update is stored in bfloat16 anywhere, so that optim.rounding matters."""
    return "bfloat16" in (master_dtype, moments_format(optim, master_dtype))


def is_compact(optim: Optim, master_dtype: str) -> bool:
    """Return True if torch's own AdamW does not support the configured formats.

    It keeps moments in the weights' format only, and rounds to nearest.
    """
    stochastic = optim.rounding == "stochastic" and rounds(optim, master_dtype)
    return stochastic or moments_format(optim, master_dtype) != master_dtype
