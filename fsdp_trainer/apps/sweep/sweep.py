"""The command `fsdp-trainer -m`: jobs that each have their own ranks and folder. No torch."""

import fcntl
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
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_trainer.apps.sweep.jobs import (
    Board,
    Job,
    JobProgress,
    JobToStart,
    finished,
    job_folder,
    job_id,
    objective,
    table,
    varying,
    without_run_folder,
)
from fsdp_trainer.apps.sweep.slurm import Shown
from fsdp_trainer.apps.sweep.sweep_backends import SWEEP_BACKENDS, JobHandle, SweepBackend
from fsdp_trainer.base.counted import counted
from fsdp_trainer.base.process import ECHO_SECONDS, SIGNALS, STOPPED
from fsdp_trainer.base.safe_text import safe, without_secrets
from fsdp_trainer.config.composing.compose import compose, config_flag
from fsdp_trainer.config.composing.overrides import quoted
from fsdp_trainer.config.composing.sweep_overrides import PLACE, SweepLine
from fsdp_trainer.config.devices import Device
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.errors import Problem, RunFailed, UserError
from fsdp_trainer.launch.start import launcher
from fsdp_trainer.observe.console import duration
from fsdp_trainer.observe.records import Records, replace, whole_lines

if TYPE_CHECKING:
    from fsdp_trainer.apps.sweep.study import Study

LOOK_SECONDS, READ_SECONDS = 0.1, 1.0  # between polls of the processes, and of their metrics
GRACE_SECONDS = 5.0  # for jobs to end after a second signal
STATES = {0: "finished", 2: "refused", STOPPED: "stopped"}  # every other exit code: failed

DONE = {"finished", "skipped"}


class SweepStopped(Exception):
    """A signal ended the sweep."""


def sweep(words: list[str], config_dir: str | None) -> int:
    """Train once for each combination of values.

    Returns the exit code. 0: finished; 1: a job failed or was refused, or none finished; 75:
    stopped.
    """
    refuse_launcher(words, config_dir)
    line = SweepLine(words, config_dir)
    jobs = Jobs(line)
    with jobs, suppress(SweepStopped, Shown):
        if line.sweeper == "optuna":
            jobs.run_study()
        else:
            line.run(jobs.run_batch)
    if line.launcher == "slurm" and line.launcher_settings.dry_run:
        return 0
    every = jobs.all()
    print(safe("\n" + table(every, line.best)))
    unfinished = {job.state for job in jobs.jobs.values()} - DONE - {"pruned", "does not fit"}
    if unfinished and (jobs.received or unfinished == {"stopped"}):
        print("stopped: the same command resumes")
        return STOPPED
    return 1 if unfinished or not any(job.state in DONE for job in every) else 0


def refuse_launcher(words: list[str], config_dir: str | None) -> None:
    """Raise UserError, with the command to type instead, if a launcher started this process."""
    under = launcher(os.environ)
    if not under:
        return
    environment = os.environ
    tasks = environment.get("LOCAL_WORLD_SIZE") or environment.get("SLURM_STEP_TASKS_PER_NODE")
    ranks = re.match(r"\d+", tasks or "1")
    count = [f"launch.nproc_per_node={ranks[0]}"] if ranks else []
    typed = shlex.join(["fsdp-trainer", "-m", *config_flag(config_dir), *words, *count])
    reason = (
        f"a sweep starts the ranks of each job itself, on one node. Type, without {under}:\n{typed}"
    )
    raise UserError("the sweep cannot be started", f"-m under {under}", reason)


class FixedJobs:
    """The search of a sweep whose jobs are all known in advance. See Study."""

    def __init__(self, batch: Sequence[Sequence[str]]):
        self.batch: list[Sequence[str]] = list(batch)

    def ask(self, room: int) -> Sequence[Sequence[str]]:
        """Return all jobs at once, so that all are checked before the first one starts."""
        batch, self.batch = self.batch, []
        return batch

    def tell(self, job: Job) -> None:
        """Do nothing: no job depends on another."""

    def prunes(self, job: Job, validates: bool, lines: list[dict[str, Any]]) -> bool:
        return False


if TYPE_CHECKING:
    Search = FixedJobs | Study


@dataclass
class RunningJob:
    """A running job.

    began: start in Unix seconds; last_read: time.monotonic() when its metrics were last read;
    pruned: True if it was sent SIGTERM because other jobs are better.
    """

    handle: JobHandle
    cfg: TrainConfig
    progress: JobProgress
    began: float
    last_read: float = 0.0
    pruned: bool = False

    @property
    def validates(self) -> bool:
        return self.cfg.data.validation is not None and self.cfg.train.validate_every is not None

    def summary(self) -> str:
        return self.progress.summary(self.cfg.train.steps)


class Jobs:
    """The jobs of one command. Some sweepers call `run` several times, with a new search each."""

    def __init__(self, line: SweepLine):
        self.line, self.folder = line, line.root / line.name
        self.jobs: dict[str, Job] = {}
        self.study: Study | None = None
        self.received: list[int] = []  # signals that arrived
        self._held = ExitStack()
        self._signalled_at = -ECHO_SECONDS
        self._words: dict[str, list[str]] = {}  # the arguments of each accepted job
        self._configurations: dict[str, TrainConfig] = {}
        self._refused: dict[str, UserError] = {}
        self._finished: dict[str, bool] = {}  # whether a job's folder held its finished run
        self._running: dict[str, RunningJob] = {}
        self._board = Board()
        self._backend: SweepBackend | None = None  # known with the first configuration

    def run_study(self) -> None:
        """Search with optuna. Raises SweepStopped after a signal."""
        from fsdp_trainer.apps.sweep.study import (
            Study,  # imports numpy, and optuna, which is optional
        )

        self.study = Study(self.line.sweeper_settings, self.line.space())
        self.check_common(self.study.example())
        self.hold()
        self.study.open(self.folder)
        self.run(self.study)

    def run_batch(self, batch: Sequence[Sequence[str]]) -> list[float]:
        self.run(FixedJobs(batch))
        objectives = [self.jobs[job_id(overrides)].objective for overrides in batch]
        return [math.nan if value is None else value for value in objectives]

    def run(self, search: "Search") -> None:
        """Run the jobs of a search, as many at the same time as there is room for.

        Raises SweepStopped after a signal.
        """
        waiting: deque[str] = deque()
        while not self.received:
            room = (
                (self._backend.at_once if self._backend else 1) - len(self._running) - len(waiting)
            )
            next_jobs = search.ask(room) if room > 0 else []
            waiting += self._accept(next_jobs, search)
            self._start_waiting(waiting, search)
            if not (self._running or waiting or next_jobs):
                return
            self._wait(search)
        while self._running:
            self._wait(search)
        raise SweepStopped

    def _start_waiting(self, waiting: deque[str], search: "Search") -> None:
        while waiting and not self.received and self._has_room(waiting[0]):
            id = waiting.popleft()
            self._begin(id)
            if id not in self._running:
                search.tell(self.jobs[id])

    def _accept(self, batch: Sequence[Sequence[str]], search: "Search") -> list[str]:
        """Check the jobs of a batch. Returns the ids of new ones: each job is run only once."""
        first, new = not self.jobs, list[str]()
        for overrides in batch:
            if self.received:  # checking hundreds of jobs takes a while
                return new
            id = job_id(overrides)
            job = self.jobs.get(id)
            if job is None:
                own = without_run_folder(overrides)
                keys = (word.lstrip("+").partition("=")[0] for word in own)
                varied = [
                    word for word, key in zip(own, keys, strict=True) if key in self.line.swept
                ]
                folder = str(job_folder(self.folder / "jobs", id, varied))
                job = self.jobs[id] = Job(id, folder, [*map(without_secrets, own)])
                self._check(job, list(overrides))
                new.append(id)
            elif job.state not in ("waiting", "running"):
                search.tell(job)
        if first and new and isinstance(search, FixedJobs):
            self._raise_if_all_are_refused()
            self.hold()
        return new

    def _wait(self, search: "Search") -> None:
        if not self._running:
            return
        time.sleep(LOOK_SECONDS)
        for id, started in list(self._running.items()):
            if len(self.received) > 1 and time.monotonic() - self._signalled_at > GRACE_SECONDS:
                started.handle.signal(signal.SIGKILL)
            code = started.handle.poll()
            self._read_metrics(self.jobs[id], started, search, ended=code is not None)
            if code is not None:
                del self._running[id]
                self._end(self.jobs[id], code, started)
                search.tell(self.jobs[id])
                self.write()
        if self._backend and self._backend.at_once > 1:
            titles = self._titles()
            running = self._running.items()
            self._board.show({titles[id]: job.summary() for id, job in running})

    def _read_metrics(self, job: Job, started: RunningJob, search: "Search", ended: bool) -> None:
        now = time.monotonic()
        if now - started.last_read <= READ_SECONDS and not ended:
            return
        started.last_read = now
        prune = search.prunes(job, started.validates, started.progress.lines())
        if prune and not ended and not started.pruned:
            started.pruned = True
            started.handle.signal(signal.SIGTERM)

    def all(self) -> list[Job]:
        """Return this command's jobs; for a study, also those of earlier commands."""
        if self.study is None:
            return list(self.jobs.values())
        known = {job.job: job for job in self.on_record()}
        return [known[id] for id in dict.fromkeys(self.study.jobs()) if id in known]

    def on_record(self) -> list[Job]:
        """Return this command's jobs, and those of earlier commands whose folders still exist."""
        names = {f.name for f in fields(Job)}
        earlier = [
            Job(**{name: line[name] for name in names & line.keys()})
            for line in whole_lines(self.folder / "sweep.jsonl")
            if line["job"] not in self.jobs and Path(line["folder"]).exists()
        ]
        return [*earlier, *self.jobs.values()]

    def write(self) -> None:
        lines = "".join(json.dumps(asdict(job)) + "\n" for job in self.on_record())
        replace(self.folder / "sweep.jsonl", lines)

    def __enter__(self) -> None:
        """Begin to handle signals: pass each one to the running jobs, and start no more jobs."""
        for signum in SIGNALS:
            before = signal.signal(signum, self._on_signal)
            self._held.callback(signal.signal, signum, before)

    def _on_signal(self, signum: int, _frame: object) -> None:
        if time.monotonic() - self._signalled_at < ECHO_SECONDS:
            return
        self._signalled_at = time.monotonic()
        self.received.append(signum)
        for started in list(self._running.values()):
            started.handle.signal(signum)

    def __exit__(self, *_: object) -> None:
        self._board.close()
        self._held.close()

    def hold(self) -> None:
        """Lock the sweep's folder, so that two sweeps cannot start the same jobs.

        Raises UserError if it is locked or cannot be written to.
        """
        try:
            (self.folder / "jobs").mkdir(parents=True, exist_ok=True)
            lock = self._held.enter_context((self.folder / "jobs" / ".lock").open("a"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reason = "another sweep runs there. Use  run.name=NEW  or wait"
            raise UserError("the sweep's folder is in use", str(self.folder), reason) from None
        except OSError as error:
            raise UserError(
                "the sweep's folder cannot be used",
                f"run.root={self.line.root}",
                f"{error}. Use  run.root=FOLDER",
            ) from None

    def _check(self, job: Job, overrides: list[str]) -> None:
        own = [word for word in overrides if word.partition("=")[0] not in PLACE]
        jobs, name = map(quoted, os.path.split(job.folder))
        words = [*own, f"run.root={jobs}", f"run.name={name}"]
        try:
            cfg = compose("train", words, self.line.config_dir)
        except UserError as error:
            reasons = [f"{p.what}: {p.reason.splitlines()[0]}" for p in error.problems]
            job.state, job.exit_code = "refused", error.exit_code
            job.reason = "; ".join(reasons) or error.title
            self._refused[job.job] = error
            return
        if cfg.data.cache is None:  # tokenize once for all jobs and other runs
            cfg.data.cache = str(self.line.root / ".data")
            words.append(f"data.cache={quoted(cfg.data.cache)}")
        if cfg.launch.hosts:
            reason = (
                "a sweep starts its jobs on this node, or as Slurm jobs. "
                "Leave it out; over several nodes each:  hydra/launcher=slurm"
            )
            raise UserError("the sweep cannot be started", "launch.hosts", reason)
        self._backend = self._backend or SWEEP_BACKENDS[self.line.launcher](
            self.line.launcher_settings, cfg.launch
        )
        self._words[job.job], self._configurations[job.job] = words, cfg
        problem = does_not_fit(cfg, self._backend)
        if problem:
            job.state, job.reason = "does not fit", problem

    def check_common(self, overrides: list[str]) -> None:
        """Raise UserError for problems of a job that do not concern the values that vary."""
        try:
            compose("train", overrides, self.line.config_dir)
        except UserError as error:
            common = [p for p in error.problems if key_of(p) not in self.line.swept]
            if common:
                raise UserError(f"{error.title}, in every job", common) from None

    def _raise_if_all_are_refused(self) -> None:
        """Raise UserError if all jobs were refused: with their common problems, else with all."""
        if len(self._refused) < len(self.jobs):
            return
        errors = list(self._refused.values())
        by_key = [{key_of(problem): problem for problem in error.problems} for error in errors]
        common = [
            Problem(self.line.swept.get(key, p.what), p.reason)
            for key, p in by_key[0].items()
            if all(key in problems for problems in by_key)
        ]
        own = {(p.what, p.reason): p for error in errors for p in error.problems}
        title = f"{errors[0].title}, in every job" if len(errors) > 1 else errors[0].title
        raise UserError(title, common or list(own.values()))

    def _has_room(self, id: str) -> bool:
        """Return True if a job can start now, or need not be started."""
        cfg = self._configurations.get(id)
        if cfg is None or not self._backend or self._nothing_to_do(id):
            return True
        return self._backend.has_room(cfg.launch) and not self.received

    def _nothing_to_do(self, id: str) -> str:
        job, cfg = self.jobs[id], self._configurations.get(id)
        if cfg is None or job.state == "does not fit":
            return job.state
        if id not in self._finished:
            self._finished[id] = not cfg.run.overwrite and finished(Path(job.folder), cfg)
        return "finished before" if self._finished[id] else ""

    def _begin(self, id: str) -> None:
        """Print a job's title, and start the job unless there is nothing to do."""
        job, cfg = self.jobs[id], self._configurations.get(id)
        state = self._nothing_to_do(id)
        number = [job.job for job in self.all()].index(id) + 1
        total = self.study.settings.n_trials if self.study else len(self.jobs)
        shown = f"  {state}" if state else ""
        print(f"\njob {number}/{total}  {self._titles()[id]}{shown}", flush=True)
        if state == "finished before":
            job.state, job.exit_code = "skipped", 0
            job.objective = objective(Path(job.folder), self.line.metric)
        elif state:
            print(safe(str(self._refused.get(id, job.reason))), file=sys.stderr, flush=True)
        elif cfg and self._backend:
            self._start(job, cfg, self._backend)
        self.write()

    def _start(self, job: Job, cfg: TrainConfig, backend: SweepBackend) -> None:
        words, began = [*self.line.config_flag, *self._words[job.job]], time.time()
        try:
            output = Path(job.folder) / "output.log"
            handle = backend.start(JobToStart(cfg, words, output))
        except (RunFailed, OSError) as error:  # Slurm rejected it, or a disk error
            job.state, job.exit_code = "failed", 1
            job.reason = f"cannot be started: {str(error).removeprefix('fsdp-trainer: ')}"
            print(safe(f"fsdp-trainer: job {job.job} {job.reason}"), file=sys.stderr, flush=True)
            return
        self._running[job.job] = RunningJob(handle, cfg, JobProgress(job.folder), began)
        job.state = "running"
        for signum in self.received:  # arrived while the job was being started
            handle.signal(signum)

    def _titles(self) -> dict[str, str]:
        words = varying(list(self.jobs.values()))
        return {id: f"{id}  {shlex.join(own)}" for id, own in words.items()}

    def _end(self, job: Job, code: int, started: RunningJob) -> None:
        job.seconds = round(time.time() - started.began, 1)
        job.exit_code = code
        job.state = "stopped" if self.received and code else STATES.get(code, "failed")
        last = Records(Path(job.folder)).last_event()
        in_order = last.get("event") == "end" and last["time"] >= started.began
        job.reason = last["reason"] if in_order else "ended without a message"
        if started.pruned and job.state == "stopped" and not self.received:
            pruner = self.line.sweeper_settings.pruner
            job.state = "pruned"
            job.reason = f"others were better: hydra.sweeper.pruner={pruner}"
        if code < 0:
            job.exit_code = 1
            name = signal.Signals(-code).name
            print(f"fsdp-trainer: job {job.job} was killed by {name}", file=sys.stderr)
        if job.state in ("finished", "pruned"):  # the loss of a failed job is not a result
            job.objective = objective(Path(job.folder), self.line.metric)
        self._print_end(job)

    def _print_end(self, job: Job) -> None:
        """Print how a job ended, unless the job itself prints to the terminal."""
        if not self._backend or self._backend.at_once == 1:
            return
        value = "" if job.objective is None else f"  objective {job.objective:.4f}"
        print(f"{self._titles()[job.job]}  {job.state}{value}  {duration(job.seconds)}", flush=True)
        if job.state in ("failed", "refused"):
            print(safe(f"{job.reason}: see {job.folder}/output.log"), file=sys.stderr, flush=True)


def key_of(problem: Problem) -> str:
    return problem.what.split("=")[0].lstrip("+")


def does_not_fit(cfg: TrainConfig, backend: SweepBackend) -> str | None:
    """Return a text if a job needs too much memory, with an override that helps, else None.

    Uses the lower bound of `plan`. Returns None also if the available memory is unknown.
    """
    limit, world = backend.memory_gib(), backend.world(cfg.launch)
    if limit is None:
        return None
    # imported here because they import torch, which a sweep without a memory limit does not need
    from fsdp_trainer.planning.plan.changes import Candidate
    from fsdp_trainer.planning.plan.plan import GIB, make_plan
    from fsdp_trainer.planning.plan.plan_inputs import architecture
    from fsdp_trainer.planning.plan.suggest import suggest

    device = Device("cpu" if cfg.launch.device == "cpu" else "any", limit)
    try:
        config, _ = architecture(cfg)
        plan = make_plan(cfg, config, world, device)
        if plan.fits:
            return None
        suggestions = suggest(Candidate(cfg, config, world, device))[:1]
    except UserError:  # the job itself reports it
        return None
    memory = f"{plan.peak_bytes / GIB:.2f} of {limit:.2f} GiB"
    needed = f"needs at least {memory} on each of {counted(world, 'rank')}"
    return needed + "".join(f": try  {suggestion.override}" for suggestion in suggestions)
