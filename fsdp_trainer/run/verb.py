"""The verb `train`: run as a rank started by a launcher, or start the ranks."""

import ctypes
import gc
import importlib
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from fsdp_trainer.base.folders import NewFolders
from fsdp_trainer.base.process import SIGNALS, cores
from fsdp_trainer.config.evaluation_inputs import require_tasks
from fsdp_trainer.config.paths import COMPILE_CACHE, compile_cache, run_folder
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.errors import UserError
from fsdp_trainer.launch.hosts import start_on_hosts
from fsdp_trainer.launch.start import start_ranks, starts_ranks
from fsdp_trainer.launch.start_groups import start_groups

SYMPY_NEEDS = ("cmath", "decimal", "unicodedata")
"""Modules used by sympy that are shared libraries: they would wait for the dynamic linker while it
loads libtorch."""
MOST_COMPILE_THREADS = 32  # torch's own limit


def train(cfg: TrainConfig, overrides: list[str]) -> int:
    """Train as one rank of torchrun or srun, else start launch.nproc_per_node ranks.

    Returns the exit code. If it refuses to start, it deletes the folders that it has created.
    """
    # torch creates its cache folder when it is imported
    new_folders = NewFolders(run_folder(cfg), compile_cache(cfg))
    try:
        code = start(cfg, overrides, new_folders)
    except UserError:
        new_folders.delete_empty()
        raise
    if code == UserError.exit_code:  # a rank has refused
        new_folders.delete_empty()
    return code


def start(cfg: TrainConfig, overrides: list[str], new_folders: NewFolders) -> int:
    """Train; see `train`. new_folders: folders that did not exist when the command began."""
    if cfg.evaluation.tasks or cfg.train.evaluate_every:
        require_tasks(cfg.evaluation, "evaluation.")
        os.environ.setdefault("TQDM_DISABLE", "1")  # hides the harness's progress bars
    # signals stay pending until a handler is installed
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        if cfg.launch.hosts:
            return start_on_hosts(cfg, overrides)
        if cfg.launch.groups > 1:
            return start_groups(cfg, overrides)
        if starts_ranks(cfg.launch, os.environ):
            return start_ranks(cfg, overrides)
        for name, value in cfg.launch.env.items():
            os.environ.setdefault(name, value)
        if cfg.compile.enabled:
            os.environ[COMPILE_CACHE] = str(compile_cache(cfg))  # torch reads it when imported
        limit_compile_threads()
        return import_run_rank()(cfg, new_folders)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def limit_compile_threads() -> None:
    """Divide the cores among the ranks of this node for torch's compiler.

    By default each rank starts a process per core: 256 processes for 8 ranks on 32 cores.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if ranks > 1:
        threads = min(MOST_COMPILE_THREADS, max(1, cores() // ranks))
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))


def import_run_rank() -> Callable[[TrainConfig, NewFolders], int]:
    """Import and return training.run.run_rank.

    A process that only starts ranks does not call this, since it imports torch. The import creates
    300,000 objects that live for ever. Searching them for garbage during the import would take a
    tenth of the start, so the collector is off, and they are frozen afterwards.
    """
    is_first = "fsdp_trainer.run.run" not in sys.modules
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        if "torch" not in sys.modules and sys.platform == "linux":
            import_sympy_beside_libtorch()
        import torch._dynamo  # noqa: F401 - otherwise fully_shard's hooks import it in step 1

        from fsdp_trainer.run.run import run_rank
    finally:
        if was_enabled:
            gc.enable()
    if is_first:
        gc.freeze()
    return run_rank


def import_sympy_beside_libtorch() -> None:
    """Import sympy, which torch's compiler needs, while a thread loads torch's library."""
    for name in SYMPY_NEEDS:
        importlib.import_module(name)
    threading.Thread(target=load_libtorch).start()
    importlib.import_module("sympy")


def load_libtorch() -> None:
    """Load torch's largest shared library, so that `import torch` finds it loaded.

    Loading it is a fifth of the import and runs no Python. launch.env must be set before, since
    OpenMP, which is loaded as well, reads its variables. Does nothing for a GPU build, whose many
    libraries torch must load in its own order. A failure is harmless: torch then loads it itself.
    """
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return
    folder = Path(torch.origin).parent / "lib"
    if any((folder / f"libtorch_{kind}.so").exists() for kind in ("cuda", "hip", "xpu")):
        return
    # calling a C function releases the GIL; ctypes.CDLL(path) does not
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype = ctypes.c_void_p
    if dlopen(os.fsencode(folder / "libtorch_global_deps.so"), os.RTLD_LAZY | os.RTLD_GLOBAL):
        dlopen(os.fsencode(folder / "libtorch_cpu.so"), os.RTLD_LAZY)
