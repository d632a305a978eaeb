"""A complete Hugging Face folder from a checkpoint, a few pieces of tensors at a time."""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fsdp_trainer.checkpoint.base import require_unchanged, weights_on_disk
from fsdp_trainer.checkpoint.files import (
    checksum,
    damage,
    named_checkpoint,
    read_manifest,
    whole_folder,
    write_json,
)
from fsdp_trainer.checkpoint.huggingface import (
    DTYPES,
    INDEX,
    SINGLE,
    TensorPart,
    tensor_parts,
    tensor_shapes,
)
from fsdp_trainer.checkpoint.store import read_progress
from fsdp_trainer.checkpoint.stream import (
    TensorOnDisk,
    as_tensor,
    grouped,
    in_threads,
    piece_bytes,
    row_ranges,
    write,
)
from fsdp_trainer.config.paths import MANIFEST
from fsdp_trainer.config.verbs import ExportConfig
from fsdp_trainer.errors import Problem, RunFailed, UserError
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import meta_decoder

NAMES = {dtype: name for name, dtype in DTYPES.items()}
ORIGIN = "fsdp_trainer.json"  # in an export: the checkpoint that it was made of


@dataclass
class ExportPiece:
    """Rows of a checkpoint's tensor, to be written as `dtype` from byte `offset` of a file on."""

    source: TensorOnDisk
    first: int
    last: int
    dtype: torch.dtype
    file: int
    offset: int


def export(cfg: ExportConfig) -> int:
    """Run the verb: `source=` a run or a checkpoint, `out=` the folder to write."""
    checkpoint = require_checkpoint(str(cfg.source))
    out = Path(str(cfg.out)).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        problem = Problem(f"out={cfg.out}", "exists; choose another folder or delete it")
        raise UserError("the export would overwrite something", [problem])
    try:
        export_checkpoint(checkpoint, out, cfg.dtype, cfg.shard_gib)
    except OSError as error:
        raise RunFailed(f"cannot write the export {out}: {error}") from None
    print(f"exported {checkpoint} to {out}")
    return 0


def require_checkpoint(source: str) -> Path:
    """Return the checkpoint that `source` names.

    Raises UserError if there is none or it is damaged.
    """
    checkpoint = named_checkpoint(source)
    if problems := damage(checkpoint):
        raise UserError(f"the checkpoint {checkpoint} is damaged", problems)
    return checkpoint


def export_checkpoint(
    checkpoint: Path, out: Path, dtype: str | None = None, shard_gib: float = 4.0
) -> None:
    """Write `out` under a temporary name and rename it when whole.

    dtype: of all weights; None: as they were imported. Raises RunFailed for a checkpoint that
    lacks weights, UserError for one whose frozen weights are gone or have changed, and OSError.
    """
    model = meta_decoder(ModelConfig.from_hf(checkpoint / "hf"))
    parts = tensor_parts(model, model.config.vocab_size)
    imported = read_progress(checkpoint)["dtypes"]
    default = dtype or imported["default"]
    dtypes = {part.tensor: dtype or imported.get(part.parameter, default) for part in parts}
    tensors = {
        name: TensorOnDisk(getattr(torch, dtypes[name]), shape, [])
        for name, shape in tensor_shapes(model, parts).items()
    }
    require_unchanged(model.config, checkpoint)
    sources = weights_on_disk(model.config, checkpoint)
    files = split_into_files(tensors, int(shard_gib * 2**30))
    with whole_folder(out) as partial, ExitStack() as opened:
        shutil.copytree(checkpoint / "hf", partial, dirs_exist_ok=True)
        config = json.loads((partial / "config.json").read_text())
        write_json(partial / "config.json", config | {"dtype": default, "torch_dtype": default})
        write_json(partial / ORIGIN, origin(checkpoint, dtype))
        if len(files) > 1:
            write_json(partial / INDEX, index_of(files, tensors))
        places: dict[str, tuple[int, int]] = {}
        for file, names in files.items():
            handle = opened.enter_context((partial / file).open("wb", 0))
            places |= write_header(handle, {name: tensors[name] for name in names})
        pieces = export_pieces(sources, parts, tensors, places)
        # in the checkpoint a number takes at most twice its bytes in the export
        largest = piece_bytes(2 * tensor.row_bytes for tensor in tensors.values())
        in_threads(export_piece, pieces, 2 * largest)


def origin(checkpoint: Path, dtype: str | None) -> dict[str, Any]:
    """Return what an export records of its checkpoint; the checksum is another in each branch."""
    return {
        "step": read_manifest(checkpoint)["step"],
        "manifest_crc32": checksum(checkpoint / MANIFEST),
        "dtype": dtype,
    }


def is_export_of(folder: Path, checkpoint: Path, dtype: str | None) -> bool:
    """Return whether `folder` is what export_checkpoint would write."""
    try:
        return json.loads((folder / ORIGIN).read_text()) == origin(checkpoint, dtype)
    except (OSError, ValueError):
        return False


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
    """Return the content of INDEX: which file holds which tensor."""
    return {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }


def write_header(file: BinaryIO, tensors: dict[str, TensorOnDisk]) -> dict[str, tuple[int, int]]:
    """Begin a safetensors file and give it its size.

    Returns for each tensor the open file, and the byte in it with which the tensor begins.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts = {}
    end = 0
    for name, tensor in tensors.items():
        starts[name] = end
        end = end + tensor.nbytes
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    file.truncate(8 + len(text) + end)
    return {name: (file.fileno(), 8 + len(text) + start) for name, start in starts.items()}


def export_pieces(
    sources: dict[str, TensorOnDisk],
    parts: list[TensorPart],
    tensors: dict[str, TensorOnDisk],
    places: dict[str, tuple[int, int]],
) -> Iterator[ExportPiece]:
    """Yield all that is to be copied, in the order of the export.

    Of a padded vocabulary that is the rows that count. sources: all parameters.
    """
    for part in parts:
        end = part.parameter_row + part.rows
        source = sources[part.parameter]
        target = tensors[part.tensor]
        file, start = places[part.tensor]
        start += (part.tensor_row - part.parameter_row) * target.row_bytes
        row_bytes = max(source.row_bytes, target.row_bytes)
        for first, last in row_ranges(part.parameter_row, end, row_bytes):
            offset = start + first * target.row_bytes
            yield ExportPiece(source, first, last, target.dtype, file, offset)


def export_piece(piece: ExportPiece, buffer: Tensor) -> None:
    """Read, convert, write: one half of the buffer, uint8, is read into, one converted into."""
    read_into, convert_into = buffer.chunk(2)
    rows = piece.source.read_rows(piece.first, piece.last, read_into)
    if rows.dtype != piece.dtype:
        rows = as_tensor(convert_into, piece.dtype, tuple(rows.shape)).copy_(rows)
    write(piece.file, piece.offset, rows)
