"""Signals and exit codes that all processes of a launch share, and what the system knows of one."""

import ctypes
import os
import resource
import signal
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that ask a run to stop in order."""
ECHO_SECONDS = 2.0
"""Signals closer together than this are one request: a scheduler signals a process and its group,
and a launcher passes its own on."""
PARENT = "FSDP_TRAINER_PARENT"
"""Environment variable set by our own launcher: the process that ranks and jobs of a sweep must not
outlive."""
HOST = "FSDP_TRAINER_HOST"
"""Environment variable set by the process that starts the nodes of launch.hosts: the number of this
node's host among them. Standard input is then that process's."""
STOPPED = 75
"""Exit code after a signal or a time limit, with a checkpoint committed."""


def cores() -> int:
    """Return how many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def peak_resident_bytes() -> int:
    """Return the most memory that this process has had at once."""
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def wait_until(condition: Callable[[], object], seconds: float, pause: float = 0.1) -> bool:
    """Wait until a condition holds, for so many seconds at most. Returns whether it does."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
    return True


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies (PR_SET_PDEATHSIG).

    An orphaned rank would go on writing into a run that a new launch has taken over.
    """
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    except (OSError, AttributeError):
        return  # not Linux
    if os.getppid() != parent:
        os._exit(1)


def process_stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on (proc(5)), None for no such process.

    Raises OSError where the system does not say.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def start_ticks(pid: int) -> int | None:
    """Return a process's start in clock ticks since boot; None if it has ended or is a zombie."""
    fields = process_stat(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def pid_namespace() -> int:
    """Return a number for this machine and container, within which a process id names one process.

    The ranks of one node may run in several containers. 0 where the system does not say.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return zlib.crc32(f"{boot}{os.stat('/proc/self/ns/pid').st_ino}".encode())
    except OSError:
        return 0
