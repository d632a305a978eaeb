"""Memory of optimizers by optim.name, for planner and memory check. Does not import torch."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fsdp_trainer.config.formats import BLOCK, block_size, is_compact, moments_format
from fsdp_trainer.config.parts.optimizers import Optim

NUMBER_BYTES = {"float32": 4, "bfloat16": 2}
CHUNKS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Numbers that CompactOptimizer updates at a time: few, to fit in a CPU's caches, or many, to
launch few GPU kernels."""
ROUND = 1 << 24
"""Numbers that Muon assigns to a rank at a time, unless a single matrix is larger: few collectives
for small matrices, little memory for large ones."""
OWNED_COPIES = 6
"""Upper estimate of the copies of an owner's matrices during orthogonalisation: received pieces,
matrices, three temporaries of the iteration, products of rows."""
COMPACT_UPDATE_BYTES = 44
"""Temporary bytes of CompactOptimizer per number of a chunk, measured; maximum over optimizers."""


class Update(NamedTuple):
    """Quantities that determine the temporary memory of an update.

    device: cpu or cuda; largest: numbers in a rank's largest parameter; gradients: bytes of a
    rank's gradients. matrix: numbers in the largest complete matrix of a block; matrices: numbers
    in all matrices of blocks. ranks: number of ranks; shards: number of ranks that shard one copy.
    """

    device: str
    largest: float
    gradients: float
    matrix: float
    matrices: float
    ranks: int
    shards: int


class Footprint(NamedTuple):
    """The functions `state_bytes` and `update_bytes`, see below, of one optimizer."""

    state_bytes: Callable[[Optim, str, Sequence[int] | None, bool], float]
    update_bytes: Callable[[Optim, str, Update], float]


def state_bytes(
    optim: Optim, master_dtype: str, shape: Sequence[int] | None = None, in_block: bool = True
) -> float:
    """Return bytes of state per number of a parameter. shape: None for a large parameter."""
    return FOOTPRINTS[optim.name].state_bytes(optim, master_dtype, shape, in_block)


def update_bytes(optim: Optim, master_dtype: str, update: Update) -> float:
    """Return the temporary bytes that a rank needs during an update."""
    return FOOTPRINTS[optim.name].update_bytes(optim, master_dtype, update)


def is_matrix(name: str, dimensions: int) -> bool:
    """Return True if a parameter is a matrix or a stack of them, False for norms and biases."""
    # stacked biases of experts have two dimensions, too
    return dimensions >= 2 and not name.endswith("bias")


def moment_bytes(optim: Optim, master_dtype: str, shape: Sequence[int] | None) -> float:
    """Return the bytes of a moment per number, including the float32 scale of each 8-bit block."""
    moments = moments_format(optim, master_dtype)
    if moments != "8bit":
        return NUMBER_BYTES[moments]
    block = BLOCK if shape is None else block_size(shape)
    return 1 + 4 / block if block > 1 else NUMBER_BYTES["float32"]


def adamw_state_bytes(
    optim: Optim, master_dtype: str, shape: Sequence[int] | None, in_block: bool
) -> float:
    """Return the bytes of both moments per number."""
    return 2 * moment_bytes(optim, master_dtype, shape)


def adamw_update_bytes(optim: Optim, master_dtype: str, update: Update) -> float:
    """Return the bytes of temporaries; torch's fused kernel needs none."""
    if is_compact(optim, master_dtype):
        return chunked_update_bytes(optim, master_dtype, update)
    return update.gradients if optim.implementation == "foreach" else 0.0


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


def muon_update_bytes(optim: Optim, master_dtype: str, update: Update) -> float:
    """Return the bytes of a round: shards before and after it, and the owner's matrices."""
    dealt = min(max(ROUND, update.matrix) * update.ranks, update.matrices)
    shards = dealt / update.shards * NUMBER_BYTES[optim.ns_dtype]
    owned = max(dealt / update.ranks, update.matrix) * NUMBER_BYTES[optim.ns_dtype]
    chunk = chunked_update_bytes(optim, master_dtype, update)
    return max(2 * shards + OWNED_COPIES * owned, chunk + shards)


def lion_state_bytes(
    optim: Optim, master_dtype: str, shape: Sequence[int] | None, in_block: bool
) -> float:
    """Return the bytes of the only moment per number."""
    return moment_bytes(optim, master_dtype, shape)


def chunked_update_bytes(optim: Optim, master_dtype: str, update: Update) -> float:
    """Return the bytes of a CompactOptimizer's temporaries."""
    return COMPACT_UPDATE_BYTES * min(CHUNKS[update.device], update.largest)


FOOTPRINTS = {
    "adamw": Footprint(adamw_state_bytes, adamw_update_bytes),
    "lamb": Footprint(adamw_state_bytes, chunked_update_bytes),
    "lars": Footprint(lion_state_bytes, chunked_update_bytes),
    "lion": Footprint(lion_state_bytes, chunked_update_bytes),
    "sgd": Footprint(lion_state_bytes, chunked_update_bytes),
    "muon": Footprint(muon_state_bytes, muon_update_bytes),
}
