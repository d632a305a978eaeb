"""Which rank of a node holds up the others: a decision over what its ranks show of themselves. Imports no torch."""

import math
import re
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from statistics import mean, median

from fsdp_trainer.phases import in_collective
from fsdp_trainer.process import process_stat
from fsdp_trainer.slots import PhaseVisit, RankSlot

ORDINARY = {"data", "forward", "backward", "clip", "update", "validation", "log", "read", "agree"}
"""Phases that take about as long each time. All others, and the first steps, may take up to launch.timeout."""
STORAGE = {"data", "validation", "log"}
"""Of these, phases that read or write files, or wait for a thread that does: where storage is remote or cold, one such wait may be long."""
UNLIMITED = {
    "start",
    "export",
    "end",
}  # wait for a rank that works, outside any collective, or for trackers
FACTOR, PATIENCE = 5, 12  # times the median; times launch.stall where storage is waited for
STOPPED_SECONDS = 1.0
DEBUGGERS = ("/pdb.py", "/bdb.py", "/debugpy/", "/pydevd")


@dataclass
class Seen:
    """One rank at one look. state: as in proc(5), None if it has ended; standing: seconds in this phase, of the `allowed` ones.

    stopped: for how long; stacks: of all its threads, where they were asked for.
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
        """Among all of the world."""
        return self.slot.rank

    @property
    def place(self) -> PhaseVisit:
        """The phase of the training thread."""
        return self.slot.training

    @property
    def died(self) -> bool:
        """Ended without leaving in order."""
        return self.state is None and not self.slot.closed

    @property
    def trains(self) -> bool:
        """Neither ended nor about to."""
        return self.state is not None and not self.slot.closed and self.place.phase != "end"

    @property
    def waits(self) -> bool:
        """Whether it waits for others: in a collective, or for a device that may be in one."""
        return self.place.phase == "read" or in_collective(frames(self.stacks, self.slot.thread))

    @property
    def debugged(self) -> bool:
        """Whether somebody is looking at it."""
        return self.traced or any(name in self.stacks for name in DEBUGGERS)


@dataclass
class Verdict:
    """what: `dead`, `stopped`, `stuck` (does not go on), `waiting` (for another node), `debugged`; ranks: whose fault it is, as far as known.

    kill: whether these ranks are to end.
    """

    what: str
    ranks: list[Seen]
    why: str
    kill: bool = True


class Durations:
    """How long each phase takes on this node."""

    def __init__(self) -> None:
        self._seconds: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=101))
        self._noted: dict[int, int] = {}  # by pid: the last visit that counts already
        self._have_read: set[int] = set()  # pids of ranks that have waited for their device

    def note(self, slots: Iterable[RankSlot]) -> None:
        """Take the visits that ended since the last look: of each rank and phase the mean."""
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
        """Seconds that a rank may stand where it is. Slow is not dead: the first step, saves, the compiler and a disk have the `longest`."""
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
        # a GPU's host may stand in any phase until the device has done what it was given since the last `read`
        return min(
            longest, max(shortest, FACTOR * median(self._seconds[phase]), FACTOR * median(device))
        )


def look(slot: RankSlot) -> Seen:
    """What the system says about a rank. State `?`: it does not say."""
    try:
        fields = process_stat(slot.pid)
    except (
        OSError
    ):  # a system short of memory, or that hides processes; one that ended would be another error
        return Seen(slot, "?", standing=time.monotonic() - slot.training.since)
    if fields is None or fields[0] in "ZX" or int(fields[19]) != slot.started:
        return Seen(slot, None)
    return Seen(slot, fields[0], traced(slot.pid), standing=time.monotonic() - slot.training.since)


def traced(pid: int) -> bool:
    """Whether a debugger is attached."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    return any(line.startswith("TracerPid:") and int(line.split()[1]) for line in lines)


def suspended(seen: Seen) -> bool:
    """Whether a rank was stopped on purpose: from its terminal (Ctrl-Z), or together with whoever started it, by a scheduler."""
    try:
        fields = process_stat(seen.slot.pid)
    except OSError:
        return False
    if seen.state != "T" or fields is None:
        return False
    return bool(int(fields[4])) or state_of(int(fields[1])) == "T"


def starved(pid: int) -> float:
    """Seconds that the main thread could have worked and had no processor; 0 where the system does not count them."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def state_of(thread: int) -> str | None:
    """As in proc(5); None if it has ended or may not be known."""
    try:
        return next(iter(process_stat(thread) or []), None)
    except OSError:
        return None


def reads_disk(pid: int) -> bool:
    """Whether any thread waits for a disk now: data may be read ahead of the thread that trains."""
    return "D" in [state_of(int(task.name)) for task in Path(f"/proc/{pid}/task").glob("*")]


def stopped(ranks: list[Seen]) -> Verdict | None:
    """Ranks that a signal has stopped and nothing has let go on for a second."""
    found = [seen for seen in ranks if seen.stopped >= STOPPED_SECONDS and not seen.debugged]
    return Verdict("stopped", found, "stopped by a signal") if found else None


def standing(ranks: list[Seen]) -> bool:
    """Return True if every rank at work on this node has been in its phase for longer than allowed.

    A rank within its time may be the one that the others wait for. A rank in state T can show no
    stacks, so nothing could be judged by them: `stopped` reports it a second later.
    """
    at_work = [seen for seen in ranks if seen.trains]
    return bool(at_work) and all(
        seen.standing > seen.allowed and seen.state != "T" for seen in at_work
    )


def unchanged(before: list[Seen], after: list[Seen]) -> bool:
    """Return True if no rank entered a phase, was stopped or ended between two looks."""

    def condition(ranks: list[Seen]) -> list[tuple[int, int, bool, bool]]:
        return [(s.rank, s.place.entered, s.trains, s.state == "T") for s in ranks]

    return condition(before) == condition(after)


def judge(ranks: list[Seen], world_size: int, longest: float, on_device: bool = False) -> Verdict:
    """Whose fault it is that all ranks of the node stand, by their stacks and by the collectives that they have begun.

    on_device: a host that is in no collective may wait for a GPU that is, when that has been given all that it takes.
    """
    at_work = [seen for seen in ranks if seen.trains]
    if debugged := [seen for seen in at_work if seen.debugged]:
        return Verdict("debugged", debugged, "in a debugger", kill=False)
    outside = [seen for seen in at_work if not seen.waits]
    devices_wait = on_device and len(outside) == len(at_work) and len(ranks) < world_size
    if outside and not devices_wait:
        behind = min((seen.place.step, seen.place.collectives) for seen in outside)
        found = [seen for seen in outside if (seen.place.step, seen.place.collectives) == behind]
        return Verdict("stuck", found, "does not go on, outside any collective")
    if differ := first_difference(at_work):
        step, phase, made = differ
        fewest = [seen for seen in at_work if made.get(seen.rank) == min(made.values())]
        told = ", ".join(f"rank {rank} began {count}" for rank, count in sorted(made.items()))
        return Verdict("stuck", fewest, f"skipped a collective in {phase} of step {step} ({told})")
    if gone := [seen for seen in ranks if not seen.trains]:
        return Verdict("stuck", at_work, f"waits for rank {gone[0].rank}, which has left")
    if len(at_work) == world_size:
        return Verdict("stuck", at_work, "all ranks wait in a collective that does not end")
    late = all(seen.standing > longest + seen.allowed for seen in at_work)
    return Verdict(
        "waiting",
        at_work,
        "waits for others, as all of this node do: look at the other nodes",
        kill=late,
    )


def first_difference(ranks: list[Seen]) -> tuple[int, str, dict[int, int]] | None:
    """Step and phase in which ranks that remember it have begun different numbers of collectives, and how many each; None if there is none.

    Of the phase that a rank waits in nobody knows how many; it is taken to be those of the step before.
    """
    made: dict[tuple[int, str, int], dict[int, int]] = defaultdict(dict)
    for seen in ranks:
        visits: dict[tuple[int, str], int] = defaultdict(int)
        oldest = seen.slot.trace[0].step  # not wholly remembered
        for begun, after in zip_longest(seen.slot.trace, seen.slot.trace[1:]):
            step, phase = begun.step, begun.phase
            visits[step, phase] += 1
            visit = step, phase, visits[step, phase]
            if after:
                made[visit][seen.rank] = after.collectives - begun.collectives
            elif usual := made.get((step - 1, *visit[1:])):
                made[visit][seen.rank] = max(usual.values())
            if step == oldest:
                made.pop(visit, None)
    for (step, phase, _), counts in sorted(made.items(), key=lambda visit: visit[0][0]):
        if phase in ORDINARY and len(counts) == len(ranks) and len(set(counts.values())) > 1:
            return step, phase, counts
    return None


def frames(stacks: str, thread: int) -> list[str]:
    """Files that a thread is in, innermost first, from faulthandler's dump of all threads."""
    below = stacks.rpartition(f"hread 0x{thread:016x} ")[2].partition("\n\n")[0]
    return re.findall(r'^  File "([^"]+)"', below, re.MULTILINE)
