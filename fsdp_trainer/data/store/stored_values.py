"""Values that a second model gives to the samples of a store, in files next to the store.

A reference: Σ log-probability of each sample. A teacher: its top-k tokens for each supervised
token, in the order of the store. Neither depends on packing, row order or the number of ranks.
"""

import fcntl
import io
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_trainer.base.disk_space import reserve
from fsdp_trainer.base.unpacked import FULL
from fsdp_trainer.data.store.cache_folders import LOCK, clear_leftovers
from fsdp_trainer.data.store.token_store import (
    CHECKED_BYTES,
    CHECKSUMS,
    Damaged,
    TokenStore,
    check_files,
    checksums_of,
)

REFERENCE, TEACHER = "reference", "teacher"
"""Names of the folders next to a store's columns."""
ABOUT = "about.json"
TOP_K = (TOKENS, LOGS, REST, TARGET) = ("top_tokens", "top_logs", "top_rest", "top_target")
"""Names of a teacher's files, and of columns of rows: the likeliest tokens, their
log-probabilities, the log of the total probability of all other tokens, and the log-probability of
the target."""
CRC_BYTES = 4


@dataclass(frozen=True)
class SampleColumns:
    """Values of the samples of a store beside what it holds. None: there are none.

    reference: [samples] float64, Σ log-probability of each under a reference.
    label_values: [samples, numbers] float64, what a head is to learn of each. token_labels:
    [supervised tokens] int64, the number of each one's label, which its own position gives, and not
    the one before it. of_tokens: returns
    values of supervised tokens, [tokens, ...] by name, given their indices among all supervised
    tokens of the store.
    """

    reference: np.ndarray | None = None
    label_values: np.ndarray | None = None
    token_labels: np.ndarray | None = None
    of_tokens: Callable[[np.ndarray], dict[str, np.ndarray]] | None = None


# --- a reference


def read_sums(place: Path, store: TokenStore) -> SampleColumns | None:
    try:
        sums = np.load(place, mmap_mode="r")
        size = place.stat().st_size
        # earlier versions wrote no checksum behind the array
        is_checked = sums.offset + sums.nbytes < size <= CHECKED_BYTES
        is_whole = not is_checked or _has_checksum(place.read_bytes())
    except (OSError, ValueError, EOFError):
        return None
    return SampleColumns(reference=sums) if is_whole and sums.shape == (len(store),) else None


def _has_checksum(content: bytes) -> bool:
    return content[-CRC_BYTES:] == _checksum_bytes(content[:-CRC_BYTES])


def _checksum_bytes(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(CRC_BYTES, "little")


def write_sums(file: Path, sums: np.ndarray) -> None:
    """Write a file atomically, with its CRC-32 behind the array.

    Errors are ignored: the run then only has the sums in memory.
    """
    content = io.BytesIO()
    np.save(content, sums)
    with suppress(OSError):
        file.parent.mkdir(exist_ok=True)
        descriptor, aside = tempfile.mkstemp(prefix=".", dir=file.parent)
        with open(descriptor, "wb") as opened:
            opened.write(content.getvalue() + _checksum_bytes(content.getvalue()))
            opened.flush()
            os.fsync(opened.fileno())
        os.chmod(aside, 0o644)  # mkstemp makes a file that only its owner can read
        os.replace(aside, file)


# --- a teacher


def top_k_types(count: int, vocabulary: int) -> dict[str, tuple[type, tuple[int, ...]]]:
    """Return dtype and shape of the values of one token. count: k, the number of tokens listed."""
    token = np.uint16 if vocabulary <= 2**16 else np.int32
    return {
        TOKENS: (token, (count,)),
        LOGS: (np.float16, (count,)),
        REST: (np.float32, ()),
        TARGET: (np.float32, ()),
    }


def bytes_per_token(count: int, vocabulary: int) -> int:
    """Return the bytes on disk per supervised token."""
    types = top_k_types(count, vocabulary).values()
    return sum(np.dtype(dtype).itemsize * int(np.prod(shape)) for dtype, shape in types)


@dataclass(frozen=True)
class TopKValues:
    """A teacher's values of supervised tokens. arrays: [supervised tokens, ...] by name."""

    arrays: dict[str, np.ndarray]

    def __call__(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        columns = {name: array[numbers] for name, array in self.arrays.items()}
        # few operators of torch know uint16
        return columns | {TOKENS: columns[TOKENS].astype(np.int32)}


def read_top_k(place: Path, store: TokenStore) -> SampleColumns | None:
    try:
        about = json.loads((place / ABOUT).read_text())
        check_files(place, about.get(CHECKSUMS, {}))
        arrays = {name: np.load(place / f"{name}.npy", mmap_mode="r") for name in TOP_K}
    except (OSError, ValueError, EOFError, AttributeError, RecursionError, Damaged):
        return None
    whole = all(len(array) == store.supervised_tokens for array in arrays.values())
    return SampleColumns(of_tokens=TopKValues(arrays)) if whole else None


class TopKWriter:
    """Writer of a teacher's files, which appear only when they are complete.

    Creating it raises OSError if the disk has no room for all of them.
    """

    def __init__(self, folder: Path, tokens: int, count: int, vocabulary: int):
        """Create the files next to `folder`, their final location.

        tokens: number of supervised tokens in the store. count: k, the number of tokens listed.
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
            for name, (dtype, shape) in top_k_types(count, vocabulary).items():
                file = self.aside / f"{name}.npy"
                array = np.lib.format.open_memmap(file, "w+", dtype, (tokens, *shape))
                reserve_all(
                    file
                )  # otherwise a page without room on the disk would kill the process
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
        about = about | {CHECKSUMS: checksums_of(self.aside, self.aside.glob("*.npy"))}
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


def reserve_all(file: Path) -> None:
    """Allocate all blocks of a file on disk. Raises OSError if the disk is full."""
    with open(file, "r+b") as opened:
        try:
            reserve(opened.fileno(), os.fstat(opened.fileno()).st_size)
        except OSError as error:
            if error.errno in FULL:
                raise
