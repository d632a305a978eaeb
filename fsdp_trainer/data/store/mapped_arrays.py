"""Arrays in memory-mapped files, common to the processes of a node.

One process writes the files, which appear only when they are complete; all processes map them.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]
UNUSED_SECONDS = 30 * 24 * 3600.0
# number of samples or rows; with fewer, each process makes an epoch's arrays in 0.1 s and a few MB
MAPPED_FROM = 200_000


class MappedArrays:
    """Groups of named arrays in `folder`, one subfolder for each group.

    Writing a group deletes all groups, also in sibling folders, that were not opened for a month. A
    process that has mapped a deleted group can still use it.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.problem: OSError | None = None
        """Error that prevented writing files; every process then keeps the arrays in memory."""

    def get(self, group: str, make: Callable[[], Arrays]) -> Arrays:
        """Return the arrays of a group, from its files or, if there are none, from `make`.

        Waits if another process is making them.
        """
        arrays: Arrays | None = self._open(group)
        if arrays is not None:
            return arrays
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / "lock", "w") as lock:
                with suppress(OSError):  # this file system has no locks: several may make the same
                    fcntl.flock(lock, fcntl.LOCK_EX)
                stored = self._open(group)
                if stored is not None:
                    return stored
                arrays = make()
                self._write(group, arrays)
                self._clear_up()
            return self._open(group) or arrays
        except OSError as error:
            self.problem = error
            return arrays or make()

    def _open(self, group: str) -> Arrays | None:
        try:
            arrays = {
                file.stem: np.asarray(np.load(file, mmap_mode="r"))
                for file in (self.folder / group).glob("*.npy")
            }
        except (OSError, ValueError, EOFError):  # files damaged by a crash of the machine
            return None
        with suppress(OSError):
            os.utime(self.folder / group)
        return arrays or None

    def _write(self, group: str, arrays: Arrays) -> None:
        aside = Path(tempfile.mkdtemp(prefix=f".{group}-", dir=self.folder))
        try:
            for name, array in arrays.items():
                with open(aside / f"{name}.npy", "wb") as file:
                    np.save(file, array)
                    file.flush()
                    os.fsync(file.fileno())
            aside.chmod(0o755)  # mkdtemp's folder is private to its owner
            _remove(self.folder / group)
            os.replace(aside, self.folder / group)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _clear_up(self) -> None:
        with suppress(OSError):
            for group in self.folder.parent.glob("*/*/"):
                if time.time() - group.stat().st_mtime > UNUSED_SECONDS:
                    _remove(group)


def _remove(group: Path) -> None:
    """Delete a group; rename it first, so that no process finds half of it."""
    gone = group.with_name(f".gone-{group.name}-{os.getpid()}")
    with suppress(OSError):
        os.replace(group, gone)
        shutil.rmtree(gone, ignore_errors=True)
