"""Export of any weights as torchtitan's checkpoint or Meta's files.

Both hold the whole model in memory once.
"""

import json
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from fsdp_trainer.base.counted import counted
from fsdp_trainer.base.safe_text import safe
from fsdp_trainer.checkpoint.atomic_files import (
    complete_folder,
    named_checkpoint,
    require_undamaged,
    write_json,
)
from fsdp_trainer.checkpoint.exports.hf_folder import export_checkpoint
from fsdp_trainer.checkpoint.formats.headers import read_headers
from fsdp_trainer.checkpoint.formats.tensor_files import TensorOnDisk, read_whole
from fsdp_trainer.config.new_folder import new_folder, writing_export
from fsdp_trainer.config.parts.own_parts import usable_part
from fsdp_trainer.config.paths import is_adapter, is_whole_model
from fsdp_trainer.config.verbs import ExportConfig
from fsdp_trainer.errors import UserError
from fsdp_trainer.interop.folders.other_weights import META_PARAMS, METADATA, kind_of_weights
from fsdp_trainer.interop.weights.foreign_tensors import in_pairs
from fsdp_trainer.interop.weights.tensor_names import META, TORCHTITAN
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.hf.further_blocks import is_unread
from fsdp_trainer.models.hf.read_architecture import read_architecture

LLAMA_3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 8192}  # fmt: skip
"""What Meta's own code assumes of scaled positions."""
MULTIPLES, MULTIPLIERS = (256, 1024, 2048, 4096), (1.0, 1.3, 1.4, 1.5)
"""Values of Meta's params.json that give the width of the feed-forward layers of its models."""


@contextmanager
def as_folder(source: Path, beside: Path, dtype: str | None) -> Iterator[Path]:
    """Yield a Hugging Face folder with the whole model: the source, or one that is deleted again.

    Raises UserError and RunFailed.
    """
    if is_whole_model(source) and not is_adapter(source):
        yield source
        return
    checkpoint = source
    if not is_adapter(source) and not kind_of_weights(source):
        checkpoint = named_checkpoint(str(source))
        require_undamaged(checkpoint)
    with TemporaryDirectory(prefix=".whole-", dir=beside.parent) as aside:
        whole = Path(aside) / beside.stem
        for note in export_checkpoint(checkpoint, whole, dtype):
            print(safe(note))
        yield whole


@contextmanager
def new_export(cfg: ExportConfig) -> Iterator[tuple[Path, Path]]:
    """Yield a folder with the whole model, and a new one, which is `out` when the block ends."""
    source, out = Path(str(cfg.source)).expanduser(), new_folder(str(cfg.out))
    with (
        writing_export(out),
        as_folder(source, out, cfg.dtype) as folder,
        complete_folder(out) as partial,
    ):
        yield folder, partial
    print(f"exported {source} to {out}")


def export_other(cfg: ExportConfig) -> int:
    with new_export(cfg) as (folder, partial):
        config = read_architecture(folder)
        dtype = getattr(torch, cfg.dtype) if cfg.dtype else None
        if cfg.form in WRITERS:
            require_names(config, cfg.form)
        tensors = dict(own_weights(folder, config, dtype))
        if cfg.form in WRITERS:
            WRITERS[cfg.form](partial, folder, config, dict(by_meta(tensors, folder, config)))
        else:
            usable_part("form", cfg.form)(partial, folder, tensors)
    return 0


def own_weights(
    folder: Path, config: ModelConfig, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    for name, on_disk in read_tensors(folder, config).items():
        tensor = read_whole(on_disk, 0, on_disk.shape[0])
        yield name, tensor.to(dtype) if dtype else tensor


def require_names(config: ModelConfig, form: str) -> None:
    known = MODELS[form]
    if config.by_transformers or config.family not in known:
        reason = f"has no form={form}: only {' '.join(known)} have.\nUse  form=merged"
        raise UserError("it cannot be exported", f"model_type={config.family}", reason)


def by_meta(
    tensors: dict[str, Tensor], folder: Path, config: ModelConfig
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Meta's name, tensor) of a Hugging Face folder's tensors, which are taken out.

    Raises UserError for one that has no name.
    """
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    for name in [*tensors]:
        tensor, new = tensors.pop(name), META.from_huggingface(name)
        if new is None:
            raise UserError(
                "it cannot be exported", f"{folder}: {name}", "has no name in this form"
            )
        if config.family in META.pairs and (".wq." in new or ".wk." in new):
            tensor = in_pairs(tensor, len(tensor) // config.head_dim).contiguous()
        yield new, tensor


def read_tensors(folder: Path, config: ModelConfig) -> Mapping[str, TensorOnDisk]:
    """Return the tensors of a Hugging Face folder by name, and print how many no module reads.

    Those are not among them. Raises UserError.
    """
    tensors, problems = read_headers(folder)
    if problems:
        raise UserError(f"the weights in {folder} cannot be read", problems)
    unread = {name: None for name in tensors if is_unread(name, config)}  # in their order
    if unread:
        text = f"{counted(len(unread), 'tensor')} such as {next(iter(unread))}"
        print(safe(f"not in the export: {text}"))
    return {name: tensor for name, tensor in tensors.items() if name not in unread}


def write_torchtitan(
    out: Path, folder: Path, config: ModelConfig, tensors: dict[str, Tensor]
) -> None:
    """Write a distributed checkpoint with weights alone, and the model's configuration."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        with failing_as_python_does():
            metadata = dcp.save(tensors, checkpoint_id=out, no_dist=True)
    add_newer_names(out, metadata)
    for pattern in ("config.json", "tokenizer*", "generation_config.json", "*.jinja"):
        for file in folder.glob(pattern):
            shutil.copyfile(file, out / file.name)


@contextmanager
def failing_as_python_does() -> Iterator[None]:
    """Within, raise the OSError because of which torch raises another error."""
    try:
        yield
    except (RuntimeError, CheckpointException) as error:
        cause: BaseException | None = error
        if isinstance(error, CheckpointException):
            cause, _ = next(iter(error.failures.values()))
        while cause and not isinstance(cause, OSError):
            cause = cause.__context__
        raise cause or error from None


def add_newer_names(checkpoint: Path, metadata: Metadata) -> None:
    """Let the names of torchtitan's newer releases stand for the same numbers.

    Each release reads the names that it knows, and the numbers are stored once. metadata: as
    written.
    """
    for index, place in list((metadata.storage_data or {}).items()):
        newer = TORCHTITAN.from_huggingface(META.to_huggingface(index.fqn) or "")
        if newer and newer != index.fqn:
            metadata.state_dict_metadata[newer] = metadata.state_dict_metadata[index.fqn]
            metadata.storage_data[replace(index, fqn=newer)] = place
            metadata.planner_data[newer] = (newer,)
    (checkpoint / METADATA).write_bytes(pickle.dumps(metadata))


def write_meta(out: Path, folder: Path, config: ModelConfig, tensors: dict[str, Tensor]) -> None:
    """Write consolidated.00.pth, params.json and the tokenizer. Raises UserError."""
    write_json(out / META_PARAMS, meta_params(config))
    with failing_as_python_does(), (out / "consolidated.00.pth").open("wb") as opened:
        torch.save(tensors, opened)
    for file in folder.glob("tokenizer*"):
        shutil.copyfile(file, out / file.name)


def meta_params(config: ModelConfig) -> dict[str, Any]:
    width = config.hidden_size
    params: dict[str, Any] = {
        "dim": width,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "vocab_size": config.vocab_size,
        "norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        **_feed_forward(width, config.intermediate_size),
    }
    scaling = dict(config.rope_scaling or {})
    if scaling.pop("rope_type", "default") == "llama3":
        factor = float(scaling.pop("factor"))
        if {key: scaling.get(key) for key in LLAMA_3_SCALING} == LLAMA_3_SCALING:
            return params | {"use_scaled_rope": True, "rope_scaling_factor": factor}
        scaling = {"rope_type": "llama3, not as Llama 3.1 has it"}
    if config.rope_scaling or config.head_dim * config.num_attention_heads != width:
        what = f"rope_scaling={json.dumps(config.rope_scaling)}"
        if not config.rope_scaling:
            what = f"head_dim={config.head_dim}"
        reason = "has no place in Meta's params.json"
        raise UserError("it cannot be exported", what, reason)
    return params


def _feed_forward(width: int, wanted: int) -> dict[str, float]:
    """Return the values from which Meta's code computes the width of a feed-forward layer."""
    base = int(2 * 4 * width / 3)
    for multiplier in MULTIPLIERS:
        for multiple in MULTIPLES:
            if -(-int(multiplier * base) // multiple) * multiple == wanted:
                return {"ffn_dim_multiplier": multiplier, "multiple_of": multiple}
    return {"ffn_dim_multiplier": (wanted + 0.5) / base, "multiple_of": 1}


Writer = Callable[[Path, Path, ModelConfig, dict[str, Tensor]], None]
WRITERS: dict[str, Writer] = {"torchtitan": write_torchtitan, "meta": write_meta}
MODELS = {"torchtitan": ("llama", "qwen3"), "meta": ("llama",)}
"""Model types that a form has names for."""
