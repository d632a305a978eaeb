"""Where a job of a sweep runs: `hydra/launcher=NAME` chooses one of PLACES. Needs no torch."""

import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

from fsdp_trainer.config.handover import DESCRIPTOR, hand_over
from fsdp_trainer.config.schema import Launch, TrainConfig
from fsdp_trainer.config.sweeping import Local
from fsdp_trainer.devices import gpus
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.launch.slurm import OnSlurm
from fsdp_trainer.launch.start import cores, ranks_to_start, start_process
from fsdp_trainer.process import PARENT, SIGNALS


class Running(Protocol):
    """A job that was started."""

    def poll(self) -> int | None:
        """The run's exit code once all of it has ended, below 0 if a signal killed it; None before."""

    def signal(self, signum: int) -> None:
        """Ask it to stop in order, or end it by SIGKILL. One that has ended hears nothing."""


class Place(Protocol):
    """Starts jobs, and knows how many."""

    at_once: int
    """Jobs side by side. If it is 1, a job's output is the sweep's own."""

    def world(self, cfg: TrainConfig) -> int:
        """How many ranks such a job has."""

    def memory_gib(self) -> float | None:
        """What each of them may take on its device; None: any."""

    def has_room(self, cfg: TrainConfig) -> bool:
        """Whether another job, of this configuration, can be started now."""

    def start(self, cfg: TrainConfig, words: list[str], output: Path) -> Running:
        """Start a training. words: the arguments of `train`, from which `cfg` was composed; output: where it prints to, if not here."""


class OnThisNode:
    """hydra/launcher=local: processes of this node, each with devices of its own."""

    def __init__(self, settings: Local, cfg: TrainConfig):
        """cfg: that of a job, which says what devices there are and, unless settings do, how many of them a job has.

        Raises UserError for jobs of several nodes.
        """
        if cfg.launch.nodes > 1:
            why = f"jobs run on this node. Over several nodes each:  hydra/launcher=slurm hydra.launcher.nodes={cfg.launch.nodes}"
            raise UserError(
                "the sweep cannot be started", [Problem(f"launch.nodes={cfg.launch.nodes}", why)]
            )
        self.devices = devices(cfg.launch)
        possible = len(self.devices) // ranks_to_start(cfg.launch) if self.devices else 1
        self.at_once = settings.jobs or max(1, possible)
        self.settings, self.running = settings, list[Process]()

    def memory_gib(self) -> float | None:
        """What was set, else what the first GPU has."""
        if self.settings.memory_gib or not self.devices:
            return self.settings.memory_gib
        import torch  # only where there is a GPU to ask

        return torch.cuda.get_device_properties(0).total_memory / 2**30

    def world(self, cfg: TrainConfig) -> int:
        """Ranks of one job: a share of the devices, if it wants all there are."""
        if cfg.launch.nproc_per_node == "auto":
            return max(1, len(self.devices) // self.at_once)
        return cfg.launch.nproc_per_node

    def free(self) -> list[str]:
        """Devices that no job has."""
        self.running = [process for process in self.running if process.poll() is None]
        taken = {device for process in self.running for device in process.devices}
        return [device for device in self.devices if device not in taken]

    def has_room(self, cfg: TrainConfig) -> bool:
        """One that wants more devices than there are is started too, and says so itself."""
        free = len(self.free())
        return not self.running or (
            len(self.running) < self.at_once and (not self.devices or self.world(cfg) <= free)
        )

    def start(self, cfg: TrainConfig, words: list[str], output: Path) -> "Process":
        """Start a process that trains, or whose ranks do."""
        mine, ranks = self.free()[: self.world(cfg)], self.world(cfg)
        env = {
            name: value
            for name, value in os.environ.items()
            if name not in ("MASTER_ADDR", "MASTER_PORT")
        } | {PARENT: str(os.getpid())}
        env.setdefault("OMP_NUM_THREADS", str(max(1, cores() // (self.at_once * ranks))))
        if mine:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
        with ExitStack() as closing:
            shown = None
            if self.at_once > 1:
                output.parent.mkdir(parents=True, exist_ok=True)
                shown = closing.enter_context(output.open("ab"))
            file = closing.enter_context(hand_over(cfg))
            blocked = signal.pthread_sigmask(
                signal.SIG_BLOCK, SIGNALS
            )  # it listens as soon as it can answer
            closing.callback(signal.pthread_sigmask, signal.SIG_SETMASK, blocked)
            streams = {"stdin": subprocess.DEVNULL, "stdout": shown, "stderr": shown}
            process = start_process(
                ["train", *words], env | {DESCRIPTOR: str(file.fileno())}, file.fileno(), **streams
            )
        self.running.append(Process(process, mine))
        return self.running[-1]


class Process:
    """A job on this node."""

    def __init__(self, process: subprocess.Popen, devices: list[str]):
        self.process, self.devices = process, devices

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        return self.process.poll()

    def signal(self, signum: int) -> None:
        """It passes the signal on to its ranks; they do not outlive it."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signum)


def devices(cfg: Launch) -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; [] if it trains on the CPU."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = gpus(cfg)
    return (
        [name.strip() for name in given.split(",")][:count]
        if given is not None
        else [str(i) for i in range(count)]
    )


PLACES: dict[str, Callable[[Any, TrainConfig], Place]] = {"local": OnThisNode, "slurm": OnSlurm}
