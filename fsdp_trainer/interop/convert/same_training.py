"""A table at a recipe's end: what another trainer would train, and what the recipe trains."""

import math
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from safetensors import SafetensorError

from fsdp_trainer.config.schema import Adapter, Model
from fsdp_trainer.errors import UserError
from fsdp_trainer.interop.convert.defaults import TRAINERS
from fsdp_trainer.interop.convert.foreign_file import ForeignFile
from fsdp_trainer.interop.convert.lengths import (
    is_packed,
    samples_of_step,
    steps_of_run,
    warm_up_steps,
)
from fsdp_trainer.interop.convert.trainers import OWN_TOOL
from fsdp_trainer.interop.convert.translation import as_number
from fsdp_trainer.optim.schedules import warmup_steps
from fsdp_trainer.training.setup.run_length import RunLength

UNKNOWN = "unknown until the data is read"
NO_WEIGHTS = "unknown without the model's files"
NOT_SAID = "not in the file"
"""What stands in the table for a number that nobody knows."""


def rates_there(file: ForeignFile, steps: int) -> list[float] | None:
    name = str(file.value("lr_scheduler_type", "lr_scheduler")).rpartition(".")[2].lower()
    shapes = {"linear": lambda x: 1 - x, "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
              "constant": lambda x: 1.0, "constant_with_warmup": lambda x: 1.0}  # fmt: skip
    peak, rise = as_number(file.value("learning_rate")), warm_up_steps(file, steps)
    if name not in shapes or not isinstance(peak, int | float) or rise is None:
        return None
    return [peak * (n / rise if n < rise else shapes[name]((n - rise) / max(1, steps - rise)))
            for n in range(steps)]  # fmt: skip


def comparison(
    length: RunLength, trained: tuple[Any, Any], file: ForeignFile
) -> list[tuple[str, str, str]]:
    """Return what is compared, there and here; [] for a file that is no whole training.

    length: that of the recipe's run, without rows if nobody knows how many its data has. trained:
    how many parameters are, there and here.
    """
    if file.tool not in TRAINERS:
        return []
    there, steps = steps_of_run(file), length.steps or None
    rise, highest = rise_here(length, steps)
    rates = rates_there(file, there) if there else None
    peak = as_number(file.value("learning_rate")) or NOT_SAID
    lines = [
        (f"{unit_of(file)} a step", samples_of_step(file) or NOT_SAID, length.batch.rows),
        ("steps", there, steps),
        ("highest learning rate", max(rates) if rates else peak, highest),
        ("steps of warm-up", warm_up_steps(file, there), rise),
        ("trained parameters", *trained),
    ]
    head = ("", shown_name(file), "here")
    return [head, *((what, number(one), number(other)) for what, one, other in lines)]


def rise_here(length: RunLength, steps: int | None) -> tuple[int | None, float]:
    """Return the steps of the recipe's warm-up, None if nobody knows them, and the highest rate."""
    rise = warmup_steps(length.schedule, steps or 0)
    if steps is None:
        return None if length.schedule.warmup else rise, length.optim.lr
    return rise, length.highest_rate(1, steps, rise)[0]


def unit_of(file: ForeignFile) -> str:
    if file.method == "grpo":
        return "prompts"
    return "rows of several samples" if is_packed(file) else "samples"


def shown_name(file: ForeignFile) -> str:
    own = "TRL" if file.method else "transformers"
    return own if file.tool == OWN_TOOL else file.tool


def trained_parameters(model: Model, adapter: Adapter, method: str | None) -> tuple[Any, Any]:
    folder = Path(model.init_from or "")
    if not model.init_from or not (folder / "config.json").is_file():
        return NO_WEIGHTS, NO_WEIGHTS
    try:
        here, shapes = resolve_name("fsdp_trainer.interop.convert.trained_here:trained_here")(
            model, adapter, method == "reward"
        )
        if method == "reward":  # a head of one row
            shapes.pop("lm_head.weight", None)
            shapes["score.weight"] = [1, *shapes.get("model.embed_tokens.weight", [0, 0])[1:]]
        return trained_there(adapter, shapes) or NO_WEIGHTS, here
    except (UserError, SafetensorError, OSError, ValueError):
        return NO_WEIGHTS, NO_WEIGHTS


def trained_there(adapter: Adapter, shapes: dict[str, list[int]]) -> int:
    """Return how many parameters of stored tensors, or of PEFT's matrices for them, are trained."""
    if adapter.name == "none":
        return sum(math.prod(shape) for shape in shapes.values())
    matrices = {name.removesuffix(".weight"): shape for name, shape in shapes.items()
                if name.endswith(".weight") and len(shape) == 2 and ".layers." in name}  # fmt: skip
    chosen = [
        shape
        for name, shape in matrices.items()
        if adapter.targets == "all" or name.rpartition(".")[2] in adapter.targets
    ]
    lengths = sum(rows for rows, _ in chosen) if adapter.name == "dora" else 0
    return lengths + sum(adapter.rank * (rows + columns) for rows, columns in chosen)


def number(value: Any) -> str:
    """Return a number as it is shown; None: nobody knows it before the data is read."""
    if value is None:
        return UNKNOWN
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
