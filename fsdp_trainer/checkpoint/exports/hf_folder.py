"""Export of a checkpoint as a complete Hugging Face folder, a few pieces of tensors at a time."""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from fsdp_trainer.base.matrix_rows import matrix_rows
from fsdp_trainer.checkpoint.atomic_files import (
    complete_folder,
    named_checkpoint,
    require_undamaged,
    write_json,
)
from fsdp_trainer.checkpoint.exports.model_card import write_model_card
from fsdp_trainer.checkpoint.formats.headers import INDEX, SINGLE
from fsdp_trainer.checkpoint.formats.placed_tensors import as_exported
from fsdp_trainer.checkpoint.formats.safetensors_file import ExportPiece, export_piece, write_header
from fsdp_trainer.checkpoint.formats.tensor_files import (
    TensorOnDisk,
    grouped,
    in_threads,
    piece_bytes,
    row_ranges,
)
from fsdp_trainer.checkpoint.frozen_weights import (
    base_folder,
    kept_in_four_bits,
    model_config,
    number_formats,
    read_base,
    require_unchanged,
    weights_on_disk,
)
from fsdp_trainer.checkpoint.huggingface import TensorPart, tensor_parts, tensor_shapes
from fsdp_trainer.checkpoint.origin import ORIGIN, identity, merged_into, origin, read_origin
from fsdp_trainer.checkpoint.sentence_files import MODULES
from fsdp_trainer.checkpoint.unread_tensors import Carried, carry, notes_on
from fsdp_trainer.config.paths import (
    ADAPTER_CONFIG,
    is_adapter,
    is_whole_model,
    model_folder,
    tokenizer_folder,
)
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.errors import UserError
from fsdp_trainer.interop.folders.other_weights import kind_of_weights
from fsdp_trainer.models.config import COMPUTED_BY, TRAINED_MTP, ModelConfig
from fsdp_trainer.models.decoder import Decoder, stored_buffers
from fsdp_trainer.models.hf.new_model import meta_decoder

NOT_COPIED = (INDEX, ORIGIN, ADAPTER_CONFIG)


def exportable(source: str, form: str) -> Path:
    """Return the checkpoint or PEFT folder that `source` names.

    Raises UserError if it is neither, or is damaged, or has no adapter to be exported as one.
    """
    folder = Path(source).expanduser()
    if is_adapter(folder):
        if form == "adapter":
            raise UserError(
                "the source is an adapter already",
                f"source={source}",
                "has PEFT's format already: copy it",
            )
        return folder
    if is_whole_model(folder):
        text = "is a whole model in Hugging Face's format already: there is nothing to merge"
        if merged_into(folder):
            text = "is an export with its adapter already merged: use it without the adapter"
        raise UserError("there is nothing to export", f"source={source}", text)
    if kind_of_weights(folder):
        if form == "adapter":
            raise UserError(
                "there is no adapter", f"source={source}", "is a whole model. Use  form=merged"
            )
        return folder
    checkpoint = require_checkpoint(source)
    if form == "adapter" and not read_base(checkpoint).adapters:
        text = f"{checkpoint} has no adapter: all of its weights were trained.\nUse  form=merged"
        raise UserError("there is no adapter", "form=adapter", text)
    return checkpoint


def require_checkpoint(source: str) -> Path:
    checkpoint = named_checkpoint(source)
    require_undamaged(checkpoint)
    return checkpoint


def export_checkpoint(
    source: Path,
    out: Path,
    dtype: str | None = None,
    shard_gib: float = 4.0,
    merge_into: str = "original",
) -> list[str]:
    """Write `out` under a temporary name and rename it when it is complete.

    Returns lines on what it lacks of the tensors that no module reads.
    source: a checkpoint, a PEFT folder, whose adapter is merged, or weights of another tool.
    dtype: number format of all parameters; None: the one they were imported in, which buffers
    always keep. merge_into: as for weights_on_disk. Raises RunFailed for a checkpoint that lacks
    weights, UserError for one whose frozen weights are gone or have changed, and OSError.
    """
    config = model_config(source)
    model = meta_decoder(config)
    parts = tensor_parts(model, config.vocab_size)
    imported = number_formats(config, source)
    default = dtype or imported["default"]
    tensors = tensors_of_export(model, parts, imported, dtype)
    is_foreign = not is_adapter(source) and kind_of_weights(source) is not None
    if not is_foreign:
        require_unchanged(config, source)
    sources = as_exported(model, weights_on_disk(config, source, merge_into))
    carried = carry(model, source, dtype)
    tensors |= carried.tensors
    sources |= carried.sources
    for name, tensor in carried.tensors.items():
        parts.append(TensorPart(name, 0, name, 0, matrix_rows(tensor.shape)))
    files = split_into_files(tensors, int(shard_gib * 2**30))
    with complete_folder(out) as partial, ExitStack() as opened:
        copy_assets(source, partial)
        notes = write_config(
            partial / "config.json", config if is_foreign else None, default, carried
        )
        if (own := tokenizer_folder(source)).suffix == ".gguf":
            load_tokenizer(str(own)).save(partial)
        if not is_foreign:
            write_json(partial / ORIGIN, record(source, dtype, merge_into))
            if not is_adapter(source):
                write_model_card(partial, source, is_adapter=False)
        if len(files) > 1:
            write_json(partial / INDEX, index_of(files, tensors))
        places: dict[str, tuple[int, int]] = {}
        for file, names in files.items():
            handle = opened.enter_context((partial / file).open("wb", 0))
            places |= write_header(handle, {name: tensors[name] for name in names})
        pieces = export_pieces(sources, parts, tensors, places)
        # numbers are read as float32 at most: at most twice their bytes in the export
        matrices = [tensor.as_matrix() for tensor in tensors.values()]
        largest = piece_bytes(2 * matrix.row_bytes for matrix in matrices)
        in_threads(export_piece, pieces, 2 * largest)
    return notes


def tensors_of_export(
    model: Decoder, parts: list[TensorPart], imported: dict[str, str], dtype: str | None
) -> dict[str, TensorOnDisk]:
    """Return the tensors that the parts make up, by name. imported: see number_formats."""
    buffers = stored_buffers(model)
    dtypes = {}
    for part in parts:
        before = imported.get(part.parameter, imported["default"])
        dtypes[part.tensor] = before if part.parameter in buffers else dtype or before
    return {
        name: TensorOnDisk(getattr(torch, dtypes[name]), shape, [])
        for name, shape in tensor_shapes(model, parts).items()
    }


def write_config(
    file: Path, foreign: ModelConfig | None, dtype: str, carried: Carried
) -> list[str]:
    """Write the config.json of an export in place of the copied one; return notes_on it.

    foreign: of weights of another tool, whose own is not copied.
    """
    config = foreign.to_hf(dtype) if foreign else json.loads(file.read_text())
    config.pop("quantization_config", None)  # a quantized base is decoded as it is read
    config.pop(COMPUTED_BY, None)
    notes = carried.notes if config.pop(TRAINED_MTP, 0) else notes_on(config, carried)
    write_json(file, config | {"dtype": dtype, "torch_dtype": dtype})
    return notes


def copy_assets(source: Path, out: Path) -> None:
    """Copy a Hugging Face folder's files except weights: configuration, tokenizer, template."""
    for folder in dict.fromkeys([model_folder(source), tokenizer_folder(source)]):
        for pattern in ("*.json", "*.jinja", "*.model", "*.txt", "*.py"):
            for file in folder.glob(pattern):
                if file.name not in NOT_COPIED and not file.name.endswith(".index.json"):
                    shutil.copyfile(file, out / file.name)
        for name in filter(None, MODULES):  # of an embedding model
            if (folder / name).is_dir():
                shutil.copytree(folder / name, out / name, dirs_exist_ok=True)


def record(source: Path, dtype: str | None, merge_into: str) -> dict[str, Any]:
    made_of = origin(source, dtype)
    if kept_in_four_bits(source):
        made_of |= {"merge_into": merge_into}
    if is_adapter(source):
        return made_of | {"merged": identity(source) + merged_into(base_folder(source))}
    base = read_base(source)
    if not base.adapters:
        return made_of
    before = merged_into(Path(base.source)) if base.source else []
    return made_of | {"merged": identity(source) + before}


def is_export_of(folder: Path, checkpoint: Path, dtype: str | None) -> bool:
    recorded = read_origin(folder)
    expected = origin(checkpoint, dtype)
    return bool(recorded) and expected.items() <= recorded.items()


def split_into_files(tensors: dict[str, TensorOnDisk], limit: int) -> dict[str, list[str]]:
    """Return the names of the tensors in each file, in order.

    A file has up to `limit` bytes, or a single larger tensor.
    """
    parts = list(grouped(tensors, lambda name: tensors[name].nbytes, limit))
    count = len(parts)
    if count == 1:
        return {SINGLE: parts[0]}
    return {f"model-{i:05d}-of-{count:05d}.safetensors": part for i, part in enumerate(parts, 1)}


def index_of(files: dict[str, list[str]], tensors: dict[str, TensorOnDisk]) -> dict[str, Any]:
    return {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }


def export_pieces(
    sources: dict[str, TensorOnDisk],
    parts: list[TensorPart],
    tensors: dict[str, TensorOnDisk],
    places: dict[str, tuple[int, int]],
) -> Iterator[ExportPiece]:
    """Yield every piece to copy, in the order of the export, without a vocabulary's padding rows.

    sources: all parameters, by name. places: open file and first byte of each exported tensor.
    """
    sources = {name: source.as_matrix() for name, source in sources.items()}
    for part in parts:
        end = part.parameter_row + part.rows
        source = sources[part.parameter]
        target = tensors[part.tensor].as_matrix()
        file, start = places[part.tensor]
        start += (part.tensor_row - part.parameter_row) * target.row_bytes
        row_bytes = max(source.row_bytes, target.row_bytes)
        for first, last in row_ranges(part.parameter_row, end, row_bytes):
            offset = start + first * target.row_bytes
            yield ExportPiece(source, first, last, target.dtype, file, offset)
