"""Runs, read from the files in their folders.

A run may be at work, have crashed, or be of an older version: it may lack any of the figures.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import yaml

from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.observe.records import parse

READ_BYTES = 2**30  # of all runs' metrics together; of longer ones the end is read
EVENTS, SAMPLES = 20_000, 200  # kept of each run, the latest
SILENT_SECONDS = 900  # without a line, after which a run is taken for dead
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
GONE = "ended without a word"
HOLDS_NO_RUN = (
    "holds no run: a run has metrics.jsonl, events.jsonl or config.yaml, a sweep sweep.jsonl"
)


@dataclass
class RecordedRun:
    """Everything on record of a run.

    metrics: a column for each figure, NaN where a line lacks it; those of `phases` and of the
    sources are named `phases/forward` and so on. configuration: by dotted key; job: its line in
    sweep.jsonl; remarks: parts of the files that could not be read.
    """

    name: str
    folder: Path
    metrics: dict[str, np.ndarray] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    configuration: dict[str, Any] = field(default_factory=dict)
    job: dict[str, Any] | None = None
    remarks: list[str] = field(default_factory=list)
    state: str = "nothing yet"
    reason: str = ""
    expert_load: tuple[int, list[str]] | None = None
    """The last step whose line has the load of every expert, and what it says of each block."""
    label: str = ""
    """A short name for narrow places of the page; the name if there is none."""

    def __post_init__(self) -> None:
        self.label = self.label or self.name

    def column(self, name: str) -> np.ndarray:
        """A figure of all lines; NaN where there is none."""
        return self.metrics.get(name, np.full(self.lines, np.nan))

    @property
    def phases(self) -> dict[str, np.ndarray]:
        """The column of seconds in each phase; {} if an older version wrote them."""
        return {
            name.partition("/")[2]: values
            for name, values in self.metrics.items()
            if name.startswith("phases/")
        }

    def last(self, name: str) -> float | None:
        """The last value of a column; None if it has none."""
        known = self.column(name)[~np.isnan(self.column(name))]
        return float(known[-1]) if len(known) else None

    def minimum(self, name: str) -> tuple[int, float] | None:
        """The step of the smallest value of a column, and the value."""
        column = self.column(name)
        if np.isnan(column).all():
            return None
        at = int(np.nanargmin(column))
        return int(self.metrics["step"][at]), float(column[at])

    @property
    def given(self) -> dict[str, str]:
        """The overrides of a sweep's job, by key."""
        return {
            key: value
            for word in (self.job or {}).get("overrides", ())
            for key, _, value in [word.partition("=")]
        }

    @property
    def explanation(self) -> str:
        """The reason of the state, if it says more than the state."""
        return "" if self.reason in (self.state, "already finished") else self.reason

    @property
    def lines(self) -> int:
        """The number of lines of the metrics."""
        return len(self.metrics.get("step", ()))


def read_sources(sources: list[str]) -> list[RecordedRun]:
    """Every run of some folders: of runs, of sweeps, or of both. Raises UserError without one."""
    names: dict[Path, tuple[str, dict[str, Any] | None]] = {}
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
    runs = [read_run(folder, name, job, each) for folder, (name, job) in names.items()]
    label_jobs(runs)
    return runs


def label_jobs(runs: list["RecordedRun"]) -> None:
    """Label the jobs of a sweep by the settings in which they differ, where no two are alike.

    A job's own name is a number that means nothing to people.
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
    """Return True if the folder has one of a run's files."""
    files = ("metrics.jsonl", "events.jsonl", "config.yaml")
    return any((folder / name).is_file() for name in files)


def runs_below(folder: Path) -> Iterator[tuple[Path, str, dict[str, Any] | None]]:
    """Folder, name and job of the run, of a sweep's jobs, or of the runs and sweeps in a folder."""
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


def jobs_of(sweep: Path) -> Iterator[tuple[Path, str, dict[str, Any]]]:
    """Folder, name and line in sweep.jsonl of each job."""
    for job in read_lines(sweep / "sweep.jsonl", lambda count: None):
        name = str(job.get("job"))
        folder = sweep / "jobs" / name  # after a sweep was moved, job["folder"] is where it was
        yield folder if folder.is_dir() else Path(str(job.get("folder"))), name, job


def read_lines(
    file: Path, broken: Callable[[int], None], max_bytes: int | None = None
) -> Iterator[dict[str, Any]]:
    """The objects in the last `max_bytes` of a file of JSON lines; nothing if there is no file.

    `broken` is called once, with the number of lines that hold no object.
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
                elif text.endswith(b"\n"):  # else it is just being written
                    bad += 1
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            bad += 1
    broken(bad)


def read_run(
    folder: Path, name: str, job: dict[str, Any] | None = None, max_bytes: int = READ_BYTES
) -> RecordedRun:
    """Read all files of a run, and of its metrics the last `max_bytes`."""
    run = RecordedRun(name, folder, job=job)

    def lines(file: str, max_bytes: int) -> Iterator[dict[str, Any]]:
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

    run.metrics = columns(steps(run, lines("metrics.jsonl", max_bytes)))
    run.events = [event for event in lines("events.jsonl", 2**26) if is_event(event)][-EVENTS:]
    run.samples = list(lines("samples.jsonl", 2**24))[-SAMPLES:]
    try:
        run.configuration = dict(
            flat(yaml.load((folder / "config.yaml").read_text(), YAML_LOADER) or {})
        )
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        if not isinstance(error, FileNotFoundError):
            run.remarks.append(f"config.yaml cannot be read: {error}")
    run.state, run.reason = state(run)
    return run


def steps(run: RecordedRun, lines: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the lines of metrics.jsonl that are of a step; the run keeps the last load of every
    expert."""
    for line in lines:
        if isinstance(line.get("step"), int):
            if "expert_load" in line:
                run.expert_load = line["step"], line["expert_load"]
            yield line


def is_event(line: dict[str, Any]) -> bool:
    """Return True if a line has an event, its time, and no step or one that is a number."""
    return (
        "event" in line
        and isinstance(line.get("time"), int | float)
        and isinstance(line.get("step"), int | NoneType)
    )


def columns(lines: Iterator[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Lines as columns of numbers; those of an object in a line are named `object/key`."""
    sparse: dict[str, tuple[list[int], list[float]]] = {}
    count = 0
    for line in lines:
        for key, number in flat(line, "/"):
            if isinstance(number, int | float):
                at, values = sparse.setdefault(key, ([], []))
                at.append(count)
                values.append(number)
        count += 1
    dense = {name: np.full(count, np.nan) for name in sparse}
    for name, (at, values) in sparse.items():
        dense[name][at] = values
    return dense


def flat(tree: dict[str, Any], separator: str = ".") -> Iterator[tuple[str, Any]]:
    """(key, value) of every leaf, its key joined of all keys above it."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            for below, leaf in flat(value, separator):
                yield f"{key}{separator}{below}", leaf
        else:
            yield str(key), value


def state(run: RecordedRun) -> tuple[str, str]:
    """(running, finished, stopped, failed or nothing yet; the reason).

    The state of a sweep's job that has ended is the one in sweep.jsonl.
    """
    job = run.job or {}
    if job.get("state", "running") not in ("waiting", "running"):
        name = "finished" if job["state"] == "skipped" else str(job["state"])
        return name, str(job.get("reason") or "")
    if not run.events and not run.lines:
        return "nothing yet", ""
    last = run.events[-1] if run.events else {}
    if last.get("event") == "end":
        name = {0: "finished", 75: "stopped"}.get(last.get("exit_code", 1), "failed")
        return name, str(last.get("reason", ""))
    silent = time.time() - max(run.last("time") or 0.0, last.get("time", 0.0))
    if silent < SILENT_SECONDS:
        return "running", f"last line {silent:.0f} s ago"
    return "failed", GONE


def differing(runs: list[RecordedRun]) -> dict[str, list[Any]]:
    """Keys whose values differ among runs, with each run's value; not those of its folder."""
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
    """The keys that a sweep's jobs were started with and that not all have alike."""
    jobs = [run.given for run in runs if run.job]
    return [
        key
        for key in dict.fromkeys(key for given in jobs for key in given)
        if len({given.get(key) for given in jobs}) > 1
    ]
