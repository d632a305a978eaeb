"""`fsdp-trainer -m`: trainings, each with ranks and a folder of its own: which jobs there are, and what becomes of them. Needs no torch."""

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
from typing import TYPE_CHECKING, Any, Protocol

from fsdp_trainer.config.compose import compose, config_flag
from fsdp_trainer.config.overrides import quoted
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.config.sweep import PLACE, SweepLine
from fsdp_trainer.errors import Problem, RunFailed, UserError
from fsdp_trainer.launch.jobs import (
    Board,
    Job,
    JobProgress,
    finished,
    job_id,
    objective,
    table,
    varying,
    without_place,
)
from fsdp_trainer.launch.places import PLACES, Place, Running
from fsdp_trainer.launch.slurm import Shown
from fsdp_trainer.launch.start import launcher
from fsdp_trainer.observe.console import duration
from fsdp_trainer.observe.records import Records, replace, whole_lines
from fsdp_trainer.process import ECHO_SECONDS, SIGNALS, STOPPED

if TYPE_CHECKING:
    from fsdp_trainer.launch.study import Study

LOOK_SECONDS, READ_SECONDS = 0.1, 1.0  # between looks at processes, at what they have written
GRACE_SECONDS = 5.0  # after a second signal, for a job to have ended
STATES = {0: "finished", 2: "refused", STOPPED: "stopped"}  # every other exit code: failed

DONE = {"finished", "skipped"}


class SweepStopped(Exception):
    """A signal ended the sweep."""


def sweep(words: list[str], config_dir: str | None) -> int:
    """Train once for each combination of values. Returns the exit code: 0 finished, 1 a job failed or was refused, or none finished, 75 stopped."""
    if under := launcher(os.environ):
        ranks = re.match(
            r"\d+",
            os.environ.get("LOCAL_WORLD_SIZE")
            or os.environ.get("SLURM_STEP_TASKS_PER_NODE")
            or "1",
        )
        count = [f"launch.nproc_per_node={ranks[0]}"] if ranks else []
        typed = shlex.join(["fsdp-trainer", "-m", *config_flag(config_dir), *words, *count])
        why = f"a sweep starts the ranks of each job itself, on one node. Type, without {under}:\n{typed}"
        raise UserError("the sweep cannot be started", [Problem(f"-m under {under}", why)])
    line = SweepLine(words, config_dir)
    jobs = Jobs(line)
    with jobs, suppress(SweepStopped, Shown):
        if line.sweeper == "optuna":
            from fsdp_trainer.launch.study import Study  # an extra, and numpy

            jobs.study = Study(line.sweeper_settings, line.space())
            jobs.check_what_all_have_in_common(jobs.study.example())
            jobs.hold()
            jobs.study.open(jobs.folder)
            jobs.run(jobs.study)
        else:
            line.run(jobs.run_batch)
    if line.launcher == "slurm" and line.launcher_settings.dry_run:
        return 0
    whole = jobs.all()
    print("\n" + table(whole, line.best))
    left = {job.state for job in jobs.jobs.values()} - DONE - {"pruned", "does not fit"}
    if left and (jobs.received or left == {"stopped"}):
        print("stopped: the same command goes on")
        return STOPPED
    return 1 if left or not any(job.state in DONE for job in whole) else 0


class Search(Protocol):
    """Which jobs there are to be."""

    def ask(self, room: int) -> Sequence[Sequence[str]]:
        """The overrides of the next jobs: at most `room`, unless all are known from the start. None to come any more: []."""

    def tell(self, job: Job) -> None:
        """How it ended."""

    def prunes(self, job: Job, cfg: TrainConfig, lines: list[dict[str, Any]]) -> bool:
        """Whether a job that runs is to end, from new lines of its metrics."""


class FixedJobs:
    """Jobs that are all known."""

    def __init__(self, batch: Sequence[Sequence[str]]):
        self.batch: list[Sequence[str]] = list(batch)

    def ask(self, room: int) -> Sequence[Sequence[str]]:
        """All at once: they are checked before the first one starts."""
        batch, self.batch = self.batch, []
        return batch

    def tell(self, job: Job) -> None:
        """Changes nothing about the others."""

    def prunes(self, job: Job, cfg: TrainConfig, lines: list[dict[str, Any]]) -> bool:
        """All are wanted."""
        return False


@dataclass
class Started:
    """A job that runs. began: unix seconds; looked: when its metrics were last read; unwanted: it was told to end, since others are better."""

    running: Running
    cfg: TrainConfig
    progress: JobProgress
    began: float
    looked: float = 0.0
    unwanted: bool = False


class Jobs:
    """The jobs of one command; `run` is called with a search among them, by some sweepers several times."""

    def __init__(self, line: SweepLine):
        self.line, self.folder = line, line.root / line.name
        self.jobs: dict[str, Job] = {}
        self.study: Study | None = None
        self.received: list[int] = []  # signals
        self._held = ExitStack()
        self._heard_at = -ECHO_SECONDS
        self._words: dict[str, list[str]] = {}  # what each accepted job is started with
        self._configurations: dict[str, TrainConfig] = {}
        self._refused: dict[str, UserError] = {}
        self._running: dict[str, Started] = {}
        self._board = Board()
        self._place: Place | None = None  # known with the first configuration

    def run_batch(self, batch: Sequence[Sequence[str]]) -> list[float]:
        """Check every job of a batch, then run them. Gives their objectives, NaN where there is none. Raises SweepStopped."""
        self.run(FixedJobs(batch))
        return [
            math.nan if (value := self.jobs[job_id(overrides)].objective) is None else value
            for overrides in batch
        ]

    def run(self, search: Search) -> None:
        """Run what `search` asks for, side by side where there is room, until it asks for nothing more. Raises SweepStopped after a signal."""
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
        raise SweepStopped

    def _take_on(self, batch: Sequence[Sequence[str]], search: Search) -> list[str]:
        """Check what is asked for; the ids of jobs that are new: a job is run once."""
        first, new = not self.jobs, list[str]()
        for overrides in batch:
            if self.received:  # hundreds of jobs take a while to check
                return new
            job = self.jobs.get(id := job_id(overrides))
            if job is None:
                job = self.jobs[id] = Job(
                    id, str(self.folder / "jobs" / id), without_place(overrides)
                )
                self._check(job, list(overrides))
                new.append(id)
            elif job.state not in ("waiting", "running"):
                search.tell(job)
        if first and new and isinstance(search, FixedJobs):
            self._refuse_what_all_have_in_common()
            self.hold()
        return new

    def _wait(self, search: Search) -> None:
        """Look after the jobs that run."""
        if not self._running:
            return
        time.sleep(LOOK_SECONDS)
        for id, started in list(self._running.items()):
            job, now = self.jobs[id], time.monotonic()
            if len(self.received) > 1 and now - self._heard_at > GRACE_SECONDS:
                started.running.signal(signal.SIGKILL)
            code = started.running.poll()
            if now - started.looked > READ_SECONDS or code is not None:
                started.looked, lines = now, started.progress.lines()
                if search.prunes(job, started.cfg, lines) and code is None and not started.unwanted:
                    started.unwanted = True
                    started.running.signal(signal.SIGTERM)
            if code is not None:
                del self._running[id]
                self._ended(job, code, started)
                search.tell(job)
                self.write()
        if self._place and self._place.at_once > 1:
            self._board.show(
                {
                    self._called(id): (started.cfg, started.progress)
                    for id, started in self._running.items()
                }
            )

    def all(self) -> list[Job]:
        """This command's jobs; of a study, those of earlier commands too."""
        if self.study is None:
            return list(self.jobs.values())
        known = {job.job: job for job in self.on_record()}
        return [known[id] for id in dict.fromkeys(self.study.jobs()) if id in known]

    def on_record(self) -> list[Job]:
        """All of sweep.jsonl: this command's, and those of earlier ones whose folders are still there."""
        names = {f.name for f in fields(Job)}
        kept = [
            line
            for line in whole_lines(self.folder / "sweep.jsonl")
            if line["job"] not in self.jobs and Path(line["folder"]).exists()
        ]
        return [
            *(Job(**{name: line[name] for name in names & line.keys()}) for line in kept),
            *self.jobs.values(),
        ]

    def write(self) -> None:
        """sweep.jsonl: a line for each job. Those of earlier commands stay as long as their folders do."""
        replace(
            self.folder / "sweep.jsonl",
            "".join(json.dumps(asdict(job)) + "\n" for job in self.on_record()),
        )

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
        for started in list(self._running.values()):
            started.running.signal(signum)

    def __exit__(self, *_: object) -> None:
        self._board.close()
        self._held.close()

    def hold(self) -> None:
        """Two sweeps in one folder would start the same jobs. The lock goes with the process, whatever ends it."""
        try:
            (self.folder / "jobs").mkdir(parents=True, exist_ok=True)
            lock = self._held.enter_context((self.folder / "jobs" / ".lock").open("a"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            why = "another sweep runs there. Use  run.name=NEW  or wait"
            raise UserError(
                "the sweep's folder is in use", [Problem(str(self.folder), why)]
            ) from None
        except OSError as error:
            raise UserError(
                "the sweep's folder cannot be used",
                [Problem(f"run.root={self.line.root}", f"{error}. Use  run.root=FOLDER")],
            ) from None

    def _check(self, job: Job, overrides: list[str]) -> None:
        own = [word for word in overrides if word.partition("=")[0] not in PLACE]
        words = [*own, f"run.root={quoted(str(self.folder / 'jobs'))}", f"run.name={job.job}"]
        try:
            cfg = compose("train", words, self.line.config_dir)
        except UserError as error:
            job.state, job.exit_code = "refused", error.exit_code
            job.reason = (
                "; ".join(f"{p.what}: {p.why.splitlines()[0]}" for p in error.problems)
                or error.title
            )
            self._refused[job.job] = error
            return
        if cfg.data.cache is None:  # tokenised once, for all jobs and other runs
            cfg.data.cache = str(self.line.root / ".data")
            words.append(f"data.cache={quoted(cfg.data.cache)}")
        if cfg.launch.hosts:
            reason = (
                "a sweep starts its jobs on this node, or as Slurm jobs. "
                "Leave it out; over several nodes each:  hydra/launcher=slurm"
            )
            raise UserError("the sweep cannot be started", [Problem("launch.hosts", reason)])
        self._place = self._place or PLACES[self.line.launcher](self.line.launcher_settings, cfg)
        self._words[job.job], self._configurations[job.job] = words, cfg
        if why := does_not_fit(cfg, self._place):
            job.state, job.reason = "does not fit", why

    def check_what_all_have_in_common(self, overrides: list[str]) -> None:
        """Raises UserError for what is wrong with a job, but for the values that vary."""
        try:
            compose("train", overrides, self.line.config_dir)
        except UserError as error:
            if own := [
                p for p in error.problems if p.what.split("=")[0].lstrip("+") not in self.line.swept
            ]:
                raise UserError(f"{error.title}, in every job", own) from None

    def _refuse_what_all_have_in_common(self) -> None:
        """A mistake that every job has is told once, and nothing starts. Neither if all jobs are refused, each for a reason of its own."""
        if len(self._refused) < len(self.jobs):
            return
        errors = list(self._refused.values())
        by_key = [{p.what.split("=")[0].lstrip("+"): p for p in error.problems} for error in errors]
        common = [
            Problem(self.line.swept.get(key, p.what), p.why)
            for key, p in by_key[0].items()
            if all(key in b for b in by_key)
        ]
        own = {(p.what, p.why): p for error in errors for p in error.problems}
        raise UserError(
            f"{errors[0].title}, in every job" if len(errors) > 1 else errors[0].title,
            common or list(own.values()),
        )

    def _begin(self, id: str) -> bool:
        """Start a job, unless there is nothing to do; False: there is no room for it yet."""
        job, cfg = self.jobs[id], self._configurations.get(id)
        idle = job.state == "does not fit" or cfg is None
        done = (
            cfg is not None
            and not idle
            and not cfg.run.overwrite
            and finished(Path(job.folder), cfg)
        )
        if (
            cfg
            and self._place
            and not (idle or done)
            and (not self._place.has_room(cfg) or self.received)
        ):
            return False
        told = f"  {job.state}" if idle else "  finished before" if done else ""
        number = [job.job for job in self.all()].index(id) + 1
        print(
            f"\njob {number}/{self.study.settings.n_trials if self.study else len(self.jobs)}  {self._called(id)}{told}",
            flush=True,
        )
        if idle:
            print(self._refused.get(id, job.reason), file=sys.stderr, flush=True)
        elif done:
            job.state, job.exit_code, job.objective = (
                "skipped",
                0,
                objective(Path(job.folder), self.line.metric),
            )
        elif cfg and self._place:
            words, began = [*self.line.config_flag, *self._words[id]], time.time()
            try:
                running = self._place.start(cfg, words, Path(job.folder) / "output.log")
            except (RunFailed, OSError) as error:  # a queue or a disk that does not take it
                job.state, job.exit_code, job.reason = (
                    "failed",
                    1,
                    f"cannot be started: {str(error).removeprefix('fsdp-trainer: ')}",
                )
                print(f"fsdp-trainer: job {id} {job.reason}", file=sys.stderr, flush=True)
            else:
                self._running[id], job.state = (
                    Started(running, cfg, JobProgress(job.folder), began),
                    "running",
                )
                for signum in self.received:  # heard meanwhile
                    running.signal(signum)
        self.write()
        return True

    def _called(self, id: str) -> str:
        return f"{id}  {shlex.join(varying(list(self.jobs.values()))[id])}"

    def _ended(self, job: Job, code: int, started: Started) -> None:
        job.seconds, job.exit_code = round(time.time() - started.began, 1), code if code >= 0 else 1
        job.state = "stopped" if self.received and code else STATES.get(code, "failed")
        last = Records(Path(job.folder)).last_event()
        job.reason = (
            last["reason"]
            if last.get("event") == "end" and last["time"] >= started.began
            else "ended without a word"
        )
        if started.unwanted and job.state == "stopped" and not self.received:
            job.state, job.reason = (
                "pruned",
                f"others were better: hydra.sweeper.pruner={self.line.sweeper_settings.pruner}",
            )
        if code < 0:
            print(
                f"fsdp-trainer: job {job.job} was killed by {signal.Signals(-code).name}",
                file=sys.stderr,
            )
        if job.state in ("finished", "pruned"):  # what a job that went wrong came to is no result
            job.objective = objective(Path(job.folder), self.line.metric)
        if self._place and self._place.at_once > 1:
            value = "" if job.objective is None else f"  objective {job.objective:.4f}"
            print(
                f"{self._called(job.job)}  {job.state}{value}  {duration(job.seconds)}", flush=True
            )
            if job.state in ("failed", "refused"):
                print(f"{job.reason}: see {job.folder}/output.log", file=sys.stderr, flush=True)


def does_not_fit(cfg: TrainConfig, place: Place) -> str | None:
    """By `plan`: how much more memory than there is a job would take, and the first override that would help. None: it fits, or nobody knows."""
    limit, world = place.memory_gib(), place.world(cfg)
    if limit is None:
        return None
    from fsdp_trainer.plan.inputs import (
        architecture,
    )  # and with it torch, for a sweep that has something to ask it
    from fsdp_trainer.plan.plan import GIB, Device, make_plan
    from fsdp_trainer.plan.suggest import suggest

    device = Device("cpu" if cfg.launch.device == "cpu" else "any", limit)
    try:
        config, _ = architecture(cfg)
        plan = make_plan(cfg, config, world, device)
        if plan.fits:
            return None
        helps = [found.override for found in suggest(cfg, config, world, device)[:1]]
    except UserError:  # the run itself will tell it
        return None
    return (
        f"needs {plan.memory.peak.total / GIB:.2f} of {limit:.2f} GiB on each of {world} ranks"
        + "".join(f": try  {word}" for word in helps)
    )
