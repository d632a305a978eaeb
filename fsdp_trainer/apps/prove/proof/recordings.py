"""The records of a proof's ranks: where they lie, and complete tensors of all ranks' parts."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

FOLDER = "FSDP_TRAINER_PROOF"
"""Environment variable with the folder for the records."""
NUDGE = "FSDP_TRAINER_PROOF_NUDGE"
"""Environment variable that changes the weights at the start by this share, up or down."""
BIAS = "e_score_correction_bias"
"""The end of the names of routers' biases, which no gradient moves."""
STEPS = 10
GRADIENTS = (1, 2, STEPS)
"""Steps whose gradients are recorded."""


def whole_tensors(folder: Path, name: str) -> tuple[dict[str, Tensor], dict[str, bool], list[str]]:
    """Return complete tensors that ranks have written, whether each is trained, and unequal copies.

    The last are sentences about ranks that hold the same numbers and have other values.
    """
    whole: dict[str, Tensor] = {}
    trained: dict[str, bool] = {}
    known: dict[str, Tensor] = {}
    unequal = []
    for rank, parts in ranks_of(folder, name):
        for key, (is_trained, shape, starts, numbers) in parts.items():
            if key not in whole:
                whole[key] = torch.zeros(shape, dtype=numbers.dtype)
                known[key] = torch.zeros(shape, dtype=torch.bool)
                trained[key] = is_trained
            sizes = zip(starts, numbers.shape, strict=True)
            place = tuple(slice(start, start + size) for start, size in sizes)
            before = known[key][place]
            if not torch.equal(whole[key][place][before], numbers[before]):
                unequal.append(f"rank {rank} holds other numbers of {key} than a rank before it")
            whole[key][place], known[key][place] = numbers, True
    missing = [f"no rank holds all of {key}" for key, here in known.items() if not here.all()]
    return whole, trained, [*unequal, *missing]


def ranks_of(folder: Path, name: str) -> Iterator[tuple[int, dict]]:
    for path in sorted(folder.glob(f"{name}.rank*.pt")):
        yield int(path.stem.rpartition("rank")[2]), torch.load(path, weights_only=True)
