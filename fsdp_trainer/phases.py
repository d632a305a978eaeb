"""Where this rank is: in which step, and at what. Whoever watches over ranks, or breaks them on purpose, looks here."""

import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

CHECKPOINT = ("staging", "shards", "manifest", "rename", "prune")
PHASES = (
    "start",
    "data",
    "forward",
    "backward",
    "clip",
    "update",
    "profile",
    "validation",
    "samples",
    "log",
    "read",
    *CHECKPOINT,
    "agree",
    "export",
    "end",
    "rewind",
    "check",
    "compile",
)
"""In a step's order. `read` waits for the device to have done all that it was given, `staging` to `prune` are a checkpoint's, `agree` is the
ranks' decision whether to stop, `check` looks for wrong bits; `compile` interrupts another phase."""
NUMBER = {name: number for number, name in enumerate(PHASES)}

SLOT = 8192
"""Bytes that a rank has in the file which all ranks of a node share: who it is, where its two threads are, how long it was in which phase, and
the phases that it entered last."""
HEAD, PLACE, TIME, TRACE = (
    struct.Struct("qqqqQQ"),
    struct.Struct("qqqqd"),
    struct.Struct("qd"),
    struct.Struct("qqqq"),
)
PLACES, TIMES = 64, 256
TRACES = TIMES + 64 * TIME.size
TRACE_LENGTH = (SLOT - TRACES) // TRACE.size


@dataclass
class Place:
    """since: time.monotonic() when the phase began; entered: how many have begun; collectives: how many this rank had begun by then.

    spent: by phase, how often this thread left it and after how many seconds in all.
    """

    step: int = 0
    phase: str = "start"
    since: float = field(default_factory=time.monotonic)
    entered: int = 0
    collectives: int = 0
    spent: dict[str, tuple[int, float]] = field(default_factory=dict)


@dataclass
class Slot:
    """What a rank shows of itself. started: clock ticks since boot, so that a pid that is used again is not taken for it; thread: Python's
    number of the one that trains; where: see `here`.

    spent: by phase, how often it was left and after how many seconds in all; trace: (entered, step, phase, collectives), oldest first.
    """

    pid: int
    started: int
    rank: int
    left: bool
    thread: int
    where: int
    main: Place
    background: Place
    spent: dict[str, tuple[int, float]]
    trace: list[tuple[int, int, str, int]]


main, background = Place(), Place()
"""Of the thread that trains, and of the one that writes checkpoints."""
_memory: mmap.mmap | None = None
_offset = 0
_trains = threading.main_thread().ident
_count: Callable[[], int] = int
_told: dict[str, float] = {}
listener: Callable[[str], None] | None = None
"""Hears of each phase that the thread which trains begins."""


def begin() -> None:
    """A run begins, in this thread."""
    global main, background, _trains
    main, background, _trains = Place(), Place(), threading.get_ident()
    _told.clear()


def enter(phase: str, step: int | None = None) -> None:
    """This thread begins a phase; of `step`, if that is another than before. About 1 µs."""
    _move(main if threading.get_ident() == _trains else background, phase, step)


def _move(place: Place, phase: str, step: int | None = None) -> None:
    now, memory = time.monotonic(), _memory
    times, seconds = place.spent.get(place.phase, (0, 0.0))
    place.spent[place.phase] = times, seconds = times + 1, seconds + now - place.since
    left, place.phase, place.since = place.phase, phase, now
    place.step = place.step if step is None else step
    place.entered += 1
    if listener and place is main and threading.get_ident() == _trains:
        listener(phase)
    if memory:
        place.collectives = _count() if place is main else 0
        TIME.pack_into(memory, _offset + TIMES + TIME.size * NUMBER[left], times, seconds)
        _show(memory, place)


def _show(memory: mmap.mmap, place: Place) -> None:
    number, first = NUMBER[place.phase], place is main
    PLACE.pack_into(
        memory,
        _offset + PLACES + PLACE.size * (not first),
        place.step,
        number,
        place.entered,
        place.collectives,
        place.since,
    )
    if first:
        at = _offset + TRACES + TRACE.size * (place.entered % TRACE_LENGTH)
        TRACE.pack_into(memory, at, place.entered, place.step, number, place.collectives)


def seconds() -> dict[str, float]:
    """That the thread which trains has spent in each phase since the run began: they sum to the time since then."""
    spent = {phase: seconds for phase, (_, seconds) in main.spent.items()}
    return spent | {main.phase: spent.get(main.phase, 0.0) + time.monotonic() - main.since}


def lately() -> dict[str, float]:
    """The same since this was asked last."""
    now = seconds()
    passed = {
        phase: round(spent - _told.get(phase, 0.0), 6)
        for phase, spent in now.items()
        if spent > _told.get(phase, 0.0)
    }
    _told.update(now)
    return passed


class Compiling:
    """The compiler's callbacks: what it interrupts is not slow, and is gone on with afterwards. It may work in a thread of autograd's."""

    interrupted = "start"

    def begins(self, _: object) -> None:
        """Enter `compile`."""
        self.interrupted = main.phase
        _move(main, "compile")

    def ends(self, _: object) -> None:
        """Back to what it interrupted."""
        _move(main, self.interrupted)


compiling = Compiling()


def share(file: Path, index: int, rank: int) -> None:
    """From now on show this process's place in slot `index` of a file that all ranks of the node map, until `leave`. Raises OSError."""
    global _memory, _offset, _trains
    descriptor = os.open(file, os.O_RDWR)
    try:
        os.posix_fallocate(
            descriptor, index * SLOT, SLOT
        )  # a page that a full /dev/shm cannot give would be a SIGBUS later
        memory = mmap.mmap(descriptor, (index + 1) * SLOT)
    finally:
        os.close(descriptor)
    _offset, _trains = index * SLOT, threading.get_ident()
    _show(memory, main)
    _show(memory, background)
    HEAD.pack_into(
        memory, _offset, os.getpid(), started_at(os.getpid()) or 0, rank, 0, _trains, here()
    )
    _memory = memory


def count_collectives(count: Callable[[], int]) -> None:
    """`count` says how many collectives this rank has begun."""
    global _count
    _count = count


def leave() -> None:
    """This rank goes in order."""
    global _memory, _count, _trains
    memory, _memory, _count, _trains = _memory, None, int, threading.main_thread().ident
    if memory:
        pid, started, rank, _, *rest = HEAD.unpack_from(memory, _offset)
        HEAD.pack_into(memory, _offset, pid, started, rank, 1, *rest)


def in_collective(files: Iterable[str]) -> bool:
    """Whether a thread whose Python frames are in `files`, innermost first, waits in a collective."""
    file = next(
        (file for file in files if not file.endswith("/torch/_ops.py")), ""
    )  # which only calls what others ask for
    return "/torch/distributed/" in file and not any(
        part in file for part in ("/distributed/tensor/", "/distributed/checkpoint/")
    )


def slots(content: bytes) -> list[Slot]:
    """Of all ranks that have come, in the order of the node's."""
    found = []
    for offset in range(0, len(content) - SLOT + 1, SLOT):
        pid, started, rank, left, thread, where = HEAD.unpack_from(content, offset)
        if not thread:  # written last
            continue
        places = []
        for at in (offset + PLACES, offset + PLACES + PLACE.size):
            step, number, entered, collectives, since = PLACE.unpack_from(content, at)
            places.append(Place(step, PHASES[number], since, entered, collectives))
        spent = {
            name: TIME.unpack_from(content, offset + TIMES + TIME.size * number)
            for name, number in NUMBER.items()
        }
        lines = sorted(
            TRACE.unpack_from(content, offset + TRACES + TRACE.size * i)
            for i in range(TRACE_LENGTH)
        )
        trace = [
            (entered, step, PHASES[number], collectives)
            for entered, step, number, collectives in lines
            if entered
        ]
        found.append(
            Slot(pid, started, rank, bool(left), thread, where, places[0], places[1], spent, trace)
        )
    return found


def started_at(pid: int) -> int | None:
    """Clock ticks from the boot to the process's start; None if it has ended, also if nobody has asked for its exit code yet."""
    state = stat(pid)
    return None if state is None or state[0] in "ZX" else int(state[19])


def stat(pid: int) -> list[str] | None:
    """/proc/PID/stat from the state on (proc(5)); None if there is no such process. Raises OSError where that cannot be known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def here() -> int:
    """Of all processes for which a process id means the same: those of this container on this machine. Ranks of one node may have several."""
    try:
        return zlib.crc32(
            f"{Path('/proc/sys/kernel/random/boot_id').read_text()}{os.stat('/proc/self/ns/pid').st_ino}".encode()
        )
    except OSError:
        return 0
