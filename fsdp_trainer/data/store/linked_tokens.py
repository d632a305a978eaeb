"""Tokens of a store that stay in the files they were read from, which are mapped, not copied."""

from dataclasses import dataclass, field
from functools import cached_property
from mmap import MADV_RANDOM, MADV_WILLNEED, PAGESIZE, mmap
from pathlib import Path

import numpy as np

BEGINS, TYPES = "begins", "types"
"""Columns [samples] of a store with links: the byte of the file at which the tokens begin, and the
index of their type in NUMBER_TYPES, 0 for a sample whose tokens are in the store."""
NUMBER_TYPES = ("", "<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8")


def type_number(dtype: np.dtype) -> int:
    return NUMBER_TYPES.index(dtype.newbyteorder("<").str.replace("|", "<"))


def link_columns(links: list[tuple[int, np.dtype] | None]) -> dict[str, np.ndarray]:
    types = [type_number(link[1]) if link else 0 for link in links]
    return {
        BEGINS: np.array([link[0] if link else 0 for link in links], np.int64),
        TYPES: np.array(types, np.uint8),
    }


@dataclass
class LinkedTokens:
    """The samples of a store whose tokens are in other files.

    All their tokens but the first are supervised. begins, types, files: [samples]. files: index of
    each sample's file in `names`.
    """

    begins: np.ndarray
    types: np.ndarray
    files: np.ndarray
    names: list[str]
    _open: dict[int, np.memmap] = field(default_factory=dict)

    @cached_property
    def is_linked(self) -> np.ndarray:
        """True for each sample whose tokens are in another file: [samples] bool."""
        return np.asarray(self.types) > 0

    def read(self, sample: int, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        weights = np.ones(count, np.float32)
        if start == 0:
            weights[:1] = 0  # no token precedes the first one to predict it from
        file, first, stop, dtype = self._place(sample, start, count)
        tokens = file[first:stop].view(dtype)
        if len(tokens) != count:
            name = self.names[self.files[sample]]
            raise OSError(f"{name} has become shorter while it is read")
        return tokens.astype(np.int32), weights

    def fetch(self, sample: int, start: int, count: int) -> None:
        file, first, stop, _ = self._place(sample, start, count)
        if isinstance(file.base, mmap):
            begin = first // PAGESIZE * PAGESIZE
            file.base.madvise(MADV_WILLNEED, begin, stop - begin)

    def _place(self, sample: int, start: int, count: int) -> tuple[np.ndarray, int, int, np.dtype]:
        """Return the mapped file of a piece, its first byte, the byte after it, and its type."""
        dtype = np.dtype(NUMBER_TYPES[self.types[sample]])
        first = int(self.begins[sample]) + start * dtype.itemsize
        return self._file(int(self.files[sample])), first, first + count * dtype.itemsize, dtype

    def _file(self, number: int) -> np.ndarray:
        if number not in self._open:
            mapped = np.memmap(Path(self.names[number]), np.uint8, "r")
            if isinstance(mapped.base, mmap):
                mapped.base.madvise(MADV_RANDOM)
            self._open[number] = mapped
        return self._open[number]
