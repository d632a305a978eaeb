"""Bytes that an optimizer holds, by optim.name, for the planner and the memory check. No torch."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fsdp_trainer.config.formats import BLOCK, block_size, is_compact, moments_format
from fsdp_trainer.config.schema import Optim

NUMBER_BYTES = {"float32": 4, "bfloat16": 2}
CHUNKS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Numbers that CompactOptimizer updates at a time: few for a CPU's caches, many for launches."""
ROUND = 1 << 24
"""Numbers of matrices that Muon deals a rank at a time, if its matrices are not larger: few
collectives for small ones, little memory for large ones."""
OWNED_COPIES = 6
"""Of an owner's matrices, while they are made orthogonal: what came, the matrices, three steps of
the arithmetic, products of rows: an upper estimate."""
COMPACT_UPDATE_BYTES = 44
"""Bytes for each number that CompactOptimizer updates at a time, measured: the most of all."""


class Update(NamedTuple):
    """Everything that the memory of an update depends on.

    device: cpu or cuda; largest: numbers of a rank's largest parameter; gradients: bytes of all its
    gradients. matrix: numbers of the largest matrix of a block, whole; matrices: of all of them.
    ranks: all of them; shards: those that share one copy.
    """

    device: str
    largest: float
    gradients: float
    matrix: float
    matrices: float
    ranks: int
    shards: int


class Footprint(NamedTuple):
    """state_bytes, update_bytes: as the functions of these names below, of one optimizer."""

    state_bytes: Callable[[Optim, str, Sequence[int] | None, bool], float]
    update_bytes: Callable[[Optim, str, Update], float]


def state_bytes(
    optim: Optim, master_dtype: str, shape: Sequence[int] | None = None, in_block: bool = True
) -> float:
    """Return bytes of state for each number of a parameter of `shape`; None: of a large one."""
    return FOOTPRINTS[optim.name].state_bytes(optim, master_dtype, shape, in_block)


def update_bytes(optim: Optim, master_dtype: str, update: Update) -> float:
    """Return bytes that a rank needs for a moment in an update."""
    return FOOTPRINTS[optim.name].update_bytes(optim, master_dtype, update)


def is_block_matrix(name: str, dimensions: int) -> bool:
    """Return whether a parameter is a matrix of a block, or a stack of them: Muon's.

    Embedding and head are matrices too, whose rows are moved one by one: they are told by name.
    """
    # biases of all experts are stacked too
    is_matrix = dimensions >= 2 and not name.endswith("bias")
    return name.startswith("model.layers.") and is_matrix


def moment_bytes(optim: Optim, master_dtype: str, shape: Sequence[int] | None) -> float:
    """Return the bytes of a moment's number; codes of 8 bits have a float32 scale for each
    block."""
    moments = moments_format(optim, master_dtype)
    if moments != "8bit":
        return NUMBER_BYTES[moments]
    block = BLOCK if shape is None else block_size(shape)
    return 1 + 4 / block if block > 1 else NUMBER_BYTES["float32"]


def adamw_state_bytes(
    optim: Optim, master_dtype: str, shape: Sequence[int] | None, in_block: bool
) -> float:
    """Return the bytes of both moments."""
    return 2 * moment_bytes(optim, master_dtype, shape)


def adamw_update_bytes(optim: Optim, master_dtype: str, update: Update) -> float:
    """Return the bytes of what the arithmetic needs; torch's fused kernel needs nothing."""
    if is_compact(optim, master_dtype):
        return COMPACT_UPDATE_BYTES * min(CHUNKS[update.device], update.largest)
    return update.gradients if optim.implementation == "foreach" else 0.0


def muon_state_bytes(
    optim: Optim, master_dtype: str, shape: Sequence[int] | None, in_block: bool
) -> float:
    """Return the bytes of the momentum of a block's matrices (with NorMuon also a number for each
    row), of both moments of all else."""
    momentum = moment_bytes(optim, master_dtype, shape)
    if not in_block or (shape is not None and len(shape) < 2):
        return 2 * momentum
    rows = NUMBER_BYTES["float32"] / shape[-1] if optim.normuon and shape else 0.0
    return momentum + rows


def muon_update_bytes(optim: Optim, master_dtype: str, update: Update) -> float:
    """Return the bytes of a round: shards before and after, and the owner's matrices."""
    dealt = min(max(ROUND, update.matrix) * update.ranks, update.matrices)
    shards = dealt / update.shards * NUMBER_BYTES[optim.ns_dtype]
    owned = max(dealt / update.ranks, update.matrix) * NUMBER_BYTES[optim.ns_dtype]
    chunk = COMPACT_UPDATE_BYTES * min(CHUNKS[update.device], update.largest)
    return max(2 * shards + OWNED_COPIES * owned, chunk + shards)


def lion_state_bytes(
    optim: Optim, master_dtype: str, shape: Sequence[int] | None, in_block: bool
) -> float:
    """Return the bytes of the one moment."""
    return moment_bytes(optim, master_dtype, shape)


def chunked_update_bytes(optim: Optim, master_dtype: str, update: Update) -> float:
    """Return the bytes of a CompactOptimizer's arithmetic."""
    return COMPACT_UPDATE_BYTES * min(CHUNKS[update.device], update.largest)


FOOTPRINTS = {
    "adamw": Footprint(adamw_state_bytes, adamw_update_bytes),
    "lamb": Footprint(adamw_state_bytes, chunked_update_bytes),
    "lion": Footprint(lion_state_bytes, chunked_update_bytes),
    "sgd": Footprint(lion_state_bytes, chunked_update_bytes),
    "muon": Footprint(muon_state_bytes, muon_update_bytes),
}
