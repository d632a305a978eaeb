"""A rank's file of a checkpoint: the bytes that torch.distributed.checkpoint would write, laid out once and written by large pieces.

`dcp.save` plans, pickles and gathers anew at every save, under the interpreter's lock, and its writes go through the page cache. Where a tensor's
numbers lie in the file depends on shapes alone: so the plan is made at the first save, the copy in host memory is already the file, and what a
thread has to do meanwhile is to sum and to write. `dcp.load` reads the result as its own.
"""

import errno
import fcntl
import io
import mmap
import os
import pickle
import weakref
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.tensor import DTensor
from torch.serialization import get_crc32_options, set_crc32_options

from fsdp_trainer.checkpoint.stream import write

ALIGNED = 4096  # what a disk that is written to without the page cache asks of addresses, lengths and offsets
ARCHIVES_ALIGNED = 64  # as torch.save aligns the numbers within
WINDOW_BYTES = 2**26  # of host memory with checkpoint.mode=sync; a larger tensor has one of its own
WRITE_BYTES = 2**24
DIRECT = getattr(os, "O_DIRECT", 0)
METADATA = ".metadata"


@dataclass
class Archive:
    """A tensor as torch.save writes it, from byte `start` of the file on: head, numbers, tail."""

    name: str
    start: int
    head: bytes
    shape: torch.Size
    dtype: torch.dtype
    tail: bytes

    @property
    def numbers(self) -> int:
        """Bytes between head and tail."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def stop(self) -> int:
        """Where in the file it ends."""
        return self.start + len(self.head) + self.numbers + len(self.tail)


@dataclass
class Window:
    """A part of the file that is made and written at once; begins where a direct write may."""

    start: int
    archives: list[Archive]

    @property
    def size(self) -> int:
        """In bytes; a little more than its archives, so that the next one is aligned."""
        return round_up(self.archives[-1].stop - self.start, ALIGNED)


class Shard:
    """What this rank writes of each checkpoint. group: over which the ranks plan; None: the default one."""

    def __init__(self, group: dist.ProcessGroup | None, whole: bool):
        """whole: make all of the file in memory at once, so that the state may change while it is written."""
        self.group, self.file = group, f"__{dist.get_rank()}_0.distcp"
        self.metadata = b""
        """What DCP keeps in `.metadata`; on rank 0."""
        self._limit: float = float("inf") if whole else WINDOW_BYTES
        self._planned: list[Any] = []
        self._windows: list[Window] = []
        self._memory = torch.empty(0, dtype=torch.uint8)

    def windows(self, state: dict[str, Tensor]) -> Iterator[Tensor]:
        """The file's bytes, uint8 in host memory, a window at a time, whose memory is used again for the next."""
        for window in self._windows:
            yield self._fill(window, state)

    def plan(self, state: dict[str, Tensor]) -> None:
        """Which rank writes which of the tensors that several have, and what lies where. Collective if shapes are not those of the last time."""
        described = [
            (name, t.shape, t.dtype, t.placements if isinstance(t, DTensor) else None)
            for name, t in state.items()
        ]
        if described == self._planned:  # on all ranks or on none
            return
        self._planned = described
        main = dist.get_rank() == 0
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, is_coordinator=main)
        plans = self._to_main(planner.create_local_plan())
        ordered, metadata = planner.create_global_plan(plans) if main else (None, None)
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, ordered, src=0, group=self.group)
        self._windows, at, parts = [], 0, {}
        for item in mine[0].items:
            dtype, shape = item.tensor_data.properties.dtype, item.tensor_data.chunk.sizes
            head, tail = frame(dtype, shape)
            archive = Archive(
                item.index.fqn, round_up(at, ARCHIVES_ALIGNED), head, shape, dtype, tail
            )
            if not self._windows or archive.stop - self._windows[-1].start > self._limit:
                archive.start = round_up(at, ALIGNED)
                self._windows.append(Window(archive.start, []))
            self._windows[-1].archives.append(archive)
            parts[item.index] = (archive.start, archive.stop - archive.start)
            at = archive.stop
        written = self._to_main((self.file, parts))
        if metadata:
            metadata.storage_data = {
                i: _StorageInfo(file, *where)
                for file, found in written
                for i, where in found.items()
            }
            metadata.storage_meta = StorageMeta()
            self.metadata = pickle.dumps(metadata)
        self._memory = host_memory(
            max((window.size for window in self._windows), default=0),
            pinned=any(tensor.is_cuda for tensor in state.values()),
        )

    def _to_main(self, value: Any) -> list[Any]:
        """Every rank's value, on rank 0."""
        values: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values or []

    def _fill(self, window: Window, state: dict[str, Tensor]) -> Tensor:
        """Copy the state to its places; complete when this returns."""
        view = self._memory.numpy().data
        for archive in window.archives:
            tensor = state[archive.name]
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            begin = archive.start - window.start
            middle, end = begin + len(archive.head), archive.stop - window.start
            view[begin:middle] = archive.head
            if archive.numbers:  # a rank may have no row of a small tensor
                into = (
                    self._memory[middle : middle + archive.numbers]
                    .view(archive.dtype)
                    .view(archive.shape)
                )
                into.copy_(local, non_blocking=True)
            view[end - len(archive.tail) : end] = archive.tail
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        return self._memory[: window.size]


@cache
def frame(dtype: torch.dtype, shape: torch.Size) -> tuple[bytes, bytes]:
    """What torch.save writes before and after the numbers of a tensor, which it does not look at: their checksum is the manifest's."""
    around, tensor = (
        _Around(),
        torch.empty(shape, dtype=dtype),
    )  # of a large one the system gives no page that is not touched
    around.numbers = tensor.data_ptr()
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        torch.save(tensor, around)  # type: ignore[arg-type]
    finally:
        set_crc32_options(before)
    return bytes(around.head), bytes(around.tail)


class _Around(io.RawIOBase):
    """Takes what is written before and after the numbers at a certain address."""

    def __init__(self) -> None:
        self.head, self.tail, self.numbers, self._passed = bytearray(), bytearray(), 0, False

    def write(self, piece: Any) -> int:
        if self.numbers and np.frombuffer(piece, np.uint8).ctypes.data == self.numbers:
            self._passed = True
        else:
            (self.tail if self._passed else self.head).extend(piece)
        return len(piece)


def host_memory(size: int, pinned: bool) -> Tensor:
    """[size] uint8 that begins with a page, as direct writes ask for. torch's own would round pinned memory up to a power of two."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if pinned:
        cuda = torch.cuda.cudart()
        torch.cuda.check_error(int(cuda.cudaHostRegister(memory.data_ptr(), size, 0)))
        weakref.finalize(memory, cuda.cudaHostUnregister, memory.data_ptr())
    return memory


def write_file(path: Path, windows: Iterable[Tensor]) -> dict[str, int]:
    """Write a file durably, past the page cache where the system can; its size, and the checksum of what was handed over. Raises OSError.

    windows: uint8 in host memory, as `Shard.windows` gives them.
    """
    file, size, crc32 = open_directly(path), 0, 0
    try:
        for window in windows:
            for piece in window.split(WRITE_BYTES):
                crc32 = zlib.crc32(piece.numpy().data, crc32)
                write_directly(file, size, piece)
                size += len(piece)
        os.fsync(file)
    finally:
        os.close(file)
    return {"bytes": size, "crc32": crc32}


def open_directly(path: Path) -> int:
    """An empty file, to be written without the page cache where the system can."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        return os.open(path, flags | DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o666)


def write_directly(file: int, offset: int, piece: Tensor) -> None:
    """Write a piece whose offset and length are ALIGNED."""
    try:
        write(file, offset, piece)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(
            file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~DIRECT
        )  # this file system cannot
        write(file, offset, piece)


def round_up(size: int, unit: int) -> int:
    """To the next multiple."""
    return -(-size // unit) * unit
