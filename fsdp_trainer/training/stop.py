"""Stopping in order: a signal or a limit of time on any rank becomes a decision of all ranks at the next boundary."""

import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from fsdp_trainer import phases
from fsdp_trainer.errors import Stopped, UserError
from fsdp_trainer.launch.start import ECHO_SECONDS, SIGNALS

LIMITS = ("time_limit", "slurm_time_limit")
KICK = signal.SIGURG  # wakes the main thread where it waits; nobody else sends it, and whom it hits unprepared it does nothing to
PATIENCE_SECONDS = 0.5  # in which what is waited for may yet come
GRACE_SECONDS = 2.0  # for a rank to leave by itself when another has gone
INTERACTIVE: Callable[[], bool] = partial(hasattr, sys, "ps1")  # a notebook, or Python's prompt
T = TypeVar("T")


class Agreement(NamedTuple):
    """reason: a signal's name, `time_limit` or `slurm_time_limit`, None to go on; save_failed, missing: whether that is so on any rank."""

    reason: str | None
    save_failed: bool
    missing: bool


class StopRequests:
    """Listens from its creation on. Two threads do, since the main thread hears nothing while it waits in a collective.

    A second signal ends the process at once, which no committed checkpoint minds; so does the first, if another rank of this node has died.
    """

    def __init__(self, time_limit: float | None, say: Callable[[str], None]):
        now = time.monotonic()
        self.deadlines = {} if time_limit is None else {"time_limit": now + time_limit}
        self.received, self.say = 0, say
        self.margin: Callable[[], float] = lambda: 0.0
        """Seconds that it takes to come to the next boundary and to commit a checkpoint there."""
        self.last_words: Callable[[str, int], Any] = lambda reason, code: None
        """Hears why the process ends at once, and with which code."""
        self.missing: str | UserError | None = None
        """Why this rank lacks the data of a step; empty if a stop did not wait for it."""
        self.leaving = False
        """From here on this rank waits for no other: they may go."""
        self.gone: list[int] = []
        """Ranks of this node that have ended."""
        self._heard, self._limit = 0.0, 0
        self._waits_since: tuple[float, bool] | None = None
        self._store: dist.Store | None = None
        self._main = False
        self._closed = threading.Event()
        # only the main thread may listen: in a notebook's worker thread the limits alone count
        self._listens = threading.current_thread() is threading.main_thread()
        if self._listens:
            self._ear, self._mouth = os.pipe()
            os.set_blocking(self._mouth, False)
            self._selector = selectors.DefaultSelector()
            self._selector.register(self._ear, selectors.EVENT_READ)
            self._wakes_before = signal.set_wakeup_fd(
                self._mouth, warn_on_full_buffer=False
            )  # written to wherever the main thread is
            self._before = {
                signum: signal.signal(signum, self._in_main) for signum in (*SIGNALS, KICK)
            }
            self._threads = [
                threading.Thread(target=work, name="stop", daemon=True)
                for work in (self._listen, self._relay)
            ]
            for thread in self._threads:
                thread.start()
            self._blocked_before = signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def close(self) -> None:
        """Listen no longer."""
        if not self._listens or self._closed.is_set():
            return
        self._closed.set()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked_before)
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._wakes_before)
        os.close(self._mouth)
        for thread in self._threads:
            thread.join(1)
        for key in [*self._selector.get_map().values()]:
            os.close(key.fd)
        self._selector.close()

    def connect(self, store: dist.Store, main: bool = False) -> None:
        """Hear of the other ranks' signals, and tell of this one's, through the store that they share; rank 0 (main) also of their failures."""
        self._main = main
        self._store = store.clone()  # type: ignore[attr-defined]  # whose owner may wait in it for hours

    def watch(self, ranks: Mapping[int, int]) -> None:
        """Hear of the end of other processes: the pid of each rank of this node."""
        for rank, pid in ranks.items():
            with suppress(
                OSError, AttributeError
            ):  # a system without pidfd_open, or a pid of another container
                if pid != os.getpid() and self._listens:
                    self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, rank)

    def ended(self) -> list[int]:
        """Ranks of this node that have ended, when a collective has just failed: it may have failed for that, and a little earlier."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (
            not self.gone
            and self._listens
            and len(self._selector.get_map()) > 1
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        return sorted(self.gone)

    def tell_failure(self, text: str) -> None:
        """Have rank 0 say why this rank, which it does not know anything of, ends the run."""
        with suppress(RuntimeError):
            if self._store:
                self._store.set("failure", text)

    def failure(self) -> str | None:
        """What another rank has told of, if one has."""
        try:
            return (
                self._store.get("failure").decode()
                if self._store and self._store.check(["failure"])
                else None
            )
        except RuntimeError:  # the store has gone with its owner
            return None

    def ask_slurm(self) -> None:
        """Stop before the Slurm job is over, if there is one. Rank 0's task, which agrees with the others; squeue may take its time."""

        def ask() -> None:
            left = slurm_seconds_left(os.environ)
            if left is not None:
                self.deadlines = self.deadlines | {"slurm_time_limit": time.monotonic() + left}

        threading.Thread(target=ask, name="squeue", daemon=True).start()

    def agreed(self, save_failed: bool = False, limits: bool = True) -> Agreement:
        """What all ranks do now. Collective, over the host's gloo: no device waits."""
        late = self._late() if limits else 0
        mine = torch.tensor([self.received, late, int(save_failed), int(self.missing is not None)])
        if dist.get_world_size() > 1:
            dist.all_reduce(mine, dist.ReduceOp.MAX)
        signum, late, failed, lacking = mine.tolist()
        reason = signal.Signals(signum).name if signum else LIMITS[late - 1] if late else None
        return Agreement(reason, bool(failed), bool(lacking))

    def _late(self) -> int:
        """Which limit comes before another boundary would, as a number from 1; 0: none. Once it does, it stays so."""
        at = time.monotonic() + self.margin() if self.deadlines and not self._limit else 0.0
        self._limit = self._limit or next(
            (i for i, limit in enumerate(LIMITS, 1) if at > self.deadlines.get(limit, at)), 0
        )
        return self._limit

    def stoppable(self, work: Callable[[], T]) -> T:
        """`work`, outside any collective, where there is nothing to save. Raises Stopped within it when any rank is to stop."""
        if self.received:
            raise Stopped(signal.Signals(self.received).name)
        with self.waiting(limits=False):
            return work()

    @contextmanager
    def waiting(self, limits: bool = True) -> Iterator[None]:
        """The main thread waits for what may never come. Raises Stopped within the block, if it lasts, when any rank is to stop."""
        self._waits_since = (time.monotonic(), limits)
        try:
            yield
        finally:
            self._waits_since = None

    def _waits_long(self) -> bool:
        waits = self._waits_since
        return waits is not None and time.monotonic() - waits[0] > PATIENCE_SECONDS

    def _in_main(self, signum: int, _frame: object) -> None:
        if signum != KICK:
            self.received = self.received or signum
            if (
                signum == signal.SIGINT
                and INTERACTIVE()
                and self._heard
                and time.monotonic() - self._heard > ECHO_SECONDS
            ):
                raise KeyboardInterrupt
        elif self._waits_long():
            self._waits_since = None
            raise Stopped(signal.Signals(self.received).name if self.received else "time_limit")

    def _relay(self) -> None:
        """Tell the other ranks of a signal; wake the main thread where it waits and is to stop."""
        told = False
        while not self._closed.wait(PATIENCE_SECONDS / 2):
            if (
                self._main
                and (failure := self.failure())
                and not self._closed.wait(GRACE_SECONDS)
                and not self.leaving
            ):
                briefly(
                    partial(self.say, failure)
                )  # the main thread has not noticed: it may wait for a device that waits for that rank
                self._end(1, failure.partition("\n")[0])
            with suppress(RuntimeError):  # the store may be gone before us
                if self.received and self._store and not told:
                    self._store.set("stop", str(self.received))
                    told = True
                waits = self._waits_since
                if not waits or not self._waits_long():
                    continue
                if not self.received and self._store and self._store.check(["stop"]):
                    self.received, told = int(self._store.get("stop")), True
                if self.received or (waits[1] and self._late()):
                    signal.pthread_kill(threading.main_thread().ident or 0, KICK)

    def _listen(self) -> None:
        leave_at = float("inf")
        while not self._closed.is_set():
            for key, _ in self._selector.select(PATIENCE_SECONDS):
                if key.fileobj == self._ear:
                    for signum in (numbers := os.read(self._ear, 64)):
                        self._hear(signum)
                    if self._wakes_before >= 0 and (
                        others := bytes(n for n in numbers if n not in (*SIGNALS, KICK))
                    ):
                        with suppress(OSError):
                            os.write(
                                self._wakes_before, others
                            )  # an event loop's that this process had before
                else:
                    self.gone.append(key.data)
                    self._selector.unregister(key.fileobj)
                    os.close(key.fd)
            if self.received and self.gone and not self.leaving:
                leave_at = min(leave_at, time.monotonic() + GRACE_SECONDS)
                if time.monotonic() >= leave_at:
                    self._end(
                        1,
                        f"{signal.Signals(self.received).name} after rank {self.gone[0]} had ended",
                    )

    def _hear(self, signum: int) -> None:
        if signum not in SIGNALS or (self._heard and time.monotonic() - self._heard < ECHO_SECONDS):
            return
        name = signal.Signals(signum).name
        if self._heard and signum == signal.SIGINT and INTERACTIVE():
            return  # the main thread raises KeyboardInterrupt; the process is more than this run
        if self._heard:
            self._end(128 + signum, f"second signal ({name})")
        self.received, self._heard = self.received or signum, time.monotonic()
        briefly(
            lambda: self.say(
                f"{name}: stops in order, with a checkpoint of what was trained; a second signal ends at once"
            )
        )

    def _end(self, code: int, reason: str) -> None:
        briefly(lambda: self.say(f"{reason}: ended at once; what is committed stays"))
        briefly(lambda: self.last_words(reason, code))
        phases.leave()
        os._exit(code)


def briefly(work: Callable[[], Any]) -> None:
    """`work`, unless it takes a second: a disk or a terminal that hangs, or the thread that hangs with it and has the lock, keeps nobody."""

    def attempt() -> None:
        with suppress(Exception):
            work()

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(1.0)


def deaf() -> None:
    """In a forked child, which shares the pipe: a signal to it, such as a pool's to its workers, is none to this rank."""
    if signal.getsignal(KICK) != signal.SIG_DFL:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for signum in (
            signal.SIGINT,
            signal.SIGUSR1,
            KICK,
        ):  # sent to all at once; the rank ends its workers itself
            signal.signal(signum, signal.SIG_IGN)


os.register_at_fork(after_in_child=deaf)


def slurm_seconds_left(env: Mapping[str, str]) -> float | None:
    """Until the Slurm job that this process belongs to is over: as the environment says (Slurm 22.05), else squeue. None: no job, or no limit."""
    if "SLURM_JOB_END_TIME" in env:
        return float(env["SLURM_JOB_END_TIME"]) - time.time()
    if "SLURM_JOB_ID" not in env:
        return None
    try:
        asked = subprocess.run(
            ["squeue", "-h", "-j", env["SLURM_JOB_ID"], "-o", "%L"],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    days, _, clock = asked.stdout.strip().rpartition("-")
    parts = clock.split(":")  # [[hours:]minutes:]seconds, but hours[:minutes[:seconds]] after days
    if not all(part.isdigit() for part in [*parts, days or "0"]):
        return None  # UNLIMITED, NOT_SET, INVALID
    hours = [int(part) for part in ([*parts, "0", "0"][:3] if days else ["0", "0", *parts][-3:])]
    return int(days or 0) * 86_400 + hours[0] * 3600 + hours[1] * 60 + hours[2]
