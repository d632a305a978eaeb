"""Files of torch.save with a dict of tensors: PyTorch's .bin, torchtune's .pt, Meta's .pth.

Nothing but tensors is unpickled, and their numbers are read from the file in pieces.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from fsdp_trainer.checkpoint.formats.tensor_files import TensorOnDisk
from fsdp_trainer.config.weight_files import weight_files
from fsdp_trainer.errors import UserError
from fsdp_trainer.interop.folders.other_weights import (
    META_FILES,
    TORCH_INDEX,
    TORCH_SINGLE,
    torch_files,
)
from fsdp_trainer.interop.weights.foreign_states import (
    STEP,
    StatesByName,
    known_options,
    unusable_states,
)
from fsdp_trainer.interop.weights.foreign_tensors import ForeignTensor, joined
from fsdp_trainer.interop.weights.torch_archive import TorchArchive
from fsdp_trainer.interop.weights.translated_names import huggingface_names
from fsdp_trainer.models.config import ModelConfig

WITHIN = ("model", "state_dict", "module", "model_state_dict")
"""Keys below which tools store the weights, next to other things."""
BY_COLUMNS = (".attention.wo.weight", ".feed_forward.w2.weight")
"""Matrices of Meta's that are cut by columns where a model is cut into several files."""


def torch_tensors(folder: Path, config: ModelConfig) -> dict[str, ForeignTensor]:
    tensors: dict[str, TensorOnDisk] = {}
    for file in _named_files(folder):
        further = tensors_of(file)
        if twice := tensors.keys() & further.keys():
            other = tensors[min(twice)].chunks[0].file.name
            reason = f"has {min(twice)} too, as {other}: move the files of another model away"
            raise UserError("the weights are not clear", str(file), reason)
        tensors |= further
    return huggingface_names(tensors, config)


def meta_tensors(folder: Path, config: ModelConfig) -> dict[str, ForeignTensor]:
    parts = [tensors_of(file) for file in sorted(folder.glob(META_FILES))]
    whole = {}
    for name, first in parts[0].items():
        held = [part[name] for part in parts if name in part]
        if len(held) != len(parts):
            raise UserError(
                "the weights are not complete",
                str(folder),
                f"not each of {META_FILES} has {name}: copy them again",
            )
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
    files = weight_files(folder, TORCH_SINGLE, TORCH_INDEX) or torch_files(folder)
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise UserError(
            "the weights are not complete",
            str(missing[0]),
            f"is not there, and {TORCH_INDEX} names it",
        )
    return files


def tensors_of(file: Path) -> dict[str, TensorOnDisk]:
    archive = TorchArchive(file, "the weights")
    weights = _weights_of(archive.content)
    tensors = {}
    for name, tensor in weights.items() if isinstance(weights, dict) else ():
        if isinstance(name, str) and isinstance(tensor, Tensor) and tensor.is_floating_point():
            tensors[name] = archive.tensor(name, tensor)
    if not tensors:
        raise UserError("cannot read the weights", str(file), "holds no weights")
    return tensors


def torch_states(file: Path) -> StatesByName:
    archive = TorchArchive(file, "the optimizer's states")
    try:
        loaded = archive.content.get("optimizer", archive.content)
        states = {
            str(name): {key: _state(archive, key, value) for key, value in state.items()}
            for name, state in loaded["state"].items()
        }
        return StatesByName(states, known_options(loaded.get("param_groups")))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise unusable_states(file, f"holds no states of AdamW ({error})") from None


def _state(archive: TorchArchive, key: Any, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return archive.number(key, value) if key == STEP else archive.tensor(key, value)


def _weights_of(loaded: Any) -> Any:
    for key in WITHIN:
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            return loaded[key]
    return loaded
