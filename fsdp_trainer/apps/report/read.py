"""Runs, read from the files in their folders.

A run may still be running, have crashed, or be of an older version, so any figure may be missing.
"""

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import yaml

from fsdp_trainer.apps.report.columns import PHASES, ROWS, RunColumns
from fsdp_trainer.apps.report.known_certificate import KnownCertificate, read_certificate
from fsdp_trainer.base.json_files import Json
from fsdp_trainer.base.recorded import flat
from fsdp_trainer.config.methods import method_in
from fsdp_trainer.config.yaml_text import load_yaml
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.observe.metric_groups import OWN_METRICS, group_of
from fsdp_trainer.observe.records import parse

READ_BYTES = 2**30  # most bytes of all runs' metrics together; of longer files only the end is read
EVENTS, SAMPLES = 20_000, 200  # the latest that are kept of each run
SILENT_SECONDS = 900  # without a new line or event, after which a run is considered dead
GONE = "ended without a message"
HOLDS_NO_RUN = (
    "holds no run: a run has metrics.jsonl, events.jsonl or config.yaml, a sweep sweep.jsonl"
)


@dataclass
class RecordedRun:
    """All recorded data of a run.

    columns: the figures by line; entries of objects such as `phases` are named `phases/forward`.
    configuration: values by dotted key. job: its line in sweep.jsonl. remarks: notes on parts of
    the files that were not or could not be read.
    """

    name: str
    folder: Path
    columns: RunColumns = field(default_factory=RunColumns)
    events: list[Json] = field(default_factory=list)
    samples: list[Json] = field(default_factory=list)
    configuration: Json = field(default_factory=dict)
    job: Json | None = None
    remarks: list[str] = field(default_factory=list)
    state: str = "nothing yet"
    reason: str = ""
    expert_load: tuple[int, list[str]] | None = None
    """The last step whose line has the load of every expert, and that load, one text per block."""
    own_metrics: set[str] = field(default_factory=set)
    """Names of the entries of lines that the user's own metrics wrote."""
    certificate: KnownCertificate | None = None
    """What `prove` has found out about a small copy of the run; None: it was not proved."""
    label: str = ""
    """A short name for narrow places of the page; by default the name."""

    def __post_init__(self) -> None:
        self.label = self.label or self.name

    @property
    def metrics(self) -> dict[str, np.ndarray]:
        return self.columns.values

    def column(self, name: str) -> np.ndarray:
        return self.metrics.get(name, np.full(len(self.columns.counts), np.nan))

    def means(self, name: str) -> np.ndarray:
        return self.columns.means.get(name, self.column(name))

    @property
    def method(self) -> str | None:
        return method_in(self.configuration)

    @cached_property
    def groups(self) -> dict[str, str]:
        return {name: group_of(name, self.method, self.own_metrics) for name in self.metrics}

    @property
    def phases(self) -> dict[str, np.ndarray]:
        """The columns of seconds by phase; {} if an older version wrote the run."""
        return {
            name.partition("/")[2]: values
            for name, values in self.metrics.items()
            if name.startswith(PHASES)
        }

    def last(self, name: str) -> float | None:
        known = self.column(name)[~np.isnan(self.column(name))]
        return float(known[-1]) if len(known) else None

    def minimum(self, name: str) -> tuple[int, float] | None:
        """Return the step of the smallest value of a column and the value; None if it has none."""
        column = self.column(name)
        if np.isnan(column).all():
            return None
        at = int(np.nanargmin(column))
        return int(self.metrics["step"][at]), float(column[at])

    @property
    def given(self) -> dict[str, str]:
        return {
            key: value
            for word in (self.job or {}).get("overrides", ())
            for key, _, value in [word.partition("=")]
        }

    @property
    def explanation(self) -> str:
        """The reason for the state; "" if it only repeats the state."""
        return "" if self.reason in (self.state, "already finished") else self.reason

    @property
    def lines(self) -> int:
        return int(self.columns.counts.sum())


def read_sources(sources: list[str]) -> list[RecordedRun]:
    """Return all runs in some folders, each a run, a sweep, or a folder of runs and sweeps.

    Raises UserError for a folder without any.
    """
    names: dict[Path, tuple[str, Json | None]] = {}
    problems = []
    for source in sources:
        try:
            below = list(runs_below(Path(source)))
        except OSError as error:
            problems.append(Problem(f"source={source}", str(error)))
            continue
        if not below:
            inside = is_run(Path(source).resolve().parent)
            meant = f"\nUse  source={Path(source).parent}" if inside else ""
            problems.append(Problem(f"source={source}", HOLDS_NO_RUN + meant))
        names |= {folder.resolve(): (name, job) for folder, name, job in below}
    if problems:
        raise UserError("there is nothing to report on", problems)
    each = READ_BYTES // len(names)
    rows = max(ROWS // 8, min(ROWS, 4 * ROWS // len(names)))
    runs = [read_run(folder, name, job, each, rows) for folder, (name, job) in names.items()]
    label_jobs(runs)
    return runs


def label_jobs(runs: list["RecordedRun"]) -> None:
    """Label the jobs of a sweep by the settings in which they differ.

    A job's name is a number without meaning to people. It stays the label if the settings are not
    unique or too long.
    """
    keys = overrides(runs)
    names = {
        id(run): " ".join(f"{key}={run.given[key]}" for key in keys if key in run.given)
        for run in runs
        if run.job
    }
    common = Counter(names.values())
    for run in runs:
        name = names.get(id(run), "")
        if name and common[name] == 1 and len(name) <= LONGEST_LABEL:
            run.label = name


LONGEST_LABEL = 80  # characters


def is_run(folder: Path) -> bool:
    files = ("metrics.jsonl", "events.jsonl", "config.yaml")
    return any((folder / name).is_file() for name in files)


def runs_below(folder: Path) -> Iterator[tuple[Path, str, Json | None]]:
    """Yield folder, name and job of each run in a folder.

    The folder is a run, a sweep, or holds runs and sweeps. The job is None for a run of no sweep.
    """
    if is_sweep(folder):
        yield from jobs_of(folder)
    elif is_run(folder):
        yield folder, folder.name or folder.resolve().name, None
    else:
        for inside in sorted(path for path in folder.iterdir() if path.is_dir()):
            if inside.name.startswith("."):
                continue
            if is_sweep(inside):
                for job_folder, name, job in jobs_of(inside):
                    yield job_folder, f"{inside.name}/{name}", job
            elif is_run(inside):
                yield inside, inside.name, None


def is_sweep(folder: Path) -> bool:
    return (folder / "sweep.jsonl").is_file()


def jobs_of(sweep: Path) -> Iterator[tuple[Path, str, Json]]:
    for job in read_lines(sweep / "sweep.jsonl", lambda count: None):
        name = str(job.get("job"))
        folder = sweep / "jobs" / name  # job["folder"] is out of date if the sweep was moved
        yield folder if folder.is_dir() else Path(str(job.get("folder"))), name, job


def read_lines(
    file: Path, broken: Callable[[int], None], max_bytes: int | None = None
) -> Iterator[Json]:
    """Yield the objects in the last `max_bytes` of a file of JSON lines, which may be missing.

    broken: called once at the end, with the number of lines that hold no object.
    """
    bad = 0
    try:
        with file.open("rb") as lines:
            if max_bytes is not None and file.stat().st_size > max_bytes:
                lines.seek(-max_bytes, 2)
                lines.readline()
            for text in lines:
                line = parse(text.decode(errors="replace"))
                if isinstance(line, dict):
                    yield line
                elif text.endswith(b"\n"):  # a line without an end is still being written
                    bad += 1
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            bad += 1
    broken(bad)


def read_run(
    folder: Path,
    name: str,
    job: Json | None = None,
    max_bytes: int = READ_BYTES,
    max_rows: int = ROWS,
) -> RecordedRun:
    """Read all files of a run, but only the last `max_bytes` of its metrics.

    max_rows: see RunColumns.
    """
    run = RecordedRun(name, folder, job=job)

    def lines(file: str, max_bytes: int) -> Iterator[Json]:
        def broken(count: int) -> None:
            if count:
                run.remarks.append(f"{count:,} line{'s' * (count != 1)} of {file} cannot be read")

        path = folder / file
        if path.is_file() and path.stat().st_size > max_bytes:
            run.remarks.append(
                f"{file} has {path.stat().st_size / 2**20:,.0f} MiB;"
                f" only the last {max_bytes / 2**20:,.0f} were read"
            )
        return read_lines(path, broken, max_bytes)

    events, wrong = deque[dict[str, Any]](maxlen=EVENTS), 0
    for line in lines("events.jsonl", 2**26):
        if is_event(line):
            events.append(line)
        else:
            wrong += 1
    run.events.extend(events)
    if wrong:
        run.remarks.append(f"{wrong:,} line{'s' * (wrong != 1)} of events.jsonl are no events")
    read_metrics(run, lines("metrics.jsonl", max_bytes), max_rows)
    run.samples.extend(deque(lines("samples.jsonl", 2**24), SAMPLES))
    try:
        run.configuration = dict(flat(load_yaml((folder / "config.yaml").read_text()) or {}))
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        if not isinstance(error, FileNotFoundError):
            run.remarks.append(f"config.yaml cannot be read: {error}")
    run.certificate = read_certificate(folder, run.configuration, run.remarks.append)
    run.state, run.reason = state(run)
    return run


def read_metrics(run: RecordedRun, lines: Iterator[Json], max_rows: int) -> None:
    ends = [step for step in map(continued_from, run.events) if step is not None]
    run.columns = RunColumns(max_rows, ends)
    for line in lines:
        if isinstance(line.get("step"), int) and is_finite(line["step"]):
            if "expert_load" in line:
                run.expert_load = line["step"], line["expert_load"]
            if isinstance(line.get(OWN_METRICS), list):
                run.own_metrics.update(map(str, line[OWN_METRICS]))
            run.columns.add(line)
    run.columns.finish()
    if run.columns.width > 1:
        run.remarks.append(
            f"metrics.jsonl has {run.lines:,} lines: curves have the extremes and means of each"
            f" {run.columns.width:,}, and the median speed is of {len(run.columns.speeds):,} lines"
        )


def continued_from(event: Json) -> int | None:
    """Return the step after which an attempt begins; None for an event that begins none."""
    if event["event"] not in ("start", "resume", "rewind"):
        return None
    return int(event.get("to" if event["event"] == "rewind" else "step") or 0)


def is_event(line: Json) -> bool:
    numbers = [line.get(name) for name in ("seconds", "stall_seconds", "step", "to")]
    for name in ("phases", "reached"):
        inner = line.get(name)
        numbers += inner.values() if isinstance(inner, dict) else [inner]
    numbers = [line.get("time"), *(number for number in numbers if number is not None)]
    return (
        isinstance(line.get("event"), str)
        and isinstance(line.get("step"), int | NoneType)
        and all(map(is_finite, numbers))
    )


def is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e300


def last_but_refusals(events: list[Json]) -> tuple[Json, str]:
    """Return the last event, without starts that were refused after the run had ended.

    Such a start has changed nothing: it is an `end` with exit code 2 after another `end`. The
    second value is why the last of them was refused.
    """
    ended = list(events)
    while len(ended) > 1 and ended[-1].get("exit_code") == 2 and ended[-2].get("event") == "end":
        ended.pop()
    refused = str(events[-1].get("reason", "")) if len(ended) < len(events) else ""
    return (ended[-1] if ended else {}), refused


def state_at_end(end: Json, refused: str) -> tuple[str, str]:
    """Return the state of a run that has ended, and the reason.

    refused: why a later start was refused, if one was.
    """
    name = {0: "finished", 75: "stopped"}.get(end.get("exit_code", 1), "failed")
    reason = str(end.get("reason", ""))
    if not refused:
        return name, reason
    later = f"a later start was refused: {refused}"
    return name, later if reason == name else f"{reason}; {later}"


def state(run: RecordedRun) -> tuple[str, str]:
    """Return a run's state (running, finished, stopped, failed or nothing yet) and the reason.

    If a sweep's job has ended, its state is the one in sweep.jsonl.
    """
    job = run.job or {}
    if job.get("state", "running") not in ("waiting", "running"):
        name = "finished" if job["state"] == "skipped" else str(job["state"])
        return name, str(job.get("reason") or "")
    if not run.events and not run.lines:
        return "nothing yet", ""
    last, refused = last_but_refusals(run.events)
    if last.get("event") == "end":
        return state_at_end(last, refused)
    silent = time.time() - max(run.last("time") or 0.0, last.get("time", 0.0))
    if silent < SILENT_SECONDS:
        return "running", f"last line {silent:.0f} s ago"
    return "failed", GONE


def differing(runs: list[RecordedRun]) -> dict[str, list[Any]]:
    """Return the configuration keys whose values differ among runs, with each run's value.

    Keys of the run's folder are left out.
    """
    known = [run for run in runs if run.configuration]
    keys = dict.fromkeys(key for run in known for key in run.configuration)
    shown = {key: [json.dumps(run.configuration.get(key)) for run in known] for key in keys}
    own = ("run.name", "run.root", "run.overwrite")
    return {
        key: [run.configuration.get(key, "") for run in runs]
        for key in keys
        if len(set(shown[key])) > 1 and key not in own
    }


def overrides(runs: list[RecordedRun]) -> list[str]:
    jobs = [run.given for run in runs if run.job]
    return [
        key
        for key in dict.fromkeys(key for given in jobs for key in given)
        if len({given.get(key) for given in jobs}) > 1
    ]
