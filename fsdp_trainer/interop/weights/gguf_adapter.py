"""A PEFT folder as a GGUF file, as llama.cpp loads it beside the base model's file (--lora)."""

import json
import math
import re
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file

from fsdp_trainer.config.paths import ADAPTER_CONFIG, model_folder
from fsdp_trainer.errors import UserError
from fsdp_trainer.interop.weights.foreign_tensors import in_pairs
from fsdp_trainer.interop.weights.gguf_file import (
    NUMBERS,
    new_file,
    require_family,
    require_same,
    rotated_heads,
)
from fsdp_trainer.interop.weights.gguf_models import MODELS
from fsdp_trainer.models.adapters.peft_config import WEIGHTS_FILE
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.hf.read_architecture import read_architecture

TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
"""Names of PEFT's tensors: the module in the base model, and which matrix it is."""


def write_gguf_adapter(folder: Path, file: Path, numbers: str) -> None:
    """Write a PEFT folder as a GGUF file, which is complete or not there.

    numbers: a key of NUMBERS without blocks. Raises UserError for what llama.cpp does not load.
    """
    about = json.loads((folder / ADAPTER_CONFIG).read_text())
    base = model_folder(folder)
    config = read_architecture(base)
    require_family(config, MODELS)
    require_same(config, base)
    tensors = named_tensors(folder, about, config)
    with new_file(file, MODELS[config.family].architecture) as (writer, partial):
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha_of(about))
        writer.add_name(folder.resolve().name)
        writer.add_file_type(NUMBERS[numbers][1])
        for name, tensor in tensors.items():
            array = gguf.quants.quantize(tensor.float().numpy(), NUMBERS[numbers][0])
            writer.add_tensor(name, array, raw_dtype=NUMBERS[numbers][0])
        writer.write_header_to_file(partial)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def alpha_of(about: dict[str, Any]) -> float:
    """Return the alpha with which alpha ÷ rank is the adapter's scale.

    Raises UserError for layers with ranks or alphas of their own, of which a file has one.
    """
    for key in ("rank_pattern", "alpha_pattern"):
        if about.get(key):
            reason = "a GGUF adapter has one scale for all layers. Use  form=gguf , which merges it"
            raise UserError("there is no GGUF of it", f"{key}={about[key]}", reason)
    alpha, rank = float(about["lora_alpha"]), int(about["r"])
    return alpha * math.sqrt(rank) if about.get("use_rslora") else alpha


def named_tensors(
    folder: Path, about: dict[str, Any], config: ModelConfig
) -> dict[str, torch.Tensor]:
    """Return the matrices by llama.cpp's names. Raises UserError for one that has none."""
    architecture = MODELS[config.family].architecture
    known = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    tensors = {}
    for name, tensor in load_file(folder / WEIGHTS_FILE).items():
        parsed = TENSOR.fullmatch(name)
        new = known.get_name(parsed[1]) if parsed else None
        if parsed is None or new is None:
            what = "DoRA's magnitudes have" if "magnitude" in name else f"{name} has"
            reason = f"{what} no place in a GGUF adapter. Use  form=gguf , which merges it"
            raise UserError("there is no GGUF of it", str(folder), reason)
        if parsed[2] == "B" and (heads := rotated_heads(config, f"{parsed[1]}.")):
            tensor = in_pairs(tensor, heads)
        tensors[f"{new}.weight.lora_{parsed[2].lower()}"] = tensor.contiguous()
    return tensors
