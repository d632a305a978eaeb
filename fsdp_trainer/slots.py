"""A slot in memory for each rank of a node: who it is and in which phase. The watchdog reads it."""

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from fsdp_trainer import phases
from fsdp_trainer.phases import PHASES, ThreadPhase
from fsdp_trainer.process import pid_namespace, start_ticks

NUMBER = {name: number for number, name in enumerate(PHASES)}
TRACE_LENGTH = 216
"""Phases remembered of each rank: those of about 15 steps."""

# A slot is a header, the checkpoint thread's visit, and the newest visits of the training thread.
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

    since: time.monotonic() when it began; collectives: begun by this rank before it; entered: its
    number, from 1. That is written last: half a visit is taken for the one that it replaces.
    """

    since: float
    step: int
    phase: str
    collectives: int
    entered: int


@dataclass
class RankSlot:
    """One rank as its slot shows it.

    started: clock ticks from boot to the start of `pid`, so that a pid used again is not mistaken
    for it; closed: left in order; thread: threading.get_ident() of the training thread;
    pid_namespace: see process.pid_namespace; trace: of the training thread, oldest first;
    coordinates: in each dimension of the mesh, as `context 1, tensor 0`.
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
        """The current phase of the training thread."""
        return self.trace[-1]


class SlotWriter:
    """This process's slot, kept up to date from its construction until `close`.

    file: mapped by all ranks of the node; index: of the slot in it. Raises OSError.
    """

    def __init__(self, file: Path, index: int, rank: int):
        descriptor = os.open(file, os.O_RDWR)
        offset = index * SLOT_BYTES
        try:
            # a page that a full /dev/shm cannot give would be a SIGBUS later
            os.posix_fallocate(descriptor, offset, SLOT_BYTES)
            self._slot = memoryview(mmap.mmap(descriptor, offset + SLOT_BYTES))[offset:]
        finally:
            os.close(descriptor)
        self.count_collectives: Callable[[], int] = int
        self._write(phases.training)
        pid = os.getpid()
        thread = phases.training.ident
        started = start_ticks(pid) or 0
        # last: a slot without a thread is not read
        facts = pid, started, rank, False, thread, pid_namespace(), b""
        HEADER.pack_into(self._slot, 0, *facts)
        phases.add_listener(self._write)

    def show_coordinates(self, text: str) -> None:
        """Show where this rank is in the mesh."""
        encoded = text.encode()[: BACKGROUND_AT - COORDINATES_AT]
        self._slot[COORDINATES_AT : COORDINATES_AT + len(encoded)] = encoded

    def close(self) -> None:
        """Show that this rank leaves in order."""
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


def share(file: Path, index: int, rank: int) -> None:
    """Show this process in slot `index` of `file` until `leave`. Raises OSError."""
    global _writer
    _writer = SlotWriter(file, index, rank)


def count_collectives(count: Callable[[], int]) -> None:
    """Show with each phase how many collectives this rank has begun, by calling `count`."""
    if _writer:
        _writer.count_collectives = count


def show_coordinates(text: str) -> None:
    """Show where this rank is in the mesh, as `context 1, tensor 0`."""
    if _writer:
        _writer.show_coordinates(text)


def leave() -> None:
    """Show that this rank leaves in order, if it shows anything."""
    global _writer
    writer = _writer
    _writer = None
    if writer:
        writer.close()


def read_slots(content: bytes) -> list[RankSlot]:
    """Return the slots of all ranks that have come, by local rank."""
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
