"""Places of the states of the model in training: optim.offload."""

import hashlib
import shutil
from pathlib import Path

import torch.distributed as dist

from fsdp_trainer.base.distributed import run_on_all_ranks
from fsdp_trainer.checkpoint.state import stored_parameters
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.optim.offload.offloaded_optimizer import (
    UPDATING,
    DiskOptimizer,
    OffloadedOptimizer,
    use_disk,
)
from fsdp_trainer.optim.offload.parts import parts_in_memory
from fsdp_trainer.optim.offload.weight_copies import WeightCopies
from fsdp_trainer.optim.optimizer_interface import TrainerOptimizer
from fsdp_trainer.training.setup.run_setup import RunSetup

STATES = "states"
"""Folder in the run's own, unless optim.offload_path names another place."""


def offload_states(
    setup: RunSetup, model: Decoder, optimizer: TrainerOptimizer
) -> TrainerOptimizer:
    """Return the optimizer with its states where optim.offload keeps them. Collective.

    The model's weights are allocated, and not set yet. Raises RunFailed, for example if the disk
    has no room for the files.
    """
    cfg = setup.cfg.optim
    if cfg.offload == "none":
        return optimizer
    copies, named = WeightCopies(model, setup.cfg.sharding.cpu_offload), stored_parameters(model)
    if cfg.offload == "cpu":
        parts = parts_in_memory(named, cfg.spec.whole_matrices)
        return OffloadedOptimizer(optimizer, copies, parts)
    folder = clean_folder(setup) / f"rank-{dist.get_rank()}"
    optimizers: list[TrainerOptimizer] = []

    def make_files() -> None:
        folder.mkdir(parents=True)
        pinned = setup.device.type == "cuda"
        optimizers.append(DiskOptimizer(optimizer, copies, named, folder, pinned))

    use_disk(f"make files for the optimizer's states in {folder}", make_files)
    return optimizers[0]


def clean_folder(setup: RunSetup) -> Path:
    """Return the folder of the run's states, without what an earlier process left there.

    Says if that was in the middle of an update. Collective.
    """
    folder = states_folder(setup.folder, setup.cfg.optim.offload_path)
    what = f"look into {folder}"
    if any(run_on_all_ranks(what, lambda: any(folder.glob(f"rank-*/{UPDATING}")))):
        setup.observer.say(
            "states   an update was cut off when the run ended: they come from the checkpoint"
        )

    def clear() -> None:
        if setup.world.local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)

    run_on_all_ranks(f"clear {folder}", clear)
    return folder


def states_folder(run: Path, path: str | None) -> Path:
    """Return the folder of a run's files of states. path: optim.offload_path."""
    if path is None:
        return run / STATES
    digest = hashlib.blake2b(str(run.resolve()).encode(), digest_size=4).hexdigest()
    return Path(path).expanduser() / f"{run.name}-{digest}"
