"""`fsdp-trainer -m`: trainings, each with ranks and a folder of its own: which jobs there are, and what becomes of them. Needs no torch."""

import fcntl
import hashlib
import json
import math
import os
import re
import shlex
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, TextIO

import yaml

from fsdp_trainer.config.compose import compose, config_flag
from fsdp_trainer.config.overrides import quoted
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.config.sweep import SweepLine
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.launch.places import PLACES, Place, Running
from fsdp_trainer.launch.start import ECHO_SECONDS, SIGNALS, STOPPED, launcher
from fsdp_trainer.observe.records import Records, parse

LOOK_SECONDS = 0.1
GRACE_SECONDS = 5.0  # after a second signal, for a job to have ended
STATES = {0: "finished", 2: "refused", STOPPED: "stopped"}  # every other exit code: failed


@dataclass
class Job:
    """One training of a sweep, and its line in sweep.jsonl."""

    job: str
    folder: str
    overrides: list[str]
    state: str = "waiting"  # running, finished, skipped (finished by an earlier command), stopped, failed, refused
    exit_code: int | None = None
    objective: float | None = None  # the last validation loss, without validation the last loss
    seconds: float = 0.0  # of this command
    reason: str = ""


class Stopped(Exception):
    """A signal ended the sweep."""


def sweep(words: list[str], config_dir: str | None) -> int:
    """Train once for each combination of values. Returns the exit code: 0 all finished, 1 a job failed or was refused, 75 stopped."""
    if under := launcher(os.environ):
        ranks = re.match(r"\d+", os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_STEP_TASKS_PER_NODE") or "1")
        count = [f"launch.nproc_per_node={ranks[0]}"] if ranks else []
        typed = shlex.join(["fsdp-trainer", "-m", *config_flag(config_dir), *words, *count])
        why = f"a sweep starts the ranks of each job itself, on one node. Type, without {under}:\n{typed}"
        raise UserError("the sweep cannot be started", [Problem(f"-m under {under}", why)])
    line = SweepLine(words, config_dir)
    jobs = Jobs(line)
    with jobs, suppress(Stopped):
        line.run(jobs.run_batch)
    print("\n" + table(list(jobs.jobs.values())))
    left = {job.state for job in jobs.jobs.values()} - {"finished", "skipped"}
    if left and (jobs.received or left == {"stopped"}):
        print("stopped: the same command goes on")
        return STOPPED
    return 1 if left else 0


class Search(Protocol):
    """Which jobs there are to be."""

    def ask(self, room: int) -> Sequence[Sequence[str]]:
        """The overrides of the next jobs: at most `room`, unless all are known from the start. None to come any more: []."""

    def tell(self, job: Job) -> None:
        """How it ended."""


class Batch:
    """Jobs that are all known."""

    def __init__(self, batch: Sequence[Sequence[str]]):
        self.batch: list[Sequence[str]] = list(batch)

    def ask(self, room: int) -> Sequence[Sequence[str]]:
        """All at once: they are checked before the first one starts."""
        batch, self.batch = self.batch, []
        return batch

    def tell(self, job: Job) -> None:
        """Changes nothing about the others."""


class Jobs:
    """The jobs of one command; `run` is called with a search among them, by some sweepers several times."""

    def __init__(self, line: SweepLine):
        self.line, self.folder = line, line.root / line.name
        self.jobs: dict[str, Job] = {}
        self.received: list[int] = []  # signals
        self._held = ExitStack()
        self._heard_at = -ECHO_SECONDS
        self._words: dict[str, list[str]] = {}  # what each accepted job is started with
        self._configurations: dict[str, TrainConfig] = {}
        self._refused: dict[str, UserError] = {}
        self._running: dict[str, tuple[Running, float]] = {}  # and when it began
        self._place: Place | None = None  # known with the first configuration

    def run_batch(self, batch: Sequence[Sequence[str]]) -> list[float]:
        """Check every job of a batch, then run them. Gives their objectives, NaN where there is none. Raises Stopped."""
        self.run(Batch(batch))
        return [math.nan if (value := self.jobs[job_id(overrides)].objective) is None else value for overrides in batch]

    def run(self, search: Search) -> None:
        """Run what `search` asks for, side by side where there is room, until it asks for nothing more. Raises Stopped after a signal."""
        waiting: deque[str] = deque()
        while not self.received:
            room = (self._place.at_once if self._place else 1) - len(self._running) - len(waiting)
            asked = search.ask(room) if room > 0 else []
            waiting += self._take_on(asked, search)
            while waiting and not self.received and self._begin(waiting[0]):
                job = waiting.popleft()
                if job not in self._running:
                    search.tell(self.jobs[job])
            if not (self._running or waiting or asked):
                return
            self._wait(search)
        while self._running:
            self._wait(search)
        raise Stopped

    def _take_on(self, batch: Sequence[Sequence[str]], search: Search) -> list[str]:
        """Check what is asked for; the ids of jobs that are new: a job is run once."""
        new = {job: list(overrides) for overrides in batch if (job := job_id(overrides)) not in self.jobs}
        first = not self.jobs
        for overrides in batch:
            if (job := job_id(overrides)) in self.jobs and job not in self._running and self.jobs[job].state != "waiting":
                search.tell(self.jobs[job])
        for job, overrides in new.items():
            self.jobs[job] = Job(job, str(self.folder / "jobs" / job), _without_place(overrides))
            self._check(self.jobs[job])
        if first and new:
            self._refuse_what_all_have_in_common()
            self._held.enter_context(self._lock())
        return list(new)

    def _wait(self, search: Search) -> None:
        """Look after the jobs that run."""
        if self._running:
            time.sleep(LOOK_SECONDS)
        for job, (running, began) in list(self._running.items()):
            if len(self.received) > 1 and time.monotonic() - self._heard_at > GRACE_SECONDS:
                running.signal(signal.SIGKILL)
            if (code := running.poll()) is not None:
                del self._running[job]
                self._ended(self.jobs[job], code, began)
                search.tell(self.jobs[job])
                self.write()

    def write(self) -> None:
        """sweep.jsonl: a line for each job. Those of earlier commands stay as long as their folders do."""
        file = self.folder / "sweep.jsonl"
        before = [line for text in file.read_text().splitlines() if (line := parse(text))] if file.exists() else []
        kept = [line for line in before if line["job"] not in self.jobs and Path(line["folder"]).exists()]
        partial = file.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in [*kept, *map(asdict, self.jobs.values())]))
        partial.replace(file)

    def __enter__(self) -> None:
        """Listen: jobs that run get a signal too, and no other starts."""
        for signum in SIGNALS:
            before = signal.signal(signum, self._hear)
            self._held.callback(signal.signal, signum, before)

    def _hear(self, signum: int, _frame: object) -> None:
        if time.monotonic() - self._heard_at < ECHO_SECONDS:
            return
        self._heard_at = time.monotonic()
        self.received.append(signum)
        for running, _ in list(self._running.values()):
            running.signal(signum)

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def _lock(self) -> TextIO:
        """Two sweeps in one folder would start the same jobs. The lock goes with the process, whatever ends it."""
        try:
            (self.folder / "jobs").mkdir(parents=True, exist_ok=True)
            lock = (self.folder / "jobs" / ".lock").open("a")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            why = "another sweep runs there. Use  run.name=NEW  or wait"
            raise UserError("the sweep's folder is in use", [Problem(str(self.folder), why)]) from None
        except OSError as error:
            raise UserError(
                "the sweep's folder cannot be used", [Problem(f"run.root={self.line.root}", f"{error}. Use  run.root=FOLDER")]
            ) from None

    def _check(self, job: Job) -> None:
        words = [*job.overrides, f"run.root={quoted(str(self.folder / 'jobs'))}", f"run.name={job.job}"]
        try:
            cfg = compose("train", words, self.line.config_dir)
        except UserError as error:
            job.state, job.exit_code = "refused", error.exit_code
            job.reason = "; ".join(f"{p.what}: {p.why.splitlines()[0]}" for p in error.problems) or error.title
            self._refused[job.job] = error
            return
        if cfg.data.cache is None:  # tokenised once, for all jobs and other runs
            cfg.data.cache = str(self.line.root / ".data")
            words.append(f"data.cache={quoted(cfg.data.cache)}")
        self._words[job.job], self._configurations[job.job] = words, cfg

    def _refuse_what_all_have_in_common(self) -> None:
        """A mistake that every job has is told once, and nothing starts. Neither if all jobs are refused, each for a reason of its own."""
        if len(self._refused) < len(self.jobs):
            return
        errors = list(self._refused.values())
        by_key = [{p.what.split("=")[0].lstrip("+"): p for p in error.problems} for error in errors]
        common = [Problem(self.line.swept.get(key, p.what), p.why) for key, p in by_key[0].items() if all(key in b for b in by_key)]
        own = {(p.what, p.why): p for error in errors for p in error.problems}
        raise UserError(f"{errors[0].title}, in every job" if len(errors) > 1 else errors[0].title, common or list(own.values()))

    def _begin(self, id: str) -> bool:
        """Start a job, unless there is nothing to do; False: there is no room for it yet."""
        job, cfg = self.jobs[id], self._configurations.get(id)
        done = cfg is not None and not cfg.run.overwrite and finished(Path(job.folder), cfg)
        if cfg and not done:
            self._place = self._place or PLACES[self.line.launcher](self.line.launcher_settings, cfg)
            if not self._place.has_room(cfg):
                return False
        told = "  refused" if cfg is None else "  finished before" if done else ""
        number, varied = list(self.jobs).index(id) + 1, shlex.join(varying(list(self.jobs.values()))[id])
        print(f"\njob {number}/{len(self.jobs)}  {id}  {varied}{told}", flush=True)
        if cfg is None:
            print(self._refused[id], file=sys.stderr, flush=True)
        elif done:
            job.state, job.exit_code, job.objective = "skipped", 0, objective(Path(job.folder))
        elif self._place:
            job.state, words = "running", [*self.line.config_flag, *self._words[id]]
            self._running[id] = self._place.start(cfg, words, Path(job.folder) / "output.log"), time.time()
            for signum in self.received:  # heard meanwhile
                self._running[id][0].signal(signum)
        self.write()
        return True

    def _ended(self, job: Job, code: int, began: float) -> None:
        job.seconds, job.exit_code = round(time.time() - began, 1), code if code >= 0 else 1
        job.state = "stopped" if self.received and code else STATES.get(code, "failed")
        last = Records(Path(job.folder)).last_event()
        job.reason = last["reason"] if last.get("event") == "end" and last["time"] >= began else "ended without a word"
        if code < 0:
            print(f"fsdp-trainer: job {job.job} was killed by {signal.Signals(-code).name}", file=sys.stderr)
        if job.state == "finished":  # what a job that went wrong came to is no result
            job.objective = objective(Path(job.folder))


def job_id(overrides: Sequence[str]) -> str:
    """The name of a job's folder: a short hash of its sorted overrides; where the sweep lies does not count."""
    return hashlib.blake2b("\n".join(sorted(_without_place(overrides))).encode(), digest_size=4).hexdigest()


def _without_place(overrides: Sequence[str]) -> list[str]:
    words = [word.replace("\\:", ":") for word in overrides]  # Hydra escapes it, for no need
    return [word for word in words if word.partition("=")[0] not in ("run.root", "run.name")]


def finished(folder: Path, cfg: TrainConfig) -> bool:
    """Whether this very configuration was trained to its end there."""
    last, stored = Records(folder).last_event(), folder / "config.yaml"
    return last.get("event") == "end" and last["exit_code"] == 0 and stored.exists() and yaml.safe_load(stored.read_text()) == asdict(cfg)


def objective(folder: Path) -> float | None:
    """The last validation loss of a run, without validation its last loss; None if it has neither."""
    metrics = Records(folder).metrics
    lines = [line for text in metrics.read_text().splitlines() if (line := parse(text))] if metrics.exists() else []
    found = [[line[name] for line in lines if line.get(name) is not None] for name in ("validation_loss", "loss")]
    return next((values[-1] for values in found if values), None)


def varying(jobs: list[Job]) -> dict[str, list[str]]:
    """By job: the overrides that not all have."""
    common = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    return {job.job: [word for word in job.overrides if word not in common] for job in jobs}


def table(jobs: list[Job]) -> str:
    """All jobs, one a line, in columns, and which has the lowest objective."""
    names = varying(jobs)
    rows = [["job", "overrides", "objective", "state", "seconds"]]
    for job in jobs:
        value = "-" if job.objective is None else f"{job.objective:.4f}"
        rows.append([job.job, shlex.join(names[job.job]), value, job.state, f"{job.seconds:.0f}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    done = [job for job in jobs if job.objective is not None and job.state in ("finished", "skipped")]
    if done:
        best = min(done, key=lambda job: job.objective or 0.0)
        lines.append(f"lowest objective: {best.folder}  {shlex.join(names[best.job])}".rstrip())
    return "\n".join(lines)
