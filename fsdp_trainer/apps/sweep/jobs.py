"""The jobs of a sweep: their progress and results, read from their files. Needs no torch."""

import hashlib
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fsdp_trainer.base.recorded import as_recorded_earlier, as_written, recorded
from fsdp_trainer.base.safe_text import identity, without_secrets
from fsdp_trainer.config.paths import checkpoint_configuration
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.errors import UserError
from fsdp_trainer.observe.console import duration
from fsdp_trainer.observe.records import Records, parse, whole_lines

TELL_EVERY_SECONDS = 30.0  # between reports of progress in a log file
LONGEST_NAME = 80
"""Characters of a folder's name that show a job's values."""
UNSAFE = re.compile(r"[^A-Za-z0-9._]+")
"""What needs quotes in a shell or in an override of ours, or means something else there."""


class JobToStart(NamedTuple):
    """A training to start.

    words: the arguments of `train`, from which `cfg` was composed. output: the file that the job
    prints to, unless the backend runs one at a time.
    """

    cfg: TrainConfig
    words: list[str]
    output: Path


@dataclass
class Job:
    """One training of a sweep. Its fields are those of its line in sweep.jsonl."""

    job: str
    folder: str
    overrides: list[str]
    state: str = "waiting"
    """One of waiting, running, finished, skipped, stopped, pruned, failed, refused, does not fit.

    A skipped job was finished by an earlier command.
    """
    exit_code: int | None = None
    objective: float | None = None
    """The last value of hydra.sweeper.metric.

    Without a metric: the last validation loss, or, if there is none, the last training loss.
    """
    seconds: float = 0.0  # duration within this command
    reason: str = ""


class JobProgress:
    """Reads a job's metrics.jsonl as it grows."""

    def __init__(self, folder: str):
        self._file, self._read = Path(folder) / "metrics.jsonl", 0
        self.last: dict[str, Any] = {}

    def lines(self) -> list[dict[str, Any]]:
        """Return the new lines, and the last one read again: a validation may have added to it."""
        if not self._file.exists():
            return []
        with self._file.open("rb") as file:
            if self._file.stat().st_size < self._read:  # a resumed run has truncated it
                self._read = 0
            file.seek(self._read)
            whole = [text for text in file.read().splitlines(keepends=True) if text.endswith(b"\n")]
        self._read += sum(map(len, whole[:-1]))
        parsed = [parse(text.decode(errors="replace")) for text in whole]
        lines = [line for line in parsed if line]
        self.last = lines[-1] if lines else self.last
        return lines

    def summary(self, steps: int | None) -> str:
        if not self.last:
            return "starts"
        step, seconds = self.last["step"], self.last.get("step_seconds")
        eta = f"  eta {duration((steps - step) * seconds)}" if steps and seconds else ""
        loss = "not finite" if self.last["loss"] is None else f"{self.last['loss']:.4f}"
        return f"step {step:,}{f'/{steps:,}' if steps else ''}  loss {loss}{eta}"


class Board:
    """Shows the progress of jobs that run at the same time.

    Updated continuously on a terminal, and every TELL_EVERY_SECONDS in a log file.
    """

    def __init__(self) -> None:
        self._live: Any = None
        self._printed_at, self._shown = time.monotonic(), ""

    def show(self, jobs: dict[str, str]) -> None:
        text = "\n".join(f"{title}  {summary}" for title, summary in jobs.items())
        if text == self._shown:
            return
        if sys.stdout.isatty():
            from rich.live import Live
            from rich.text import Text

            if self._live is None:
                self._live = Live(auto_refresh=False, transient=True)
                self._live.start()
            self._live.update(Text(text), refresh=True)
            self._shown = text
        elif time.monotonic() - self._printed_at > TELL_EVERY_SECONDS:
            self._printed_at, self._shown = time.monotonic(), text
            print(text, flush=True)

    def close(self) -> None:
        """Remove the progress display from the terminal."""
        if self._live:
            self._live.stop()


def job_id(overrides: Sequence[str]) -> str:
    """Return a job's name: a hash of its sorted overrides, without run.root."""
    text = identity("\n".join(sorted(without_run_folder(overrides))))
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def job_folder(jobs: Path, job: str, varied: Sequence[str]) -> Path:
    """Return the folder of a job: that of an earlier command, else one named by its values.

    jobs: the folder of all. varied: the job's overrides of keys that vary. Folders of earlier
    versions have the job's name alone.
    """
    if earlier := next(jobs.glob(f"*{job}"), None):
        return earlier
    named = []
    for word in varied:
        key, _, value = without_secrets(word).partition("=")
        text = f"{re.split('[./]', key)[-1]}-{value.rstrip('/').rpartition('/')[2]}"
        named.append(UNSAFE.sub("-", text).strip("-"))
    return jobs / "_".join([*filter(None, ["_".join(named)[:LONGEST_NAME]]), job])


def without_run_folder(overrides: Sequence[str]) -> list[str]:
    words = [word.replace("\\:", ":") for word in overrides]  # Hydra escapes colons needlessly
    return [word for word in words if word.partition("=")[0] not in ("run.root", "run.name")]


def finished(folder: Path, cfg: TrainConfig) -> bool:
    last = Records(folder).last_event()
    if last.get("event") != "end" or last["exit_code"] != 0:
        return False
    try:
        stored = as_written(checkpoint_configuration(folder))
    except (OSError, UserError):
        return False
    return stored in (recorded(cfg), as_recorded_earlier(asdict(cfg)))


def objective(folder: Path, metric: str | None = None) -> float | None:
    """Return the last value of `metric`, or None if the run has none.

    Without a metric: the last validation loss, or, if there is none, the last training loss.
    """
    lines = [*whole_lines(Records(folder).metrics.path)]
    names = ("validation_loss", "loss") if metric is None else (metric,)
    values = [[line[name] for line in lines if line.get(name) is not None] for name in names]
    return next((column[-1] for column in values if column), None)


def varying(jobs: list[Job]) -> dict[str, list[str]]:
    common = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    return {job.job: [word for word in job.overrides if word not in common] for job in jobs}


def table(jobs: list[Job], best: str = "lowest") -> str:
    """Format all jobs as a table, with a line for the best job, and what can be typed next.

    best: `lowest` or `highest`.
    """
    names = varying(jobs)
    rows = [["job", "overrides", "objective", "state", "seconds"]]
    for job in jobs:
        value = "-" if job.objective is None else f"{job.objective:.4f}"
        rows.append([job.job, shlex.join(names[job.job]), value, job.state, f"{job.seconds:.0f}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    done = [
        job for job in jobs if job.objective is not None and job.state in ("finished", "skipped")
    ]
    if done:
        first = (min if best == "lowest" else max)(done, key=lambda job: job.objective or 0.0)
        lines.append(f"{best} objective: {first.folder}  {shlex.join(names[first.job])}".rstrip())
        every = Path(first.folder).parents[1]  # the sweep's
        commands = (f"report {shlex.quote(str(every))}", f"report {shlex.quote(first.folder)}")
        lines += ["next:", *(f"  fsdp-trainer {command}" for command in commands)]
    return "\n".join(lines)
