"""Number formats that follow from several keys. No torch."""

from collections.abc import Sequence

from fsdp_trainer.config.schema import Optim

BLOCK = 256  # numbers of a moment that share a scale in 8 bits, at most
MIN_BLOCK = 64  # a scale for fewer numbers would cost more than it saves
FOUR_BIT_BLOCK = 64  # numbers of a matrix in 4 bits that share a scale


def block_size(shape: Sequence[int]) -> int:
    """Return how many numbers of a parameter share a scale in 8 bits; 1: it stays in float32.

    It is the largest power of two that divides a row, so that a block never crosses rows.
    """
    row = shape[-1] if len(shape) > 1 else 0
    block = min(row & -row, BLOCK)
    return block if block >= MIN_BLOCK else 1


def moments_format(optim: Optim, master_dtype: str) -> str:
    """`float32`, `bfloat16` or `8bit`."""
    return optim.state_dtype or master_dtype


def rounds(optim: Optim, master_dtype: str) -> bool:
    """Return True if an update ends in bfloat16 anywhere, so that optim.rounding counts."""
    return "bfloat16" in (master_dtype, moments_format(optim, master_dtype))


def is_compact(optim: Optim, master_dtype: str) -> bool:
    """Return True if torch's own AdamW cannot do it.

    It has moments in the weights' format only, and rounds to nearest.
    """
    stochastic = optim.rounding == "stochastic" and rounds(optim, master_dtype)
    return stochastic or moments_format(optim, master_dtype) != master_dtype
