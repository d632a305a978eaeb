"""Files of torch.save with a dict of tensors: PyTorch's .bin, torchtune's .pt, Meta's .pth.

Nothing but tensors is unpickled, and their numbers are read from the file in pieces.
"""

import json
import math
import pickle
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from fsdp_trainer.base.distributed import whole_slice
from fsdp_trainer.base.torch_private import fake_load, file_offset
from fsdp_trainer.checkpoint.formats.tensor_files import Chunk, TensorOnDisk, read_number
from fsdp_trainer.checkpoint.other_tools.foreign_states import (
    STEP,
    StatesByName,
    known_options,
    unusable_states,
)
from fsdp_trainer.checkpoint.other_tools.foreign_tensors import ForeignTensor, is_floating, joined
from fsdp_trainer.checkpoint.other_tools.translated_names import huggingface_names
from fsdp_trainer.config.other_tools.other_weights import META_FILES, TORCH_INDEX, torch_files
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.config import ModelConfig

WITHIN = ("model", "state_dict", "module", "model_state_dict")
"""Keys below which tools store the weights, next to other things."""
ZIP, NAMED = b"PK\x03\x04", re.compile(r"GLOBAL (\S+)")
"""First bytes of a file, and how torch names what it does not unpickle."""
BY_COLUMNS = (".attention.wo.weight", ".feed_forward.w2.weight")
"""Matrices of Meta's that are cut by columns where a model is cut into several files."""


def torch_tensors(folder: Path, config: ModelConfig) -> dict[str, ForeignTensor]:
    """Return the tensors of a folder's files by Hugging Face's names. Raises UserError."""
    tensors: dict[str, TensorOnDisk] = {}
    for file in _named_files(folder):
        tensors |= tensors_of(file)
    return huggingface_names(tensors, config)


def meta_tensors(folder: Path, config: ModelConfig) -> dict[str, ForeignTensor]:
    """Return the tensors of Meta's consolidated files by Hugging Face's names. Raises UserError."""
    parts = [tensors_of(file) for file in sorted(folder.glob(META_FILES))]
    whole = {}
    for name, first in parts[0].items():
        held = [part[name] for part in parts if name in part]
        if len(held) != len(parts):
            problem = Problem(str(folder), f"not each of {META_FILES} has {name}: copy them again")
            raise UserError("the weights are not complete", [problem])
        if len(held) > 1 and len(first.shape) == 2:
            whole[name] = joined(held, _cut_dimension(name, first, config))
        else:
            whole[name] = first
    return huggingface_names(whole, config)


def _cut_dimension(name: str, part: TensorOnDisk, config: ModelConfig) -> int:
    if name == "tok_embeddings.weight":  # by columns in Llama 1 and 2, by rows from Llama 3 on
        return 0 if part.shape[1] == config.hidden_size else 1
    return int(name.endswith(BY_COLUMNS))


def _named_files(folder: Path) -> list[Path]:
    index = folder / TORCH_INDEX
    if not index.is_file():
        return torch_files(folder)
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = Problem(str(index), f"{type(error).__name__}: {error}")
        raise UserError("cannot read the index of the weights", [problem]) from None
    missing = [name for name in names if not (folder / Path(name).name).is_file()]
    if missing:
        problem = Problem(str(folder / missing[0]), f"is not there, and {TORCH_INDEX} names it")
        raise UserError("the weights are not complete", [problem])
    return [folder / Path(name).name for name in names]


def tensors_of(file: Path) -> dict[str, TensorOnDisk]:
    """Return the tensors in a file of torch.save by name. Raises UserError."""
    tensors = {}
    for name, tensor in _flat(_weights_of(_opened(file, "the weights"))).items():
        on_disk = _on_disk(file, name, tensor)
        if is_floating(on_disk):
            tensors[name] = on_disk
    if not tensors:
        raise UserError("cannot read the weights", [Problem(str(file), "holds no weights")])
    return tensors


def _opened(file: Path, what: str) -> Any:
    """Return what torch.save wrote, without numbers. what: is read of it. Raises UserError."""
    try:
        with file.open("rb") as opened:
            is_zip = opened.read(len(ZIP)) == ZIP
        if not is_zip:
            raise ValueError("its first bytes are others, or torch before 1.6 has written it")
        return fake_load(file)
    except pickle.UnpicklingError as error:
        named = NAMED.search(str(error))
        more = f" ({named[1]})" if named else ""
        reason = (
            f"holds more than tensors{more}, and reading that could run code of others.\nSave a"
            " state_dict() alone"
        )
        raise UserError(f"cannot read {what}", [Problem(str(file), reason)]) from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = f"is no file of torch.save, or not the whole of it: {str(error).splitlines()[0]}"
        raise UserError(f"cannot read {what}", [Problem(str(file), reason)]) from None


def torch_states(file: Path) -> StatesByName:
    """Return the states of AdamW in a file of torch.save. Raises UserError."""
    loaded = _opened(file, "the optimizer's states")
    try:
        loaded = loaded.get("optimizer", loaded)
        states = {
            str(name): {key: _state(file, key, value) for key, value in state.items()}
            for name, state in loaded["state"].items()
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise unusable_states(file, f"holds no states of AdamW ({error})") from None
    return StatesByName(states, known_options(loaded.get("param_groups")))


def _state(file: Path, key: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if key == STEP:
        return read_number(file, file_offset(value), value.dtype)
    return _on_disk(file, key, value)


def _weights_of(loaded: Any) -> Any:
    for key in WITHIN:
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            return loaded[key]
    return loaded


def _flat(loaded: Any) -> dict[str, Tensor]:
    values = loaded if isinstance(loaded, dict) else {}
    return {str(key): value for key, value in values.items() if isinstance(value, Tensor)}


def _on_disk(file: Path, name: str, tensor: Tensor) -> TensorOnDisk:
    if not tensor.is_contiguous():
        reason = f"{name} is a view that is not contiguous. Save it with  .contiguous()"
        raise UserError("cannot read the weights", [Problem(str(file), reason)])
    offset = file_offset(tensor)
    shape = tuple(tensor.shape)
    end = offset + math.prod(shape) * tensor.element_size()
    if end > file.stat().st_size:
        reason = f"ends before {name}: copied or downloaded in part, do it again"
        raise UserError("cannot read the weights", [Problem(str(file), reason)])
    return TensorOnDisk(tensor.dtype, shape, [Chunk(file, offset, whole_slice(shape))])
