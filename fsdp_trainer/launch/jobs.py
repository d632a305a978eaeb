"""A job of a sweep, and what its files tell about it. Needs no torch."""

import hashlib
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.observe.console import duration
from fsdp_trainer.observe.records import Records, parse, whole_lines

TELL_EVERY_SECONDS = 30.0  # in a log file


@dataclass
class Job:
    """One training of a sweep, and its line in sweep.jsonl."""

    job: str
    folder: str
    overrides: list[str]
    state: str = "waiting"  # running, finished, skipped (finished by an earlier command), stopped, pruned, failed, refused, does not fit
    exit_code: int | None = None
    objective: float | None = (
        None  # the last validation loss, without validation the last loss; or what hydra.sweeper.metric names
    )
    seconds: float = 0.0  # of this command
    reason: str = ""


class JobProgress:
    """What a job has written to metrics.jsonl so far, read on as it grows."""

    def __init__(self, folder: str):
        self._file, self._read = Path(folder) / "metrics.jsonl", 0
        self.last: dict[str, Any] = {}

    def lines(self) -> list[dict[str, Any]]:
        """What is new, after the last line of before: a validation adds to that."""
        if not self._file.exists():
            return []
        with self._file.open("rb") as file:
            if self._file.stat().st_size < self._read:  # a resume has cut it
                self._read = 0
            file.seek(self._read)
            whole = [text for text in file.read().splitlines(keepends=True) if text.endswith(b"\n")]
        self._read += sum(map(len, whole[:-1]))
        found = [line for text in whole if (line := parse(text.decode(errors="replace")))]
        self.last = found[-1] if found else self.last
        return found

    def told(self, cfg: TrainConfig) -> str:
        """Step, loss and, if it is known how many steps there are, the time left."""
        if not self.last:
            return "starts"
        step, steps, seconds = self.last["step"], cfg.train.steps, self.last.get("step_seconds")
        left = f"  eta {duration((steps - step) * seconds)}" if steps and seconds else ""
        loss = "not finite" if self.last["loss"] is None else f"{self.last['loss']:.4f}"
        return f"step {step:,}{f'/{steps:,}' if steps else ''}  loss {loss}{left}"


class Board:
    """How far the jobs are that run side by side: in a terminal always there, in a log file every now and then."""

    def __init__(self) -> None:
        self._live: Any = None
        self._told, self._shown = time.monotonic(), ""

    def show(self, jobs: dict[str, tuple[TrainConfig, JobProgress]]) -> None:
        """jobs: by what to call them."""
        text = "\n".join(f"{name}  {progress.told(cfg)}" for name, (cfg, progress) in jobs.items())
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
        elif time.monotonic() - self._told > TELL_EVERY_SECONDS:
            self._told, self._shown = time.monotonic(), text
            print(text, flush=True)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._live:
            self._live.stop()


def job_id(overrides: Sequence[str]) -> str:
    """The name of a job's folder: a short hash of its sorted overrides; where the sweep lies does not count."""
    return hashlib.blake2b(
        "\n".join(sorted(without_place(overrides))).encode(), digest_size=4
    ).hexdigest()


def without_place(overrides: Sequence[str]) -> list[str]:
    """The overrides but for run.root and run.name."""
    words = [word.replace("\\:", ":") for word in overrides]  # Hydra escapes it, for no need
    return [word for word in words if word.partition("=")[0] not in ("run.root", "run.name")]


def finished(folder: Path, cfg: TrainConfig) -> bool:
    """Whether this very configuration was trained to its end there."""
    last, stored = Records(folder).last_event(), folder / "config.yaml"
    return (
        last.get("event") == "end"
        and last["exit_code"] == 0
        and stored.exists()
        and yaml.safe_load(stored.read_text()) == asdict(cfg)
    )


def objective(folder: Path, metric: str | None = None) -> float | None:
    """The last value of `metric`; of None: the last validation loss of a run, without validation its last loss. None if it has neither."""
    lines = [*whole_lines(Records(folder).metrics.path)]
    names = ("validation_loss", "loss") if metric is None else (metric,)
    found = [[line[name] for line in lines if line.get(name) is not None] for name in names]
    return next((values[-1] for values in found if values), None)


def varying(jobs: list[Job]) -> dict[str, list[str]]:
    """By job: the overrides that not all have."""
    common = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    return {job.job: [word for word in job.overrides if word not in common] for job in jobs}


def table(jobs: list[Job], best: str = "lowest") -> str:
    """All jobs, one a line, in columns, and which has the `best` (lowest or highest) objective."""
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
    return "\n".join(lines)
