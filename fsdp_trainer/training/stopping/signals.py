"""Handling of signals to this process, also while its main thread is blocked in a collective."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fsdp_trainer.base import slots
from fsdp_trainer.base.process import ECHO_SECONDS, SIGNALS
from fsdp_trainer.errors import Stopped

WAKE_SIGNAL = signal.SIGURG
"""Signal that interrupts the main thread's wait; ignored by default, so it harms no process."""
WAIT_SECONDS = 0.5
"""Seconds that a wait must have lasted before a stop interrupts it."""
NEVER = float("inf")


class SignalListener:
    """Handles the signals in SIGNALS from its construction until `close`.

    Python runs signal handlers in the main thread between two bytecodes, so never while it is
    blocked in a collective. Therefore a thread reads the signals' numbers from a pipe
    (signal.set_wakeup_fd). The first signal requests a clean stop, the second one ends the process
    at once.
    """

    def __init__(self, say: Callable[[str], None], on_forced_exit: Callable[[str, int], Any]):
        """Install the handlers.

        on_forced_exit: called with the reason and the exit code before the process ends at once.
        """
        self.say, self.on_forced_exit = say, on_forced_exit
        self.received = 0
        """Number of the signal to stop for, which another rank may have received; 0: none."""
        self.first_at: float | None = None
        """time.monotonic() when this process received its first signal."""
        self._waiting_since, self._interrupt_reason = NEVER, ""
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self.active = threading.current_thread() is threading.main_thread()
        """False in a notebook's worker thread, which must not install handlers."""
        if self.active:
            self._install()

    def _install(self) -> None:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._pipe_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._handlers_before = {
            number: signal.signal(number, self._handle) for number in (*SIGNALS, WAKE_SIGNAL)
        }
        self._start_thread(self._listen)
        self._mask_before = signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _start_thread(self, work: Callable[[], None]) -> None:
        """Run `work` in a thread, which must end when `_closed` is set."""
        thread = threading.Thread(target=work, name="stop", daemon=True)
        thread.start()
        self._threads.append(thread)

    def close(self) -> None:
        """Stop listening and restore the previous handlers. May be called twice."""
        if not self.active or self._closed.is_set():
            return
        self._closed.set()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask_before)
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._pipe_before)
        os.write(self._write_end, bytes(1))  # wakes the thread
        for thread in self._threads:
            thread.join(1)
        os.close(self._write_end)
        os.close(self._read_end)

    @property
    def reason(self) -> str:
        return name_of(self.received)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Allow a stop to interrupt the block, a wait of the main thread that may never end.

        If any rank must stop, Stopped is raised in the block once it has lasted WAIT_SECONDS.
        """
        self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            self._waiting_since = NEVER

    def waits_long(self) -> bool:
        return time.monotonic() - self._waiting_since > WAIT_SECONDS

    def interrupt(self, reason: str) -> None:
        """Raise Stopped(reason) in the main thread if `waits_long` when the wake signal arrives."""
        self._interrupt_reason = reason
        signal.pthread_kill(threading.main_thread().ident or 0, WAKE_SIGNAL)

    def _handle(self, number: int, _frame: object) -> None:
        """Handle a signal. Python calls this in the main thread as soon as it runs Python code."""
        if number in SIGNALS:
            self.received = self.received or number
        if number == WAKE_SIGNAL and self.waits_long():
            self._waiting_since = NEVER
            raise Stopped(self._interrupt_reason)
        if number == signal.SIGINT and is_interactive() and self._later_than_echo():
            raise KeyboardInterrupt

    def _later_than_echo(self) -> bool:
        return self.first_at is not None and time.monotonic() - self.first_at > ECHO_SECONDS

    def _listen(self) -> None:
        while not self._closed.is_set():
            for number in os.read(self._read_end, 64):
                if number in SIGNALS:
                    self._receive(number)
                elif number not in (0, WAKE_SIGNAL) and self._pipe_before >= 0:
                    with suppress(OSError):  # passes it on to an earlier event loop, e.g. asyncio
                        os.write(self._pipe_before, bytes([number]))

    def _receive(self, number: int) -> None:
        name = name_of(number)
        if self.first_at is None:
            self.first_at = time.monotonic()
            self.received = self.received or number
            then = "stops after saving a checkpoint"
            run_with_timeout(self.say, f"{name}: {then}; a second signal ends at once")
        elif self._later_than_echo() and not (number == signal.SIGINT and is_interactive()):
            self.exit_now(f"second signal ({name})", 128 + number)

    def exit_now(self, reason: str, code: int) -> None:
        """End the process at once, regardless of its other threads."""
        run_with_timeout(self.say, f"{reason}\nEnded at once; what is committed stays")
        run_with_timeout(self.on_forced_exit, reason.partition("\n")[0], code)
        slots.leave()
        os._exit(code)


def name_of(number: int) -> str:
    """Return the name of a signal; empty for 0, which stands for no signal."""
    return signal.Signals(number).name if number else ""


def is_interactive() -> bool:
    """Return True in a notebook or at Python's prompt.

    There a second interrupt raises KeyboardInterrupt instead of ending the process, which does more
    than this run.
    """
    return hasattr(sys, "ps1")


def run_with_timeout(work: Callable[..., Any], *args: object) -> None:
    """Call `work` in a thread, and wait for at most a second, since a disk or terminal may hang."""

    def attempt() -> None:
        with suppress(Exception):
            work(*args)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(1.0)


def reset_signals_in_child() -> None:
    """Undo the listener in a forked child, such as a data worker.

    The child shares the pipe, so a signal to it would otherwise reach its parent's listener. It
    ends at SIGTERM. It ignores the other signals, which may be sent to its whole process group: its
    rank ends it.
    """
    if signal.getsignal(WAKE_SIGNAL) != signal.SIG_DFL:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number in (signal.SIGINT, signal.SIGUSR1, WAKE_SIGNAL):
            signal.signal(number, signal.SIG_IGN)


os.register_at_fork(after_in_child=reset_signals_in_child)
