"""Number formats that follow from several keys. No torch."""

from fsdp_trainer.config.schema import Optim


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
