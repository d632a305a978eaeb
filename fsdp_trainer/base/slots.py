"""A slot in shared memory for each rank of a node, with its identity and current phase.

The watchdog reads the slots.
"""

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from fsdp_trainer.base import phases
from fsdp_trainer.base.phases import PHASES, ThreadPhase
from fsdp_trainer.base.process import pid_namespace, start_ticks

NUMBER = {name: number for number, name in enumerate(PHASES)}
TRACE_LENGTH = 216
"""Number of phases kept for each rank, which are those of about 15 steps."""

# A slot holds a header, the checkpoint thread's current visit, and the training thread's newest
# visits.
# pid, started, rank, closed, thread, pid_namespace, and the rank's coordinates as text
HEADER = Struct("qqq?QQ96s")
VISIT = Struct("dqqqq")  # since, step, phase, collectives, entered
CLOSED_AT = Struct("qqq").size
COORDINATES_AT = Struct("qqq?QQ").size
BACKGROUND_AT = HEADER.size
TRACE_AT = BACKGROUND_AT + VISIT.size
SLOT_BYTES = TRACE_AT + VISIT.size * TRACE_LENGTH


class PhaseVisit(NamedTuple):
    """A phase that a thread entered.

    since: time.monotonic() when it began. collectives: number of collectives that this rank began
    before it. entered: sequence number of the visit, from 1. It is the last field in memory, so a
    reader takes a half-written visit for the older one that it replaces.
    """

    since: float
    step: int
    phase: str
    collectives: int
    entered: int


@dataclass
class RankSlot:
    """The content of one rank's slot.

    started: clock ticks from boot to the start of process `pid`, to detect that the pid was reused.
    closed: whether the rank left cleanly. thread: threading.get_ident() of the training thread.
    pid_namespace: see process.pid_namespace. background: the checkpoint thread's current phase.
    trace: the training thread's visits, oldest first. coordinates: the rank's index in each
    dimension of the mesh, e.g. `context 1, tensor 0`.
    """

    pid: int
    started: int
    rank: int
    closed: bool
    thread: int
    pid_namespace: int
    background: PhaseVisit
    trace: list[PhaseVisit]
    coordinates: str = ""

    @property
    def training(self) -> PhaseVisit:
        return self.trace[-1]


class SlotWriter:
    """The slot of this process, kept up to date from construction until `close`.

    file: file that all ranks of the node map. index: the slot's index in it. Raises OSError.
    """

    def __init__(self, file: Path, index: int, rank: int):
        descriptor = os.open(file, os.O_RDWR)
        offset = index * SLOT_BYTES
        try:
            # without it, a full /dev/shm would cause a SIGBUS at the first write
            os.posix_fallocate(descriptor, offset, SLOT_BYTES)
            self._slot = memoryview(mmap.mmap(descriptor, offset + SLOT_BYTES))[offset:]
        finally:
            os.close(descriptor)
        self.count_collectives: Callable[[], int] = int
        self._write(phases.training)
        pid = os.getpid()
        thread = phases.training.ident
        started = start_ticks(pid) or 0
        # written last: readers skip a slot without a thread
        facts = pid, started, rank, False, thread, pid_namespace(), b""
        HEADER.pack_into(self._slot, 0, *facts)
        phases.add_listener(self._write)

    def show_coordinates(self, text: str) -> None:
        encoded = text.encode()[: BACKGROUND_AT - COORDINATES_AT]
        self._slot[COORDINATES_AT : COORDINATES_AT + len(encoded)] = encoded

    def close(self) -> None:
        """Mark the slot as closed: the rank leaves cleanly."""
        phases.remove_listener(self._write)
        self._slot[CLOSED_AT] = 1

    def _write(self, thread: ThreadPhase, _ended: str = "") -> None:
        at = BACKGROUND_AT
        collectives = 0
        if thread is phases.training:
            at = TRACE_AT + VISIT.size * (thread.entered % TRACE_LENGTH)
            collectives = self.count_collectives()
        visit = thread.since, thread.step, NUMBER[thread.phase], collectives, thread.entered
        VISIT.pack_into(self._slot, at, *visit)


_writer: SlotWriter | None = None


def open_slot(file: Path, index: int, rank: int) -> None:
    """Keep slot `index` of `file` up to date for this process until `leave`. Raises OSError."""
    global _writer
    _writer = SlotWriter(file, index, rank)


def count_collectives(count: Callable[[], int]) -> None:
    """Store with each phase the number of collectives that this rank has begun.

    count: returns that number.
    """
    if _writer:
        _writer.count_collectives = count


def show_coordinates(text: str) -> None:
    """Write this rank's coordinates in the mesh, e.g. `context 1, tensor 0`, into its slot."""
    if _writer:
        _writer.show_coordinates(text)


def leave() -> None:
    global _writer
    writer = _writer
    _writer = None
    if writer:
        writer.close()


def read_slots(content: bytes) -> list[RankSlot]:
    offsets = range(0, len(content) - SLOT_BYTES + 1, SLOT_BYTES)
    slots = [_read(content[offset : offset + SLOT_BYTES]) for offset in offsets]
    return [slot for slot in slots if slot.thread]


def _read(slot: bytes) -> RankSlot:
    pid, started, rank, closed, thread, namespace, encoded = HEADER.unpack_from(slot)
    background, *trace = (
        PhaseVisit(since, step, PHASES[phase], collectives, entered)
        for since, step, phase, collectives, entered in VISIT.iter_unpack(slot[BACKGROUND_AT:])
    )
    visits = (visit for visit in trace if visit.entered)
    trace = sorted(visits, key=lambda visit: visit.entered)
    coordinates = encoded.rstrip(b"\0").decode(errors="replace")
    return RankSlot(pid, started, rank, closed, thread, namespace, background, trace, coordinates)
