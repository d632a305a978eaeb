"""One rank of an evaluation: it computes a part of the requests on the model or a shard of it."""

import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_trainer.apps.evaluate.retrieval_tasks import evaluate_reader
from fsdp_trainer.apps.generate import reader_of_media
from fsdp_trainer.base.safe_text import visible
from fsdp_trainer.checkpoint.frozen_weights import model_config
from fsdp_trainer.checkpoint.load import load_model, read_into
from fsdp_trainer.checkpoint.store import damage_anywhere
from fsdp_trainer.config.durations import parse_duration
from fsdp_trainer.config.evaluation_inputs import is_retrieval, task_names
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.config.paths import find_checkpoint, step_of, tokenizer_folder
from fsdp_trainer.config.schema import Batch, Precision, Sharding
from fsdp_trainer.config.verbs import EvaluateConfig
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.data.tokens.tokenizer_template import load_template
from fsdp_trainer.errors import UserError, report
from fsdp_trainer.evaluation.generation_settings import settings_of_model
from fsdp_trainer.evaluation.scoring import Metrics, Scorer, sharded_split
from fsdp_trainer.evaluation.tasks import Tasks
from fsdp_trainer.launch.world import connect, environment_of_ranks, join
from fsdp_trainer.models.hf.new_model import meta_decoder
from fsdp_trainer.observe.console import error_name, without_errors
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.materialize import allocate
from fsdp_trainer.parallel.memory_check import free_bytes
from fsdp_trainer.parallel.parallelize import Computation, parallelize
from fsdp_trainer.rl.rounds.reward_scores import open_models

RESULTS = "evaluations.jsonl"


def evaluate_as_rank(cfg: EvaluateConfig) -> int:
    """Evaluate with the other ranks; rank 0 prints the results. Returns the exit code."""
    timeout = parse_duration(cfg.launch.timeout)
    env = environment_of_ranks(os.environ) or os.environ
    world = join(env, cfg.launch.device, timeout, cfg.launch.ranks_per_gpu)
    if not world.main:
        os.environ["TQDM_DISABLE"] = "1"
    if world.size > 1:
        connect(world, timeout)
    try:
        metrics = evaluate_model(cfg, world.device)
    except UserError as error:
        if world.main:  # all ranks raise the same error
            report(error)
        return error.exit_code
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if world.main:
        show(cfg, metrics)  # first, because a file may not be writable
        record(cfg, metrics)
    return 0


def evaluate_model(cfg: EvaluateConfig, device: torch.device) -> Metrics:
    """Return {task: {metric: value}}. Collective."""
    reads = not model_config(Path(str(cfg.source)).expanduser(), cfg.implementation).predicts
    if reads or any(map(is_retrieval, task_names(cfg))):
        return evaluate_reader(cfg, device)
    folder = tokenizer_folder(str(cfg.source))
    tokenizer = load_tokenizer(str(folder))
    open_rewards = partial(open_models, device=device)
    template = load_template(cfg.template, tokenizer)
    tasks = Tasks(cfg, tokenizer, template, open_rewards, settings_of_model(Path(folder)))
    return tasks.run(build_scorer(cfg, device))


def record(cfg: EvaluateConfig, metrics: Metrics) -> None:
    source = Path(str(cfg.source))
    checkpoint = find_checkpoint(source)
    if cfg.out:
        Path(cfg.out).expanduser().write_text(json.dumps(metrics, indent=1) + "\n")
    if checkpoint is None:
        return
    run = checkpoint.parent.parent
    line: dict[str, Any] = {"time": time.time(), "step": step_of(checkpoint), "tasks": metrics}
    line["limit"] = cfg.limit
    with open(run / RESULTS, "a") as file:
        file.write(json.dumps(line) + "\n")


def show(cfg: EvaluateConfig, metrics: Metrics) -> None:
    if cfg.format == "json":
        print(json.dumps(metrics))
        return
    rows = [
        (task, name, value, values.get(error_name(name)))
        for task, values in metrics.items()
        for name, value in without_errors(values).items()
    ]
    width = max((len(task) for task, *_ in rows), default=4)
    metric_width = max((len(name) for _, name, *_ in rows), default=6)
    for task, name, value, error in rows:
        spread = "" if error is None else f"  ± {error:.4f}"
        print(visible(f"{task:{width}}  {name:{metric_width}}  {value:8.4f}{spread}"))


# --- the model ------------------------------------------------------------------------------------


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
