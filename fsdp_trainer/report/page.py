"""A report as one HTML file that needs nothing else. Names, prompts and configurations are text of strangers: all is escaped, and no script but ours could run."""

import json
import time
from base64 import b64encode
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.phases import CHECKPOINT
from fsdp_trainer.report.goodput import OUTSIDE, PARTS, attempts_of
from fsdp_trainer.report.read import RecordedRun, differing, overrides
from fsdp_trainer.report.summary import Summary, by_objective, duration, short

HERE = Path(__file__).parent
ROWS, ALL_ROWS = 2_000, 40_000  # points of each line of the page: of one run, and of all together
BARS = 120  # intervals of which the phases are shown
CURVES = 100  # runs with lines of their own; of the others there are figures
EVENTS, TEXT = 400, 2_000  # events shown of each run, characters of an answer
LINES = (
    "loss",
    "objective",
    "validation_loss",
    "lr",
    "grad_norm",
    "tokens_per_second",
    "step_seconds",
    "memory_gib",
    "mfu_palm",
    "mfu_causal",
)
OF_SOURCES = ("loss_by_source/", "validation_loss_by_source/")
GROUPS = {  # phases in the order of a step, as they are stacked
    "data": ("data",),
    "forward": ("forward",),
    "backward": ("backward",),
    "clip, update": ("clip", "update"),
    "waiting for the device": ("read",),
    "validation, samples": ("validation", "samples"),
    "checkpoint": CHECKPOINT,
    "compile": ("compile",),
}  # and all others


def write(summaries: list[Summary], file: Path) -> None:
    """Write it; UserError where that cannot be."""
    summaries = by_objective(summaries)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"duration": duration, "short": short, "shown": shown}
    styles, scripts = (
        [(HERE / name).read_text() for name in names]
        for names in (("uPlot.css", "page.css"), ("uPlot.js", "page.js"))
    )
    runs, data = [summary.run for summary in summaries], page_data(summaries[:CURVES])
    html = environment.get_template("page.html.jinja").render(
        summaries=summaries,
        data=data,
        script_data=as_script(data),
        style="\n".join(styles),
        script="\n".join(scripts),
        hash=content_hash,
        parts=PARTS,
        differing=differing(runs) if len(runs) > 1 else {},
        overrides=overrides(runs),
        curves=CURVES,
        text=TEXT,
        written=time.strftime("%Y-%m-%d %H:%M"),
    )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(html, encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(
            "the report cannot be written", [Problem(f"out={file}", f"{error}. Use  out=FILE")]
        ) from None


def content_hash(content: str) -> str:
    """As a Content-Security-Policy names what may be used."""
    return f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'"


def as_script(data: Any) -> str:
    """JSON that no HTML can end before its time."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")


def shown(value: Any) -> str:
    """A value of a configuration, as one types it."""
    return value if isinstance(value, str) else json.dumps(value)


def page_data(summaries: list[Summary]) -> dict[str, Any]:
    """What the page's charts are made of."""
    most = max(50, min(ROWS, ALL_ROWS // max(1, len(summaries))))
    runs = [run_data(summary.run, most) for summary in summaries]
    spent = [run["phases"]["bars"] for run in runs if run["phases"]]
    return {
        "groups": [
            group for group in (*GROUPS, "other") if any(any(bars[group]) for bars in spent)
        ],
        "runs": runs,
    }


def run_data(run: RecordedRun, most: int) -> dict[str, Any]:
    """A run's lines, each with at most `most` rows or so; the rows of every line's least and greatest values are among them."""
    names = [name for name in run.metrics if name in LINES or name.startswith(OF_SOURCES)]
    began = beginning(run)
    steps, tokens, seconds = (
        run.column("step"),
        run.column("tokens"),
        np.fmax.accumulate(run.column("time")) - began,
    )
    kept = thinned({name: run.metrics[name] for name in names}, run.lines, most)
    lines = {name: numbers(run.metrics[name][kept]) for name in names}
    if len(kept) < run.lines and "loss" in run.metrics:
        lines["mean of loss"] = numbers(means(run.metrics["loss"], kept))
    x = {
        "steps": numbers(steps[kept], 15),
        "tokens": numbers(tokens[kept], 15),
        "time": numbers(seconds[kept], 9),
    }
    known = (steps, np.nan_to_num(tokens)) if run.lines else (np.zeros(1), np.zeros(1))
    told = []
    for event in run.events[-EVENTS:]:
        since, step = float(event["time"]) - began, event.get("step")
        if not isinstance(step, int):
            step = int(steps[seconds <= since][-1]) if (seconds <= since).any() else 0
        place = {
            "steps": step,
            "tokens": round(float(np.interp(step, *known))),
            "time": round(since, 3),
        }
        told.append({"kind": str(event["event"]), "text": about(event)} | place)
    return {
        "name": run.label,
        "rows": run.lines,
        "x": x,
        "lines": lines,
        "events": told,
        "phases": intervals(run, seconds),
    }


def thinned(columns: dict[str, np.ndarray], rows: int, most: int) -> np.ndarray:
    """Which rows to show: first and last, and of each of equal ranges those where a column is least or greatest."""
    if rows <= most:
        return np.arange(rows)
    edges = np.linspace(0, rows, max(2, most // 4) + 1).astype(int)
    keep = {0, rows - 1}
    for values in columns.values():
        for start, stop in pairwise(edges):
            part = values[start:stop]
            if not np.isnan(part).all():
                keep |= {start + int(np.nanargmin(part)), start + int(np.nanargmax(part))}
    return np.array(sorted(keep))


def means(values: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """The mean of the rows around each that is kept: up to halfway to its neighbours, and at least 1/200 of all."""
    half = max(1, len(values) // 400)
    known, sums = (
        np.concatenate([[0.0], np.cumsum(part)])
        for part in (~np.isnan(values), np.nan_to_num(values))
    )
    low, high = np.maximum(kept - half, 0), np.minimum(kept + half + 1, len(values))
    with np.errstate(invalid="ignore"):
        return (sums[high] - sums[low]) / (known[high] - known[low])


def numbers(values: np.ndarray, digits: int = 6) -> list[float | None]:
    """As JSON writes them: null for NaN, integers without a point."""
    return [
        None
        if not np.isfinite(v)
        else int(v)
        if v == int(v) and abs(v) < 2**53
        else float(f"{v:.{digits}g}")
        for v in values.tolist()
    ]


def beginning(run: RecordedRun) -> float:
    """Unix seconds at which its first attempt began, or of what else is known first."""
    known = [
        *(attempt.began for attempt in attempts_of(run)[:1]),
        *run.column("time")[:1],
        *(event["time"] for event in run.events[:1]),
    ]
    return next((time for time in known if not np.isnan(time)), 0.0)


def about(event: dict[str, Any]) -> str:
    """An event's details on a line."""
    details = {
        name: value
        for name, value in event.items()
        if name not in ("event", "time", "step", "phases", "about", "reached")
    }
    if (
        again := int((event.get("reached") or {}).get("step") or 0) - int(event.get("step") or 0)
    ) > 0:
        details["steps done again"] = again
    return ", ".join(
        f"{name.replace('_', ' ')} {short(value) if isinstance(value, float) else shown(value)}"
        for name, value in details.items()
    )


def intervals(run: RecordedRun, seconds: np.ndarray) -> dict[str, Any]:
    """Seconds in each group of phases between two writes, several writes taken together where there are many."""
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
    count = np.diff(np.concatenate([[0], last + 1]))
    x = {
        "steps": numbers(run.column("step")[last], 15),
        "tokens": numbers(run.column("tokens")[last], 15),
        "time": numbers(seconds[last], 9),
    }
    return {
        "x": x,
        "count": count.tolist(),
        "bars": {group: numbers(values) for group, values in bars.items()},
    }
