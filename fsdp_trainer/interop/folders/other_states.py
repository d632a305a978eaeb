"""The places of an optimizer's states in other tools' folders. Does not import torch."""

from pathlib import Path

from fsdp_trainer.interop.folders.other_weights import METADATA, zero_folder

STATES_BELOW = "optimizer_*"
"""The folder in which accelerate puts a distributed checkpoint of the states."""
FILES = ("optimizer.bin", "optimizer.pt")
"""Files of torch.save with the states of all ranks."""


def place_of_states(path: Path) -> tuple[str, Path] | None:
    """Return the kind of the states at a path, a key of READERS, and their folder or file.

    None if there are none. Whether they can be used shows when they are read.
    """
    if path.is_file():
        return "torch", path
    zero = zero_folder(path)
    if zero:
        return "zero", zero
    for folder in (path, *sorted(path.glob(STATES_BELOW))):
        if (folder / METADATA).is_file() and not folder.name.startswith("pytorch_model"):
            return "sharded", folder
    file = next((path / name for name in FILES if (path / name).is_file()), None)
    return ("torch", file) if file else None
