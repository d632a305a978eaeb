"""The content of a distributed checkpoint and its places: tensors in parts, and other values.

Own checkpoints say it in TENSORS. Their METADATA, which torch pickles, is for other tools. From
checkpoints of other tools and of earlier versions it is read, and nothing that it names is run.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fsdp_trainer.base.folders import is_inside
from fsdp_trainer.base.torch_private import storage_info
from fsdp_trainer.checkpoint.formats.inert_pickles import DTYPES, Pickled, read_pickle
from fsdp_trainer.checkpoint.formats.tensor_files import dtype_name
from fsdp_trainer.errors import UserError
from fsdp_trainer.interop.folders.other_weights import METADATA

TENSORS = "tensors.json"
LARGEST, MOST_DIMENSIONS, LONGEST = 2**29, 8, 2**48
"""Bytes of a description, dimensions of a tensor, and indices and bytes anywhere in it."""


class FilePlace(NamedTuple):
    """The place of something that torch.save wrote. offset, length: bytes of the file."""

    file: str
    offset: int
    length: int


class StoredPart(NamedTuple):
    """A part of a tensor. offsets, sizes: its position, for each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: FilePlace


@dataclass
class TensorEntry:
    """A tensor of a checkpoint, without parts that are empty."""

    dtype: torch.dtype
    shape: torch.Size
    parts: list[StoredPart]

    def require_rows(self, rows: int, name: str, checkpoint: Path) -> None:
        """Raise UserError unless the parts hold each number of the first rows, and hold it once.

        rows: without meaning for a single number.
        """
        # with a sign that alternates, the corners of boxes that make up one box leave its corners
        corners: Counter[tuple[int, ...]] = Counter()
        whole = (rows, *self.shape[1:])[: len(self.shape)]
        _add_corners(corners, (0,) * len(whole), whole, -1)
        held = 0
        for offsets, sizes, _ in self.parts:
            sizes = (min(sizes[0], rows - offsets[0]), *sizes[1:]) if sizes else ()
            if all(size > 0 for size in sizes):
                _add_corners(corners, offsets, sizes, 1)
                held += prod(sizes)
        if any(corners.values()):
            some = f"{held // max(1, prod(self.shape[1:])):,} of {rows:,} rows"
            reason = f"holds {some} of {name}, or some of them twice"
            raise UserError("cannot read the checkpoint", str(checkpoint), reason)


def _add_corners(
    corners: Counter[tuple[int, ...]], offsets: tuple[int, ...], sizes: tuple[int, ...], sign: int
) -> None:
    ends = [(o, o + size) for o, size in zip(offsets, sizes, strict=True)]
    for corner, signs in zip(product(*ends), product((1, -1), repeat=len(ends)), strict=True):
        corners[corner] += sign * prod(signs)


@dataclass
class Description:
    """Tensors and places of other values, by name."""

    tensors: dict[str, TensorEntry]
    values: dict[str, FilePlace]

    def require_within_files(self, checkpoint: Path) -> None:
        """Raise UserError if a part of a tensor is after the end of its file. Raises OSError."""
        ends: dict[str, int] = {}
        for tensor in self.tensors.values():
            for _, _, (file, offset, length) in tensor.parts:
                ends[file] = max(ends.get(file, 0), offset + length)
        for file, end in ends.items():
            size = (checkpoint / file).stat().st_size
            if end > size:
                reason = f"has {size:,} bytes, and tensors of it would end at byte {end:,}"
                raise UserError("cannot read the checkpoint", str(checkpoint / file), reason)

    def as_metadata(self) -> Metadata:
        """Return the tensors as torch describes them, without other values: torch runs those."""
        entries: dict[str, Any] = {}
        places = {}
        for name, tensor in self.tensors.items():
            chunks = [
                ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                for offsets, sizes, _ in tensor.parts
            ]
            properties = TensorProperties(dtype=tensor.dtype)
            entries[name] = TensorStorageMetadata(properties, tensor.shape, chunks)
            for part in tensor.parts:
                places[MetadataIndex(name, part.offsets)] = storage_info(*part.place)
        return Metadata(entries, storage_data=places)


def as_json(metadata: Metadata) -> str:
    """Return the content of TENSORS for tensors that torch has planned."""
    tensors = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        parts = []
        for chunk in entry.chunks:
            if chunk.sizes.numel():  # a rank may have no part of a small tensor
                info = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
                place = info.relative_path, info.offset, info.length
                parts.append([chunk.offsets, chunk.sizes, *place])
        dtype = dtype_name(entry.properties.dtype)
        tensors[name] = {"dtype": dtype, "shape": entry.size, "parts": parts}
    return json.dumps({"tensors": tensors})


def read_description(checkpoint: Path) -> Description:
    """Return what a checkpoint holds.

    Raises UserError, and OSError for a file that is not there or cannot be read.
    """
    own = checkpoint / TENSORS
    return _read(own, _of_json) if own.is_file() else described_by_torch(checkpoint)


def described_by_torch(checkpoint: Path, what: str = "the checkpoint") -> Description:
    """Return what a checkpoint of any tool holds. what: is read of it, for messages.

    Raises UserError and OSError.
    """
    return _read(checkpoint / METADATA, _of_pickle, what)


def require_safe_for_others(checkpoint: Path) -> None:
    """Raise UserError unless METADATA, which other tools unpickle freely, describes the same."""
    own = read_description(checkpoint)
    if own != described_by_torch(checkpoint):
        reason = f"describes other tensors than {TENSORS}, and other tools would read those"
        raise UserError("the checkpoint is damaged", str(checkpoint / METADATA), reason)


def _read(
    file: Path, parse: Callable[[bytes], Description], what: str = "the checkpoint"
) -> Description:
    try:
        if (size := file.stat().st_size) > LARGEST:
            raise ValueError(f"it has {size:,} bytes, and at most {LARGEST:,} are read")
        return parse(file.read_bytes())
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        said = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        reason = f"is no description of a checkpoint, or holds more than that: {said:.300}"
        raise UserError(f"cannot read {what}", str(file), reason) from None


def _of_json(content: bytes) -> Description:
    tensors = {}
    for name, entry in json.loads(content)["tensors"].items():
        parts = [_part(offsets, sizes, *place) for offsets, sizes, *place in entry["parts"]]
        tensors[name] = _tensor(name, DTYPES[entry["dtype"]], entry["shape"], parts)
    return Description(tensors, {})


def _of_pickle(content: bytes) -> Description:
    metadata = read_pickle(content).state
    places: dict[tuple[str, tuple[int, ...] | None], list[Any]] = {}
    for index, info in metadata["storage_data"].items():
        if info.state.get("transform_descriptors"):
            raise ValueError(f"{index.state['fqn']} is compressed, which is not read")
        offset = index.state.get("offset")
        key = index.state["fqn"], None if offset is None else tuple(offset)
        places[key] = [info.state[name] for name in ("relative_path", "offset", "length")]
    tensors, values = {}, {}
    allowed = len(content)
    for name, entry in metadata["state_dict_metadata"].items():
        if "chunks" not in entry.state:
            if (name, None) in places:
                values[name] = _place(*places[name, None])
            continue
        allowed -= len(entry.state["chunks"])
        if allowed < 0:
            raise ValueError("it names the same parts again and again")
        parts = list(_parts(name, entry.state["chunks"], places))
        dtype = entry.state["properties"].state[0]
        tensors[name] = _tensor(name, dtype, entry.state["size"], parts)
    return Description(tensors, values)


def _parts(name: str, chunks: list[Pickled], places: dict[Any, Any]) -> Iterator[StoredPart]:
    for chunk in chunks:
        offsets, sizes = chunk.state["offsets"], chunk.state["sizes"]
        if 0 not in sizes[:MOST_DIMENSIONS]:  # a rank may have no part of a small tensor
            yield _part(offsets, sizes, *places[name, tuple(offsets[:MOST_DIMENSIONS])])


def _part(offsets: list[int], sizes: list[int], file: str, offset: int, length: int) -> StoredPart:
    return StoredPart(_numbers(offsets), _numbers(sizes), _place(file, offset, length))


def _place(file: str, offset: int, length: int) -> FilePlace:
    if not _is_file(file):
        raise ValueError(f"{str(file)!r:.99} is no file of the checkpoint")
    _numbers((offset, length))
    return FilePlace(file, offset, length)


@lru_cache(maxsize=4096)  # each file has many parts
def _is_file(name: object) -> bool:
    return isinstance(name, str) and is_inside(name)


def _numbers(values: Sequence[int]) -> tuple[int, ...]:
    """Return sizes or positions. Raises ValueError for what cannot be any."""
    if len(values) > MOST_DIMENSIONS:
        raise ValueError(f"a tensor has {len(values):,} dimensions")
    for value in values:
        if type(value) is not int or not 0 <= value < LONGEST:
            raise ValueError("a size or a position is no number that can be one")
    return tuple(values)


def _tensor(name: str, dtype: Any, shape: list[int], parts: list[StoredPart]) -> TensorEntry:
    if not isinstance(name, str) or not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor has no name, or no number format that is known")
    size = _numbers(shape)
    for offsets, sizes, place in parts:
        if not len(offsets) == len(sizes) == len(size):
            raise ValueError(f"a part of {name} has other dimensions")
        if any(map(_ends_outside, offsets, sizes, size)):
            raise ValueError(f"a part of {name} ends outside of it")
        if prod(sizes) * dtype.itemsize > place.length:
            raise ValueError(f"a part of {name} has {place.length:,} bytes, fewer than its numbers")
    return TensorEntry(dtype, torch.Size(size), parts)


def _ends_outside(offset: int, size: int, whole: int) -> bool:
    return offset + size > whole
