"""hydra/launcher=slurm: every job of a sweep is a Slurm job, submitted and watched by submitit.

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
from pathlib import Path
from typing import Any

from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.config.sweeping import CORES_A_GPU, Slurm
from fsdp_trainer.errors import Problem, RunFailed, UserError
from fsdp_trainer.observe.records import replace
from fsdp_trainer.process import PARENT, SIGNALS, STOPPED

LOOK_SECONDS = 2.0  # between looks at a job's result on the shared disk
ASK_SECONDS = 60  # between questions to Slurm's accounting, which many people ask
REQUEUE_SECONDS = 120.0  # for Slurm to end a job that it was told to put back into the queue


class Shown(Exception):
    """hydra.launcher.dry_run: there is nothing more to do."""


class OnSlurm:
    """The place of `hydra/launcher=slurm`: submits jobs.

    It finds those again that an earlier command of the same sweep has submitted.
    """

    def __init__(self, settings: Slurm, cfg: TrainConfig):
        """Raises UserError where there is no Slurm."""
        if not settings.dry_run and not (shutil.which("sbatch") and shutil.which("srun")):
            reason = (
                "there is no sbatch and srun here: start the sweep where jobs are submitted, or"
                " look at the script with"
            )
            raise UserError(
                "the sweep cannot be started",
                [Problem("hydra/launcher=slurm", f"{reason}  hydra.launcher.dry_run=true")],
            )
        from submitit.slurm.slurm import SlurmInfoWatcher, SlurmJob

        self.settings, self.at_once = settings, settings.jobs
        self.running: list[SlurmRunning] = []
        # a watcher that asks Slurm once, for all jobs
        watcher = SlurmInfoWatcher(delay_s=ASK_SECONDS)
        self.job: Any = type("Job", (SlurmJob,), {"watcher": watcher})

    def memory_gib(self) -> float | None:
        """The memory that was configured."""
        return self.settings.memory_gib

    def world(self, cfg: TrainConfig) -> int:
        """Ranks of one job."""
        each = cfg.launch.nproc_per_node
        return self.settings.nodes * (
            max(1, self.settings.gpus_per_node) if each == "auto" else each
        )

    def has_room(self, cfg: TrainConfig) -> bool:
        """Return True if fewer jobs than allowed wait in the queue or run."""
        self.running = [job for job in self.running if job.poll() is None]
        return len(self.running) < self.at_once

    def start(self, cfg: TrainConfig, words: list[str], output: Path) -> "SlurmRunning":
        """Submit a training, unless it is queued or runs.

        Raises Shown for a dry run, RunFailed if Slurm refuses it.
        """
        folder = output.parents[2] / "slurm" / output.parent.name
        submitted = folder / "job_id"
        if submitted.exists() and not self.settings.dry_run:
            earlier = self.job(folder, submitted.read_text())
            if not earlier.done(force_check=True):
                print(f"found again: Slurm job {earlier.job_id}", flush=True)
                self.running.append(SlurmRunning(earlier))
                return self.running[-1]
        import submitit

        executor = (
            submitit.SlurmExecutor
            if not self.settings.dry_run
            else type("Dry", (submitit.SlurmExecutor,), {"affinity": staticmethod(lambda: 1)})
        )
        slurm = executor(folder=folder, max_num_timeout=0)
        slurm.update_parameters(**parameters(self.settings, output.parent.name))
        if self.settings.dry_run:
            print(
                "# every job is submitted like this one, which does\n#"
                f"   {shlex.join(['fsdp-trainer', 'train', *words])}"
            )
            print(slurm._make_submission_file_text(slurm._submitit_command_str, "dry"))
            raise Shown
        output.parent.mkdir(parents=True, exist_ok=True)
        try:
            job = slurm.submit(Training(words, str(output), self.settings.requeue))
        except submitit.core.utils.FailedJobError as error:
            raise RunFailed(f"Slurm refuses the job: {str(error).strip()}") from None
        replace(submitted, job.job_id)
        print(f"submitted: Slurm job {job.job_id}", flush=True)
        self.running.append(SlurmRunning(self.job(folder, job.job_id)))
        return self.running[-1]


def parameters(settings: Slurm, job: str) -> dict[str, Any]:
    """The settings for submitit: one task a node, which starts the ranks of its node itself."""
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
        **{name: getattr(settings, name) for name in ("partition", "account", "qos", "constraint")},
    }
    return {name: value for name, value in given.items() if value is not None}


class SlurmRunning:
    """A job that was submitted, by this command or an earlier one."""

    def __init__(self, job: Any):
        """job: submitit's, of task 0; the others are nodes of the same run."""
        self.id, self._job = job.job_id, job
        self._looked = 0.0
        self._code: int | None = None

    def poll(self) -> int | None:
        """The run's exit code; 1 if Slurm ended the job, without a word of its own."""
        if self._code is None and time.monotonic() - self._looked > LOOK_SECONDS:
            self._looked = time.monotonic()
            if self._job.done():
                try:
                    self._code = int(self._job.result())
                except RuntimeError:  # submitit's: cancelled, killed, or it could not begin
                    self._code = 1
        return self._code

    def signal(self, signum: int) -> None:
        """Cancel a job that waits; ask one that runs to stop, and not to be queued again."""
        ends = signum == signal.SIGKILL or self._job.watcher.get_state(self.id, mode="force") in (
            "PENDING",
            "REQUEUED",
        )
        with suppress(OSError):
            done = subprocess.run(
                ["scancel", *([] if ends else ["--signal=TERM"]), self.id], check=False
            )
            if ends and done.returncode == 0:
                self._code = 1  # submitit would wait for a result that does not come


@dataclass
class Training:
    """The function that submitit runs, once on every node of a job. Returns the run's exit code."""

    words: list[str]
    output: str
    requeue: bool

    def __call__(self) -> int:
        """Train.

        A run that stopped in order goes back into the queue, unless a person stopped it (SIGTERM).
        """
        received: list[int] = []

        def pass_on(signum: int, _frame: object) -> None:
            received.append(signum)
            process.send_signal(signum)

        # the run inherits the mask, and unblocks signals once it can handle them
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        with open(self.output, "ab") as shown:
            process = subprocess.Popen(
                [sys.executable, "-m", "fsdp_trainer", "train", *self.words],
                env={**os.environ, PARENT: str(os.getpid())},
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
            sys.exit(STOPPED)  # without a result: the job is not done
        return code if code >= 0 else 128 - code
