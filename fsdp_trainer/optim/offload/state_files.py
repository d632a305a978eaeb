"""A rank's weights and moments in files, in the format of a checkpoint.

A file holds the tensors of some parameters. Each tensor is an archive as torch.save writes it, and
its numbers begin at a multiple of ALIGNED, as direct reads and writes need. A checkpoint links the
files. A file that is linked is not changed any more: the next update writes another one.
"""

import fcntl
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from errno import EINVAL, EIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp_trainer.base.disk_space import reserve
from fsdp_trainer.base.round_up import round_up
from fsdp_trainer.checkpoint.formats.tensor_files import as_bytes, as_tensor
from fsdp_trainer.checkpoint.linked_files import LinkedPlace
from fsdp_trainer.checkpoint.shards import ALIGNED, DIRECT, frame

NEAR = 2**16
"""Bytes between two pieces of a file that are read and written together with them."""
PIECE_BYTES = 2**23
"""Bytes of a read or write; several are in progress at a time."""
THREADS = 4
Move = Callable[[int, Any, int], int]


@dataclass(frozen=True)
class FiledTensor:
    """A tensor in a file. begin: offset of its first number; head, tail: what surrounds them."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    begin: int
    head: bytes
    tail: bytes

    @property
    def end(self) -> int:
        return self.begin + self.shape.numel() * self.dtype.itemsize

    def place(self, file: int) -> LinkedPlace:
        length = len(self.head) + self.end - self.begin + len(self.tail)
        return LinkedPlace(file, self.begin - len(self.head), length)


class Span(NamedTuple):
    """A piece of a file, and where it lies in a buffer; all are multiples of ALIGNED."""

    offset: int
    length: int
    at: int


@dataclass
class StateFile:
    """A file with tensors. numbers: views of its bytes as they are mapped to memory, by name."""

    path: Path
    tensors: dict[str, FiledTensor] = field(default_factory=dict)
    size: int = 0
    numbers: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, tensor: Tensor) -> None:
        head, tail = frame(tensor.dtype, tensor.shape)
        begin = round_up(self.size + len(head), ALIGNED)
        added = FiledTensor(name, tensor.dtype, tensor.shape, begin, head, tail)
        self.tensors[name] = added
        self.size = added.end + len(tail)

    def create(self, path: Path) -> None:
        """Create a file of zeros with this layout. Raises OSError, for example on a full disk."""
        size = round_up(self.size, ALIGNED)
        with path.open("wb") as file:
            reserve(file.fileno(), size)
            for tensor in self.tensors.values():
                os.pwrite(file.fileno(), tensor.head, tensor.begin - len(tensor.head))
                os.pwrite(file.fileno(), tensor.tail, tensor.end)

    def map(self) -> None:
        """Map the file to memory: reading a number reads the file, writing one writes it."""
        size = round_up(self.size, ALIGNED)
        memory = torch.from_file(str(self.path), shared=True, size=size, dtype=torch.uint8)
        self.numbers = {
            name: as_tensor(memory[tensor.begin :], tensor.dtype, tensor.shape)
            for name, tensor in self.tensors.items()
        }

    @property
    def is_linked(self) -> bool:
        return self.path.stat().st_nlink > 1

    def spans(self, ranges: list[tuple[int, int]], near: int) -> list[Span]:
        """Return the spans that cover ranges of bytes, which are in ascending order.

        near: ranges at most so far from each other are covered together with what is between them,
        which must be no numbers of another part.
        """
        spans: list[Span] = []
        for begin, end in ranges:
            first, last = begin // ALIGNED * ALIGNED, round_up(end, ALIGNED)
            if spans and first - (spans[-1].offset + spans[-1].length) <= near:
                before = spans.pop()
                spans.append(Span(before.offset, last - before.offset, before.at))
                continue
            at = spans[-1].at + spans[-1].length if spans else 0
            spans.append(Span(first, last - first, at))
        return spans


def open_for_update(path: Path) -> int:
    """Return a descriptor of a file for direct reads and writes, if its file system has them."""
    try:
        return os.open(path, os.O_RDWR | DIRECT)
    except OSError as error:
        if error.errno != EINVAL:
            raise
    return os.open(path, os.O_RDWR)


class Transfers:
    """Reads and writes of spans by several threads. bytes_moved: of all so far."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "states")
        self.bytes_moved = 0

    def begin(self, move: Move, file: int, spans: list[Span], buffer: Tensor) -> list[Future[None]]:
        """Begin to move spans between a file and a buffer. move: os.preadv or os.pwritev."""
        whole, jobs = as_bytes(buffer), []
        for offset, length, at in spans:
            self.bytes_moved += length
            for first in range(0, length, PIECE_BYTES):
                size = min(PIECE_BYTES, length - first)
                view = whole[at + first : at + first + size]
                jobs.append(self._pool.submit(move_piece, move, file, offset + first, view))
        return jobs

    def close(self) -> None:
        self._pool.shutdown()


def move_piece(move: Move, file: int, offset: int, view: memoryview) -> None:
    """Move a piece between a file and memory, directly if the file system can. Raises OSError."""
    done = 0
    while done < len(view):
        try:
            count = move(file, [view[done:]], offset + done)
        except OSError as error:
            flags = fcntl.fcntl(file, fcntl.F_GETFL)
            if error.errno != EINVAL or not flags & DIRECT:
                raise
            fcntl.fcntl(file, fcntl.F_SETFL, flags & ~DIRECT)
            continue
        if not count:
            raise OSError(EIO, "a file of optimizer states is shorter than it was made")
        done += count
