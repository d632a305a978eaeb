"""Starting the ranks of this node, and waiting for them."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fsdp_trainer.base.process import (
    ECHO_SECONDS,
    HOST,
    PARENT,
    SIGNALS,
    STOPPED,
    cores,
    die_with_parent,
)
from fsdp_trainer.base.safe_text import safe, without_secrets
from fsdp_trainer.config.composing.handover import DESCRIPTOR, configuration_file
from fsdp_trainer.config.devices import gpus, has_gpus
from fsdp_trainer.config.paths import committed_checkpoints, run_folder, step_of
from fsdp_trainer.config.schema import Launch, TrainConfig
from fsdp_trainer.errors import Stopped
from fsdp_trainer.launch.nodes import Node, free_port, nodes_of_step
from fsdp_trainer.launch.started_node import obey_starter

GRACE_SECONDS = 10.0  # for ranks to end after another one failed
SECOND_SECONDS = 1.0  # for ranks to end after a second signal


def launcher(env: Mapping[str, str]) -> str | None:
    if "RANK" in env:
        return "torchrun"
    return "srun" if int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1 else None


def starts_ranks(cfg: Launch, env: Mapping[str, str]) -> bool:
    """Return True if this process starts ranks instead of being one.

    True without a launcher if there are several ranks, nodes or hosts, and for the only task that
    srun starts on a node of several ranks.
    """
    started_by = launcher(env)
    if started_by is None:
        return bool(cfg.hosts) or cfg.nodes > 1 or HOST in env or ranks_to_start(cfg) > 1
    return started_by == "srun" and nodes_of_step(env) > 1 and ranks_to_start(cfg) > 1


def ranks_to_start(cfg: Launch) -> int:
    if cfg.nproc_per_node != "auto":
        return cfg.nproc_per_node
    return max(1, gpus(cfg) * cfg.ranks_per_gpu)


def start_ranks(
    cfg: TrainConfig,
    overrides: list[str],
    verb: str = "train",
    start: "Callable[..., Child] | None" = None,
    **streams: Any,
) -> int:
    """Start this node's ranks and wait for them.

    Returns the exit code of the first rank that failed, else 0. Unlike torchrun, this keeps the
    exit code and imports no torch. Signals are passed on to the ranks. With several nodes, each one
    starts its ranks when all nodes have met. When ranks of one node fail, those of the others end
    too, and all nodes return the same code. overrides: the arguments that `cfg` was composed from.
    start: starts a rank, as start_process does; streams: stdout and stderr of the ranks, as of
    subprocess.Popen.
    """
    if PARENT in os.environ:  # a job of a sweep
        die_with_parent(int(os.environ[PARENT]))
    count = ranks_to_start(cfg.launch)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # inherited by the ranks
    try:
        if HOST in os.environ:
            obey_starter()
        node = meet_nodes(cfg.launch, str(cfg.run.name), count)
        with configuration_file(cfg) as file:
            words = [verb, *overrides]
            given = words, cfg.launch.env, file.fileno(), count, node, start
            processes = start_processes(*given, **streams)
        advice = partial(advice_after_kill, run_folder(cfg), cfg.checkpoint.resume, verb)
        ranks = RankProcesses(processes, node, advice)
        with passing_on_signals(ranks) as received:
            code = ranks.wait()
            if node:
                node.leave(code)
    except Stopped as stopped:
        print(f"stopped by {stopped.args[0]} before all nodes had joined", file=sys.stderr)
        return STOPPED
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if node and node.node and code not in (0, STOPPED) and HOST not in os.environ:
        where = f"rank 0, on {node.address}, says why"
        print(f"fsdp-trainer: this node ends with code {code}; {where}", file=sys.stderr)
    if received and code == 1:
        name = signal.Signals(received[0]).name
        print(f"fsdp-trainer: ended by {name}; what was committed stays", file=sys.stderr)
    return code


def how_to_go_on(resume: str, step: int | None = None) -> str:
    """Return advice on how to resume a run.

    resume: checkpoint.resume; step: of its newest checkpoint, to be mentioned.
    """
    after = "" if step is None else f" after step {step:,}"
    if resume == "auto":
        return f"the same command resumes{after}"
    return f"resume{after} with  checkpoint.resume=auto"


def advice_after_kill(run: Path, resume: str, verb: str) -> str:
    """Return advice on what to type after ranks of `train` were killed; "" for other commands.

    run: the run's folder; resume: checkpoint.resume.
    """
    if verb != "train":
        return ""
    committed = committed_checkpoints(run)
    if not committed:
        return "No checkpoint was committed: the same command starts from the beginning"
    line = how_to_go_on(resume, step_of(committed[-1]))
    return line[0].upper() + line[1:]


def meet_nodes(cfg: Launch, run: str, ranks: int) -> Node | None:
    """Meet the other nodes; return None if there are none. Raises Stopped at a signal.

    run: the run's name; ranks: number of ranks of this node.
    """
    if cfg.nodes == 1 and not nodes_of_step(os.environ):
        return None
    devices = ""
    if has_gpus(cfg):
        devices = f"{socket.gethostname()}:{os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}"
    return Node(cfg, run, ranks, devices, os.environ)


def start_processes(
    words: list[str],
    configured: Mapping[str, str],
    configuration: int,
    count: int,
    node: Node | None,
    start: "Callable[..., Child] | None",
    **streams: Any,
) -> "list[Child]":
    """Start `count` ranks with the variables that torchrun would set.

    words, configuration, start, streams: see `start_ranks`; configured: launch.env.
    """
    env = {**configured, **os.environ, "LOCAL_WORLD_SIZE": str(count), PARENT: str(os.getpid())}
    env |= {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env |= node.environment() if node else {}
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores() // count)))
    # a node of launch.hosts receives its signals through its standard input
    if env.pop(HOST, None):
        streams["stdin"] = subprocess.DEVNULL
    first = node.first if node else 0
    env[DESCRIPTOR] = str(configuration)
    numbers = [{"RANK": str(first + i), "LOCAL_RANK": str(i)} for i in range(count)]
    start = start or start_process
    return [start(words, env | number, configuration, **streams) for number in numbers]


def start_process(
    words: list[str], env: dict[str, str], configuration: int, **streams: Any
) -> subprocess.Popen:
    """Start a rank, or a job of a sweep.

    configuration: descriptor of the open file from which it reads its configuration; words:
    arguments, which only inform people who list processes; streams: stdin, stdout and stderr of
    subprocess.Popen.
    """
    command = [sys.executable, "-m", "fsdp_trainer", *map(without_secrets, words)]
    # in a new session, so that Ctrl-C at a terminal reaches it only through this process, and once
    return subprocess.Popen(
        command, env=env, pass_fds=[configuration], start_new_session=True, **streams
    )


class Child(Protocol):
    """A started process, with the methods of subprocess.Popen."""

    def poll(self) -> int | None:
        """Return the exit code, below 0 if a signal killed the process; None while it runs."""

    def send_signal(self, signum: int) -> None:
        """Send a signal to the process."""

    def kill(self) -> None:
        """End the process at once."""


class RankProcesses:
    """The ranks of this node, and a deadline for them."""

    def __init__(
        self,
        processes: Sequence[Child],
        node: Node | None = None,
        advice: Callable[[], str] = str,
    ):
        """Take over started processes. advice: returns advice after a rank was killed, or ""."""
        self.processes, self.node, self.advice = processes, node, advice
        self.first = node.first if node else 0
        self.deadline = float("inf")
        self._explained = False

    def end_within(self, seconds: float) -> None:
        self.deadline = min(self.deadline, time.monotonic() + seconds)

    def send_signal(self, signum: int) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signum)

    def wait(self) -> int:
        """Wait until all have ended, and return the code of the first failure, else 0.

        A failure here or on another node gives the other ranks GRACE_SECONDS to end.
        """
        failure = 0
        while True:
            # poll all before deciding, so that the first of several failed ranks is reported
            codes = [process.poll() for process in self.processes]
            failed = {rank: code for rank, code in enumerate(codes, self.first) if code}
            failure = failure or self._first_failure(failed)
            self._report_killed(failed)
            if None not in codes:
                return 1 if failure < 0 else failure
            if time.monotonic() > self.deadline:
                for process in self.processes:
                    process.kill()
            time.sleep(0.05)

    def _first_failure(self, failed: dict[int, int]) -> int:
        """Return the code of a failed rank or node, else 0, and set a deadline for the others."""
        code = next(iter(failed.values()), 0)
        if not code and self.node and self.node.heard:
            code, reason = self.node.heard
            print(safe(f"fsdp-trainer: {reason}"), file=sys.stderr)
            self._explained = True  # ranks that end from now on end for this reason
            self.end_within(GRACE_SECONDS)
        elif code not in (0, STOPPED):  # after STOPPED the others may still be closing trackers
            self.end_within(GRACE_SECONDS)
        return code

    def _report_killed(self, failed: dict[int, int]) -> None:
        """Print once which ranks a signal killed: later deaths may only be a consequence."""
        if self._explained or time.monotonic() >= self.deadline:
            return
        for rank, code in failed.items():
            if code < 0:
                text = f"fsdp-trainer: {self._how_killed(rank, code)}"
                print("\n".join(filter(None, (text, self.advice()))), file=sys.stderr)
                self._explained = True

    def _how_killed(self, rank: int, code: int) -> str:
        return f"rank {rank} was killed by {signal.Signals(-code).name}"


@contextmanager
def passing_on_signals(ranks: RankProcesses) -> Iterator[list[int]]:
    """Pass signals on to the ranks, and yield the list of those received.

    Signals within ECHO_SECONDS of the first one are ignored. A later one leaves the ranks
    SECOND_SECONDS to end. If the ranks end after a signal, further signals are ignored for
    ECHO_SECONDS, since the run has already stopped.
    """
    received: list[int] = []
    heard_at = -ECHO_SECONDS
    ended_at = 0.0

    def pass_on(signum: int, _frame: object) -> None:
        nonlocal heard_at
        if time.monotonic() - heard_at < ECHO_SECONDS:
            return
        heard_at = heard_at if received else time.monotonic()
        received.append(signum)
        ranks.send_signal(signum)
        if len(received) > 1:
            ranks.end_within(SECOND_SECONDS)

    def ignore_echo(signum: int, _frame: object) -> None:
        if time.monotonic() - ended_at >= ECHO_SECONDS:
            signal.signal(signum, before[signal.Signals(signum)])
            signal.raise_signal(signum)

    in_main_thread = threading.current_thread() is threading.main_thread()
    signals = SIGNALS if in_main_thread else ()
    before = {signum: signal.signal(signum, pass_on) for signum in signals}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        yield received
    finally:
        # blocked until the caller restores the mask, when the new handlers are in place
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        ended_at = time.monotonic()
        for signum, handler in before.items():
            signal.signal(signum, ignore_echo if received else handler)
