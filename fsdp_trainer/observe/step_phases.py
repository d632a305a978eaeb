"""The time of a step by phase, from a profiler's trace, with exposed and hidden communication."""

import gzip
import json
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from fsdp_trainer.base.phases import CHECKPOINT

GATHER = "all-gather, exposed"
SYNC = "gradient sync, exposed"
ROWS = (
    "data",
    "forward",
    "loss",
    "backward",
    GATHER,
    SYNC,
    "clip",
    "optimizer",
    "agree",
    "log",
    "checkpoint",
    "validation",
    "other",
)
"""Rows of the table. Every instant of a step is in exactly one row, so the rows sum to the step's
time. `loss` is the head's part of forward, including its gradients."""
ROW_OF = {
    "update": "optimizer",
    "read": "log",
    "samples": "validation",
    "evaluation": "validation",
    "check": "other",
    "profile": "other",
    "compile": "other",
}
ROW_OF |= dict.fromkeys(CHECKPOINT, "checkpoint") | {row: row for row in ROWS}
MODEL_ROWS = ("forward", "loss", "backward")
LAUNCHES = ("cuda_runtime", "cuda_driver")
KINDS = ("kernel", *LAUNCHES, "cpu_op", "user_annotation")
COMPUTES = ("aten::", "fsdp::", "Torch-Compiled Region", "CompiledFunction")
"""Beginnings of the names of CPU operators. Any other time of the training thread is spent in
Python or waiting."""
MAX_TRACE_BYTES = 64 * 2**20  # compressed; reading a larger one takes minutes

PhaseTimes = dict[str, dict[str, float]]
"""Means over the steps of a trace, by row. `seconds`: total time; `idle`: time without operator or
message; `hidden`: communication during computing."""


class Event(NamedTuple):
    """A slice of the trace; begin and end in microseconds.

    source: the correlation id for a kernel and its launch, the thread id for all other slices.
    """

    kind: str
    name: str
    begin: float
    end: float
    source: int


Work = list[tuple[Event, str]]
"""Events with their rows. The row "" stands for the host's current row."""
HostRows = list[tuple[float, str]]
"""The times in microseconds at which the host's row changes, each with the new row."""


def _slim(entry: dict[str, Any]) -> Any:
    """Return the `Event` for an entry of a trace, or None if no table needs it.

    It is applied while the JSON is parsed, because a trace has millions of entries.
    """
    if "ph" not in entry:
        return entry
    kind = entry.get("cat")
    if entry["ph"] != "X" or kind not in KINDS:
        return None
    source = entry["tid"]
    if kind in ("kernel", *LAUNCHES):
        source = entry.get("args", {}).get("correlation", -1)
    return Event(kind, entry["name"], entry["ts"], entry["ts"] + entry.get("dur", 0), source)


def read_trace(file: Path) -> list[Event]:
    if file.stat().st_size > MAX_TRACE_BYTES:
        raise ValueError(f"{file} is too large for a table of its phases: profile fewer steps")
    with gzip.open(file) as stream:
        return [event for event in json.load(stream, object_hook=_slim)["traceEvents"] if event]


def phases_of(events: list[Event]) -> PhaseTimes:
    """Return the time of one rank's steps by row.

    If the trace has kernels, this is the device's time: a kernel belongs to the phase that launched
    it, and while no kernel runs, the time belongs to the host's current phase. Without kernels it
    is the training thread's time, and communication is that of gloo's threads.
    """
    marks = [event for event in events if event.kind == "user_annotation"]
    steps = [event for event in marks if event.name.startswith("step ")]
    thread = steps[0].source
    begin = min(event.begin for event in steps)
    end = max(event.end for event in steps)
    host = _host_rows(e for e in marks if e.source == thread and e.name in ROW_OF)
    kernels = [event for event in events if event.kind == "kernel"]
    if kernels:
        end = max(end, *(event.end for event in kernels))
        working, messages = _device_work(events, kernels, host)
    else:
        own = [event for event in events if event.source == thread]
        working = [(event, "") for event in own if event.name.startswith(COMPUTES)]
        messages = [(event, "") for event in events if event.name.startswith("gloo:")]
    return _sweep(host, working, messages, begin, end, len(steps))


def _device_work(events: list[Event], kernels: list[Event], host: HostRows) -> tuple[Work, Work]:
    launched = {event.source: event.begin for event in events if event.kind in LAUNCHES}
    work: tuple[Work, Work] = ([], [])
    for event in kernels:
        moment = launched.get(event.source, event.begin)
        row = host[bisect_right(host, moment, key=lambda change: change[0]) - 1][1]
        work["nccl" in event.name.lower()].append((event, row))
    return work


def _host_rows(ranges: Iterable[Event]) -> HostRows:
    changes: HostRows = [(float("-inf"), "other")]
    enclosing: list[tuple[float, str]] = [(float("inf"), "other")]

    def leave_until(moment: float) -> None:
        while len(enclosing) > 1 and enclosing[-1][0] <= moment:
            ended, _ = enclosing.pop()
            changes.append((ended, enclosing[-1][1]))

    for event in sorted(ranges, key=lambda event: (event.begin, -event.end)):
        leave_until(event.begin)
        enclosing.append((event.end, ROW_OF[event.name]))
        changes.append((event.begin, ROW_OF[event.name]))
    leave_until(float("inf"))
    return changes


def _sweep(
    host: HostRows, working: Work, messages: Work, begin: float, end: float, steps: int
) -> PhaseTimes:
    """Return the times by row between `begin` and `end`, as means over `steps` steps.

    It visits all changes in order of time and adds the time between two changes to its row.
    """
    times: PhaseTimes = {row: dict.fromkeys(("seconds", "idle", "hidden"), 0.0) for row in ROWS}
    work = [*working, *messages]
    changes = [(moment, 0, i) for i, (moment, _) in enumerate(host)] + [(end, 0, 0)]
    for i, (event, _) in enumerate(work):
        if event.end > event.begin:
            changes += [(event.begin, 1, i), (event.end, -1, i)]
    computing: dict[int, tuple[Event, str]] = {}  # in order of their beginnings
    under_way: dict[int, tuple[Event, str]] = {}
    at_host = "other"
    last = begin
    for moment, change, i in sorted(changes, key=lambda change: change[:2]):
        now = min(max(moment, begin), end)
        if now > last:
            rows = {_row(message, row or at_host) for message, row in under_way.values()}
            newest = [row or at_host for _, row in computing.values()][-1:]
            _book(times, (now - last) / 1e6 / steps, newest, rows, at_host)
            last = now
        if change == 0:
            at_host = host[i][1]
        elif change == 1:
            (computing if i < len(working) else under_way)[i] = work[i]
        else:
            computing.pop(i, None)
            under_way.pop(i, None)
    return {row: values for row, values in times.items() if any(values.values())}


def _book(
    times: PhaseTimes, seconds: float, computing: list[str], messages: set[str], at_host: str
) -> None:
    """Add seconds to the row that computes, else to a message's row, else to the host's row."""
    row = [*computing, *sorted(messages), at_host][0]
    times[row]["seconds"] += seconds
    if computing:
        for message in messages:
            times[message]["hidden"] += seconds
    elif not messages:
        times[row]["idle"] += seconds


def _row(message: Event, row: str) -> str:
    if row not in MODEL_ROWS:
        return row
    return GATHER if "gather" in message.name.lower().replace("_", "") else SYNC


def table(ranks: dict[int, PhaseTimes]) -> list[str]:
    """Return a table with the milliseconds of a step by row: mean and spread over the ranks."""
    rows = [row for row in ROWS if any(row in times for times in ranks.values())]

    def values(row: str, kind: str) -> list[float]:
        return [times.get(row, {}).get(kind, 0.0) * 1e3 for times in ranks.values()]

    step = sum(mean(values(row, "seconds")) for row in rows)
    several = len(ranks) > 1
    spread = f"{'min':>11}{'median':>9}{'max':>9}  of {len(ranks)} ranks"
    title = f"{'':24}{'ms':>9}{'share':>8}{'idle':>9}{'hidden':>9}"
    lines = [title + spread * several]
    for row in rows:
        seconds = values(row, "seconds")
        text = f"{row:24}{mean(seconds):9.1f}{mean(seconds) / step:8.1%}"
        if row in (GATHER, SYNC):
            text += f"{'':9}{mean(values(row, 'hidden')):9.1f}"
        else:
            text += f"{mean(values(row, 'idle')):9.1f}{'':9}"
        spread = f"{min(seconds):11.1f}{median(seconds):9.1f}{max(seconds):9.1f}"
        lines.append((text + spread * several).rstrip())
    return [*lines, f"{'a step':24}{step:9.1f}"]
