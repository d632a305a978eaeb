"""Rules for a model that transformers' own class computes. Does not import torch."""

from collections.abc import Iterator
from typing import Any

from fsdp_trainer.config.parts.families import FAMILIES
from fsdp_trainer.config.schema import Model, Sharding
from fsdp_trainer.errors import Problem
from fsdp_trainer.models.config import AUTO, NATIVE, NOT_COMPUTED, TRANSFORMERS

FREE = (*NOT_COMPUTED, "vocab_size")
"""Keys of the architecture that may be set: all others are read by transformers' class."""


def transformers_problems(sharding: Sharding, kind: Any, keys: dict[str, Any]) -> Iterator[Problem]:
    """Yield what is not possible with a model of transformers.

    kind: its model_type. keys: keys of the architecture that are set.
    """
    computes = f"transformers' class computes {kind}, which is sharded by fsdp, hsdp and ddp alone"
    native = f"{', '.join(FAMILIES)} have it, and docs/any-model.md says how another one gets it"
    for name in ("tensor", "context", "expert", "pipeline"):
        if (size := getattr(sharding, name)) > 1:
            reason = f"{computes}.\nUse  sharding.{name}=1  ({native})"
            yield Problem(f"sharding.{name}={size}", reason)
    for name, value in keys.items():
        if name not in FREE:
            reason = f"transformers' class of {kind} reads this from the folder: drop it"
            yield Problem(f"model.{name}={value}", reason)


def without_folder(model: Model) -> Iterator[Problem]:
    chosen = model.implementation
    if chosen == TRANSFORMERS and model.init_from is None:
        reason = (
            "transformers' class needs a folder with config.json and weights.\n"
            f"Use  model.init_from=FOLDER  or  model.implementation={NATIVE}  or  {AUTO}"
        )
        yield Problem(f"model.implementation={chosen}", reason)
