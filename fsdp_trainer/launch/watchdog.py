"""A process beside the ranks of a node that finds those which died, were stopped or do not go on, and ends them. Imports no torch."""

import faulthandler
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

from fsdp_trainer import slots
from fsdp_trainer.config.units import parse_duration
from fsdp_trainer.launch.hangs import (
    Durations,
    Seen,
    Verdict,
    judge,
    look,
    reads_disk,
    standing,
    starved,
    state_of,
    stopped,
    suspended,
    unchanged,
)
from fsdp_trainer.observe.records import Records
from fsdp_trainer.process import pid_namespace

if TYPE_CHECKING:
    from fsdp_trainer.config.schema import Launch
    from fsdp_trainer.launch.world import World

LOOK_SECONDS = 0.25
GRACE_SECONDS = 3.0  # for the others to notice and to leave by themselves; then they are blocked
DISK_SECONDS = 3.0
STACKS_SECONDS = 3.0  # a machine under load is slow to show them, and a rank whose stacks are not seen would be blamed
PAUSE_SECONDS = 5.0  # between two looks: the watchdog itself was stopped, or starved
SHOW_STACKS = signal.SIGUSR2
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_started: list[subprocess.Popen] = []
_flight_settings: dict[str, str] = {}
"""Variables that a run in this process has set, which the next one replaces."""


@dataclass
class Watch:
    """What the watchdog is told. board: the file that the ranks share; stall and timeout in seconds; on_device: they compute on GPUs.

    alone: one rank that no launcher started, and none would start again: perhaps a notebook, whose process is more than the run.
    """

    board: str
    run: str
    world_size: int
    stall: float
    timeout: float
    on_device: bool = False
    alone: bool = False


# --- in a rank ---------------------------------------------------------------------------------------------------------------------


def watched(cfg: "Launch", run: Path, world: "World") -> "Watched | None":
    """This rank under the watchdog's eyes, from its place in the world on; None with launch.watchdog=false, or on a system without /proc.

    None too where it cannot be: memory or processes are short, this rank's container is another than that of the node's first, or that has
    come and gone meanwhile.
    """
    if not cfg.watchdog or not Path("/proc/self/stat").exists():
        return None
    board = board_of(world)
    on_device = world.device.type == "cuda"
    if on_device:
        record_flights(board)
    alone = world.size == 1 and "RANK" not in os.environ
    longest = (
        parse_duration(cfg.timeout) + GRACE_SECONDS
    )  # collectives that end after launch.timeout come first, and their ranks leave by themselves
    watch = Watch(
        board, str(run.absolute()), world.size, parse_duration(cfg.stall), longest, on_device, alone
    )
    try:
        return Watched(watch, world.rank, world.local_rank)
    except OSError as error:
        say(f"fsdp-trainer: rank {world.rank} has no watchdog: {error}")
        return None


class Watched:
    """A rank that shows where it is, and its stacks when asked. The node's first one starts the watchdog."""

    def __init__(self, watch: Watch, rank: int, local_rank: int):
        self._stacks: IO[str] | None = None
        try:
            self._begin(watch, rank, local_rank)
        except OSError:
            self.close()
            if local_rank == 0:
                Path(watch.board).unlink(missing_ok=True)
            raise

    def _begin(self, watch: Watch, rank: int, local_rank: int) -> None:
        slots.share(Path(watch.board), local_rank, rank)
        if signal.getsignal(SHOW_STACKS) == signal.SIG_DFL:
            self._stacks = open(stacks_of(watch.board, rank), "w")  # noqa: SIM115
            # in C: it needs neither Python's lock nor a main thread that is in Python
            faulthandler.register(SHOW_STACKS, file=self._stacks, all_threads=True, chain=False)
        if local_rank == 0:
            start_watchdog(watch)

    def close(self) -> None:
        """This rank leaves in order."""
        slots.leave()
        if self._stacks:
            faulthandler.unregister(SHOW_STACKS)
            self._stacks.close()


def board_of(world: "World") -> str:
    """A file that all ranks of the node share in this attempt, in memory where there is such a folder; its first rank names it."""
    key = f"watchdog of node {world.node}"
    if world.local_rank == 0:
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
        board = Path(f"{folder}/fsdp_trainer-{os.getpid()}-{uuid.uuid4().hex[:8]}")
        with suppress(OSError):  # then nobody finds it
            board.touch(0o600)
        world.store.set(key, str(board))
    return world.store.get(key).decode()


def stacks_of(board: str, rank: int) -> str:
    """Where a rank writes its stacks."""
    return f"{board}.rank-{rank}.stacks"


def record_flights(board: str) -> None:
    """Before NCCL is initialised: have torch's flight recorder write its last collectives when something is written to a pipe."""
    for name, value in {
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{board}.flight-",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{board}.flight-",
    }.items():
        if os.environ.get(name) in (None, _flight_settings.get(name)):
            os.environ[name] = _flight_settings[name] = value


def start_watchdog(watch: Watch) -> None:
    """In a session of its own, so that what is meant for the ranks does not end it; it ends with them."""
    root = Path(__file__).parents[2]
    code = f"import sys; sys.path.insert(0, {str(root)!r}); from fsdp_trainer.launch.watchdog import main; main(sys.argv[1])"
    # without site-packages: 30 ms, and it reads no code but the standard library's and ours
    words = [sys.executable, "-I", "-S", "-c", code, json.dumps(asdict(watch))]
    env = {
        name: value for name, value in os.environ.items() if name not in RANK_VARIABLES
    }  # it is no rank
    _started[:] = [
        earlier for earlier in _started if earlier.poll() is None
    ]  # of runs before in this process, which lives on
    _started.append(
        subprocess.Popen(
            words,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    )


# --- the process -------------------------------------------------------------------------------------------------------------------


def main(told: str) -> None:
    """Watch until the last rank has gone."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    watch = Watch(**json.loads(told))
    watchdog = Watchdog(watch)
    try:
        watchdog.run()
        watchdog.keep_flights()
    finally:
        for file in (
            Path(watch.board),
            *Path(watch.board).parent.glob(Path(watch.board).name + ".*"),
        ):
            file.unlink(missing_ok=True)


class Watchdog:
    """Looks at the ranks of a node several times a second."""

    def __init__(self, watch: Watch, kill: Callable[[int, int], None] = os.kill):
        self.watch, self.kill, self.host = watch, kill, socket.gethostname()
        self.durations = Durations()
        self.stopped_since: dict[int, float] = {}
        self.starved: dict[
            int, tuple[int, float]
        ] = {}  # by rank: the phase's number, seconds without a processor when it began
        self.pid_namespace = pid_namespace()
        self.killed: set[int] = set()
        self.copied: set[Path] = set()
        """Files with the last collectives of a rank that are in the run's hangs/ already."""
        self.told: set[int] = set()
        self.ends_at = float("inf")  # when ranks that have not left by themselves are ended
        self.quiet_until = 0.0
        self.counts_from = self.looked = time.monotonic()

    def run(self) -> None:
        """Until all ranks have gone."""
        while True:
            ranks = self.look()
            if not any(seen.state is not None and not seen.slot.closed for seen in ranks):
                self.tell_dead(ranks)
                return
            self.act(ranks)
            time.sleep(LOOK_SECONDS)

    def look(self) -> list[Seen]:
        """All ranks of the node that have come so far."""
        now = time.monotonic()
        here = self.slots()
        self.durations.note(here)
        ranks = [look(slot) for slot in here]
        if any(seen.died for seen in ranks):  # or has left since we looked where it is
            closed = {slot.pid for slot in self.slots() if slot.closed}
            ranks = [
                replace(seen, slot=replace(seen.slot, closed=seen.slot.pid in closed))
                for seen in ranks
            ]
        whole = len(ranks) == self.watch.world_size and all(
            seen.state == "T" for seen in ranks
        )  # somebody wants the machine for himself
        if (
            whole
            or now - self.looked > PAUSE_SECONDS
            or any(seen.traced or suspended(seen) for seen in ranks)
        ):
            self.counts_from, self.stopped_since = now, {}
        self.looked = now
        for seen in ranks:
            if seen.state is None:
                continue
            seen.standing = min(seen.standing, now - self.counts_from) - self.starved_for(seen)
            seen.allowed = self.durations.allowed(
                seen.slot, seen.state, self.watch.stall, self.watch.timeout
            )
            if seen.state != "T" or self.counts_from == now:
                self.stopped_since.pop(seen.rank, None)
            else:
                seen.stopped = now - self.stopped_since.setdefault(seen.rank, now)
        return ranks

    def slots(self) -> list[slots.RankSlot]:
        """Of the ranks whose process ids are those that we see."""
        return [
            slot
            for slot in slots.read_slots(Path(self.watch.board).read_bytes())
            if slot.pid_namespace == self.pid_namespace
        ]

    def starved_for(self, seen: Seen) -> float:
        """Seconds of its phase in which a rank had no processor to go on with."""
        total, entered = starved(seen.slot.pid), seen.place.entered
        if self.starved.get(seen.rank, (None, 0.0))[0] != entered:
            self.starved[seen.rank] = entered, total
        return total - self.starved[seen.rank][1]

    def act(self, ranks: list[Seen]) -> None:
        """Tell what there is to tell, and end what has to end."""
        now = time.monotonic()
        self.tell_dead(ranks)
        if now > self.ends_at:
            self.end([seen for seen in ranks if seen.trains])
        if self.ends_at < float("inf") or now < self.quiet_until:
            return
        verdict = stopped(ranks)
        if (
            not verdict
            and standing(ranks)
            and not any(reads_disk(seen.slot.pid) for seen in ranks if self.within_timeout(seen))
        ):
            self.ask_for_stacks(ranks)
            if not unchanged(ranks, self.look()):
                return  # what the stacks show is out of date, or missing because a rank was stopped
            verdict = judge(ranks, self.watch.world_size, self.watch.timeout, self.watch.on_device)
        if verdict:
            verdict.kill = verdict.kill and not self.watch.alone
            self.carry_out(verdict, ranks)
            self.looked = time.monotonic()  # what that took is no pause

    def within_timeout(self, seen: Seen) -> bool:
        """Whether a rank has not been in its phase for launch.timeout."""
        return seen.trains and seen.standing <= self.watch.timeout

    def tell_dead(self, ranks: list[Seen]) -> None:
        """Ranks that ended without leaving. The others find out by themselves where a connection breaks; not so on a device."""
        dead = [
            seen
            for seen in ranks
            if seen.died and seen.slot.pid not in self.killed and seen.rank not in self.told
        ]
        if dead:
            self.told |= {seen.rank for seen in dead}
            self.record(Verdict("dead", dead, "died", kill=False), {}, [])
            self.ends_at = min(self.ends_at, time.monotonic() + GRACE_SECONDS)

    def carry_out(self, verdict: Verdict, ranks: list[Seen]) -> None:
        """Keep what shows why, then end the ranks whose fault it is."""
        if verdict.what == "stopped":
            self.ask_for_stacks(ranks)
        self.record(
            verdict,
            {f"rank-{seen.rank}.txt": described(seen) for seen in ranks},
            self.ask_for_flights(ranks),
        )
        if verdict.kill:
            self.end(verdict.ranks)
            self.ends_at = time.monotonic() + GRACE_SECONDS
        else:
            self.quiet_until = time.monotonic() + max(60.0, 10 * self.watch.stall)

    def end(self, ranks: list[Seen]) -> None:
        """At once, also if stopped: a rank that is blocked would take the launcher's whole grace."""
        for seen in ranks:
            self.killed.add(seen.slot.pid)
            with suppress(OSError):
                self.kill(seen.slot.pid, signal.SIGKILL)

    def ask_for_stacks(self, ranks: list[Seen]) -> None:
        """Of all threads of all ranks, into Seen.stacks; what the system knows of those that cannot answer."""
        asked = {}
        for seen in (seen for seen in ranks if seen.state is not None and not seen.slot.closed):
            file = Path(stacks_of(self.watch.board, seen.rank))
            if seen.state != "T" and file.exists():
                asked[seen.rank] = file, file.stat().st_size
                with suppress(OSError):
                    self.kill(seen.slot.pid, SHOW_STACKS)
        deadline, pending = (
            time.monotonic() + STACKS_SECONDS,
            [seen for seen in ranks if seen.rank in asked],
        )
        while pending and time.monotonic() < deadline:
            time.sleep(0.05)
            for seen in [*pending]:
                file, size = asked[seen.rank]
                before, seen.stacks = seen.stacks, file.read_bytes()[size:].decode(errors="replace")
                if seen.stacks and seen.stacks == before:  # nothing has been added
                    pending.remove(seen)

    def ask_for_flights(self, ranks: list[Seen]) -> list[Path]:
        """torch looks at its pipes once a second, and writes the last collectives of each rank into a file."""
        asked = []
        for seen in ranks:
            pipe = Path(f"{self.watch.board}.flight-{seen.rank}.pipe")
            if seen.state in (None, "T") or not pipe.exists():
                continue
            try:
                descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
                os.write(descriptor, b"1\0")
                os.close(descriptor)
                asked.append(Path(f"{self.watch.board}.flight-{seen.rank}"))
            except OSError:
                continue
        deadline = time.monotonic() + 3.0
        while time.monotonic() < deadline and not all(file.exists() for file in asked):
            time.sleep(0.1)
        return [file for file in asked if file.exists()]

    def copy_flights(self, flights: list[Path], folder: Path) -> None:
        """Raises OSError."""
        for flight in flights:
            shutil.copy(flight, folder / flight.name.rpartition(".")[2])
            self.copied.add(flight)

    def keep_flights(self) -> None:
        """Copy what NCCL itself wrote, as it does before it ends a rank after launch.timeout."""
        board = Path(self.watch.board)
        written = [
            file
            for file in board.parent.glob(f"{board.name}.flight-*")
            if file.is_file() and file not in self.copied
        ]
        if not written:
            return
        folder = self.folder_of_hang()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.copy_flights(written, folder)
        except OSError as error:
            say(f"fsdp-trainer: cannot keep what NCCL wrote: {error}")
        else:
            say(f"fsdp-trainer: the last collectives before NCCL gave up are in {folder}")

    def folder_of_hang(self) -> Path:
        """Return where what is known of a hang is kept."""
        return Path(self.watch.run) / "hangs" / f"{time.strftime('%Y%m%dT%H%M%S')}-{self.host}"

    def record(self, verdict: Verdict, files: dict[str, str], flights: list[Path]) -> None:
        """On stderr, in the run's hangs/, and in events.jsonl unless the run has said its last word. A disk that hangs too is not waited for."""
        folder = self.folder_of_hang() if files else None
        told = []
        for seen in verdict.ranks:
            place, seconds = seen.place, round(seen.stopped or seen.standing, 1)
            line = f"fsdp-trainer: rank {seen.rank} on {self.host}: {verdict.why}, in {place.phase} of step {place.step}, {seconds} s"
            say(line + "; killed" * verdict.kill + (f"; stacks in {folder}" if folder else ""))
            where = {
                "rank": seen.rank,
                "host": self.host,
                "phase": place.phase,
                "step": place.step,
                "seconds": seconds,
            }
            told.append(
                {
                    "what": verdict.what,
                    "why": verdict.why,
                    **where,
                    "killed": verdict.kill,
                    "files": str(folder) if folder else None,
                }
            )

        def write() -> None:
            try:
                if folder:
                    folder.mkdir(parents=True, exist_ok=True)
                    for name, text in files.items():
                        (folder / name).write_text(text)
                    self.copy_flights(flights, folder)
                records = Records(Path(self.watch.run), say)
                if records.last_event().get("event") != "end":
                    for details in told:
                        records.event("hang", **details)
            except OSError as error:
                say(f"fsdp-trainer: cannot record that: {error}")

        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        writer.join(DISK_SECONDS)


def say(text: str) -> None:
    """A line on stderr."""
    print(text, file=sys.stderr, flush=True)


def described(seen: Seen) -> str:
    """A rank for people: where it is, what the system says about its threads, its stacks."""
    place, behind = seen.place, seen.slot.background
    lines = [
        f"rank {seen.rank}, process {seen.slot.pid}, state {seen.state or 'ended'}",
        f"{place.phase} of step {place.step} for {seen.standing:.1f} s of {seen.allowed:.0f} allowed, {place.collectives} collectives before it",
        f"checkpoint thread: {behind.phase} of step {behind.step}"
        if behind.entered
        else "no checkpoint thread",
        "",
        seen.stacks or "it did not show its stacks; what the system says of its threads:",
    ]
    if not seen.stacks:
        lines += threads_of(seen.slot.pid)
    return "\n".join(lines) + "\n"


def threads_of(pid: int) -> list[str]:
    """Name, state and where in the kernel each thread is, as far as it may be read."""
    lines = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        facts = []
        for name in ("comm", "wchan", "syscall", "stack"):
            try:
                facts.append(f"{name} {(task / name).read_text().strip()}")
            except OSError:
                continue
        lines.append(
            f"thread {task.name}, state {state_of(int(task.name)) or '?'}, " + ", ".join(facts)
        )
    return lines
