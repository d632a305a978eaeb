"""The model that a verb evaluates: a complete copy on each rank, or one sharded over all ranks."""

from pathlib import Path

import torch
import torch.distributed as dist

from fsdp_trainer.apps.generate import reader_of_media
from fsdp_trainer.checkpoint.frozen_weights import model_config
from fsdp_trainer.checkpoint.load import load_model, read_into
from fsdp_trainer.checkpoint.store import damage_anywhere
from fsdp_trainer.config.durations import parse_duration
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.config.paths import find_checkpoint
from fsdp_trainer.config.schema import Batch, Precision, Sharding
from fsdp_trainer.config.verbs import EvaluateConfig
from fsdp_trainer.errors import UserError
from fsdp_trainer.evaluation.scoring import Scorer, sharded_split
from fsdp_trainer.models.hf.new_model import meta_decoder
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.materialize import allocate
from fsdp_trainer.parallel.memory_check import free_bytes
from fsdp_trainer.parallel.parallelize import Computation, parallelize

ROOM = 0.8
"""Share of the free memory that a complete model may take."""


def build_scorer(cfg: EvaluateConfig, device: torch.device) -> Scorer:
    """Return a scorer with the model of cfg.source. Collective. Raises UserError and RunFailed."""
    if is_sharded(cfg, device):
        return sharded_scorer(cfg, device)
    dtype, implementation = getattr(torch, cfg.dtype), cfg.implementation
    model = load_model(str(cfg.source), device, dtype, implementation=implementation)
    media = reader_of_media(model.config, str(cfg.source))
    return Scorer(model, cfg.rows, device, media=media)


def is_sharded(cfg: EvaluateConfig, device: torch.device) -> bool:
    """Return True if one model is sharded over the ranks, to all ranks. Collective."""
    if not dist.is_initialized():
        return False
    if cfg.sharded is not None:
        return cfg.sharded
    config = model_config(Path(str(cfg.source)), cfg.implementation)
    numbers = sum(p.numel() for p in meta_decoder(config).parameters())
    size = numbers * getattr(torch, cfg.dtype).itemsize
    too_large = torch.tensor(size > ROOM * free_bytes(device), device=device)
    dist.all_reduce(too_large, dist.ReduceOp.MAX)
    return bool(too_large)


def sharded_scorer(cfg: EvaluateConfig, device: torch.device) -> Scorer:
    """Return a scorer whose model is sharded over all ranks. Collective.

    Each forward gathers its blocks one after another.
    """
    source = Path(str(cfg.source)).expanduser()
    checkpoint = find_checkpoint(source)
    if checkpoint and (problems := damage_anywhere(checkpoint)):
        raise UserError(f"the checkpoint {checkpoint} is damaged", problems)
    computation = Computation(Sharding(), Precision(cfg.dtype, cfg.dtype, cfg.dtype))
    layout = Layout(computation.sharding, dist.get_world_size(), Batch())
    dims = Dims(layout, device.type, parse_duration(cfg.launch.timeout))
    config = model_config(source, cfg.implementation)
    model = parallelize(meta_decoder(config), dims, computation)
    allocate(model, device)
    model.eval().requires_grad_(False)
    read_into(model, source)
    media = reader_of_media(model.config, source)
    return Scorer(model, cfg.rows, device, sharded_split(dims, device), media=media)
