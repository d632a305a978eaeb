"""One rank of an evaluation: it holds the whole model and computes a share of the requests."""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_trainer.checkpoint.load import load_model
from fsdp_trainer.config.paths import find_checkpoint, step_of, tokenizer_folder
from fsdp_trainer.config.units import parse_duration
from fsdp_trainer.config.verbs import EvaluateConfig
from fsdp_trainer.data.templates import load_template
from fsdp_trainer.data.tokenizer import load_tokenizer
from fsdp_trainer.errors import UserError, report
from fsdp_trainer.launch.world import connect, environment_of_ranks, join

RESULTS = "evaluations.jsonl"


def evaluate_as_rank(cfg: EvaluateConfig) -> int:
    """Evaluate with the other ranks; rank 0 prints the results. Returns the exit code."""
    timeout = parse_duration(cfg.launch.timeout)
    world = join(environment_of_ranks(os.environ) or os.environ, cfg.launch.device, timeout)
    os.environ["DISABLE_MULTIPROC"] = "1"  # the harness would fork a process for each core
    if not world.main:
        os.environ["TQDM_DISABLE"] = "1"
    if world.size > 1:
        connect(world, timeout)
    try:
        metrics = evaluate_model(cfg, world.device)
    except UserError as error:
        if world.main:  # all ranks find the same
            report(error)
        return error.exit_code
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if world.main:
        record(cfg, metrics)
        show(cfg, metrics)
    return 0


def evaluate_model(cfg: EvaluateConfig, device: torch.device) -> dict[str, dict[str, float]]:
    """Return {task: {metric: value}}. Collective."""
    # heavy optional packages
    from fsdp_trainer.evaluation.harness import HarnessModel
    from fsdp_trainer.evaluation.tasks import run_tasks

    source = str(cfg.source)
    model = load_model(source, device, getattr(torch, cfg.dtype))
    tokenizer = load_tokenizer(str(tokenizer_folder(source)))
    template = load_template(cfg.template, tokenizer)
    return run_tasks(HarnessModel(model, tokenizer, template, cfg.rows, device), cfg)


def record(cfg: EvaluateConfig, metrics: dict[str, dict[str, float]]) -> None:
    """Add a line to the evaluations of a run, and write the file that was asked for."""
    source = Path(str(cfg.source))
    checkpoint = find_checkpoint(source)
    if cfg.out:
        Path(cfg.out).write_text(json.dumps(metrics, indent=1) + "\n")
    if checkpoint is None:
        return
    run = checkpoint.parent.parent
    line: dict[str, Any] = {"time": time.time(), "step": step_of(checkpoint), "tasks": metrics}
    line["limit"] = cfg.limit
    with open(run / RESULTS, "a") as file:
        file.write(json.dumps(line) + "\n")


def show(cfg: EvaluateConfig, metrics: dict[str, dict[str, float]]) -> None:
    """Print the results: a table, or one object."""
    if cfg.format == "json":
        print(json.dumps(metrics))
        return
    rows = [
        (task, name, value, values.get(error_name(name)))
        for task, values in metrics.items()
        for name, value in values.items()
        if "_stderr" not in name
    ]
    width = max((len(task) for task, *_ in rows), default=4)
    metric_width = max((len(name) for _, name, *_ in rows), default=6)
    for task, name, value, error in rows:
        spread = "" if error is None else f"  ± {error:.4f}"
        print(f"{task:{width}}  {name:{metric_width}}  {value:8.4f}{spread}")


def error_name(metric: str) -> str:
    """Return the name of a metric's standard error."""
    name, comma, filters = metric.partition(",")
    return f"{name}_stderr{comma}{filters}"
