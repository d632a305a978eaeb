"""Places to run the jobs of a sweep, selected by `hydra/launcher=NAME`. Needs no torch."""

import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from fsdp_trainer.apps.sweep.jobs import JobToStart
from fsdp_trainer.apps.sweep.slurm import OnSlurm, SubmittedJob
from fsdp_trainer.base.process import OWN_ENDING, PARENT, SIGNALS, cores
from fsdp_trainer.config.composing.handover import DESCRIPTOR, configuration_file
from fsdp_trainer.config.devices import gpus
from fsdp_trainer.config.schema import Launch
from fsdp_trainer.config.sweep_keys import Local
from fsdp_trainer.errors import UserError
from fsdp_trainer.launch.start import ranks_to_start, start_process


class OnThisNode:
    """hydra/launcher=local: each job is a process on this node with its own devices.

    at_once: number of jobs at the same time; if it is 1, a job prints to the sweep's output.
    """

    def __init__(self, settings: Local, cfg: Launch):
        """Find the devices. Raises UserError for jobs of several nodes.

        cfg: of a job. It determines the devices, and how many jobs share them unless
        `settings.jobs` is set.
        """
        if cfg.nodes > 1:
            reason = (
                "jobs run on this node. Over several nodes each:"
                f"  hydra/launcher=slurm hydra.launcher.nodes={cfg.nodes}"
            )
            raise UserError("the sweep cannot be started", f"launch.nodes={cfg.nodes}", reason)
        self.devices = devices(cfg)
        possible = len(self.devices) // ranks_to_start(cfg) if self.devices else 1
        self.at_once = settings.jobs or max(1, possible)
        self.settings, self.running = settings, list[LocalJob]()

    def memory_gib(self) -> float | None:
        """Return the configured memory, else that of the first GPU, in GiB; None on the CPU."""
        if self.settings.memory_gib or not self.devices:
            return self.settings.memory_gib
        import torch  # only on a machine with a GPU

        return torch.cuda.get_device_properties(0).total_memory / 2**30

    def world(self, cfg: Launch) -> int:
        """Return the number of ranks of a job; with `auto` its part of the devices."""
        if cfg.nproc_per_node == "auto":
            return max(1, len(self.devices) // self.at_once)
        return cfg.nproc_per_node

    def free(self) -> list[str]:
        self.running = [process for process in self.running if process.poll() is None]
        used = {device for process in self.running for device in process.devices}
        return [device for device in self.devices if device not in used]

    def has_room(self, cfg: Launch) -> bool:
        """Return True if a job can start.

        True while no other job runs, even with too few devices: the job itself then reports that.
        """
        free = len(self.free())
        return not self.running or (
            len(self.running) < self.at_once and (not self.devices or self.world(cfg) <= free)
        )

    def start(self, job: JobToStart) -> "LocalJob":
        ranks = self.world(job.cfg.launch)
        own_devices = self.free()[:ranks]
        env = os.environ | {PARENT: str(os.getpid()), OWN_ENDING: "1"}
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            env.pop(name, None)
        env.setdefault("OMP_NUM_THREADS", str(max(1, cores() // (self.at_once * ranks))))
        if own_devices:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(own_devices)
        with ExitStack() as closing:
            stream = None
            # a job may be refused before it makes its own folder: it prints the reason there
            job.output.parent.mkdir(parents=True, exist_ok=True)
            if self.at_once > 1:
                stream = closing.enter_context(job.output.open("ab"))
            file = closing.enter_context(configuration_file(job.cfg))
            # the new process inherits the mask, and unblocks the signals when it can handle them
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            closing.callback(signal.pthread_sigmask, signal.SIG_SETMASK, blocked)
            streams = {"stdin": subprocess.DEVNULL, "stdout": stream, "stderr": stream}
            process = start_process(
                ["train", *job.words],
                env | {DESCRIPTOR: str(file.fileno())},
                file.fileno(),
                **streams,
            )
        self.running.append(LocalJob(process, own_devices))
        return self.running[-1]


@dataclass(eq=False)
class LocalJob:
    """A job on this node, and the devices it uses."""

    process: subprocess.Popen
    devices: list[str]

    def poll(self) -> int | None:
        """Return the exit code, below 0 if a signal killed the run; None while it runs."""
        return self.process.poll()

    def signal(self, signum: int) -> None:
        """Send a signal. The process passes it on to its ranks, which end with it in any case."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signum)


def devices(cfg: Launch) -> list[str]:
    """Return this process's GPUs as named in CUDA_VISIBLE_DEVICES; [] if it trains on the CPU."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = gpus(cfg)
    return (
        [name.strip() for name in given.split(",")][:count]
        if given is not None
        else [str(i) for i in range(count)]
    )


JobHandle = LocalJob | SubmittedJob
SweepBackend = OnThisNode | OnSlurm
SWEEP_BACKENDS: dict[str, Callable[[Any, Launch], SweepBackend]] = {
    "local": OnThisNode,
    "slurm": OnSlurm,
}
