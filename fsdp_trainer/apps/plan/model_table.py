"""A table of the named models and the longest rows with which each can be trained on some GPUs."""

import contextlib
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from rich import box
from rich.table import Table
from rich.text import Text

from fsdp_trainer.config.composing.compose import find_file, options
from fsdp_trainer.config.verbs import PlanConfig
from fsdp_trainer.config.yaml_text import load_yaml
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.from_config.resolve import resolve_model
from fsdp_trainer.observe.console import short
from fsdp_trainer.observe.terminal import Terminal
from fsdp_trainer.optim.footprint import state_bytes
from fsdp_trainer.planning.plan.changes import Candidate
from fsdp_trainer.planning.plan.plan import GIB, RunPlan
from fsdp_trainer.planning.plan.plan_inputs import VOCABULARY, published_vocabulary, single_target

NOT_LISTED = (
    "auto", "tiny", "llama2_", "qwen1_5_", "qwen2_5_", "gemma2_", "phi3_", "mistral_7b", "mixtral_",
    "moonlight_", "olmoe_", "smollm2_360m",
)  # fmt: skip
"""Beginnings of the names of models that have successors, or neighbours of nearly the same size."""
LENGTHS = [2**i for i in range(9, 18)]
"""Tokens of the rows that are tried."""
PLANNED = 4
"""Number of the longer one of the two that are planned."""
MARGIN = 0.87
"""Share of a device's memory that a lower bound may use: rehearsed peaks are up to 15% larger."""
METHODS: dict[str, tuple[dict[str, Any], float]] = {
    "all weights": ({"adapter.name": "none"}, 2.0),
    "LoRA": ({"adapter.name": "lora", "adapter.base": "auto"}, 2.0),
    "QLoRA": ({"adapter.name": "lora", "adapter.base": "nf4"}, 0.5),
}
"""What is trained: columns of the table, the keys that they set, and the bytes that a parameter
needs at least."""
SMALLEST = {"batch.micro_rows": 1, "activation_checkpoint.mode": "full"}
"""Keys of each run of the table."""


class ModelRow(NamedTuple):
    """A model, and for each of METHODS the tokens of the longest row that fits, None if none."""

    model: str
    parameters: int
    longest: dict[str, int | None]


def model_rows(cfg: PlanConfig) -> list[ModelRow]:
    """Return a row for each named model of now, smallest first.

    Raises UserError for several clusters.
    """
    world, device = single_target(cfg, "plan.table is of one cluster")
    rows = []
    for name in options("plan")["model"]:
        file = find_file(f"model/{name}")
        if file is None or name.startswith(NOT_LISTED):
            continue
        sizes = {**load_yaml(file.read_text()), "init_from": None, "depth": None}
        model = replace(type(cfg.model)(), **sizes)
        config = resolve_model(model, published_vocabulary(name) or VOCABULARY)
        run = Candidate(replace(cfg, model=model), config, world, device).changed(SMALLEST)
        longest = {
            title: longest_row(run.changed(keys), lowest)
            for title, (keys, lowest) in METHODS.items()
        }
        rows.append(ModelRow(name, config.parameters(), longest))
    return sorted(rows, key=lambda row: row.parameters)


def longest_row(run: Candidate, least: float) -> int | None:
    """Return the tokens of the longest row with which a run fits, by a plan's lower bound.

    least: bytes that a parameter needs at least. Only two lengths are planned: between and beyond
    them, the memory of each phase grows with the length as it does from one to the other.
    """
    least = bytes_of_states(run) or least
    on_devices = not run.cfg.sharding.cpu_offload
    if on_devices and run.config.parameters() * least > run.world * run.device.memory_gib * GIB:
        return None
    lengths = [length for length in LENGTHS if length <= run.config.max_position_embeddings]
    low, high = lengths[0], lengths[min(PLANNED, len(lengths) - 1)]
    short, long = planned(run, low), planned(run, high)
    if short is None or long is None or not short.host_fits:
        return None
    before, after = (
        {one.phase: one.total for one in plan.memory.moments} for plan in (short, long)
    )

    def fits(length: int) -> bool:
        share = (length - low) / max(1, high - low)
        peak = max(before[name] + share * (after[name] - before[name]) for name in before)
        return peak <= MARGIN * short.memory_bytes

    return max((length for length in lengths if fits(length)), default=None)


def bytes_of_states(run: Candidate) -> float:
    """Return the bytes of a parameter and its states, 0.0 if devices need not hold those of all."""
    cfg = run.cfg
    if cfg.adapter.name != "none" or cfg.optim.offload != "none" or cfg.train.freeze:
        return 0.0
    master = cfg.precision.master_dtype
    return getattr(torch, master).itemsize + state_bytes(cfg.optim, master)


def planned(run: Candidate, length: int) -> RunPlan | None:
    """Return the plan with rows of a length; None if adapters do not fit the model."""
    with contextlib.suppress(UserError):
        return run.changed({"batch.seq_len": length}).plan()
    return None


def table_as_json(cfg: PlanConfig, rows: list[ModelRow]) -> dict[str, Any]:
    """Return the rows: tokens, null where nothing fits."""
    world, device = single_target(cfg, "")
    models = [
        {"model": row.model, "parameters": row.parameters, "longest_row": row.longest}
        for row in rows
    ]
    return {"gpu": device.name, "world_size": world, "models": models}


def show_table(cfg: PlanConfig, rows: list[ModelRow]) -> None:
    world, device = single_target(cfg, "")
    console = Terminal()
    console.print(Text(f"tokens of the longest row on {world:,} × {device.name}", "bold"))
    table = Table("model", box=box.SIMPLE_HEAD, padding=(0, 1))
    for title in ("parameters", *METHODS):
        table.add_column(title, justify="right")
    for row in rows:
        cells = [f"{length:,}" if length else "–" for length in row.longest.values()]
        table.add_row(row.model, short(row.parameters), *cells)
    console.print(table)
    console.print("each with  batch.micro_rows=1 activation_checkpoint=full , and one of")
    console.print("adapter=none   adapter=lora   adapter=qlora ; more fits with")
    console.print("optim=adamw_8bit   optim.offload=cpu   sharding.cpu_offload=true")
    console.print("one of them in full:  fsdp-trainer plan model=NAME batch.seq_len=N …")
