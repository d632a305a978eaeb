"""Memory of optimizers by optim.name, for planner and memory check. Does not import torch."""

from collections.abc import Sequence

from fsdp_trainer.config.formats import BLOCK, block_size, moments_format
from fsdp_trainer.config.parts.optimizers import Optim

NUMBER_BYTES = {"float32": 4, "bfloat16": 2}
CHUNKS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Numbers that CompactOptimizer updates at a time: few, to fit in a CPU's caches, or many, to
launch few GPU kernels."""
ROUND = 1 << 24
"""Numbers that Muon assigns to a rank at a time, unless a single matrix is larger: few collectives
for small matrices, little memory for large ones."""


def state_bytes(
    optim: Optim, master_dtype: str, shape: Sequence[int] | None = None, in_block: bool = True
) -> float:
    """Return bytes of state per number of a parameter. shape: None for a large parameter."""
    return optim.spec.footprint()(optim, master_dtype, shape, in_block)


def is_matrix(name: str, dimensions: int) -> bool:
    """Return True if a parameter is a matrix or a stack of them, False for norms and biases."""
    # stacked biases of experts have two dimensions, too
    return dimensions >= 2 and not name.endswith("bias")


def moment_bytes(
    optim: Optim, master_dtype: str, shape: Sequence[int] | None, in_block: bool = True
) -> float:
    """Return the bytes of a moment per number, including the float32 scale of each 8-bit block."""
    moments = moments_format(optim, master_dtype)
    if moments != "8bit":
        return NUMBER_BYTES[moments]
    block = BLOCK if shape is None else block_size(shape)
    return 1 + 4 / block if block > 1 else NUMBER_BYTES["float32"]


def two_moments(
    optim: Optim, master_dtype: str, shape: Sequence[int] | None, in_block: bool
) -> float:
    return 2 * moment_bytes(optim, master_dtype, shape)


def muon_state_bytes(
    optim: Optim, master_dtype: str, shape: Sequence[int] | None, in_block: bool
) -> float:
    """Return the bytes per number: momentum for matrices of blocks, two AdamW moments otherwise.

    NorMuon adds a float32 number for each row of a matrix.
    """
    momentum = moment_bytes(optim, master_dtype, shape)
    if not in_block or (shape is not None and len(shape) < 2):
        return 2 * momentum
    rows = NUMBER_BYTES["float32"] / shape[-1] if optim.normuon and shape else 0.0
    return momentum + rows
