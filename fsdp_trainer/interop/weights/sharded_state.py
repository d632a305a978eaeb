"""Distributed checkpoints (DCP) of other tools: torchtitan's, accelerate's, FSDP's."""

import re
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdp_trainer.checkpoint.formats.description import described_by_torch
from fsdp_trainer.checkpoint.formats.stored_tensors import StoredTensors
from fsdp_trainer.interop.folders.other_weights import sharded_folder
from fsdp_trainer.interop.weights.foreign_states import (
    MOMENTS,
    OPTIONS,
    STEP,
    StatesByName,
    known_options,
    unusable_states,
)
from fsdp_trainer.interop.weights.foreign_tensors import ForeignTensor
from fsdp_trainer.interop.weights.translated_names import huggingface_names
from fsdp_trainer.models.config import ModelConfig

STATE = re.compile(rf"(?:.*?\.)?state\.(.+)\.({'|'.join((*MOMENTS, STEP))})")
GROUPS = re.compile(r"(?:.*?\.)?param_groups(?:\..*)?")
"""Names of the optimizer's states and options."""


def sharded_tensors(folder: Path, config: ModelConfig) -> dict[str, ForeignTensor]:
    """Return the weights of a DCP folder by Hugging Face's names. Raises UserError."""
    checkpoint = sharded_folder(folder)
    assert checkpoint is not None
    stored = opened(checkpoint, "the weights")
    tensors = {
        name: stored.tensor(name)
        for name, entry in stored.entries.items()
        if entry.shape and entry.dtype.is_floating_point and not STATE.fullmatch(name)
    }
    return huggingface_names(tensors, config)


def sharded_states(checkpoint: Path) -> StatesByName:
    stored = opened(checkpoint, "the optimizer's states")
    states: dict[str, dict[str, Any]] = defaultdict(dict)
    try:
        for name in stored.names:
            match = STATE.fullmatch(name)
            if match:
                read = stored.number if match[2] == STEP else stored.tensor
                states[match[1]][match[2]] = read(name)
    except (OSError, TypeError, ValueError) as error:
        raise unusable_states(checkpoint, str(error)) from None
    return StatesByName(states, _options(stored))


def _options(stored: StoredTensors) -> dict[str, Any]:
    """Return the options of the first group that can be read without running code."""
    options: dict[str, Any] = {}
    for name in stored.names:
        last = name.rpartition(".")[2]
        if name in stored.entries or not GROUPS.fullmatch(name) or last in options:
            continue
        if last in OPTIONS or last == "param_groups":
            with suppress(OSError, ValueError):
                options[last] = stored.value(name)
    return known_options(options.pop("param_groups", [options]))


def opened(checkpoint: Path, what: str) -> StoredTensors:
    return StoredTensors(checkpoint, described_by_torch(checkpoint, what))
