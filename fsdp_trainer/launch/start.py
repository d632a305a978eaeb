"""The verb `train`: join the ranks that a launcher started, or start them."""

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from glob import glob

from fsdp_trainer.config.handover import DESCRIPTOR, hand_over
from fsdp_trainer.config.paths import COMPILE_CACHE, compile_cache
from fsdp_trainer.config.schema import Launch, TrainConfig

GRACE_SECONDS = 10.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # that ask a run to stop in order
ECHO_SECONDS = 2.0  # a scheduler or `timeout` signals a process and its group, and a launcher passes its own on: one request, not two
STOPPED = 75  # on a signal or a time limit, with a checkpoint committed


def train(cfg: TrainConfig, overrides: list[str]) -> int:
    """Train as one rank of a world that torchrun or srun made, else start launch.nproc_per_node ranks. Returns the exit code."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # what comes before someone listens waits for him
    try:
        if launcher(os.environ) is None and ranks_to_start(cfg.launch) > 1:
            return start_ranks(cfg, overrides)
        os.environ.update({name: value for name, value in cfg.launch.env.items() if name not in os.environ})
        if cfg.compile.enabled:
            os.environ[COMPILE_CACHE] = str(compile_cache(cfg))  # read when torch is imported
        return run_rank_imported()(cfg)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def run_rank_imported() -> Callable[[TrainConfig], int]:
    """training.run's run_rank; its import is that of torch, which a process that only starts ranks has no use for."""
    first, before = "fsdp_trainer.training.run" not in sys.modules, gc.get_threshold()
    gc.set_threshold(100_000)  # 300,000 objects come and stay: at the usual 700, searching them for garbage is a tenth of the start
    try:
        from fsdp_trainer.training.run import run_rank
    finally:
        gc.set_threshold(*before)
    if first:
        gc.freeze()  # nor is there anything to find in them during training
    return run_rank


def launcher(env: Mapping[str, str]) -> str | None:
    """What made a world that this process belongs to, if anything did."""
    if "RANK" in env:
        return "torchrun"
    return "srun" if int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1 else None


def ranks_to_start(cfg: Launch) -> int:
    """How many ranks this node gets."""
    if cfg.nproc_per_node != "auto":
        return cfg.nproc_per_node
    if cfg.device == "cpu" or not glob("/dev/nvidia[0-9]*") + glob("/dev/kfd"):
        return 1
    import torch  # only where there may be a GPU to count

    return max(1, torch.cuda.device_count())


def start_ranks(cfg: TrainConfig, overrides: list[str], received: list[int] | None = None) -> int:
    """Start the ranks of `cfg`, composed from `overrides`, on this node and wait. Returns the exit code of the first that failed, else 0.

    What torchrun does, but the codes come through, and the parent needs no torch. Signals are passed on, and kept in `received`.
    """
    count = ranks_to_start(cfg.launch)
    env = {
        **cfg.launch.env,
        **os.environ,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "FSDP_TRAINER_PARENT": str(os.getpid()),
    }
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores // count)))
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the ranks inherit it
    with hand_over(cfg) as file:
        env[DESCRIPTOR] = str(file.fileno())
        ranks = [start_rank(overrides, {**env, "RANK": str(r), "LOCAL_RANK": str(r)}, file.fileno()) for r in range(count)]
    received = [] if received is None else received

    heard_at = -ECHO_SECONDS

    def pass_on(signum: int, _frame: object) -> None:
        nonlocal heard_at
        if time.monotonic() - heard_at < ECHO_SECONDS:
            return
        heard_at = heard_at if received else time.monotonic()
        received.append(signum)
        for rank in (rank for rank in ranks if rank.poll() is None):
            if len(received) > 1:
                rank.kill()  # a rank that waits for a dead one would not hear it
            else:
                rank.send_signal(signum)

    heard = SIGNALS if threading.current_thread() is threading.main_thread() else ()
    before = {signum: signal.signal(signum, pass_on) for signum in heard}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        code = wait_for_ranks(ranks)
        if received and code == 1:
            print(f"fsdp-trainer: ended by {signal.Signals(received[0]).name}; what was committed stays", file=sys.stderr)
        return code
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for s, handler in before.items():
            signal.signal(s, handler)


def start_rank(overrides: list[str], env: dict[str, str], configuration: int) -> subprocess.Popen:
    """One rank. What it is to do lies in the open file `configuration`; the overrides are there for whoever lists processes."""
    command = [sys.executable, "-m", "fsdp_trainer", "train", *overrides]
    # a session of its own: Ctrl-C at a terminal reaches it through us alone, and once
    return subprocess.Popen(command, env=env, pass_fds=[configuration], start_new_session=True)


def wait_for_ranks(ranks: list[subprocess.Popen]) -> int:
    """Wait until all have ended. The first to fail decides the code; the others get a little time, then are killed."""
    first_failure, deadline = 0, float("inf")
    while any(rank.poll() is None for rank in ranks):
        failed = [rank.returncode for rank in ranks if rank.returncode]
        if failed and not first_failure:
            first_failure = failed[0]
            if first_failure != STOPPED:  # those that stop in order may still be closing their trackers
                deadline = time.monotonic() + GRACE_SECONDS
        if time.monotonic() > deadline:
            for rank in ranks:
                rank.kill()
        time.sleep(0.05)
    first_failure = first_failure or next((rank.returncode for rank in ranks if rank.returncode), 0)
    return 1 if first_failure < 0 else first_failure


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
