"""Time limits of a run: train.time_limit, and the end of its Slurm job."""

import os
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import mul

from fsdp_trainer.config.durations import parse_duration

LIMITS = ("", "time_limit", "slurm_time_limit")
"""Names of the limits, empty for none. Ranks exchange the index of the one that has passed."""


class TimeLimits:
    """The deadlines by which the last checkpoint of a run must be committed."""

    def __init__(self, time_limit: str | None):
        """time_limit: a duration from now on, in the format of train.time_limit; None: no limit."""
        self.deadlines: dict[str, float] = {}
        if time_limit:
            self.deadlines["time_limit"] = time.monotonic() + parse_duration(time_limit)
        self.seconds_to_checkpoint = 0.0
        """Current estimate of the maximum seconds for the next step and a checkpoint after it."""
        self._passed, self._count = "", False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Enable the limits inside the block; outside of it `passed` returns none."""
        self._count = True
        try:
            yield
        finally:
            self._count = False

    def watch_slurm(self) -> None:
        """Add the end of the Slurm job, if this process belongs to one. A thread runs squeue."""

        def ask() -> None:
            seconds = slurm_seconds_left(os.environ)
            if seconds is not None:
                end = time.monotonic() + seconds
                self.deadlines = self.deadlines | {"slurm_time_limit": end}

        threading.Thread(target=ask, name="squeue", daemon=True).start()

    def passed(self) -> str:
        """Return the name of a limit that a checkpoint after one more step would miss; empty: none.

        Once a limit has been returned, it is returned by all later calls.
        """
        if not self._count:
            return ""
        committed_at = time.monotonic() + self.seconds_to_checkpoint
        missed = [name for name, deadline in self.deadlines.items() if committed_at > deadline]
        self._passed = self._passed or next(iter(missed), "")
        return self._passed


def slurm_seconds_left(env: Mapping[str, str]) -> float | None:
    """Return the seconds until this process's Slurm job ends; None: no job, or no limit.

    From SLURM_JOB_END_TIME (Slurm 22.05 and later), else from squeue.
    """
    if "SLURM_JOB_END_TIME" in env:
        return float(env["SLURM_JOB_END_TIME"]) - time.time()
    if "SLURM_JOB_ID" not in env:
        return None
    command = ["squeue", "-h", "-j", env["SLURM_JOB_ID"], "-o", "%L"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_slurm_time(answer.strip())


def parse_slurm_time(text: str) -> float | None:
    """Return the seconds of [[hours:]minutes:]seconds or days-hours[:minutes[:seconds]].

    None for anything else, such as UNLIMITED, NOT_SET or INVALID.
    """
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    units: tuple[int, ...] = (3600, 60, 1)
    units = units[: len(parts)] if days else units[-len(parts) :]
    try:
        return int(days or 0) * 86_400 + sum(map(mul, map(int, parts), units))
    except ValueError:
        return None
