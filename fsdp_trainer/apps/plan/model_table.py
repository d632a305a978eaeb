"""A table of the named models and the longest rows with which each can be trained on some GPUs."""

import contextlib
import math
from dataclasses import replace
from typing import Any, NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from fsdp_trainer.config.composing.compose import find_file, options
from fsdp_trainer.config.verbs import PlanConfig
from fsdp_trainer.config.yaml_text import load_yaml
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.resolve import resolve_model
from fsdp_trainer.observe.console import short
from fsdp_trainer.observe.terminal import Terminal
from fsdp_trainer.plan.changes import Candidate
from fsdp_trainer.plan.plan import GIB, RunPlan
from fsdp_trainer.plan.plan_inputs import VOCABULARY, published_vocabulary, single_target

SUCCEEDED = ("llama2_", "qwen1_5_", "qwen2_5_", "gemma2_", "phi3_")
"""Beginnings of the names of models that have successors of the same sizes: they are not listed."""
LENGTHS = [2**i for i in range(9, 18)]
"""Tokens of the rows that are tried."""
METHODS: dict[str, tuple[dict[str, Any], float]] = {
    "all weights": ({"adapter.name": "none"}, 2.0),
    "LoRA": ({"adapter.name": "lora"}, 2.0),
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
        if name == "auto" or file is None or name.startswith(SUCCEEDED):
            continue
        sizes = {**load_yaml(file.read_text()), "init_from": None, "depth": None}
        model = replace(type(cfg.model)(), **sizes)
        config = resolve_model(model, published_vocabulary(name) or VOCABULARY)
        run = Candidate(replace(cfg, model=model), config, world, device).changed(SMALLEST)
        longest = {
            title: longest_row(run.changed(keys), least) for title, (keys, least) in METHODS.items()
        }
        rows.append(ModelRow(name, config.parameters(), longest))
    return sorted(rows, key=lambda row: row.parameters)


def longest_row(run: Candidate, least: float) -> int | None:
    """Return the tokens of the longest row with which a run fits, by the formulas of a plan.

    least: bytes that a parameter needs at least. Memory grows with the length as it does between
    the two shortest rows; what this says is checked.
    """
    if run.config.parameters() * least > run.world * run.device.memory_gib * GIB:
        return None
    known = [planned(run, length) for length in LENGTHS[:2]]
    if known[0] is None or not fits(known[0]):
        return None
    longest = 0
    if known[1] is not None and fits(known[1]):
        of_row = max(1.0, known[1].peak_bytes - known[0].peak_bytes)
        longest = 1 + int(
            math.log2(max(1.0, (known[1].memory_bytes - known[0].peak_bytes) / of_row))
        )
    limit = sum(length <= run.config.max_position_embeddings for length in LENGTHS)
    for number in range(min(longest, limit - 1), 1, -1):
        plan = planned(run, LENGTHS[number])
        if plan is not None and fits(plan):
            return LENGTHS[number]
    return LENGTHS[min(longest, 1)]


def planned(run: Candidate, length: int) -> RunPlan | None:
    """Return the plan with rows of a length; None if adapters do not fit the model."""
    with contextlib.suppress(UserError):
        return run.changed({"batch.seq_len": length}).plan()
    return None


def fits(plan: RunPlan) -> bool:
    """Return True if a run fits device and host."""
    return plan.fits and plan.host_fits


def table_as_json(cfg: PlanConfig, rows: list[ModelRow]) -> dict[str, Any]:
    """Return the rows: tokens, null where nothing fits."""
    world, device = single_target(cfg, "")
    models = [
        {"model": row.model, "parameters": row.parameters, "longest_row": row.longest}
        for row in rows
    ]
    return {"gpu": device.name, "world_size": world, "models": models}


def show_table(cfg: PlanConfig, rows: list[ModelRow]) -> None:
    """Print the rows, and what to type for one of them."""
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
