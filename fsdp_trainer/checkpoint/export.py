"""A complete Hugging Face folder from a distributed checkpoint, streamed: memory holds a few tensors at a time."""

import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_trainer.checkpoint.files import checksum, damage, read_manifest, whole_folder
from fsdp_trainer.checkpoint.huggingface import DTYPES, INDEX, SINGLE
from fsdp_trainer.checkpoint.state import WEIGHTS, stored_tensors
from fsdp_trainer.checkpoint.store import load, read_progress
from fsdp_trainer.config.paths import MANIFEST, find_checkpoint
from fsdp_trainer.config.schema import ExportConfig
from fsdp_trainer.errors import Problem, RunFailed, UserError
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder

NAMES = {dtype: name for name, dtype in DTYPES.items()}
ORIGIN = "fsdp_trainer.json"  # in an export: the checkpoint that it was made of
GROUP_BYTES = 2**28  # read from the checkpoint at once


def export(cfg: ExportConfig) -> int:
    """The verb: `source=` a run or a checkpoint, `out=` the folder to write."""
    checkpoint, out = require_checkpoint(str(cfg.source)), Path(str(cfg.out)).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError("the export would overwrite something", [Problem(f"out={cfg.out}", "exists; choose another folder or delete it")])
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
        raise UserError("there is no checkpoint", [Problem(f"source={source}", "is neither a checkpoint nor a run with a committed one")])
    if problems := damage(checkpoint):
        raise UserError(f"the checkpoint {checkpoint} is damaged", problems)
    return checkpoint


def export_checkpoint(checkpoint: Path, out: Path, dtype: str | None = None, shard_gib: float = 4.0) -> None:
    """Write `out` under a temporary name and rename it when whole. dtype: of all weights; None: as they were imported."""
    config = ModelConfig.from_hf(checkpoint / "hf")
    shapes = stored_tensors(str(checkpoint))
    with torch.device("meta"):
        names = [name for name, _ in Decoder(config).named_parameters()]
    stored = read_progress(checkpoint)["dtypes"]
    dtypes = {name: getattr(torch, dtype or stored.get(name, stored["default"])) for name in names}
    with whole_folder(out) as partial:
        shutil.copytree(checkpoint / "hf", partial, dirs_exist_ok=True)
        told = dtype or stored["default"]
        described = json.loads((partial / "config.json").read_text()) | {"dtype": told, "torch_dtype": told}
        (partial / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        files = split_into_files(names, {n: shapes[WEIGHTS + n].numel() * dtypes[n].itemsize for n in names}, int(shard_gib * 2**30))
        for file, members in files.items():
            entries = {name: (dtypes[name], shapes[WEIGHTS + name]) for name in members}
            write_safetensors(partial / file, entries, read_tensors(checkpoint, entries))
        if len(files) > 1:
            write_index(partial / INDEX, files, shapes, dtypes)
        (partial / ORIGIN).write_text(json.dumps(origin(checkpoint, dtype), indent=2) + "\n")


def origin(checkpoint: Path, dtype: str | None) -> dict[str, Any]:
    """What an export says of where it comes from. The manifest's checksum tells checkpoints of one step apart."""
    return {"step": read_manifest(checkpoint)["step"], "manifest_crc32": checksum(checkpoint / MANIFEST), "dtype": dtype}


def is_export_of(folder: Path, checkpoint: Path, dtype: str | None) -> bool:
    """Whether `folder` is what export_checkpoint would write."""
    try:
        return json.loads((folder / ORIGIN).read_text()) == origin(checkpoint, dtype)
    except (OSError, ValueError):
        return False


def split_into_files(names: list[str], sizes: dict[str, int], limit: int) -> dict[str, list[str]]:
    """File name → tensors, in order, each file up to `limit` bytes (a single larger tensor has its own)."""
    parts: list[list[str]] = [[]]
    room = limit
    for name in names:
        if parts[-1] and sizes[name] > room:
            parts.append([])
            room = limit
        parts[-1].append(name)
        room -= sizes[name]
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, 1)}


def read_tensors(checkpoint: Path, entries: dict[str, tuple[torch.dtype, torch.Size]]) -> Iterator[Tensor]:
    """The entries' tensors in order, in the asked dtype, a group at a time."""
    group: dict[str, Tensor] = {}
    for i, (name, (_, shape)) in enumerate(entries.items(), 1):
        group[WEIGHTS + name] = torch.empty(shape)
        if i == len(entries) or sum(t.numel() * 4 for t in group.values()) >= GROUP_BYTES:
            load(checkpoint, group, alone=True)
            for key in list(group):
                yield group.pop(key).to(entries[key.removeprefix(WEIGHTS)][0])


def write_safetensors(path: Path, entries: dict[str, tuple[torch.dtype, torch.Size]], tensors: Iterator[Tensor]) -> None:
    """The safetensors format, header first, so that the tensors can stream."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in entries.items():
        end = offset + shape.numel() * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def write_index(path: Path, files: dict[str, list[str]], shapes: dict[str, torch.Size], dtypes: dict[str, torch.dtype]) -> None:
    """Which file holds which tensor."""
    weight_map = {name: file for file, members in files.items() for name in members}
    total = sum(shapes[WEIGHTS + name].numel() * dtypes[name].itemsize for name in weight_map)
    path.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")
