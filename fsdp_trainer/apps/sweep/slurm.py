"""hydra/launcher=slurm: every job of a sweep is a Slurm job, submitted and polled with submitit.

Needs no torch.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fsdp_trainer.apps.sweep.jobs import JobToStart
from fsdp_trainer.base.process import OWN_ENDING, PARENT, SIGNALS, STOPPED
from fsdp_trainer.config.composing.overrides import require_no_secrets
from fsdp_trainer.config.schema import Launch
from fsdp_trainer.config.sweep_keys import CORES_A_GPU, SLURM_TEXTS, Slurm
from fsdp_trainer.errors import RunFailed, UserError
from fsdp_trainer.observe.records import replace

LOOK_SECONDS = 2.0  # between polls of a job's result on the shared disk
ASK_SECONDS = 60  # between queries of Slurm's accounting, a service shared by all users
REQUEUE_SECONDS = 120.0  # for Slurm to end a job that is to be requeued


class Shown(Exception):
    """Raised for hydra.launcher.dry_run when the script has been printed."""


class OnSlurm:
    """hydra/launcher=slurm: submits jobs.

    Jobs that an earlier command of the same sweep submitted are found again.
    """

    def __init__(self, settings: Slurm, cfg: Launch):
        """Prepare to submit jobs. Raises UserError if Slurm is not installed."""
        if not settings.dry_run and not (shutil.which("sbatch") and shutil.which("srun")):
            reason = (
                "there is no sbatch and srun here: start the sweep where jobs are submitted, or"
                " look at the script with"
            )
            raise UserError(
                "the sweep cannot be started",
                "hydra/launcher=slurm",
                f"{reason}  hydra.launcher.dry_run=true",
            )
        from submitit.slurm.slurm import SlurmInfoWatcher, SlurmJob

        self.settings, self.at_once = settings, settings.jobs
        self.running: list[SubmittedJob] = []
        # one watcher for all jobs, so that one query covers them all
        watcher = SlurmInfoWatcher(delay_s=ASK_SECONDS)
        self.job: Any = type("Job", (SlurmJob,), {"watcher": watcher})

    def memory_gib(self) -> float | None:
        return self.settings.memory_gib

    def world(self, cfg: Launch) -> int:
        each = cfg.nproc_per_node
        return self.settings.nodes * (
            max(1, self.settings.gpus_per_node) if each == "auto" else each
        )

    def has_room(self, cfg: Launch) -> bool:
        self.running = [job for job in self.running if job.poll() is None]
        return len(self.running) < self.at_once

    def start(self, job: JobToStart) -> "SubmittedJob":
        """Submit a training, unless it is already queued or running.

        Raises Shown after a dry run, RunFailed if Slurm rejects the job, UserError for words with
        secrets, which submitit would write to a file.
        """
        require_no_secrets(job.words)
        name = job.output.parent.name
        folder = job.output.parents[2] / "slurm" / name
        submitted = folder / "job_id"
        if submitted.exists() and not self.settings.dry_run:
            earlier = self.job(folder, submitted.read_text())
            if not earlier.done(force_check=True):
                print(f"found again: Slurm job {earlier.job_id}", flush=True)
                self.running.append(SubmittedJob(earlier))
                return self.running[-1]
        import submitit

        executor = (
            submitit.SlurmExecutor
            if not self.settings.dry_run
            else type("Dry", (submitit.SlurmExecutor,), {"affinity": staticmethod(lambda: 1)})
        )
        slurm = executor(folder=folder, max_num_timeout=0)
        slurm.update_parameters(**parameters(self.settings, name))
        if self.settings.dry_run:
            print(
                "# every job is submitted like this one, which does\n#"
                f"   {shlex.join(['fsdp-trainer', 'train', *job.words])}"
            )
            print(slurm._make_submission_file_text(slurm._submitit_command_str, "dry"))
            raise Shown
        job.output.parent.mkdir(parents=True, exist_ok=True)
        try:
            task = slurm.submit(Training(job.words, str(job.output), self.settings.requeue))
        except submitit.core.utils.FailedJobError as error:
            raise RunFailed(f"Slurm refuses the job: {str(error).strip()}") from None
        replace(submitted, task.job_id)
        print(f"submitted: Slurm job {task.job_id}", flush=True)
        self.running.append(SubmittedJob(self.job(folder, task.job_id)))
        return self.running[-1]


def parameters(settings: Slurm, job: str) -> dict[str, Any]:
    """Return the settings for submitit: one task per node, which starts the ranks of its node."""
    cores = settings.cpus_per_task or CORES_A_GPU * settings.gpus_per_node or None
    more = {"signal": f"USR1@{settings.signal_seconds}", "requeue": settings.requeue or None}
    given = {
        "nodes": settings.nodes,
        "ntasks_per_node": 1,
        "gpus_per_node": settings.gpus_per_node or None,
        "cpus_per_task": cores,
        "mem": f"{settings.mem_gb * 1024:.0f}M" if settings.mem_gb else None,
        "time": settings.timeout_min,
        "job_name": f"fsdp_trainer-{job}",
        "setup": [
            *settings.setup,
            *(["export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK"] if cores else []),
        ],
        "stderr_to_stdout": True,
        "additional_parameters": {
            name: value
            for name, value in (more | settings.additional_parameters).items()
            if value is not None
        },
        **{name: getattr(settings, name) for name in SLURM_TEXTS},
    }
    return {name: value for name, value in given.items() if value is not None}


class SubmittedJob:
    """A job that was submitted, by this command or an earlier one."""

    def __init__(self, job: Any):
        """Wrap submitit's `job`, which represents task 0; other tasks are nodes of the same run."""
        self.id, self._job = job.job_id, job
        self._looked = 0.0
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the run's exit code, 1 if Slurm ended the job; None while it runs."""
        if self._code is None and time.monotonic() - self._looked > LOOK_SECONDS:
            self._looked = time.monotonic()
            if self._job.done():
                try:
                    self._code = int(self._job.result())
                except RuntimeError:  # from submitit: cancelled, killed, or it could not start
                    self._code = 1
        return self._code

    def signal(self, signum: int) -> None:
        """Cancel a queued job; ask a running one to stop without being requeued.

        A running job is cancelled too if `signum` is SIGKILL.
        """
        ends = signum == signal.SIGKILL or self._job.watcher.get_state(self.id, mode="force") in (
            "PENDING",
            "REQUEUED",
        )
        with suppress(OSError):
            done = subprocess.run(
                ["scancel", *([] if ends else ["--signal=TERM"]), self.id], check=False
            )
            if ends and done.returncode == 0:
                self._code = 1  # submitit would wait for a result that never appears


@dataclass
class Training:
    """The function that submitit runs, once on every node of a job. Returns the run's exit code."""

    words: list[str]
    output: str
    requeue: bool

    def __call__(self) -> int:
        """Train.

        A run that was interrupted and stopped cleanly (exit code 75) is requeued, unless a person
        stopped it with SIGTERM.
        """
        received: list[int] = []

        def pass_on(signum: int, _frame: object) -> None:
            received.append(signum)
            process.send_signal(signum)

        # the run inherits the mask, and unblocks the signals when it can handle them
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        with open(self.output, "ab") as shown:
            process = subprocess.Popen(
                [sys.executable, "-m", "fsdp_trainer", "train", *self.words],
                env={**os.environ, PARENT: str(os.getpid()), OWN_ENDING: "1"},
                stdout=shown,
                stderr=shown,
                start_new_session=True,
            )
        for signum in SIGNALS:
            signal.signal(signum, pass_on)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        code = process.wait()
        again = (
            code == STOPPED
            and self.requeue
            and signal.SIGTERM not in received
            and os.environ["SLURM_PROCID"] == "0"
        )
        if (
            again
            and subprocess.run(
                ["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=False
            ).returncode
            == 0
        ):
            time.sleep(REQUEUE_SECONDS)
            sys.exit(STOPPED)  # instead of returning a result: the job is not done
        return code if code >= 0 else 128 - code
