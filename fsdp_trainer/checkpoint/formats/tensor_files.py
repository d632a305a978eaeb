"""Large tensors in files, read and written in pieces of a few rows, by several threads."""

import errno
import math
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import torch
from torch import Tensor

from fsdp_trainer.base.matrix_rows import matrix_rows

# read at once: a few pieces fit a processor's cache, and a disk reaches its full speed
PIECE_BYTES = 2**22
THREADS = 4
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""The number formats that are read, by safetensors' names."""
T = TypeVar("T")
R = TypeVar("R")


@dataclass(order=True)
class Chunk:
    """A part of a tensor that is contiguous in a file, from byte `offset` on.

    part: its position in the complete tensor, a slice for each dimension.
    """

    file: Path
    offset: int
    part: tuple[slice, ...]


@dataclass
class TensorOnDisk:
    """A tensor of one or more chunks, which do not overlap."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[Chunk]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, which is one index of the first dimension."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def whole_rows(self, first: int, count: int) -> "TensorOnDisk":
        """Return `count` rows as a tensor of their own. This tensor must be a single chunk."""
        start = first * self.row_bytes
        chunks = [
            Chunk(chunk.file, chunk.offset + start, (slice(0, count), *chunk.part[1:]))
            for chunk in self.chunks
        ]
        return TensorOnDisk(self.dtype, (count, *self.shape[1:]), chunks)

    def as_matrix(self) -> "TensorOnDisk":
        """Return stacked matrices as one matrix of all their rows, any other tensor unchanged."""
        if len(self.shape) < 3:
            return self
        _, rows, *columns = self.shape
        chunks = [part for chunk in self.chunks for part in _by_matrix(chunk, self.dtype, rows)]
        return replace(self, shape=(matrix_rows(self.shape), *columns), chunks=chunks)

    def read_rows(self, first: int, last: int, buffer: Tensor) -> Tensor:
        """Read rows `first` to `last` into `buffer`, uint8; return them, [last - first, …].

        Raises OSError.
        """
        rows = as_tensor(buffer, self.dtype, (last - first, *self.shape[1:]))
        self.fill(rows, first, last)
        return rows

    def fill(self, rows: Tensor, first: int, last: int) -> None:
        """Write the numbers of rows `first` to `last` into `rows`. Raises OSError."""
        missing = rows.numel()
        for chunk in self._chunks_of(first, last):
            held, *columns = chunk.part
            begin = max(first, held.start)
            end = min(last, held.stop)
            if begin < end:
                part = rows[(slice(begin - first, end - first), *columns)]
                numbers = part.contiguous()  # the part itself, if the chunk has all columns
                skipped = (begin - held.start) * numbers[0].nbytes
                read(chunk.file, chunk.offset + skipped, numbers)
                part.copy_(numbers)
                missing -= part.numel()
        if missing:
            file = str(self.chunks[0].file) if self.chunks else None
            raise OSError(errno.EIO, "its parts are not the whole of a tensor", file)

    def _chunks_of(self, first: int, last: int) -> Iterator[Chunk]:
        """Yield the chunks that may have some of these rows.

        Stacked experts have hundreds of chunks, and are read a few rows at a time.
        """
        chunks, starts, ends = self._chunks_by_row
        for i in reversed(range(bisect_left(starts, last))):
            if ends[i] <= first:  # and so do all chunks before it
                return
            yield chunks[i]

    @cached_property
    def _chunks_by_row(self) -> tuple[list[Chunk], list[int], list[int]]:
        """The chunks by their first row, that row, and the highest end up to each of them."""
        chunks = sorted(self.chunks, key=lambda chunk: chunk.part[0].start)
        starts = [chunk.part[0].start for chunk in chunks]
        return chunks, starts, list(accumulate((chunk.part[0].stop for chunk in chunks), max))

    def pieces(self) -> Iterator[Tensor]:
        """Yield all rows in order, a piece at a time, in memory that the next piece overwrites.

        Raises OSError.
        """
        buffer = torch.empty(piece_bytes([self.row_bytes]), dtype=torch.uint8)
        for first, last in row_ranges(0, self.shape[0], self.row_bytes):
            yield self.read_rows(first, last, buffer)


@dataclass
class HuggingFaceTensor(TensorOnDisk):
    """A tensor of a safetensors file. number_format: safetensors' name of its dtype.

    size: its bytes in the file; None for a tensor that is stored in another way.
    """

    number_format: str
    size: int | None = field(default=None, kw_only=True)


@dataclass
class StoredBytes(TensorOnDisk):
    """A tensor of a safetensors file as a vector of bytes, in any number format.

    number_format, stored_shape: those of its entry in the file's header.
    """

    number_format: str
    stored_shape: tuple[int, ...]


def _by_matrix(chunk: Chunk, dtype: torch.dtype, rows: int) -> Iterator[Chunk]:
    """Yield a chunk for each matrix of which `chunk` has a part, placed in the matrix of all rows.

    rows: number of rows of each stacked matrix.
    """
    stack, held, *columns = chunk.part
    sizes = [part.stop - part.start for part in (held, *columns)]
    for i, matrix in enumerate(range(stack.start, stack.stop)):
        offset = chunk.offset + i * math.prod(sizes) * dtype.itemsize
        first = matrix * rows
        yield Chunk(chunk.file, offset, (slice(first + held.start, first + held.stop), *columns))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_tensor(buffer: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor whose memory is the beginning of `buffer`, uint8."""
    return buffer[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def as_bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def row_ranges(first: int, last: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    at_once = max(1, PIECE_BYTES // row_bytes)
    for start in range(first, last, at_once):
        yield start, min(start + at_once, last)


def grouped(items: Iterable[T], size: Callable[[T], int], limit: float) -> Iterator[list[T]]:
    """Yield groups of consecutive items of up to `limit` bytes in all, a larger item by itself."""
    group: list[T] = []
    room = limit
    for item in items:
        if group and size(item) > room:
            yield group
            group = []
            room = limit
        group.append(item)
        room -= size(item)
    yield group


def piece_bytes(row_bytes: Iterable[int]) -> int:
    """Return the bytes of the largest piece. row_bytes: bytes of a row of each tensor."""
    return max(PIECE_BYTES, max(row_bytes, default=0))


def read_whole(tensor: TensorOnDisk, first: int, last: int) -> Tensor:
    buffer = torch.empty((last - first) * tensor.row_bytes, dtype=torch.uint8)
    return tensor.read_rows(first, last, buffer)


def read_number(file: Path, offset: int, dtype: torch.dtype) -> float:
    number = torch.empty(1, dtype=dtype)
    read(file, offset, number)
    return number.item()


def in_threads(
    work: Callable[[T, Tensor], R], jobs: Iterable[T], buffer_bytes: int, pinned: bool = False
) -> list[R]:
    """Return `work(job, buffer)` of every job, started in order by THREADS threads.

    While one thread converts what it has read, the others wait for the disk. The buffer, uint8, is
    the job's own until it returns. Raises the exception of the first job that fails.
    """
    buffers: SimpleQueue[Tensor] = SimpleQueue()
    for _ in range(THREADS):
        buffers.put(torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=pinned))

    def run(job: T) -> R:
        buffer = buffers.get()
        try:
            return work(job, buffer)
        finally:
            buffers.put(buffer)

    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)  # per operation: the threads of the pool keep the processor busy
    try:
        with ThreadPoolExecutor(THREADS, "stream") as pool:
            return list(pool.map(run, jobs))
    finally:
        torch.set_num_threads(threads_before)


def read(path: Path, offset: int, into: Tensor) -> None:
    """Fill a contiguous tensor from byte `offset` of a file on. Raises OSError.

    The file is read, not mapped: mapped pages would count as this process's memory.
    """
    view = as_bytes(into)
    done = 0
    with path.open("rb", 0) as file:
        while done < len(view):
            count = os.preadv(file.fileno(), [view[done:]], offset + done)
            if not count:
                raise OSError(errno.EIO, "ends before its last tensor does", str(path))
            done += count


def write(file: int, offset: int, tensor: Tensor) -> None:
    """Write a contiguous tensor at byte `offset` and start the disk's writing. Raises OSError."""
    view = as_bytes(tensor)
    done = 0
    while done < len(view):
        done += os.pwrite(file, view[done:], offset + done)
    if hasattr(os, "posix_fadvise"):  # else the disk would idle until the fsync at the end
        os.posix_fadvise(file, offset, len(view), os.POSIX_FADV_DONTNEED)
