"""Tensors of a model's folder that no module reads, such as those of blocks for further tokens.

Training leaves them as they are, checkpoints do not hold them, and an export has the folder's own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fsdp_trainer.base.folders import is_possible
from fsdp_trainer.base.json_files import Json
from fsdp_trainer.checkpoint.formats.headers import NOT_LANGUAGE, read_headers
from fsdp_trainer.checkpoint.formats.tensor_files import (
    DTYPES,
    Chunk,
    HuggingFaceTensor,
    StoredBytes,
    TensorOnDisk,
)
from fsdp_trainer.checkpoint.frozen_weights import base_folder, folder_of
from fsdp_trainer.checkpoint.huggingface import check_tensors, stored_tensors
from fsdp_trainer.checkpoint.store import PROGRESS, read_progress
from fsdp_trainer.config.paths import (
    checkpoint_configuration,
    downloaded,
    find_checkpoint,
    is_adapter,
    is_hub_id,
    is_whole_model,
)
from fsdp_trainer.errors import UserError
from fsdp_trainer.interop.folders.other_weights import described_at
from fsdp_trainer.models.config import has_tower, read_config_file
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.hf.further_blocks import CONSTANT, copy_counts, counts, is_unread
from fsdp_trainer.models.hf.read_architecture import stored_vocabulary

MOST_STAGES = 100
"""Sources that follow one another, before they are taken to go round in a circle."""


@dataclass(frozen=True)
class Unread:
    """Tensors that only a folder has: `unread` in the trainer.json of checkpoints.

    count: their number; example: name of one. vocabulary: the folder's number of tokens if one of
    them has as many rows, else 0. images: number of further tensors, of parts for images beside a
    language model that is trained alone.
    """

    folder: str
    count: int
    example: str
    vocabulary: int
    images: int

    def __str__(self) -> str:
        return f"{self.count:,} tensor{'s' * (self.count > 1)} such as {self.example}"

    @property
    def of_tower(self) -> str:
        return f"{self.images:,} tensors for images" if self.images else ""

    def fits(self, vocabulary: int) -> bool:
        return self.vocabulary in (0, vocabulary)


@dataclass
class Carried:
    """The unread tensors of an export.

    tensors: as the export holds them; sources: what is read for them; both by name. config: the
    folder's config.json. notes: lines on what the export does not have.
    """

    tensors: dict[str, TensorOnDisk] = field(default_factory=dict)
    sources: dict[str, TensorOnDisk] = field(default_factory=dict)
    config: Json = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def unread_beside(model: Decoder, source: Path | None) -> Unread | None:
    """Return the tensors that nothing reads in the folder that weights come from; None if none.

    source: as of weights_on_disk; None: random weights. Checkpoints name that folder.
    """
    for _ in range(MOST_STAGES):
        checkpoint = find_checkpoint(source) if source else None
        if checkpoint:
            progress = read_progress(checkpoint)
            if "unread" in progress:
                return _recorded(progress["unread"], checkpoint)
            source = _begun_from(checkpoint)
        elif source and is_adapter(source):
            source = base_folder(source)
        else:
            break
    return _found_in(model, source) if source else None


def _recorded(record: Any, checkpoint: Path) -> Unread | None:
    try:
        return Unread(**record) if record else None
    except TypeError as error:
        raise UserError(
            "the checkpoint cannot be read",
            str(checkpoint / PROGRESS),
            f"unread cannot be read: {error}",
        ) from None


def _begun_from(checkpoint: Path) -> Path | None:
    """Return model.init_from of the run that wrote a checkpoint, as far as it is on this disk."""
    try:
        keys = checkpoint_configuration(checkpoint).get("model") or {}
    except FileNotFoundError:  # nothing is known of where its weights come from
        return None
    named = str(keys.get("init_from") or "") if isinstance(keys, dict) else ""
    if not named or not is_possible(named):
        return None
    folder = downloaded(named) if is_hub_id(named) else Path(named).expanduser()
    return folder if folder.is_dir() else None


def _found_in(model: Decoder, folder: Path) -> Unread | None:
    try:
        tensors = unread_tensors(model, folder)
        images = _of_images(model, folder)
        tokens = stored_vocabulary(described_at(folder))
    except (UserError, OSError):  # reading the weights themselves says what is wrong
        return None
    if not tensors and not images:
        return None
    has_rows = any(tensor.shape[:1] == (tokens,) for tensor in tensors.values())
    example = next(iter(tensors), "")
    vocabulary = tokens if has_rows else 0
    return Unread(folder_of(folder), len(tensors), example, vocabulary, images)


def _of_images(model: Decoder, folder: Path) -> int:
    if model.config.by_transformers or not is_whole_model(folder):
        return 0
    if not has_tower(read_config_file(folder / "config.json")):
        return 0
    everything, _ = read_headers(folder, all_parts=True)
    return sum(bool(NOT_LANGUAGE.match(name)) for name in everything)


def unread_tensors(model: Decoder, folder: Path) -> dict[str, HuggingFaceTensor]:
    """Return the tensors of a folder that nothing reads, by name. Raises UserError and OSError.

    A head that only repeats the embedding is not among them.
    """
    stored, _ = stored_tensors(folder, model.config)
    if model.config.by_transformers:
        own: Any = model  # a TransformersDecoder
        names = own.unread({name: tensor.shape for name, tensor in stored.items()})
    else:
        names = [name for name in stored if is_unread(name, model.config)]
    return {name: stored[name] for name in sorted(names)}


def carry(model: Decoder, source: Path, dtype: str | None) -> Carried:
    """Return what an export has of the unread tensors beside its source.

    They are copied byte for byte, but decoded like all others if they are quantised, and converted
    if dtype is given, except for constants.
    """
    unread = unread_beside(model, source)
    carried = Carried()
    if unread is None:
        return carried
    if unread.of_tower:
        carried.notes.append(
            f"not in the export: {unread.of_tower} in {unread.folder}, as the model is its language"
            " model alone"
        )
    if not unread.count:
        return carried
    folder, tokens = Path(unread.folder), model.config.vocab_size
    tensors = _still_there(model, folder)
    if not unread.fits(tokens):
        reason = f"made for a vocabulary of {unread.vocabulary:,} tokens; the model has {tokens:,}"
    elif len(tensors) != unread.count or unread.example not in tensors:
        reason = f"no longer in {folder}"
    else:
        carried.config = read_config_file(described_at(folder) / "config.json")
        for name, tensor in tensors.items():
            wanted = None if name.endswith(CONSTANT) else dtype  # as of a module's buffers
            carried.tensors[name], carried.sources[name] = _copied(tensor, wanted)
        return carried
    carried.notes.append(f"not in the export: {unread}, {reason}")
    return carried


def _still_there(model: Decoder, folder: Path) -> Mapping[str, HuggingFaceTensor]:
    """Return the unread tensors of a folder; empty if it is gone or holds another model now."""
    try:
        stored, problems = stored_tensors(folder, model.config)
        tokens = stored_vocabulary(described_at(folder))
        fits = not problems and not check_tensors(model, stored, tokens)
        return unread_tensors(model, folder) if fits else {}
    except (UserError, OSError):
        return {}


def _copied(tensor: HuggingFaceTensor, dtype: str | None) -> tuple[TensorOnDisk, TensorOnDisk]:
    is_number = tensor.number_format in DTYPES and tensor.shape and 0 not in tensor.shape
    size = getattr(tensor, "size", None)  # a Float8Matrix has none
    if size is None or (dtype and is_number):
        target = getattr(torch, dtype) if dtype else tensor.dtype
        return TensorOnDisk(target, tuple(tensor.shape), []), tensor
    (chunk,) = tensor.chunks
    whole = [Chunk(chunk.file, chunk.offset, (slice(0, size),))]
    as_bytes = StoredBytes(torch.uint8, (size,), whole, tensor.number_format, tensor.shape)
    return as_bytes, as_bytes


def notes_on(config: Json, carried: Carried) -> list[str]:
    """Let a config.json promise only the blocks that an export has; return lines on what it lacks.

    config: is changed.
    """
    if carried.config:
        copy_counts(config, carried.config)
        return carried.notes
    numbers = [(part, key, part[key]) for part, key in counts(config)]
    for part, key, _ in numbers:
        part[key] = 0
    if not numbers or not (carried.notes or any(number for *_, number in numbers)):
        return carried.notes
    keys = " ".join(f"{key}=0" for _, key, _ in numbers)
    return [*carried.notes, f"config.json of the export says {keys}: it has no such blocks"]
