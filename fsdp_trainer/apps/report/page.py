"""A report as one self-contained HTML file.

Names, prompts and configurations are untrusted text: all of it is escaped, and the page's
Content-Security-Policy allows only our own scripts.
"""

import errno
import json
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from fsdp_trainer.apps.report.charts import as_data, curves, varying
from fsdp_trainer.apps.report.goodput import OUTSIDE, PARTS, attempts_of
from fsdp_trainer.apps.report.read import RecordedRun, differing, overrides
from fsdp_trainer.apps.report.run_summary import (
    Summary,
    by_objective,
    duration,
    main_metrics,
    short,
)
from fsdp_trainer.base.checksum import policy_hash
from fsdp_trainer.base.json_files import Json
from fsdp_trainer.base.phases import CHECKPOINT
from fsdp_trainer.base.unpacked import FULL
from fsdp_trainer.errors import RunFailed, UserError
from fsdp_trainer.observe.records import replace

HERE = Path(__file__).parent
ROWS, ALL_ROWS = 2_000, 40_000  # most points of a line, and of the same line of all runs together
BARS = 120  # intervals for which the phases are shown
CURVES = 100  # runs with curves; of further runs the page shows only figures
LOADS = 8  # runs for which the load of every expert is shown
LARGEST_LOAD = 12  # quarters of the even load at which a cell reaches full colour
EVENTS, TEXT = 400, 2_000  # events shown for each run, characters shown of an answer
GROUPS = {  # phases stacked in a bar, in the order of a step
    "data": ("data",),
    "answers, rewards": ("rollouts", "environments", "rewards"),
    "forward": ("forward",),
    "backward": ("backward",),
    "clip, update": ("clip", "update"),
    "waiting for the device": ("read",),
    "validation, samples": ("validation", "samples", "evaluation"),
    "checkpoint": CHECKPOINT,
    "compile": ("compile",),
}  # all other phases are in the group `other`


def write(summaries: list[Summary], file: Path, rollouts: str | None = None) -> None:
    """Write the page. Raises UserError if the file cannot be written.

    rollouts: name of the page of rollouts beside it; None: there is none.
    """
    summaries = by_objective(summaries)
    runs, data = [summary.run for summary in summaries], page_data(summaries[:CURVES])
    html = html_of(
        "page.html.jinja",
        ("uPlot.css", "page.css"),
        ("uPlot.js", "page.js"),
        summaries=summaries,
        data=data,
        script_data=as_script(data),
        parts=PARTS,
        differing=differing(runs) if len(runs) > 1 else {},
        overrides=overrides(runs),
        mains=main_metrics(runs),
        one_method=len({run.method for run in runs}) == 1,  # else losses cannot be compared
        curves=CURVES,
        loads=[load for load in map(expert_load, runs[:LOADS]) if load],
        rollouts=rollouts,
    )
    write_page(html, file)


def html_of(
    template: str, style_files: Sequence[str], script_files: Sequence[str], **values: Any
) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"duration": duration, "short": short, "shown": shown}
    style, script = (
        "\n".join((HERE / name).read_text() for name in names)
        for names in (style_files, script_files)
    )
    written = time.strftime("%Y-%m-%d %H:%M")
    common = {"style": style, "script": script, "hash": policy_hash, "text": TEXT}
    return environment.get_template(template).render(**values, **common, written=written)


def write_page(html: str, file: Path) -> None:
    """Write a page to its file, whole or not at all: an older page stays until then.

    Raises RunFailed on a full disk, UserError for a place that cannot be written to.
    """
    file = file.resolve()  # what a link leads to
    text = html.encode(errors="replace").decode()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists() and not file.is_file() and not file.is_dir():  # a pipe, or a terminal
            file.write_text(text, encoding="utf-8")
        else:
            replace(file, text)
    except OSError as error:
        if error.errno in (*FULL, errno.EIO):
            raise RunFailed(f"the report {file} cannot be written: {error.strerror}") from None
        raise UserError(
            "the report cannot be written", f"out={file}", f"{error}. Use  out=FILE"
        ) from None


def as_script(data: Any) -> str:
    """Return JSON without `<`, so that no text in it can end the script element."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")


def shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def page_data(summaries: list[Summary]) -> Json:
    max_rows = max(50, min(ROWS, ALL_ROWS // max(1, len(summaries))))
    runs = [run_data(summary.run, max_rows) for summary in summaries]
    bars = [run["phases"]["bars"] for run in runs if run["phases"]]
    used = [group for group in (*GROUPS, "other") if any(any(bar[group]) for bar in bars)]
    return {
        "groups": used,
        "runs": runs,
        "sections": as_data([summary.run for summary in summaries]),
    }


def run_data(run: RecordedRun, max_rows: int) -> Json:
    """Return a run's curves, of about `max_rows` points each, including their extremes."""
    names = curves(run)
    began = beginning(run)
    seconds = np.fmax.accumulate(run.column("time")) - began
    rows = thinned({name: run.metrics[name] for name in names}, len(seconds), max_rows)
    lines = {name: numbers(run.metrics[name][rows]) for name in names}
    if len(rows) < run.lines:  # a smoothed line of the extremes would not be one of the means
        for name in varying(run):
            lines[f"mean of {name}"] = numbers(means(run.means(name), run.columns.counts, rows))
    return {
        "name": run.label,
        "rows": run.lines,
        "x": axes(run, seconds, rows),
        "lines": lines,
        "events": events_data(run, began, seconds),
        "phases": intervals(run, seconds),
    }


def expert_load(run: RecordedRun) -> Json | None:
    """Return the load of every expert as cells of a picture: column, row and shade from 0 to 1.

    Returns None if no step has it, or not in the format that training writes.
    """
    if run.expert_load is None:
        return None
    step, blocks = run.expert_load
    try:
        levels = [[int(level, 36) for level in block] for block in blocks]
    except (TypeError, ValueError):
        return None
    cells = [
        (expert, block, round(min(1, level / LARGEST_LOAD), 2))
        for block, row in enumerate(levels)
        for expert, level in enumerate(row)
        if level
    ]
    if not cells:
        return None
    size = {"blocks": len(levels), "experts": max(map(len, levels))}
    return {"name": run.label, "step": step, "cells": cells} | size


def axes(run: RecordedRun, seconds: np.ndarray, rows: np.ndarray) -> Json:
    return {
        "steps": numbers(run.column("step")[rows], 15),
        "tokens": numbers(run.column("tokens")[rows], 15),
        "time": numbers(seconds[rows], 9),
    }


def events_data(run: RecordedRun, began: float, seconds: np.ndarray) -> list[Json]:
    """Return a run's last events, each with its place on the three x axes."""
    steps, tokens = run.column("step"), np.nan_to_num(run.column("tokens"))
    known = (steps, tokens) if run.lines else (np.zeros(1), np.zeros(1))
    events = []
    for event in run.events[-EVENTS:]:
        since, step = float(event["time"]) - began, event.get("step")
        if not isinstance(step, int):
            step = int(steps[seconds <= since][-1]) if (seconds <= since).any() else 0
        place = {
            "steps": step,
            "tokens": round(float(np.interp(step, *known))),
            "time": round(since, 3),
        }
        events.append({"kind": str(event["event"]), "text": about(event)} | place)
    return events


def thinned(columns: dict[str, np.ndarray], rows: int, max_rows: int) -> np.ndarray:
    """Return the rows to show: first, last, and those of each column's extremes in ranges of rows.

    rows: number of rows. All of them are shown if they are at most `max_rows`. With many columns
    there are fewer ranges, so that at most about 4 · `max_rows` rows are shown.
    """
    if rows <= max_rows:
        return np.arange(rows)
    ranges = max(2, 2 * max_rows // max(8, len(columns)))
    edges = np.linspace(0, rows, ranges + 1).astype(int)
    chosen = {0, rows - 1}
    for values in columns.values():
        for start, stop in pairwise(edges):
            part = values[start:stop]
            if not np.isnan(part).all():
                chosen |= {start + int(np.nanargmin(part)), start + int(np.nanargmax(part))}
    return np.array(sorted(chosen))


def means(values: np.ndarray, counts: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the mean of a column around each of some rows, over 1/200 of all lines.

    values: the means over the lines that each row stands for; counts: the numbers of these.
    """
    ends = counts.cumsum()
    half = max(1, int(ends[-1]) // 400)
    weights = counts * np.isfinite(values)
    known, sums = (
        np.concatenate([[0.0], np.cumsum(part)])
        for part in (weights, np.where(weights > 0, values, 0.0) * weights)
    )
    low = np.searchsorted(ends, ends[rows] - half)
    high = np.searchsorted(ends, ends[rows] + half, "right")
    with np.errstate(invalid="ignore"):
        return (sums[high] - sums[low]) / (known[high] - known[low])


def numbers(values: np.ndarray, digits: int = 6) -> list[float | None]:
    """Return numbers for JSON: None if not finite, integers if exact, else rounded to `digits`."""

    def number(value: float) -> float | None:
        if not np.isfinite(value):
            return None
        if value == int(value) and abs(value) < 2**53:
            return int(value)
        return float(f"{value:.{digits}g}")

    return [number(value) for value in values.tolist()]


def beginning(run: RecordedRun) -> float:
    """Return the start of a run's first attempt, or its first line or event, in Unix seconds."""
    known = [
        *(attempt.began for attempt in attempts_of(run)[:1]),
        *run.column("time")[:1],
        *(event["time"] for event in run.events[:1]),
    ]
    return next((time for time in known if not np.isnan(time)), 0.0)


def about(event: Json) -> str:
    shown_elsewhere = ("event", "time", "step", "phases", "about", "reached")
    details = {name: value for name, value in event.items() if name not in shown_elsewhere}
    reached = int((event.get("reached") or {}).get("step") or 0)
    again = reached - int(event.get("step") or 0)
    if again > 0:
        details["steps done again"] = again
    return ", ".join(
        f"{name.replace('_', ' ')} {short(value) if isinstance(value, float) else shown(value)}"
        for name, value in details.items()
    )


def intervals(run: RecordedRun, seconds: np.ndarray) -> Json:
    """Return the seconds in each group of phases, over at most BARS intervals of writes."""
    if not run.phases:
        return {}
    closes = np.flatnonzero(np.any([~np.isnan(values) for values in run.phases.values()], axis=0))
    chosen = np.array_split(closes, min(BARS, len(closes)))
    of_phase = {phase: group for group, phases in GROUPS.items() for phase in phases}
    bars = {group: np.zeros(len(chosen)) for group in (*GROUPS, "other")}
    for phase, values in run.phases.items():
        if phase not in OUTSIDE:
            bars[of_phase.get(phase, "other")] += [
                float(np.nansum(values[rows])) for rows in chosen
            ]
    last = np.array([rows[-1] for rows in chosen])
    count = np.diff(run.columns.counts.cumsum()[last], prepend=0)
    return {
        "x": axes(run, seconds, last),
        "count": count.tolist(),
        "bars": {group: numbers(values) for group, values in bars.items()},
    }
