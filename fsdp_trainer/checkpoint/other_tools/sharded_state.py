"""Distributed checkpoints (DCP) of other tools: torchtitan's, accelerate's, FSDP's."""

import pickle
import re
from collections import defaultdict
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

from fsdp_trainer.checkpoint.other_tools.foreign_states import (
    MOMENTS,
    OPTIONS,
    STEP,
    StatesByName,
    known_options,
    unusable_states,
)
from fsdp_trainer.checkpoint.other_tools.foreign_tensors import ForeignTensor, is_floating
from fsdp_trainer.checkpoint.other_tools.translated_names import huggingface_names
from fsdp_trainer.checkpoint.stored_tensors import StoredTensors
from fsdp_trainer.config.other_tools.other_weights import METADATA, sharded_folder
from fsdp_trainer.errors import Problem, RunFailed, UserError
from fsdp_trainer.models.config import ModelConfig

ALLOWED = ("torch.distributed.checkpoint.", "torch.distributed._shard.")
"""Modules whose classes describe a checkpoint."""
ALSO_ALLOWED = {
    ("torch", "Size"), ("torch", "device"), ("torch._utils", "_rebuild_device"),
    ("torch.serialization", "_get_layout"), ("torch", "memory_format"),
    ("torch.storage", "UntypedStorage"), ("pathlib", "PosixPath"), ("pathlib", "Path"),
    ("collections", "OrderedDict"), ("builtins", "set"), ("_codecs", "encode"),
    ("pathlib._local", "PosixPath"), ("io", "BytesIO"),
}  # fmt: skip


STATE = re.compile(rf"(?:.*?\.)?state\.(.+)\.({'|'.join((*MOMENTS, STEP))})")
GROUPS = re.compile(r"(?:.*?\.)?param_groups(?:\..*)?")
"""Names of the optimizer's states and options."""


def enum_member(kind: Any, name: str) -> Enum:
    """Return a member of an enumeration, which Python 3.11.0 to 3.11.3 pickle as an attribute."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind[name]
    raise pickle.UnpicklingError(f"it reads {name} of {kind}")


class MetadataReader(pickle.Unpickler):
    """Reads a checkpoint's description, and refuses all else that a pickle could import."""

    def find_class(self, module: str, name: str) -> object:
        """Return a class that describes a checkpoint."""
        is_number_format = module == "torch" and name in NUMBER_FORMAT_NAMES
        if module.startswith(ALLOWED) or (module, name) in ALSO_ALLOWED or is_number_format:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return enum_member
        raise pickle.UnpicklingError(f"it names {module}.{name}")


NUMBER_FORMAT_NAMES = (
    "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
    "float8_e4m3fn", "float8_e5m2", "strided", "contiguous_format", "preserve_format",
)  # fmt: skip


def sharded_tensors(folder: Path, config: ModelConfig) -> dict[str, ForeignTensor]:
    """Return the weights of a DCP folder by Hugging Face's names. Raises UserError."""
    checkpoint = sharded_folder(folder)
    assert checkpoint is not None
    stored = opened(checkpoint, "the weights")
    try:
        tensors = {name: stored.tensor(name) for name, shape in stored.shapes.items() if shape}
    except (RunFailed, KeyError) as error:
        raise UserError("cannot read the weights", [Problem(str(checkpoint), str(error))]) from None
    return huggingface_names({n: t for n, t in tensors.items() if is_floating(t)}, config)


def sharded_states(checkpoint: Path) -> StatesByName:
    """Return the states of AdamW in a DCP folder. Raises UserError."""
    stored = opened(checkpoint, "the optimizer's states")
    states: dict[str, dict[str, Any]] = defaultdict(dict)
    try:
        for name in stored.names:
            found = STATE.fullmatch(name)
            if found:
                read = stored.number if found[2] == STEP else stored.tensor
                states[found[1]][found[2]] = read(name)
    except (RunFailed, KeyError, OSError, pickle.UnpicklingError) as error:
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
            with suppress(pickle.UnpicklingError, RuntimeError, OSError, KeyError):
                options[last] = stored.value(name)
    return known_options(options.pop("param_groups", [options]))


def opened(checkpoint: Path, what: str) -> StoredTensors:
    """Return a DCP folder's tensors. what: is read of it. Raises UserError."""
    try:
        with open(checkpoint / METADATA, "rb") as file:
            metadata = MetadataReader(file).load()
    except (pickle.UnpicklingError, EOFError, ValueError, AttributeError, ImportError) as error:
        reason = f"is no description of a checkpoint, or holds more than that: {error}"
        problem = Problem(str(checkpoint / METADATA), reason)
        raise UserError(f"cannot read {what}", [problem]) from None
    return StoredTensors(checkpoint, metadata)
