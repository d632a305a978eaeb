"""Where the time of a step goes, from a profiler's trace: what each phase computes, and which communication that hides."""

import gzip
import json
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from fsdp_trainer.phases import CHECKPOINT

GATHER, SYNC = "all-gather, exposed", "gradient sync, exposed"
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
"""Every instant of a step is in exactly one: they sum to its time. `loss` is the head's part of forward, its gradients included."""
ROW_OF = {
    "update": "optimizer",
    "read": "log",
    "samples": "validation",
    "check": "other",
    "profile": "other",
    "compile": "other",
}
ROW_OF |= dict.fromkeys(CHECKPOINT, "checkpoint") | {row: row for row in ROWS}
OF_MODEL = ("forward", "loss", "backward")
COMPUTES = (
    "aten::",
    "fsdp::",
    "Torch-Compiled Region",
    "CompiledFunction",
)  # a CPU's operators; all else on that thread is Python, or waits
LARGEST = 64 * 2**20  # bytes of a compressed trace: what is larger takes minutes to read


Told = dict[str, dict[str, float]]
"""Seconds of a step, the mean over the trace's, by row: `seconds` in all; `idle`, of them: with neither operator nor message; and what of
communication was `hidden` behind computing."""


class Event(NamedTuple):
    """A slice of the trace; begin and end in microseconds. of: what launched it (a correlation), or else its thread."""

    kind: str
    name: str
    begin: float
    end: float
    of: int


def _slim(found: dict[str, Any]) -> Any:
    """While the file is read: events as `Event`, None for those that tell nothing here; a trace has millions."""
    if "ph" not in found:
        return found
    kind = found.get("cat")
    if found["ph"] != "X" or kind not in (
        "kernel",
        "cuda_runtime",
        "cuda_driver",
        "cpu_op",
        "user_annotation",
    ):
        return None
    of = (
        found.get("args", {}).get("correlation", -1)
        if kind in ("kernel", "cuda_runtime", "cuda_driver")
        else found["tid"]
    )
    return Event(kind, found["name"], found["ts"], found["ts"] + found.get("dur", 0), of)


def read_trace(file: Path) -> list[Event]:
    """Raises OSError and ValueError, the latter for a trace that is too large."""
    if file.stat().st_size > LARGEST:
        raise ValueError(f"{file} is too large for a table of its phases: profile fewer steps")
    with gzip.open(file) as stream:
        return [event for event in json.load(stream, object_hook=_slim)["traceEvents"] if event]


def phases_of(events: list[Event]) -> Told:
    """Where the time of one rank's steps went.

    With kernels in the trace it is the device's time that is told: a kernel belongs to the phase that launched it, and where none runs,
    the device waits for the phase in which its host is. Else it is the time of the thread that trains, and gloo's threads communicate.
    """
    steps = [
        event
        for event in events
        if event.kind == "user_annotation" and event.name.startswith("step ")
    ]
    begin, end, thread = (
        min(event.begin for event in steps),
        max(event.end for event in steps),
        steps[0].of,
    )
    host = _host(
        event
        for event in events
        if event.kind == "user_annotation" and event.of == thread and event.name in ROW_OF
    )
    if kernels := [event for event in events if event.kind == "kernel"]:
        launched = {
            event.of: event.begin
            for event in events
            if event.kind in ("cuda_runtime", "cuda_driver")
        }
        working = [(event, _at(host, launched.get(event.of, event.begin))) for event in kernels]
        messages = [(event, row) for event, row in working if "nccl" in event.name.lower()]
        working = [(event, row) for event, row in working if "nccl" not in event.name.lower()]
        end = max(end, *(event.end for event in kernels))
    else:
        messages = [(event, "") for event in events if event.name.startswith("gloo:")]
        working = [
            (event, "")
            for event in events
            if event.of == thread and event.name.startswith(COMPUTES)
        ]
    return _swept(host, working, messages, begin, end, len(steps))


Host = list[tuple[float, str]]
"""From when on which row is the host's."""


def _host(ranges: Iterable[Event]) -> Host:
    """`ranges` may hold others; the innermost counts."""
    found: Host = [(float("-inf"), "other")]
    around: list[tuple[float, str]] = [(float("inf"), "other")]
    for event in sorted(ranges, key=lambda event: (event.begin, -event.end)):
        while around[-1][0] <= event.begin:
            ended, _ = around.pop()
            found.append((ended, around[-1][1]))
        around.append((event.end, ROW_OF[event.name]))
        found.append((event.begin, ROW_OF[event.name]))
    while len(around) > 1:
        ended, _ = around.pop()
        found.append((ended, around[-1][1]))
    return found


def _at(host: Host, moment: float) -> str:
    return host[bisect_right(host, moment, key=lambda change: change[0]) - 1][1]


def _swept(
    host: Host,
    working: list[tuple[Event, str]],
    messages: list[tuple[Event, str]],
    begin: float,
    end: float,
    steps: int,
) -> Told:
    """Goes through the window once. A row of "" is the host's at the time."""
    told: Told = {row: dict.fromkeys(("seconds", "idle", "hidden"), 0.0) for row in ROWS}
    working, messages = (
        [(event, row) for event, row in found if event.end > event.begin]
        for found in (working, messages)
    )
    both = [*working, *messages]
    marks = [(moment, 0, i) for i, (moment, _) in enumerate(host)]
    marks += [
        (moment, kind, i)
        for i, (event, _) in enumerate(both)
        for moment, kind in ((event.begin, 1), (event.end, -1))
    ]
    computing: dict[int, str] = {}  # in the order in which they began
    under_way: dict[int, str] = {}
    at_host, last = "other", begin
    for moment, kind, which in sorted([*marks, (end, 0, 0)], key=lambda mark: mark[:2]):
        passed = (min(max(moment, begin), end) - last) / 1e6 / steps
        if passed > 0:
            rows = {_row(both[i][0], row or at_host) for i, row in under_way.items()}
            row = (
                next(reversed(computing.values()))
                if computing
                else next(iter(sorted(rows)), at_host)
            ) or at_host
            told[row]["seconds"] += passed
            if computing:
                for message in rows:
                    told[message]["hidden"] += passed
            elif not rows:
                told[row]["idle"] += passed
            last = min(max(moment, begin), end)
        if kind == 0:
            at_host = host[which][1]
        elif kind == 1:
            (computing if which < len(working) else under_way)[which] = both[which][1]
        else:
            computing.pop(which, None)
            under_way.pop(which, None)
    return {row: values for row, values in told.items() if any(values.values())}


def _row(message: Event, row: str) -> str:
    """Where a message counts that nothing hides."""
    return (
        row
        if row not in OF_MODEL
        else GATHER
        if "gather" in message.name.lower().replace("_", "")
        else SYNC
    )


def table(ranks: dict[int, Told]) -> list[str]:
    """For people: milliseconds of a step by row, the mean over the ranks, and how far these are apart."""
    rows, messages = (
        [row for row in ROWS if any(row in of for of in ranks.values())],
        (GATHER, SYNC),
    )
    values = {
        row: {
            what: [of.get(row, {}).get(what, 0.0) * 1e3 for of in ranks.values()]
            for what in ("seconds", "idle", "hidden")
        }
        for row in rows
    }
    step, many = sum(mean(values[row]["seconds"]) for row in rows), len(ranks) > 1
    lines = [
        f"{'':24}{'ms':>9}{'share':>8}{'idle':>9}{'hidden':>9}"
        + (f"{'min':>11}{'median':>9}{'max':>9}  of {len(ranks)} ranks" if many else "")
    ]
    for row in rows:
        seconds, idle, hidden = (values[row][what] for what in ("seconds", "idle", "hidden"))
        told = f"{'':9}{mean(hidden):9.1f}" if row in messages else f"{mean(idle):9.1f}{'':9}"
        apart = f"{min(seconds):11.1f}{median(seconds):9.1f}{max(seconds):9.1f}" if many else ""
        lines.append(
            f"{row:24}{mean(seconds):9.1f}{mean(seconds) / step:8.1%}{told}{apart}".rstrip()
        )
    return [*lines, f"{'a step':24}{step:9.1f}"]
