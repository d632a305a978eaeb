"""Measurements of the speed of devices, links and disks, each of which takes seconds."""

import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

MIB = 2**20
SIZES = (MIB, 64 * MIB)
LINK_BYTES = 16 * MIB
WINDOW_SECONDS, MAX_CALLS = 0.3, 50
BLOCK = 4 * MIB


class Rate(NamedTuple):
    """The speed of a collective on `size` bytes, in bytes per second.

    algorithm: size divided by time; bus: speed over a link, which can be compared between different
    numbers of ranks. Both as defined by nccl-tests.
    """

    name: str
    size: int
    algorithm: float
    bus: float


def products(device: torch.device) -> float:
    """Return the FLOP/s of square matrix products: bfloat16 on a GPU, float32 on a CPU.

    Uses the median time, so that a single disturbance does not count.
    """
    size, dtype, calls = (
        (8192, torch.bfloat16, 10) if device.type == "cuda" else (512, torch.float32, 4)
    )
    a = torch.randn(size, size, device=device, dtype=dtype)
    b = torch.randn(size, size, device=device, dtype=dtype)

    def seconds() -> float:
        finish(device)
        started = time.perf_counter()
        for _ in range(calls):
            a @ b
        finish(device)
        return time.perf_counter() - started

    seconds()
    deadline = time.perf_counter() + 2 * WINDOW_SECONDS
    times: list[float] = []
    while time.perf_counter() < deadline or not times:
        times.append(seconds())
    return calls * 2 * size**3 / sorted(times)[len(times) // 2]


def collectives(device: torch.device, group: dist.ProcessGroup | None = None) -> list[Rate]:
    """Measure all-reduce and all-gather in `group`, which all its ranks must call."""
    n, rates = dist.get_world_size(group), []
    for size in SIZES:
        part = size // 4 // n
        whole, own = torch.zeros(n * part, device=device), torch.zeros(part, device=device)

        def all_reduce(whole: torch.Tensor = whole) -> None:
            dist.all_reduce(whole, group=group)

        def all_gather(whole: torch.Tensor = whole, own: torch.Tensor = own) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch 2.13 renames it
                dist.all_gather_into_tensor(whole, own, group=group)

        for name, call, factor in (("all-reduce", all_reduce, 2), ("all-gather", all_gather, 1)):
            rate = whole.nbytes / slowest(call, device, group)
            rates.append(Rate(name, size, rate, rate * factor * (n - 1) / n))
    return rates


def slowest(
    call: Callable[[], None], device: torch.device, group: dist.ProcessGroup | None
) -> float:
    """Return the seconds that a call takes on the slowest rank of `group`."""

    def measure(calls: int) -> float:
        finish(device)
        started = time.perf_counter()
        for _ in range(calls):
            call()
        finish(device)
        return largest((time.perf_counter() - started) / calls, group)

    measure(1)  # the first call also makes the connections
    return measure(max(1, min(MAX_CALLS, int(WINDOW_SECONDS / measure(1)))))


def links(device: torch.device) -> dict[tuple[int, int], float]:
    """Return the bytes per second in one direction between each rank and the next one.

    That includes the last rank of a node and the first of the next. Every second pair is measured
    at the same time. All ranks must call this and get all results.
    """
    me, size, own = dist.get_rank(), dist.get_world_size(), dict[tuple[int, int], float]()
    buffer = torch.zeros(LINK_BYTES // 4, device=device)
    everyone = dist.group.WORLD
    assert everyone
    for turn in (0, 1):
        largest(0.0)
        first = me - (me + turn) % 2
        if 0 <= first < size - 1:
            rate = there_and_back(buffer, first, first + 1, everyone)
            own |= {(first, first + 1): rate} if me == first else {}
    gathered: list = [None] * size
    dist.all_gather_object(gathered, own)
    return {pair: rate for of_one in gathered for pair, rate in of_one.items()}


def there_and_back(buffer: torch.Tensor, a: int, b: int, group: dist.ProcessGroup) -> float:
    """Return the bytes per second from rank `a` of a group to `b` and back, the best of three."""
    best = 0.0
    for turn in range(4):
        finish(buffer.device)
        started = time.perf_counter()
        if group.rank() == a:
            group.send([buffer], b, 0).wait()
            group.recv([buffer], b, 0).wait()
        else:
            group.recv([buffer], a, 0).wait()
            group.send([buffer], a, 0).wait()
        finish(buffer.device)
        if turn:  # the first turn also makes the connection
            best = max(best, 2 * buffer.nbytes / (time.perf_counter() - started))
    return best


def disk(file: Path, size: int) -> tuple[float, float]:
    """Return the bytes per second of writing `file` with fsync, and of reading it.

    The page cache is dropped before reading if possible. Raises OSError, also if the bytes read
    differ from those written.
    """
    block, count = os.urandom(BLOCK), max(1, size // BLOCK)
    try:
        started = time.perf_counter()
        with file.open("wb") as f:
            for _ in range(count):
                f.write(block)
            f.flush()
            os.fsync(f.fileno())
            written = time.perf_counter() - started
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        with file.open("rb") as f:
            for i in range(count):
                if f.read(BLOCK) != block:
                    where = f"MiB {4 * i} to {4 * i + 3}"
                    raise OSError(f"{file}: {where} were read as something else than was written")
        return count * BLOCK / written, count * BLOCK / (time.perf_counter() - started)
    finally:
        file.unlink(missing_ok=True)


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def largest(value: float, group: dist.ProcessGroup | None = None) -> float:
    maximum = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
    return maximum.item()
