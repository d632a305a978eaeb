"""A teacher's likeliest tokens for all supervised tokens of a store, in files next to the store.

There is one entry per supervised token, in the order of the store, so the files are valid for every
packing, row order and number of ranks.
"""

import errno
import fcntl
import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_trainer.data.store.cache_folders import LOCK, clear_leftovers

FOLDER = "teacher"
"""Name of the folder next to a store's columns."""
ABOUT = "about.json"
TOKENS, LOGS, REST, TARGET = "top_tokens", "top_logs", "top_rest", "top_target"
"""Names of the files, and of columns of rows: the likeliest tokens, their log-probabilities, the
log of the total probability of all other tokens, and the log-probability of the target."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def array_types(count: int, vocabulary: int) -> dict[str, tuple[type, tuple[int, ...]]]:
    """Return dtype and shape of the values stored per token. count: number of tokens in a list."""
    token = np.uint16 if vocabulary <= 2**16 else np.int32
    return {
        TOKENS: (token, (count,)),
        LOGS: (np.float16, (count,)),
        REST: (np.float32, ()),
        TARGET: (np.float32, ()),
    }


def bytes_per_token(count: int, vocabulary: int) -> int:
    """Return the bytes on disk per supervised token."""
    types = array_types(count, vocabulary).values()
    return sum(np.dtype(dtype).itemsize * int(np.prod(shape)) for dtype, shape in types)


class TopLists:
    """The stored lists of a store's supervised tokens. arrays: [supervised tokens, ...] by name."""

    def __init__(self, arrays: dict[str, np.ndarray]):
        self.arrays = arrays

    def __call__(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Return entries by name. numbers: indices among all supervised tokens of the store."""
        columns = {name: array[numbers] for name, array in self.arrays.items()}
        # few operators of torch know uint16
        return columns | {TOKENS: columns[TOKENS].astype(np.int32)}


def open_lists(folder: Path, tokens: int) -> TopLists | None:
    """Return the lists in a folder; None if they are missing or incomplete.

    tokens: number of supervised tokens in the store.
    """
    try:
        arrays = {
            name: np.load(folder / f"{name}.npy", mmap_mode="r")
            for name in (TOKENS, LOGS, REST, TARGET)
        }
    except (OSError, ValueError, EOFError):
        return None
    whole = all(len(array) == tokens for array in arrays.values())
    return TopLists(arrays) if whole else None


class ListsWriter:
    """Writer of files of lists, which appear only when they are complete.

    Creating it raises OSError if the disk has no room for all of them.
    """

    def __init__(self, folder: Path, tokens: int, count: int, vocabulary: int):
        """Create the files next to `folder`, their final location.

        tokens: number of supervised tokens in the store. count: number of tokens in a list.
        """
        folder.parent.mkdir(exist_ok=True)
        self.folder = folder
        self.aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        self.lock = open(self.aside / LOCK, "w")  # noqa: SIM115 - open as long as this object
        with suppress(OSError):  # this file system has no locks
            fcntl.flock(self.lock, fcntl.LOCK_EX)
        clear_leftovers(folder.parent, self.aside)
        self.arrays: dict[str, Any] = {}
        try:
            for name, (dtype, shape) in array_types(count, vocabulary).items():
                file = self.aside / f"{name}.npy"
                array = np.lib.format.open_memmap(file, "w+", dtype, (tokens, *shape))
                reserve(file)  # otherwise a page without room on the disk would kill the process
                self.arrays[name] = array
        except OSError:
            self.close()
            raise

    def write(self, numbers: np.ndarray, columns: dict[str, np.ndarray]) -> None:
        """Write entries of supervised tokens. numbers: their indices among all of the store."""
        for name, array in self.arrays.items():
            array[numbers] = columns[name]

    def commit(self, about: dict[str, Any]) -> None:
        """Publish the finished files with a description of their inputs.

        Another process may have published them in the meantime.
        """
        for array in self.arrays.values():
            array.flush()
        self.arrays = {}
        (self.aside / ABOUT).write_text(json.dumps(about, indent=1) + "\n")
        self.lock.close()
        (self.aside / LOCK).unlink()
        os.chmod(self.aside, 0o755)  # mkdtemp's folder is private to its owner
        try:
            os.replace(self.aside, self.folder)
        except OSError:
            if not self.folder.is_dir():
                raise
            broken = self.aside.with_name(f"{self.aside.name}-broken")
            with suppress(OSError):  # the folder is another writer's, or damaged by a failing disk
                os.replace(self.folder, broken)
                os.replace(self.aside, self.folder)
            shutil.rmtree(broken, ignore_errors=True)

    def close(self) -> None:
        """Delete all files that were not committed."""
        self.arrays = {}
        self.lock.close()
        shutil.rmtree(self.aside, ignore_errors=True)


def reserve(file: Path) -> None:
    """Allocate all blocks of a file on disk. Raises OSError if the disk is full."""
    with open(file, "r+b") as opened:
        try:
            os.posix_fallocate(opened.fileno(), 0, os.fstat(opened.fileno()).st_size)
        except OSError as error:
            if error.errno in FULL:
                raise
