"""A rank's file of a checkpoint in the format of torch.distributed.checkpoint, in large writes.

`dcp.save` plans, pickles and gathers at every save, holding the interpreter's lock, and its writes
go through the page cache. Here the layout of the file, which depends on shapes alone, is planned at
the first save, and the copy in host memory is already the content of the file. A background thread
only has to compute checksums and write. `dcp.load` reads the result as its own.
"""

import fcntl
import io
import mmap
import os
import pickle
import warnings
import weakref
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain, count
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.tensor import DTensor
from torch.serialization import get_crc32_options, set_crc32_options

from fsdp_trainer.base.distributed import local_part
from fsdp_trainer.base.round_up import round_up
from fsdp_trainer.base.torch_private import storage_info
from fsdp_trainer.checkpoint.formats.description import TENSORS, as_json
from fsdp_trainer.checkpoint.formats.tensor_files import as_bytes, as_tensor, grouped, write
from fsdp_trainer.checkpoint.linked_files import LinkedPlace
from fsdp_trainer.interop.folders.other_weights import METADATA

# bytes; writes past the page cache need addresses, lengths and offsets that are multiples of it
ALIGNED = 4096
# bytes of host memory with checkpoint.mode=sync; a larger tensor has a window of its own
WINDOW_BYTES = 2**26
WRITE_BYTES = 2**24
DIRECT = getattr(os, "O_DIRECT", 0)


@dataclass
class Archive:
    """A tensor as torch.save writes it: head, numbers, tail."""

    index: MetadataIndex
    dtype: torch.dtype
    shape: torch.Size
    head: bytes
    tail: bytes

    @property
    def length(self) -> int:
        return len(self.head) + self.shape.numel() * self.dtype.itemsize + len(self.tail)

    @property
    def room(self) -> int:
        """Bytes in the file, rounded up so that the next archive is aligned for direct writes."""
        return round_up(self.length, ALIGNED)

    def fill(self, memory: Tensor, tensor: Tensor) -> None:
        """Copy the archive to `memory`, uint8; from a GPU the copy is asynchronous."""
        view = memory.numpy().data
        begin = len(self.head)
        end = self.length - len(self.tail)
        view[:begin] = self.head
        view[end : self.length] = self.tail
        if begin < end:  # a rank may have no part of a small tensor
            numbers = as_tensor(memory[begin:], self.dtype, self.shape)
            numbers.copy_(local_part(tensor), non_blocking=True)


class ShardWriter:
    """Layout and content of `file`, this rank's part of every checkpoint."""

    def __init__(self, group: dist.ProcessGroup | None, whole: bool):
        """group: process group for planning; None: the default one.

        whole: copy the complete file to memory at once, so that the state may change while it is
        being written.
        """
        self.group = group
        self.file = file_of(dist.get_rank())
        self.linked: list[int] = []
        """Numbers of the linked files with a tensor that this rank writes."""
        self.descriptions: dict[str, bytes] = {}
        """The content of TENSORS, and of the file that DCP reads in its place, on rank 0."""
        self._limit: float = float("inf") if whole else WINDOW_BYTES
        self._planned: list[Any] = []
        self._windows: list[list[Archive]] = []
        self._memory = torch.empty(0, dtype=torch.uint8)

    def windows(self, state: dict[str, Tensor]) -> Iterator[Tensor]:
        """Yield the file's bytes, uint8 in host memory that the next window overwrites."""
        for window in self._windows:
            end = 0
            for archive in window:
                archive.fill(self._memory[end:], state[archive.index.fqn])
                end += archive.room
            if torch.cuda.is_initialized():
                torch.cuda.current_stream().synchronize()
            yield self._memory[:end]

    def plan(self, state: dict[str, Tensor], linked: dict[str, LinkedPlace] | None = None) -> None:
        """Decide which rank writes a tensor that several have, and the layout of every file.

        The plan of the last call is kept if all names, shapes, dtypes and placements are the same;
        otherwise collective. linked: places of the tensors in this rank's linked files.
        """
        linked = linked or {}
        described = [
            (name, t.shape, t.dtype, t.placements if isinstance(t, DTensor) else None)
            for name, t in state.items()
        ]
        if described == self._planned:  # on all ranks or on none of them
            return
        self._planned = described
        world = dist.get_world_size()
        main = dist.get_rank() == 0
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, is_coordinator=main)
        plans: Any = [None] * world if main else None
        own = planner.create_local_plan(), linked
        dist.gather_object(own, plans, dst=0, group=self.group)
        files: Any = None
        if main:
            in_files = [of_rank for _, of_rank in plans]
            plans, metadata = planner.create_global_plan([plan for plan, _ in plans])
            files = [list(map(archive_of, plan.items)) for plan in plans]
            located = map(places, files, in_files, count())
            metadata.storage_data = dict(chain.from_iterable(located))
            metadata.storage_meta = StorageMeta()
            self.descriptions = {
                TENSORS: as_json(metadata).encode(),
                METADATA: pickle.dumps(metadata),
            }
        listed: list[Any] = [None]
        dist.scatter_object_list(listed, files, src=0, group=self.group)
        written = [archive for archive in listed[0] if archive.index.fqn not in linked]
        names = {archive.index.fqn for archive in listed[0]} & linked.keys()
        self.linked = sorted({linked[name].file for name in names})
        self._windows = list(grouped(written, attrgetter("room"), self._limit))
        size = max((sum(archive.room for archive in window) for window in self._windows), default=0)
        self._memory = host_memory(max(size, 1), pinned=any(t.is_cuda for t in state.values()))


def file_of(rank: int, number: int = 0) -> str:
    """Return DCP's name of a rank's file. number: 0 for its own, from 1 on for linked ones."""
    return f"__{rank}_{number}.distcp"


def linked_file_of(rank: int, number: int) -> str:
    return file_of(rank, number + 1)


def places(
    archives: list[Archive], linked: dict[str, LinkedPlace], rank: int
) -> Iterator[tuple[MetadataIndex, Any]]:
    start = 0
    for archive in archives:
        if place := linked.get(archive.index.fqn):
            name = linked_file_of(rank, place.file)
            yield archive.index, storage_info(name, place.offset, place.length)
            continue
        yield archive.index, storage_info(file_of(rank), start, archive.length)
        start += archive.room


def archive_of(item: Any) -> Archive:
    dtype = item.tensor_data.properties.dtype
    shape = item.tensor_data.chunk.sizes
    return Archive(item.index, dtype, shape, *frame(dtype, shape))


@cache
def frame(dtype: torch.dtype, shape: torch.Size) -> tuple[bytes, bytes]:
    """Return the bytes that torch.save writes before and after the numbers of a tensor.

    They do not depend on the numbers, whose checksum is in the manifest.
    """
    # uninitialised: a large tensor takes no memory until its pages are touched
    tensor = torch.empty(shape, dtype=dtype)
    around = _Around(tensor.data_ptr())
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        torch.save(tensor, around)  # type: ignore[arg-type]
    finally:
        set_crc32_options(before)
    return bytes(around.head), bytes(around.tail)


class _Around(io.RawIOBase):
    """A file that keeps what is written before and after the numbers at a given address."""

    def __init__(self, numbers: int) -> None:
        self.numbers = numbers
        self.head = bytearray()
        self.tail = bytearray()
        self._side = self.head

    def write(self, piece: Any) -> int:
        if self.numbers and np.frombuffer(piece, np.uint8).ctypes.data == self.numbers:
            self._side = self.tail
        else:
            self._side.extend(piece)
        return len(piece)


def host_memory(size: int, pinned: bool) -> Tensor:
    """Return [size] uint8 that is aligned to a page, as direct writes need. size: above 0.

    torch's allocator would round pinned memory up to a power of two.
    """
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if pinned:
        pin(memory)
    return memory


def pin(memory: Tensor) -> None:
    """Pin host memory, which lets a GPU copy into it while it computes.

    If the system refuses, as sandboxed containers do, a warning says that copies are slower.
    """
    cuda = torch.cuda.cudart()
    code = int(cuda.cudaHostRegister(memory.data_ptr(), len(memory), 0))
    if code == 0:
        weakref.finalize(memory, cuda.cudaHostUnregister, memory.data_ptr())
        return
    warnings.warn(
        f"{len(memory) / 2**30:.1f} GiB for checkpoints cannot be pinned (CUDA error {code}): "
        "copies from the GPU are slower",
        stacklevel=2,
    )
    # the next CUDA call reports the error once more
    with suppress(RuntimeError, AssertionError):
        torch.ones(1, device="cuda").add_(1)


def write_file(path: Path, windows: Iterable[Tensor]) -> dict[str, int]:
    """Write a file durably, past the page cache where the system can.

    Returns its size, and the checksum of the bytes in memory. Raises OSError.
    windows: uint8 in host memory, as `ShardWriter.windows` yields them.
    """
    size = crc32 = 0
    with open_directly(path) as file:
        for window in windows:
            for piece in window.split(WRITE_BYTES):
                crc32 = zlib.crc32(as_bytes(piece), crc32)
                write_directly(file.fileno(), size, piece)
                size += len(piece)
        os.fsync(file.fileno())
    return {"bytes": size, "crc32": crc32}


def write_directly(file: int, offset: int, piece: Tensor) -> None:
    """Write a piece; if the file system refuses, go on without O_DIRECT. Raises OSError.

    Some file systems refuse all direct writes. A nearly full disk writes only a part of a piece,
    and the rest is no longer aligned.
    """
    try:
        write(file, offset, piece)
    except OSError:  # an error of another cause is raised again below
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~DIRECT)
        write(file, offset, piece)


def open_directly(path: Path) -> BinaryIO:
    """Open an empty file, past the page cache if the file system can."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | DIRECT, 0o666)

    with suppress(OSError):  # an error of another cause is raised again below
        return open(path, "wb", 0, opener=opener)
    return path.open("wb", 0)
