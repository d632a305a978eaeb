"""Decides which rank of a node holds up the others, from their phases, states and stacks.

Imports no torch.
"""

import math
import re
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from statistics import mean, median

from fsdp_trainer.base.phases import in_collective
from fsdp_trainer.base.process import process_stat
from fsdp_trainer.base.slots import PhaseVisit, RankSlot

ORDINARY = {"data", "forward", "backward", "clip", "update", "validation", "log", "read", "agree"}
"""Phases that take about the same time at each visit.

All other phases, and the first steps, may take up to launch.timeout.
"""
STORAGE = {"data", "validation", "log"}
"""Phases among ORDINARY that read or write files, or wait for a thread that does.

A single wait may be long if the storage is remote or cold.
"""
UNLIMITED = {"start", "export", "end"}
"""Phases in which a rank may wait outside any collective for a working rank, or for trackers."""
FACTOR = 5  # a phase may take this many times its median duration
PATIENCE = 12  # a phase in STORAGE may always take this many times launch.stall; others once
STOPPED_SECONDS = 1.0  # a rank stopped by a signal for longer is at fault
ALONG = {
    "/fsdp_trainer/parallel/tensor_ranks.py": "tensor",
    "/fsdp_trainer/parallel/context.py": "context",
    "/fsdp_trainer/parallel/ring.py": "context",
    "/fsdp_trainer/parallel/experts.py": "expert",
    "/fsdp_trainer/parallel/pipeline.py": "pipeline",
    "/fsdp_trainer/parallel/pipeline_runtime.py": "pipeline",
    "/_fully_shard/_fsdp_collectives.py": "shard",
    "/_fully_shard/_fsdp_param_group.py": "shard",
}
"""The dimension along which a collective runs, by the end of the path of the file that starts it.

All ranks take part in a collective started from any other file.
"""
DEBUGGERS = ("/pdb.py", "/bdb.py", "/debugpy/", "/pydevd")


@dataclass
class RankStatus:
    """State of one rank at one poll.

    state: letter as in proc(5), `?` if unknown, None if the rank has ended; traced: True if a
    debugger is attached; stopped: seconds since a signal stopped it, else 0; standing, allowed:
    seconds spent in its phase, and seconds that it may spend there; stacks: stack traces of all its
    threads, if they were requested.
    """

    slot: RankSlot
    state: str | None
    traced: bool = False
    stopped: float = 0.0
    standing: float = 0.0
    allowed: float = math.inf
    stacks: str = ""

    @property
    def rank(self) -> int:
        return self.slot.rank

    @property
    def place(self) -> PhaseVisit:
        return self.slot.training

    @property
    def died(self) -> bool:
        """True if the rank ended without having left the watchdog."""
        return self.state is None and not self.slot.closed

    @property
    def trains(self) -> bool:
        return self.state is not None and not self.slot.closed and self.place.phase != "end"

    @property
    def waits(self) -> bool:
        return self.place.phase == "read" or in_collective(frames(self.stacks, self.slot.thread))

    @property
    def waits_along(self) -> str | None:
        files = frames(self.stacks, self.slot.thread)
        if not in_collective(files):
            return None
        own = [file for file in files if "/torch/" not in file or "/_fully_shard/" in file]
        ends = (name for end, name in ALONG.items() if own and own[0].endswith(end))
        return next(ends, "all")

    @property
    def debugged(self) -> bool:
        return self.traced or any(name in self.stacks for name in DEBUGGERS)


@dataclass
class Verdict:
    """A decision about the ranks of a node.

    what: `dead`, `stopped`, `stuck` (makes no progress), `waiting` (for another node) or
    `debugged`; ranks: the ranks at fault, as far as known; kill: True if they must be ended.
    """

    what: str
    ranks: list[RankStatus]
    reason: str
    kill: bool = True


class Durations:
    """Measures how long each phase takes on this node."""

    def __init__(self) -> None:
        self._seconds: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=101))
        self._noted: dict[int, int] = {}  # by pid: number of the last visit already counted
        self._have_read: set[int] = set()  # pids of ranks that have waited for their device

    def note(self, slots: Iterable[RankSlot]) -> None:
        """Add the visits that ended since the last poll, averaged for each rank and phase."""
        for slot in slots:
            ended: dict[str, list[float]] = defaultdict(list)
            for visit, following in pairwise(slot.trace):
                if visit.entered > self._noted.get(slot.pid, 0):
                    ended[visit.phase].append(following.since - visit.since)
            for phase, seconds in ended.items():
                self._seconds[phase].append(mean(seconds))
            if "read" in ended:
                self._have_read.add(slot.pid)
            self._noted[slot.pid] = slot.training.entered - 1

    def allowed(self, slot: RankSlot, state: str, shortest: float, longest: float) -> float:
        """Return how many seconds a rank may spend in its current phase.

        shortest, longest: bounds in seconds. The first steps, phases such as saving or compiling,
        and a rank that waits for a disk may take the `longest`.
        """
        phase = slot.training.phase
        if phase in UNLIMITED:
            return math.inf
        shortest *= PATIENCE if phase in STORAGE else 1
        device = self._seconds["read"]
        if (
            phase not in ORDINARY
            or state == "D"
            or not self._seconds[phase]
            or slot.pid not in self._have_read
        ):
            return longest
        # in any phase the host may have to wait until the GPU has done all work queued since the
        # last `read`
        return min(
            longest, max(shortest, FACTOR * median(self._seconds[phase]), FACTOR * median(device))
        )


def look(slot: RankSlot) -> RankStatus:
    try:
        fields = process_stat(slot.pid)
    except OSError:  # no memory, or processes are hidden; None, not OSError, for an ended process
        return RankStatus(slot, "?", standing=time.monotonic() - slot.training.since)
    if fields is None or fields[0] in "ZX" or int(fields[19]) != slot.started:
        return RankStatus(slot, None)
    return RankStatus(
        slot, fields[0], traced(slot.pid), standing=time.monotonic() - slot.training.since
    )


def traced(pid: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    return any(line.startswith("TracerPid:") and int(line.split()[1]) for line in lines)


def suspended(status: RankStatus) -> bool:
    """Return True if a rank was stopped on purpose.

    That is: from its terminal (Ctrl-Z), or by a scheduler together with its parent process.
    """
    try:
        fields = process_stat(status.slot.pid)
    except OSError:
        return False
    if status.state != "T" or fields is None:
        return False
    return bool(int(fields[4])) or state_of(int(fields[1])) == "T"


def starved(pid: int) -> float:
    """Return the seconds that the main thread was runnable but had no processor.

    Returns 0 if the system does not count them.
    """
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def state_of(thread: int) -> str | None:
    """Return a thread's state letter, as in proc(5); None if it has ended or is unknown."""
    try:
        return next(iter(process_stat(thread) or []), None)
    except OSError:
        return None


def reads_disk(pid: int) -> bool:
    """Return True if any thread of a process waits for a disk, such as one reading data ahead."""
    return "D" in [state_of(int(task.name)) for task in Path(f"/proc/{pid}/task").glob("*")]


def stopped(ranks: list[RankStatus]) -> Verdict | None:
    """Return a verdict on the ranks that a signal stopped for STOPPED_SECONDS; None without any.

    Ranks in a debugger do not count.
    """
    at_fault = [
        status for status in ranks if status.stopped >= STOPPED_SECONDS and not status.debugged
    ]
    return Verdict("stopped", at_fault, "stopped by a signal") if at_fault else None


def standing(ranks: list[RankStatus]) -> bool:
    """Return True if every rank at work on this node has been in its phase for longer than allowed.

    A rank within its time may be the one that the others wait for. A rank in state T cannot show
    its stacks, which `judge` needs. Returns False then: `stopped` reports that rank a second later.
    """
    at_work = [status for status in ranks if status.trains]
    return bool(at_work) and all(
        status.standing > status.allowed and status.state != "T" for status in at_work
    )


def unchanged(before: list[RankStatus], after: list[RankStatus]) -> bool:
    def condition(ranks: list[RankStatus]) -> list[tuple[int, int, bool, bool]]:
        return [(s.rank, s.place.entered, s.trains, s.state == "T") for s in ranks]

    return condition(before) == condition(after)


def judge(
    ranks: list[RankStatus], world_size: int, longest: float, on_device: bool = False
) -> Verdict:
    """Decide from stacks and counts of collectives which rank is at fault when all are standing.

    on_device: True if ranks compute on GPUs. A host that has queued all its work may then be
    outside any collective and wait for a GPU that is in one.
    """
    at_work = [status for status in ranks if status.trains]
    debugged = [status for status in at_work if status.debugged]
    if debugged:
        return Verdict("debugged", debugged, "in a debugger", kill=False)
    outside = [status for status in at_work if not status.waits]
    devices_wait = on_device and len(outside) == len(at_work) and len(ranks) < world_size
    if outside and not devices_wait:
        behind = min((status.place.step, status.place.collectives) for status in outside)
        at_fault = [s for s in outside if (s.place.step, s.place.collectives) == behind]
        return Verdict("stuck", at_fault, "makes no progress, outside any collective")
    difference = first_difference(at_work)
    if difference:
        return _skipped(at_work, *difference)
    gone = [status for status in ranks if not status.trains]
    if gone:
        return Verdict("stuck", at_work, f"waits for rank {gone[0].rank}, which has left")
    if len(at_work) == world_size:
        return Verdict("stuck", at_work, "all ranks wait in a collective that does not end")
    late = all(status.standing > longest + status.allowed for status in at_work)
    return Verdict(
        "waiting",
        at_work,
        "waits for others, as all of this node do: check the other nodes",
        kill=late,
    )


def _skipped(ranks: list[RankStatus], step: int, phase: str, counts: dict[int, int]) -> Verdict:
    fewest = [status for status in ranks if counts.get(status.rank) == min(counts.values())]
    numbers = ", ".join(f"rank {rank} began {count}" for rank, count in sorted(counts.items()))
    return Verdict("stuck", fewest, f"skipped a collective in {phase} of step {step} ({numbers})")


def first_difference(ranks: list[RankStatus]) -> tuple[int, str, dict[int, int]] | None:
    """Find the first phase in which ranks began different numbers of collectives.

    Returns its step, its name and the number by rank; None if there is no such phase among those
    that all ranks remember. A rank that is still in a phase has not begun all its collectives yet:
    the number of the previous step is used instead.
    """
    counts_of: dict[tuple[int, str, int], dict[int, int]] = defaultdict(dict)
    for status in ranks:
        visits: dict[tuple[int, str], int] = defaultdict(int)
        oldest = status.slot.trace[0].step  # may be incomplete
        for begun, after in zip_longest(status.slot.trace, status.slot.trace[1:]):
            step, phase = begun.step, begun.phase
            visits[step, phase] += 1
            visit = step, phase, visits[step, phase]
            if after:
                counts_of[visit][status.rank] = after.collectives - begun.collectives
            elif before := counts_of.get((step - 1, *visit[1:])):
                counts_of[visit][status.rank] = max(before.values())
            if step == oldest:
                counts_of.pop(visit, None)
    for (step, phase, _), counts in sorted(counts_of.items(), key=lambda visit: visit[0][0]):
        if phase in ORDINARY and len(counts) == len(ranks) and len(set(counts.values())) > 1:
            return step, phase, counts
    return None


def waiting(ranks: Iterable[RankStatus]) -> dict[str, list[int]]:
    by_dimension: dict[str, list[int]] = defaultdict(list)
    for status in ranks:
        if status.waits_along:
            by_dimension[status.waits_along].append(status.rank)
    return dict(by_dimension)


def frames(stacks: str, thread: int) -> list[str]:
    """Return the files of a thread's stack frames, innermost first.

    stacks: faulthandler's dump of all threads.
    """
    below = stacks.rpartition(f"hread 0x{thread:016x} ")[2].partition("\n\n")[0]
    return re.findall(r'^  File "([^"]+)"', below, re.MULTILINE)
