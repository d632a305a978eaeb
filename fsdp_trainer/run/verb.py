"""The verb `train`: run as a rank started by a launcher, or start the ranks."""

import os
import signal
from collections.abc import Callable

from fsdp_trainer.base.folders import NewFolders
from fsdp_trainer.base.process import SIGNALS, cores
from fsdp_trainer.base.torch_import import importing_torch
from fsdp_trainer.config.evaluation_inputs import require_tasks
from fsdp_trainer.config.paths import COMPILE_CACHE, compile_cache, run_folder
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.errors import UserError
from fsdp_trainer.launch.hosts import start_on_hosts
from fsdp_trainer.launch.start import start_ranks, starts_ranks
from fsdp_trainer.launch.start_groups import start_groups

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

    A process that only starts ranks does not call this, since it imports torch.
    """
    with importing_torch():
        import torch._dynamo  # noqa: F401 - otherwise fully_shard's hooks import it in step 1

        from fsdp_trainer.run.run import run_rank
    return run_rank
