"""Signals and exit codes that all processes of a launch share, and facts about a process."""

import ctypes
import os
import resource
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that request an orderly stop of a run."""
ECHO_SECONDS = 2.0
"""Signals closer together than this count as one request: a scheduler signals both a process and
its group, and a launcher forwards its own signals."""
PARENT = "FSDP_TRAINER_PARENT"
"""Environment variable set by our own launcher: id of the process that ranks and jobs of a sweep
must not outlive."""
OWN_ENDING = "FSDP_TRAINER_OWN_ENDING"
"""Environment variable set for runs whose starter says itself what can be typed after them."""
HOST = "FSDP_TRAINER_HOST"
"""Environment variable set by the process that starts the nodes of launch.hosts: index of this
node's host in that list. Standard input then comes from that process."""
OWN_ALLOCATION = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_",
                  "GLIBC_TUNABLES")  # fmt: skip
"""Environment variables by which a user decides when glibc gives memory back."""
TRIM_ABOVE, MAPPINGS = -1, -4
"""mallopt(3): bytes free at the end of the heap from which on they are given back (-1: never), and
the number of large buffers that have a mapping of their own, which goes when they are freed."""
STOPPED = 75
"""Exit code after a signal or a time limit, with a checkpoint committed."""


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def peak_resident_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextmanager
def freed_memory_stays() -> Iterator[None]:
    """Within, memory that is freed stays with this process, for the next buffer.

    glibc gives large buffers back to the system, which fills new ones with zeros page by page: in
    each step of training that costs as much as writing them twice. At the end all that is free is
    given back. Does nothing for other allocators, and where OWN_ALLOCATION is set.
    """
    try:
        library = ctypes.CDLL(None)
        set_option, give_back = library.mallopt, library.malloc_trim
    except (OSError, AttributeError, TypeError):  # not glibc
        set_option = None
    if set_option is None or any(name in os.environ for name in OWN_ALLOCATION):
        yield
        return
    set_option(TRIM_ABOVE, -1)
    set_option(MAPPINGS, 0)
    try:
        yield
    finally:
        set_option(TRIM_ABOVE, 2**26)  # the highest that glibc itself comes to, and its default
        set_option(MAPPINGS, 2**16)
        give_back(0)


def wait_until(condition: Callable[[], object], seconds: float, pause: float = 0.1) -> bool:
    """Wait until a condition holds, at most `seconds`, and return whether it does.

    pause: seconds between two checks.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
    return True


def arrived_signal(seconds: float) -> str:
    """Return the name of a blocked signal of SIGNALS that arrives within `seconds`; "" if none."""
    if hasattr(signal, "sigtimedwait"):
        received = signal.sigtimedwait(SIGNALS, seconds)
        return signal.Signals(received.si_signo).name if received else ""
    # macOS has no such call
    if not wait_until(lambda: {*SIGNALS} & signal.sigpending(), seconds, pause=0.01):
        return ""
    return signal.Signals(signal.sigwait({*SIGNALS} & signal.sigpending())).name


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent dies (PR_SET_PDEATHSIG).

    An orphaned rank would keep writing into a run that a new launch has already resumed.
    """
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    except (OSError, AttributeError):
        return  # not Linux
    if os.getppid() != parent:
        os._exit(1)


def process_stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from `state` on (proc(5)); None if there is no process.

    Raises OSError if the file cannot be read.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def start_ticks(pid: int) -> int | None:
    """Return a process's start time in clock ticks since boot; None if it ended or is a zombie."""
    fields = process_stat(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def pid_namespace() -> int:
    """Return a number that identifies this machine and container: the scope of a process id.

    The ranks of one node may run in several containers. 0 if the system does not provide it.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return zlib.crc32(f"{boot}{os.stat('/proc/self/ns/pid').st_ino}".encode())
    except OSError:
        return 0
