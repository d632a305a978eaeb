"""Tensors that are in files already, in the format of a checkpoint, which links these files."""

import os
import shutil
from pathlib import Path
from typing import NamedTuple, Protocol

from fsdp_trainer.checkpoint.atomic_files import describe, sync


class LinkedPlace(NamedTuple):
    """The location of a tensor's archive: number of the file, offset and length in bytes."""

    file: int
    offset: int
    length: int


class LinkedFiles(Protocol):
    def places(self) -> dict[str, LinkedPlace]:
        """Return the place of each tensor by its name in a checkpoint."""

    def snapshot(self) -> list[Path]:
        """Return links to the files as they are now, which later updates leave alone."""


def link(source: Path, target: Path) -> dict[str, int]:
    """Make `target` a hard link of a file, or a copy if that is not possible.

    Returns its size, and the checksum of its bytes on the disk. Raises OSError.
    """
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)
    sync(target)
    return describe(target.parent, [target.name])[target.name]
