"""Export of any weights as compressed-tensors, which vLLM reads: matrices of blocks in few bits.

The package compressed-tensors computes the scales and packs the numbers, round-to-nearest.
"""

import importlib.util
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fsdp_trainer.checkpoint.atomic_files import write_json
from fsdp_trainer.checkpoint.exports.other_tools import new_export
from fsdp_trainer.checkpoint.formats.headers import INDEX
from fsdp_trainer.config.verbs import ExportConfig
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.hf.further_blocks import is_further
from fsdp_trainer.models.hf.read_architecture import read_architecture

PRESETS = {
    "fp8": ("FP8_DYNAMIC", "float-quantized"),
    "int8": ("INT8", "int-quantized"),
    "int4": ("W4A16", "pack-quantized"),
}
"""By value of `quantization`, the package's names of what is quantised and of how it is stored."""
MATRIX = re.compile(r"model\.layers\.\d+\.(.*_proj(_with_mqa)?|.*\.experts\.\d+\.w[123])\.weight")
"""Names of the matrices that are quantised: of blocks, but no router and no gate."""
STACKED_EXPERTS = re.compile(r"\.experts\.(?!\d)")
EMBEDDINGS = {"model.embed_tokens"}
"""Layers that have a matrix and are no Linear."""
GROUPS = (128, 64, 32)
"""Numbers of columns with one scale, for int4; the first that divides all rows is used."""


def export_compressed(cfg: ExportConfig) -> int:
    if importlib.util.find_spec("compressed_tensors") is None:
        reason = "needs the package of its authors:  pip install 'fsdp_trainer[compressed]'"
        raise UserError("it cannot be exported", "form=compressed", reason)
    if cfg.quantization is None:
        raise UserError(
            "it cannot be exported", "form=compressed", f"needs  quantization={'|'.join(PRESETS)}"
        )
    with new_export(cfg) as (folder, partial):
        write_compressed(folder, partial, cfg.quantization, cfg.dtype)
    return 0


def write_compressed(folder: Path, out: Path, kind: str, dtype: str | None) -> None:
    """Write a Hugging Face folder with quantised matrices, a file at a time. Raises UserError."""
    preset, stored_as = PRESETS[kind]
    files = sorted(folder.glob("*.safetensors"))
    architecture = read_architecture(folder)
    scheme = scheme_of(preset, folder, files, architecture)
    weight_map: dict[str, str] = {}
    unchanged = {"lm_head"}
    for file in files:
        whole = load_file(file)
        if dtype:
            whole = {name: tensor.to(getattr(torch, dtype)) for name, tensor in whole.items()}
        quantised = {n for n, t in whole.items() if is_quantised(n, t.shape, architecture)}
        tensors = {name: tensor for name, tensor in whole.items() if name not in quantised}
        matrices = [name for name, tensor in tensors.items() if tensor.ndim == 2]
        unchanged |= {name.removesuffix(".weight") for name in matrices}
        for name in quantised:
            tensors |= compressed(name, whole[name], scheme, stored_as)
        save_file(tensors, out / file.name, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file.name)
    if len(files) > 1:
        write_json(out / INDEX, {"metadata": {}, "weight_map": weight_map})
    for file in folder.iterdir():
        if file.suffix in (".json", ".jinja", ".model", ".txt") and file.name != INDEX:
            shutil.copyfile(file, out / file.name)
    config = json.loads((folder / "config.json").read_text())
    about = description(scheme, stored_as, sorted(unchanged - EMBEDDINGS))
    write_json(out / "config.json", config | {"quantization_config": about})


def is_quantised(name: str, shape: Sequence[int], config: ModelConfig) -> bool:
    """Return True for a matrix whose numbers get fewer bits: none of blocks for further tokens."""
    is_matrix = len(shape) == 2 and MATRIX.fullmatch(name)
    return bool(is_matrix) and not is_further(name, config)


def scheme_of(preset: str, folder: Path, files: list[Path], config: ModelConfig) -> Any:
    """Return the package's scheme for all matrices. Raises UserError for what has none here."""
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from safetensors import safe_open

    columns: set[int] = set()
    for file in files:
        with safe_open(file, "pt") as opened:
            shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
        read = [name for name in shapes if not is_further(name, config)]
        if any(STACKED_EXPERTS.search(name) for name in read):
            reason = "has all experts in one tensor, which is not quantised.\nUse  form=merged"
            raise UserError("it cannot be exported", str(folder), reason)
        columns |= {s[1] for name, s in shapes.items() if is_quantised(name, s, config)}
    scheme = preset_name_to_scheme(preset, ["Linear"])
    if scheme.weights.group_size:
        group = next((g for g in GROUPS if not any(width % g for width in columns)), None)
        if group is None:
            reason = (
                f"has matrices of {min(columns)} columns, no multiple of {GROUPS[-1]}: use int8"
            )
            raise UserError("it cannot be exported", "quantization=int4", reason)
        weights = scheme.weights.model_copy(update={"group_size": group})
        scheme = scheme.model_copy(update={"weights": weights})
    return scheme


def compressed(name: str, matrix: Tensor, scheme: Any, stored_as: str) -> dict[str, Tensor]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    groups = matrix.unflatten(1, (-1, scheme.weights.group_size or matrix.shape[1]))
    scale, _ = calculate_qparams(groups.amin(2), groups.amax(2), scheme.weights)
    compressor = BaseCompressor.get_value_from_registry(stored_as)
    parts = compressor.compress({"weight": matrix, "weight_scale": scale.to(matrix.dtype)}, scheme)
    module = name.removesuffix("weight")
    return {module + part: tensor.contiguous() for part, tensor in parts.items()}


def description(scheme: Any, stored_as: str, unchanged: list[str]) -> dict[str, Any]:
    """Return the quantization_config of config.json. unchanged: layers that are not quantised."""
    from compressed_tensors.quantization import QuantizationConfig

    about = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=unchanged,
        format=stored_as,
        quantization_status="compressed",
    )
    return json.loads(about.model_dump_json(exclude_none=True))
