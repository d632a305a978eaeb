"""The verb `train`: join the ranks that a launcher started, or start them."""

import ctypes
import gc
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from glob import glob
from typing import Any

from fsdp_trainer.config.handover import DESCRIPTOR, hand_over
from fsdp_trainer.config.paths import COMPILE_CACHE, compile_cache
from fsdp_trainer.config.schema import Launch, TrainConfig
from fsdp_trainer.errors import Stopped
from fsdp_trainer.launch.nodes import Node, free_port, nodes_of_step

GRACE_SECONDS = 10.0
SECOND_SECONDS = 1.0  # for ranks to end at a second signal by themselves
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # that ask a run to stop in order
ECHO_SECONDS = 2.0  # a scheduler or `timeout` signals a process and its group, and a launcher passes its own on: one request, not two
PARENT = "FSDP_TRAINER_PARENT"  # set by our own launcher: the process that a rank, or a job of a sweep, must not outlive
STOPPED = 75  # on a signal or a time limit, with a checkpoint committed


def train(cfg: TrainConfig, overrides: list[str]) -> int:
    """Train as one rank of a world that torchrun or srun made, else start launch.nproc_per_node ranks. Returns the exit code."""
    blocked = signal.pthread_sigmask(
        signal.SIG_BLOCK, SIGNALS
    )  # what comes before someone listens waits for him
    try:
        if starts_ranks(cfg.launch, os.environ):
            return start_ranks(cfg, overrides)
        os.environ.update(
            {name: value for name, value in cfg.launch.env.items() if name not in os.environ}
        )
        if cfg.compile.enabled:
            os.environ[COMPILE_CACHE] = str(compile_cache(cfg))  # read when torch is imported
        return run_rank_imported()(cfg)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def run_rank_imported() -> Callable[[TrainConfig], int]:
    """training.run's run_rank; its import is that of torch, which a process that only starts ranks has no use for."""
    first, collecting = "fsdp_trainer.training.run" not in sys.modules, gc.isenabled()
    gc.disable()  # 300,000 objects come and stay: searching them for garbage would be a tenth of the start
    try:
        if "torch" not in sys.modules and sys.platform == "linux":
            for library in (
                "cmath",
                "decimal",
                "unicodedata",
            ):  # sympy's: the linker does one thing at a time
                importlib.import_module(library)
            threading.Thread(target=load_torchs_library).start()
            importlib.import_module(
                "sympy"
            )  # torch's compiler needs it, and it needs no torch: imported meanwhile
        import torch._dynamo  # noqa: F401

        from fsdp_trainer.training.run import run_rank
    finally:
        if collecting:
            gc.enable()
    if first:
        gc.freeze()  # nor is there anything to find in them during training
    return run_rank


def load_torchs_library() -> None:
    """Load the largest of torch's shared libraries, for `import torch` to find: the linker's work, a fifth of that import, needs no Python.

    Not before launch.env is set: OpenMP, which comes with it, reads its variables then. A build for GPUs is left to torch, which minds the
    order of its many libraries. If it fails nothing is lost: torch knows other ways.
    """
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return
    lib = os.path.join(os.path.dirname(torch.origin), "lib")
    if any(
        os.path.exists(os.path.join(lib, f"libtorch_{kind}.so")) for kind in ("cuda", "hip", "xpu")
    ):
        return
    dlopen = ctypes.CDLL(
        None
    ).dlopen  # called as a C function it lets other threads work; ctypes.CDLL(path) does not
    dlopen.restype = ctypes.c_void_p
    if dlopen(os.path.join(lib, "libtorch_global_deps.so").encode(), os.RTLD_LAZY | os.RTLD_GLOBAL):
        dlopen(os.path.join(lib, "libtorch_cpu.so").encode(), os.RTLD_LAZY)


def launcher(env: Mapping[str, str]) -> str | None:
    """What made a world that this process belongs to, if anything did."""
    if "RANK" in env:
        return "torchrun"
    return "srun" if int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1 else None


def starts_ranks(cfg: Launch, env: Mapping[str, str]) -> bool:
    """Whether this process is to start ranks, rather than to be one: no launcher made any, or srun one task for a node's many."""
    alone = launcher(env) is None
    return (alone and cfg.nodes > 1) or (
        (alone or (launcher(env) == "srun" and nodes_of_step(env) > 1)) and ranks_to_start(cfg) > 1
    )


def has_gpus(cfg: Launch) -> bool:
    """Whether ranks may compute on GPUs of this node."""
    return cfg.device != "cpu" and bool(glob("/dev/nvidia[0-9]*") + glob("/dev/kfd"))


def ranks_to_start(cfg: Launch) -> int:
    """How many ranks this node gets."""
    if cfg.nproc_per_node != "auto":
        return cfg.nproc_per_node
    return max(1, gpus(cfg))


def gpus(cfg: Launch) -> int:
    """How many GPUs of this node ranks may compute on."""
    if not has_gpus(cfg):
        return 0
    import torch  # only where there may be a GPU to count

    return torch.cuda.device_count()


def cores() -> int:
    """How many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def die_with_parent(parent: int) -> None:
    """What outlives a launcher killed hard would go on writing into a run that a new launch has taken over."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    except (OSError, AttributeError):
        return  # not Linux
    if os.getppid() != parent:
        os._exit(1)


def start_ranks(cfg: TrainConfig, overrides: list[str], verb: str = "train") -> int:
    """Start the ranks of `cfg`, composed from `overrides`, on this node and wait. Returns the exit code of the first that failed, else 0.

    What torchrun does, but the codes come through, and the parent needs no torch. Signals are passed on. Of several
    nodes each starts its own ranks when all have met; when ranks of one fail, those of the others end, and all return its code.
    """
    if PARENT in os.environ:  # a job of a sweep
        die_with_parent(int(os.environ[PARENT]))
    count, node = ranks_to_start(cfg.launch), None
    env = {**cfg.launch.env, **os.environ, "LOCAL_WORLD_SIZE": str(count), PARENT: str(os.getpid())}
    env |= {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores() // count)))
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the ranks inherit it
    if cfg.launch.nodes > 1 or nodes_of_step(os.environ):
        devices = (
            f"{socket.gethostname()}:{os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}"
            if has_gpus(cfg.launch)
            else ""
        )
        try:
            node = Node(cfg.launch, str(cfg.run.name), count, devices, os.environ)
        except Stopped as stopped:
            print(f"stopped by {stopped.args[0]} before all nodes had come", file=sys.stderr)
            return STOPPED
        finally:
            if node is None:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        env |= node.environment()
    first = node.first if node else 0
    with hand_over(cfg) as file:
        env[DESCRIPTOR] = str(file.fileno())
        places = [{"RANK": str(first + r), "LOCAL_RANK": str(r)} for r in range(count)]
        ranks = [start_process([verb, *overrides], env | place, file.fileno()) for place in places]
    received: list[int] = []

    heard_at, patience = -ECHO_SECONDS, Patience()

    def pass_on(signum: int, _frame: object) -> None:
        nonlocal heard_at
        if time.monotonic() - heard_at < ECHO_SECONDS:
            return
        heard_at = heard_at if received else time.monotonic()
        received.append(signum)
        for rank in (rank for rank in ranks if rank.poll() is None):
            rank.send_signal(signum)
        if len(received) > 1:
            patience.ends_in(SECOND_SECONDS)

    heard = SIGNALS if threading.current_thread() is threading.main_thread() else ()
    before = {signum: signal.signal(signum, pass_on) for signum in heard}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        code = wait_for_ranks(ranks, patience, node)
        if node:
            node.leave(code)
            if node.node and code not in (0, STOPPED):
                print(
                    f"fsdp-trainer: this node ends with code {code}; rank 0, on {node.address}, says why",
                    file=sys.stderr,
                )
        if received and code == 1:
            print(
                f"fsdp-trainer: ended by {signal.Signals(received[0]).name}; what was committed stays",
                file=sys.stderr,
            )
        return code
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for s, handler in before.items():
            signal.signal(s, handler)


def start_process(
    words: list[str], env: dict[str, str], configuration: int, **streams: Any
) -> subprocess.Popen:
    """A rank, or a job of a sweep. What it is to do lies in the open file `configuration`; the words are there for whoever lists processes.

    streams: as of subprocess.
    """
    command = [sys.executable, "-m", "fsdp_trainer", *words]
    # a session of its own: Ctrl-C at a terminal reaches it through us alone, and once
    return subprocess.Popen(
        command, env=env, pass_fds=[configuration], start_new_session=True, **streams
    )


class Patience:
    """Until when ranks may go on; then they are killed."""

    until = float("inf")

    def ends_in(self, seconds: float) -> None:
        """At the latest."""
        self.until = min(self.until, time.monotonic() + seconds)


def wait_for_ranks(
    ranks: list[subprocess.Popen], patience: Patience, node: Node | None = None
) -> int:
    """Wait until all have ended. The first to fail, here or on another node, decides the code; the others get a little time, then are killed."""
    first_failure, told = 0, False
    while True:
        codes = [
            rank.poll() for rank in ranks
        ]  # of all: one that ended before the first must be seen
        failed = {
            number: code for number, code in enumerate(codes, node.first if node else 0) if code
        }
        if node and node.heard and not first_failure and not failed:
            first_failure, why = node.heard
            print(f"fsdp-trainer: {why}", file=sys.stderr)
            told = True  # what ends here ends for that
            patience.ends_in(GRACE_SECONDS)
        if failed and not first_failure:
            first_failure = next(iter(failed.values()))
            if (
                first_failure != STOPPED
            ):  # those that stop in order may still be closing their trackers
                patience.ends_in(GRACE_SECONDS)
        if not told and patience.until > time.monotonic():
            for number, code in failed.items():
                if code < 0:
                    print(
                        f"fsdp-trainer: rank {number} was killed by {signal.Signals(-code).name}",
                        file=sys.stderr,
                    )
                    told = True  # the others may go the same way for it
        if None not in codes:
            return 1 if first_failure < 0 else first_failure
        if time.monotonic() > patience.until:
            for rank in ranks:
                rank.kill()
        time.sleep(0.05)
