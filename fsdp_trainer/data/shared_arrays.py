"""Arrays that the processes of a node share.

One of them writes the files, which appear when they are whole; all map them.
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
# samples or rows: for less, what an epoch takes is a few MB, arrays within 0.1 s in every process
SHARED_FROM = 200_000


class SharedArrays:
    """Groups of named arrays in `folder`, one folder for each group.

    When one is made, groups are deleted that nobody has opened for a month: also those of other
    folders beside this one. A process that maps them keeps them.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.problem: OSError | None = None
        """Why nothing can be kept there; every process then holds the arrays in its own memory."""

    def get(self, group: str, make: Callable[[], Arrays]) -> Arrays:
        """Return the arrays that `make` returns, from files if any process has written them.

        A process that comes while another one makes them waits.
        """
        arrays: Arrays | None = self._open(group)
        if arrays is not None:
            return arrays
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / "lock", "w") as lock:
                with suppress(OSError):  # where there are no locks, several make the same
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
        except (OSError, ValueError, EOFError):  # cut short by a crash of the machine
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
            aside.chmod(0o755)  # mkdtemp's folder is for its owner only
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
    """Renamed first, so that nobody finds a part of it."""
    gone = group.with_name(f".gone-{group.name}-{os.getpid()}")
    with suppress(OSError):
        os.replace(group, gone)
        shutil.rmtree(gone, ignore_errors=True)
