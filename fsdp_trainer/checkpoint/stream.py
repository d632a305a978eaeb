"""Large files by pieces, in several threads: while one converts what it has read, the others wait for the disk."""

import errno
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import torch
from torch import Tensor

PIECE_BYTES = (
    2**22
)  # read at once: a few of them fit a processor's cache, and a disk is at full speed
THREADS = 4
AHEAD_BYTES = 2**25  # that the disk is told of before they are read
T = TypeVar("T")


def in_threads(
    work: Callable[[T, Tensor], None], jobs: Iterable[T], buffer_bytes: int, pinned: bool = False
) -> None:
    """`work(job, buffer)` for every job, begun in order; `buffer`, uint8, is its own until it returns. Raises what the first failure raised."""
    buffers: SimpleQueue[Tensor] = SimpleQueue()
    for _ in range(THREADS):
        buffers.put(torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=pinned))

    def run(job: T) -> None:
        buffer = buffers.get()
        try:
            work(job, buffer)
        finally:
            buffers.put(buffer)

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # of each operation: these threads are enough for the processor
    try:
        with ThreadPoolExecutor(THREADS, "stream") as pool:
            for _ in pool.map(run, jobs):
                pass
    finally:
        torch.set_num_threads(before)


def read(path: Path, file: int, offset: int, into: Tensor) -> None:
    """Fill `into`, uint8, from byte `offset` on. Copied, not mapped: mapped pages would count as this process's memory. Raises OSError."""
    view, done = into.numpy().data, 0
    if hasattr(os, "posix_fadvise"):  # the disk need not wait until the next piece is asked for
        os.posix_fadvise(file, offset + len(view), AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
    while done < len(view):
        count = os.preadv(file, [view[done:]], offset + done)
        if not count:
            raise OSError(errno.EIO, "ends before its last tensor does", str(path))
        done += count


def write(file: int, offset: int, what: Tensor) -> None:
    """Write `what`, uint8, from byte `offset` on, and have the disk begin with it. Raises OSError."""
    view, done = what.numpy().data, 0
    while done < len(view):
        done += os.pwrite(file, view[done:], offset + done)
    if hasattr(os, "posix_fadvise"):  # else the disk would idle until the fsync at the end
        os.posix_fadvise(file, offset, len(view), os.POSIX_FADV_DONTNEED)
