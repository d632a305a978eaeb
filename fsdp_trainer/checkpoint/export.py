"""A complete Hugging Face folder from a distributed checkpoint, streamed: memory holds a few pieces of tensors at a time."""

import json
import shutil
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fsdp_trainer.checkpoint.files import checksum, damage, read_manifest, whole_folder
from fsdp_trainer.checkpoint.huggingface import DTYPES, INDEX, SINGLE, stored_parts
from fsdp_trainer.checkpoint.state import WEIGHTS
from fsdp_trainer.checkpoint.store import read_progress
from fsdp_trainer.checkpoint.stored import StoredTensors
from fsdp_trainer.checkpoint.stream import PIECE_BYTES, in_threads, read, write
from fsdp_trainer.config.paths import MANIFEST, find_checkpoint
from fsdp_trainer.config.verbs import ExportConfig
from fsdp_trainer.errors import Problem, RunFailed, UserError
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder

Entry = tuple[torch.dtype, torch.Size]
NAMES = {dtype: name for name, dtype in DTYPES.items()}
ORIGIN = "fsdp_trainer.json"  # in an export: the checkpoint that it was made of


@dataclass
class Place:
    """Where in an export the numbers of a parameter go: an open file, and the byte with which they begin."""

    file: int
    offset: int
    dtype: torch.dtype


@dataclass
class Piece:
    """`count` numbers that lie together in a file of a checkpoint and in the export."""

    source: Path
    offset: int
    dtype: torch.dtype
    count: int
    target: Place


def export(cfg: ExportConfig) -> int:
    """The verb: `source=` a run or a checkpoint, `out=` the folder to write."""
    checkpoint, out = require_checkpoint(str(cfg.source)), Path(str(cfg.out)).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(
            "the export would overwrite something",
            [Problem(f"out={cfg.out}", "exists; choose another folder or delete it")],
        )
    try:
        export_checkpoint(checkpoint, out, cfg.dtype, cfg.shard_gib)
    except OSError as error:
        raise RunFailed(f"cannot write the export {out}: {error}") from None
    print(f"exported {checkpoint} to {out}")
    return 0


def require_checkpoint(source: str) -> Path:
    """The committed checkpoint that `source` names. Raises UserError if there is none or its files are damaged."""
    checkpoint = find_checkpoint(source)
    if checkpoint is None:
        raise UserError(
            "there is no checkpoint",
            [Problem(f"source={source}", "is neither a checkpoint nor a run with a committed one")],
        )
    if problems := damage(checkpoint):
        raise UserError(f"the checkpoint {checkpoint} is damaged", problems)
    return checkpoint


def export_checkpoint(
    checkpoint: Path, out: Path, dtype: str | None = None, shard_gib: float = 4.0
) -> None:
    """Write `out` under a temporary name and rename it when whole. dtype: of all weights; None: as they were imported."""
    with torch.device("meta"):
        model = Decoder(ModelConfig.from_hf(checkpoint / "hf"))
    parts, shapes = stored_parts(model), {name: p.shape for name, p in model.named_parameters()}
    stored = read_progress(checkpoint)["dtypes"]
    entries = {
        name: (
            getattr(torch, dtype or stored.get(of[0], stored["default"])),
            torch.Size([sum(shapes[part][0] for part in of), *shapes[of[0]][1:]]),
        )
        for name, of in parts.items()
    }
    with whole_folder(out) as partial:
        shutil.copytree(checkpoint / "hf", partial, dirs_exist_ok=True)
        told = dtype or stored["default"]
        described = json.loads((partial / "config.json").read_text()) | {
            "dtype": told,
            "torch_dtype": told,
        }
        (partial / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        files = split_into_files(
            {n: size_in_bytes(entry) for n, entry in entries.items()}, int(shard_gib * 2**30)
        )
        with ExitStack() as opened:
            places: dict[str, Place] = {}
            for file, members in files.items():
                handle = opened.enter_context((partial / file).open("wb", 0))
                for name, offset in write_header(
                    handle, {name: entries[name] for name in members}
                ).items():
                    for part in parts[name]:  # a fused projection's are its rows, in order
                        places[part] = Place(handle.fileno(), offset, entries[name][0])
                        offset += shapes[part].numel() * entries[name][0].itemsize
            in_threads(copy_piece, pieces(checkpoint, places, shapes), 2 * PIECE_BYTES)
        if len(files) > 1:
            write_index(partial / INDEX, files, entries)
        (partial / ORIGIN).write_text(json.dumps(origin(checkpoint, dtype), indent=2) + "\n")


def origin(checkpoint: Path, dtype: str | None) -> dict[str, Any]:
    """What an export says of where it comes from. The manifest's checksum tells checkpoints of one step apart."""
    return {
        "step": read_manifest(checkpoint)["step"],
        "manifest_crc32": checksum(checkpoint / MANIFEST),
        "dtype": dtype,
    }


def is_export_of(folder: Path, checkpoint: Path, dtype: str | None) -> bool:
    """Whether `folder` is what export_checkpoint would write."""
    try:
        return json.loads((folder / ORIGIN).read_text()) == origin(checkpoint, dtype)
    except (OSError, ValueError):
        return False


def size_in_bytes(entry: Entry) -> int:
    """Of a tensor in the file."""
    return entry[1].numel() * entry[0].itemsize


def split_into_files(sizes: dict[str, int], limit: int) -> dict[str, list[str]]:
    """File name → tensors, in order, each file up to `limit` bytes (a single larger tensor has its own)."""
    parts: list[list[str]] = [[]]
    room = limit
    for name, size in sizes.items():
        if parts[-1] and size > room:
            parts.append([])
            room = limit
        parts[-1].append(name)
        room -= size
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    return {
        f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, 1)
    }


def write_header(file: BinaryIO, entries: dict[str, Entry]) -> dict[str, int]:
    """Begin a safetensors file, and give it its size; where in it each tensor's bytes go, in any order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset, starts = 0, {}
    for name, entry in entries.items():
        starts[name], end = offset, offset + size_in_bytes(entry)
        header[name] = {
            "dtype": NAMES[entry[0]],
            "shape": list(entry[1]),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    file.truncate(8 + len(text) + offset)
    return {name: 8 + len(text) + start for name, start in starts.items()}


def pieces(
    checkpoint: Path, places: dict[str, Place], shapes: dict[str, torch.Size]
) -> Iterator[Piece]:
    """All that is to be copied, in the order of the export; of a vocabulary that was padded, the rows that count.

    Raises RunFailed for a parameter of which the checkpoint does not hold all.
    """
    stored = StoredTensors(checkpoint)
    for name, place in places.items():
        row, dtype = shapes[name][1:].numel(), stored.entry(WEIGHTS + name)[0]
        at_once = PIECE_BYTES // max(dtype.itemsize, place.dtype.itemsize)
        for rows in stored.rows(WEIGHTS + name, shapes[name][0]):
            for i in range(0, rows.count * row, at_once):
                to = Place(
                    place.file,
                    place.offset + (rows.first * row + i) * place.dtype.itemsize,
                    place.dtype,
                )
                yield Piece(
                    rows.file,
                    rows.offset + i * dtype.itemsize,
                    dtype,
                    min(at_once, rows.count * row - i),
                    to,
                )


def copy_piece(piece: Piece, buffer: Tensor) -> None:
    """Read, convert, write. buffer: [2 × PIECE_BYTES] uint8."""
    target = piece.target
    found, made = (
        buffer[: piece.count * piece.dtype.itemsize],
        buffer[PIECE_BYTES:][: piece.count * target.dtype.itemsize],
    )
    with piece.source.open("rb", 0) as file:
        read(piece.source, file.fileno(), piece.offset, found)
    if piece.dtype == target.dtype:
        made = found
    else:
        made.view(target.dtype).copy_(found.view(piece.dtype))
    write(target.file, target.offset, made)


def write_index(path: Path, files: dict[str, list[str]], entries: dict[str, Entry]) -> None:
    """Which file holds which tensor."""
    weight_map = {name: file for file, members in files.items() for name in members}
    total = sum(map(size_in_bytes, entries.values()))
    path.write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"
    )
