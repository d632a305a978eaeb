"""The watchdog: a process on each node that ends ranks which are stopped or stuck.

It also reports ranks that died. Imports no torch.
"""

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

from fsdp_trainer.base import slots
from fsdp_trainer.base.process import pid_namespace
from fsdp_trainer.base.safe_text import safe
from fsdp_trainer.config.durations import parse_duration
from fsdp_trainer.launch.hangs import (
    Durations,
    RankStatus,
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
    waiting,
)
from fsdp_trainer.observe.records import Records

if TYPE_CHECKING:
    from fsdp_trainer.config.schema import Launch
    from fsdp_trainer.launch.world import World

LOOK_SECONDS = 0.25  # between two polls
GRACE_SECONDS = 3.0  # for other ranks to notice and leave; those that do not are blocked
DISK_SECONDS = 3.0  # for a report to be written
# a loaded machine is slow to write stacks, and a rank with unknown stacks would be blamed
STACKS_SECONDS = 3.0
PAUSE_SECONDS = 5.0  # a longer time between two polls: the watchdog itself was stopped or starved
SHOW_STACKS = signal.SIGUSR2
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_started: list[subprocess.Popen] = []
_flight_settings: dict[str, str] = {}
"""Environment variables set by an earlier run in this process, which the next run replaces."""


@dataclass
class Watch:
    """The watchdog's settings.

    board: path of the file that the ranks of a node share; run: folder of the run; stall, timeout:
    see `hangs.Durations.allowed`, in seconds; on_device: True if ranks compute on GPUs; alone: True
    for a single rank without a launcher, which is never killed. Nobody would restart it, and its
    process may be a notebook that does more than this run.
    """

    board: str
    run: str
    world_size: int
    stall: float
    timeout: float
    on_device: bool = False
    alone: bool = False


# --- in a rank ---


def watched(cfg: "Launch", run: Path, world: "World") -> "Watched | None":
    """Put this rank under the watchdog.

    Returns None with launch.watchdog=false, on a system without /proc, and on failure: too little
    memory, too many processes, or the node's first rank is in another container or has ended.
    """
    if not cfg.watchdog or not Path("/proc/self/stat").exists():
        return None
    board = board_of(world)
    on_device = world.device.type == "cuda"
    if on_device:
        record_flights(board)
    alone = world.size == 1 and "RANK" not in os.environ
    # collectives that time out after launch.timeout come first: their ranks leave by themselves
    longest = parse_duration(cfg.timeout) + GRACE_SECONDS
    watch = Watch(
        board, str(run.absolute()), world.size, parse_duration(cfg.stall), longest, on_device, alone
    )
    try:
        return Watched(watch, world.rank, world.local_rank)
    except OSError as error:
        say(f"fsdp-trainer: rank {world.rank} has no watchdog: {error}")
        return None


class Watched:
    """Makes this rank show its phase, and its stacks on request.

    The first rank of a node also starts the watchdog.
    """

    def __init__(self, watch: Watch, rank: int, local_rank: int):
        self._stacks: IO[str] | None = None
        try:
            self._begin(watch, rank, local_rank)
        except OSError:
            self.close()
            if local_rank == 0:  # there is no watchdog that would delete them
                for file in (watch.board, stacks_of(watch.board, rank)):
                    Path(file).unlink(missing_ok=True)
            raise

    def _begin(self, watch: Watch, rank: int, local_rank: int) -> None:
        slots.open_slot(Path(watch.board), local_rank, rank)
        if signal.getsignal(SHOW_STACKS) == signal.SIG_DFL:
            self._stacks = open(stacks_of(watch.board, rank), "w")  # noqa: SIM115
            # implemented in C: needs neither the GIL nor a main thread that runs Python code
            faulthandler.register(SHOW_STACKS, file=self._stacks, all_threads=True, chain=False)
        if local_rank == 0:
            start_watchdog(watch)

    def close(self) -> None:
        """Leave the watchdog, so that the end of this rank is not taken for a death."""
        slots.leave()
        if self._stacks:
            faulthandler.unregister(SHOW_STACKS)
            self._stacks.close()


def board_of(world: "World") -> str:
    """Return a file that all ranks of the node share in this attempt, in memory if possible.

    The node's first rank creates it.
    """
    key = f"watchdog of node {world.node}"
    if world.local_rank == 0:
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
        board = Path(f"{folder}/fsdp_trainer-{os.getpid()}-{uuid.uuid4().hex[:8]}")
        with suppress(OSError):  # opening it then fails on every rank
            board.touch(0o600)
        world.store.set(key, str(board))
    return world.store.get(key).decode()


def stacks_of(board: str, rank: int) -> str:
    return f"{board}.rank-{rank}.stacks"


def record_flights(board: str) -> None:
    """Let torch's flight recorder write its last collectives when it is asked through a pipe.

    Must be called before NCCL is initialised.
    """
    for name, value in {
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{board}.flight-",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{board}.flight-",
    }.items():
        if os.environ.get(name) in (None, _flight_settings.get(name)):
            os.environ[name] = _flight_settings[name] = value


def start_watchdog(watch: Watch) -> None:
    """Start the watchdog in a new session, so that a signal to the ranks' group does not end it.

    It ends when the last rank has ended.
    """
    root = Path(__file__).parents[2]
    code = (
        f"import sys; sys.path.insert(0, {str(root)!r}); from fsdp_trainer.launch.watchdog import"
        " main; main(sys.argv[1])"
    )
    # without site-packages it starts in 30 ms, and imports only the standard library and our code
    words = [sys.executable, "-I", "-S", "-c", code, json.dumps(asdict(watch))]
    # it must not look like a rank
    env = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    # forget watchdogs of earlier runs in this process that have ended
    _started[:] = [earlier for earlier in _started if earlier.poll() is None]
    null = subprocess.DEVNULL
    _started.append(
        subprocess.Popen(words, env=env, stdin=null, stdout=null, start_new_session=True)
    )


# --- in the watchdog's process ---


def main(settings: str) -> None:
    """Watch until the last rank has ended. settings: a Watch as JSON."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    watch = Watch(**json.loads(settings))
    watchdog = Watchdog(watch)
    try:
        watchdog.run()
        watchdog.keep_flights()
    finally:
        board = Path(watch.board)
        for file in (board, *board.parent.glob(f"{board.name}.*")):
            file.unlink(missing_ok=True)


class Watchdog:
    """Polls the ranks of a node several times a second."""

    def __init__(self, watch: Watch, kill: Callable[[int, int], None] = os.kill):
        self.watch, self.kill, self.host = watch, kill, socket.gethostname()
        self.durations = Durations()
        self.stopped_since: dict[int, float] = {}
        self.starved: dict[int, tuple[int, float]] = {}
        """Number of the phase, and seconds without a processor when the phase began, by rank."""
        self.pid_namespace = pid_namespace()
        self.killed: set[int] = set()
        self.copied: set[Path] = set()
        """Files with the last collectives of a rank that are already in the run's hangs/."""
        self.reported: set[int] = set()
        self.ends_at = float("inf")  # when ranks that have not left by themselves are killed
        self.quiet_until = 0.0  # no new verdict before this time
        # counts_from: the start, or the end of the last pause: earlier time in a phase does not
        # count; looked: time of the last poll
        self.counts_from = self.looked = time.monotonic()

    def run(self) -> None:
        while True:
            ranks = self.look()
            if not any(status.state is not None and not status.slot.closed for status in ranks):
                self.report_dead(ranks)
                return
            self.act(ranks)
            time.sleep(LOOK_SECONDS)

    def look(self) -> list[RankStatus]:
        now = time.monotonic()
        here = self.slots()
        self.durations.note(here)
        ranks = [look(slot) for slot in here]
        if any(status.died for status in ranks):  # unless it left after its slot was read
            closed = {slot.pid for slot in self.slots() if slot.closed}
            ranks = [
                replace(status, slot=replace(status.slot, closed=status.slot.pid in closed))
                for status in ranks
            ]
        if now - self.looked > PAUSE_SECONDS or self.paused_on_purpose(ranks):
            self.counts_from, self.stopped_since = now, {}
        self.looked = now
        for status in ranks:
            if status.state is None:
                continue
            status.standing = min(status.standing, now - self.counts_from) - self.starved_for(
                status
            )
            status.allowed = self.durations.allowed(
                status.slot, status.state, self.watch.stall, self.watch.timeout
            )
            if status.state != "T" or self.counts_from == now:
                self.stopped_since.pop(status.rank, None)
            else:
                status.stopped = now - self.stopped_since.setdefault(status.rank, now)
        return ranks

    def paused_on_purpose(self, ranks: list[RankStatus]) -> bool:
        whole_world = len(ranks) == self.watch.world_size
        if whole_world and all(status.state == "T" for status in ranks):
            return True
        return any(status.traced or suspended(status) for status in ranks)

    def slots(self) -> list[slots.RankSlot]:
        return [
            slot
            for slot in slots.read_slots(Path(self.watch.board).read_bytes())
            if slot.pid_namespace == self.pid_namespace
        ]

    def starved_for(self, status: RankStatus) -> float:
        """Return the seconds of its phase in which a rank was runnable but had no processor."""
        total, entered = starved(status.slot.pid), status.place.entered
        if self.starved.get(status.rank, (None, 0.0))[0] != entered:
            self.starved[status.rank] = entered, total
        return total - self.starved[status.rank][1]

    def act(self, ranks: list[RankStatus]) -> None:
        """Report dead, stopped and stuck ranks, and kill those that must end."""
        now = time.monotonic()
        self.report_dead(ranks)
        if now > self.ends_at:
            self.end([status for status in ranks if status.trains])
        if self.ends_at < float("inf") or now < self.quiet_until:
            return
        verdict = stopped(ranks) or self.judge_standing(ranks)
        if verdict:
            verdict.kill = verdict.kill and not self.watch.alone
            self.carry_out(verdict, ranks)
            self.looked = time.monotonic()  # the time this took is not a pause

    def judge_standing(self, ranks: list[RankStatus]) -> Verdict | None:
        """Return a verdict if all ranks are in their phases for longer than allowed, else None."""
        timeout = self.watch.timeout
        in_time = (one for one in ranks if one.trains and one.standing <= timeout)
        if not standing(ranks) or any(reads_disk(one.slot.pid) for one in in_time):
            return None
        self.ask_for_stacks(ranks)
        if not unchanged(ranks, self.look()):
            return None  # the stacks are out of date, or missing because a rank was stopped
        return judge(ranks, self.watch.world_size, timeout, self.watch.on_device)

    def report_dead(self, ranks: list[RankStatus]) -> None:
        """Report ranks that ended without leaving. The others are killed after GRACE_SECONDS.

        On a CPU they notice the broken connection and end by themselves; on a GPU they do not.
        """
        dead = [
            status
            for status in ranks
            if status.died
            and status.slot.pid not in self.killed
            and status.rank not in self.reported
        ]
        if dead:
            self.reported |= {status.rank for status in dead}
            self.record(Verdict("dead", dead, "died", kill=False), {}, [], {})
            self.ends_at = min(self.ends_at, time.monotonic() + GRACE_SECONDS)

    def carry_out(self, verdict: Verdict, ranks: list[RankStatus]) -> None:
        """Store the evidence, then kill the ranks at fault."""
        if verdict.what == "stopped":
            self.ask_for_stacks(ranks)
        self.record(
            verdict,
            {f"rank-{status.rank}.txt": described(status) for status in ranks},
            self.ask_for_flights(ranks),
            waiting(ranks),
        )
        if verdict.kill:
            self.end(verdict.ranks)
            self.ends_at = time.monotonic() + GRACE_SECONDS
        else:
            self.quiet_until = time.monotonic() + max(60.0, 10 * self.watch.stall)

    def end(self, ranks: list[RankStatus]) -> None:
        """Kill ranks with SIGKILL: a blocked one would use the launcher's full grace period."""
        for status in ranks:
            self.killed.add(status.slot.pid)
            with suppress(OSError):
                self.kill(status.slot.pid, signal.SIGKILL)

    def ask_for_stacks(self, ranks: list[RankStatus]) -> None:
        files = {}
        for status in ranks:
            file = Path(stacks_of(self.watch.board, status.rank))
            can_answer = status.state not in (None, "T") and not status.slot.closed
            if can_answer and file.exists():
                files[status.rank] = file, file.stat().st_size
                with suppress(OSError):
                    self.kill(status.slot.pid, SHOW_STACKS)
        deadline = time.monotonic() + STACKS_SECONDS
        pending = [status for status in ranks if status.rank in files]
        while pending and time.monotonic() < deadline:
            time.sleep(0.05)
            pending = [status for status in pending if not self.has_stacks(status, files)]

    def has_stacks(self, status: RankStatus, files: dict[int, tuple[Path, int]]) -> bool:
        """Read a rank's stacks. Returns True if there are some, unchanged since the last reading.

        files: by rank, the file of its stacks, and the file's size before they were requested.
        """
        file, size = files[status.rank]
        before = status.stacks
        status.stacks = file.read_bytes()[size:].decode(errors="replace")
        return bool(status.stacks) and status.stacks == before

    def ask_for_flights(self, ranks: list[RankStatus]) -> list[Path]:
        """Request the last collectives of each rank from torch. Returns the files that it wrote.

        torch polls its pipes once a second.
        """
        files = []
        for status in ranks:
            pipe = Path(f"{self.watch.board}.flight-{status.rank}.pipe")
            if status.state in (None, "T") or not pipe.exists():
                continue
            try:
                descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
                os.write(descriptor, b"1\0")
                os.close(descriptor)
                files.append(Path(f"{self.watch.board}.flight-{status.rank}"))
            except OSError:
                continue
        deadline = time.monotonic() + 3.0
        while time.monotonic() < deadline and not all(file.exists() for file in files):
            time.sleep(0.1)
        return [file for file in files if file.exists()]

    def copy_flights(self, flights: list[Path], folder: Path) -> None:
        """Copy files with the last collectives to a folder. Raises OSError."""
        for flight in flights:
            shutil.copy(flight, folder / flight.name.rpartition(".")[2])
            self.copied.add(flight)

    def keep_flights(self) -> None:
        """Copy the files that NCCL wrote by itself, before it ended a rank after launch.timeout."""
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
        return Path(self.watch.run) / "hangs" / f"{time.strftime('%Y%m%dT%H%M%S')}-{self.host}"

    def record(
        self,
        verdict: Verdict,
        files: dict[str, str],
        flights: list[Path],
        waiting: dict[str, list[int]],
    ) -> None:
        """Report a verdict on stderr, in the run's hangs/, and in events.jsonl.

        files: text of each evidence file by name; flights: files with the last collectives;
        waiting: ranks of this node in a collective, by the dimension along which it runs.
        A run that has ended normally gets no event. A disk that hangs is not waited for.
        """
        folder = self.folder_of_hang() if files else None
        events = []
        for status in verdict.ranks:
            line = f"fsdp-trainer: {self.sentence(verdict, status, waiting)}"
            say(line + "; killed" * verdict.kill + (f"; stacks in {folder}" if folder else ""))
            events.append(self.event(verdict, status, waiting, folder))

        def write() -> None:
            try:
                if folder:
                    folder.mkdir(parents=True, exist_ok=True)
                    for name, text in files.items():
                        (folder / name).write_text(text)
                    self.copy_flights(flights, folder)
                records = Records(Path(self.watch.run), say)
                if records.last_event().get("event") != "end":
                    for details in events:
                        records.event("hang", **details)
            except OSError as error:
                say(f"fsdp-trainer: cannot record that: {error}")

        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        writer.join(DISK_SECONDS)

    def sentence(self, verdict: Verdict, status: RankStatus, waiting: dict[str, list[int]]) -> str:
        place = status.place
        line = (
            f"rank {in_mesh(status)} on {self.host}: {verdict.reason}, in {place.phase}"
            f" of step {place.step}, {seconds_of(status)} s"
        )
        if status.slot.coordinates and waiting:
            line += f"; waiting: {described_waits(waiting)}"
        return line

    def event(
        self,
        verdict: Verdict,
        status: RankStatus,
        waiting: dict[str, list[int]],
        folder: Path | None,
    ) -> dict[str, object]:
        place, coordinates = status.place, status.slot.coordinates
        mesh = {"coordinates": coordinates, "waiting": waiting} if coordinates else {}
        return {
            "what": verdict.what,
            "why": verdict.reason,
            "rank": status.rank,
            "host": self.host,
            "phase": place.phase,
            "step": place.step,
            "seconds": seconds_of(status),
            **mesh,
            "killed": verdict.kill,
            "files": str(folder) if folder else None,
        }


def seconds_of(status: RankStatus) -> float:
    return round(status.stopped or status.standing, 1)


def in_mesh(status: RankStatus) -> str:
    coordinates = status.slot.coordinates
    return f"{status.rank} ({coordinates})" if coordinates else f"{status.rank}"


def described_waits(waiting: dict[str, list[int]]) -> str:
    """Describe waits: {tensor: [2, 3], all: [0]} → `rank 2, 3 along tensor, rank 0 for all`."""
    return ", ".join(
        f"rank {', '.join(map(str, ranks))} {'for all' if name == 'all' else f'along {name}'}"
        for name, ranks in waiting.items()
    )


def say(text: str) -> None:
    print(safe(text), file=sys.stderr, flush=True)


def described(status: RankStatus) -> str:
    """Return the text of a rank's evidence file: its phase, its state and its stacks."""
    place, behind = status.place, status.slot.background
    lines = [
        f"rank {in_mesh(status)}, process {status.slot.pid}, state {status.state or 'ended'}",
        f"{place.phase} of step {place.step} for {status.standing:.1f} s of {status.allowed:.0f}"
        f" allowed, {place.collectives} collectives before it",
        f"checkpoint thread: {behind.phase} of step {behind.step}"
        if behind.entered
        else "no checkpoint thread",
        "",
        status.stacks or "it did not show its stacks; what the system says of its threads:",
    ]
    if not status.stacks:
        lines += threads_of(status.slot.pid)
    return "\n".join(lines) + "\n"


def threads_of(pid: int) -> list[str]:
    """Return a line for each thread: name, state and place in the kernel, if readable."""
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
