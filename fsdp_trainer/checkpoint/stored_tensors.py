"""Tensors of a checkpoint, to be read by rows, in whatever parts the ranks wrote them."""

from io import BytesIO
from operator import add
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from fsdp_trainer.base.torch_private import numbers_offset
from fsdp_trainer.checkpoint.formats.tensor_files import Chunk, TensorOnDisk, read_number
from fsdp_trainer.errors import RunFailed


class StoredTensors:
    """All tensors of a checkpoint: weights and the optimizer's state, each with its prefix."""

    def __init__(self, checkpoint: Path | str, metadata: Metadata | None = None):
        """metadata: the description of another tool's checkpoint, which is not unpickled freely."""
        self.checkpoint = Path(checkpoint)
        self._metadata = metadata or FileSystemReader(checkpoint).read_metadata()
        self.entries = {
            name: entry
            for name, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shape of every tensor, by name."""
        return {name: entry.size for name, entry in self.entries.items()}

    @property
    def names(self) -> list[str]:
        """Names of all tensors and other values."""
        return list(self._metadata.state_dict_metadata)

    def number(self, name: str) -> float:
        """Return a single number, stored as a tensor or by itself. Raises OSError and KeyError."""
        if name not in self.entries:
            return float(self.value(name))
        (chunk,) = self._chunks(name)
        return read_number(chunk.file, chunk.offset, self._dtype(name))

    def value(self, name: str) -> Any:
        """Return a value that is no tensor.

        Raises OSError, KeyError, and UnpicklingError for one of a class that could run code.
        """
        info = self._metadata.storage_data[MetadataIndex(name)]
        with (self.checkpoint / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            return torch.load(BytesIO(file.read(info.length)), weights_only=True)

    def _dtype(self, name: str) -> torch.dtype:
        return self.entries[name].properties.dtype

    def tensor(self, name: str, rows: int | None = None) -> TensorOnDisk:
        """Return a tensor after checking that its first `rows` rows are stored; None: all rows.

        Raises RunFailed if the checkpoint holds fewer, and OSError.
        """
        if name not in self.entries:
            raise RunFailed(f"{self.checkpoint} does not hold {name}")
        entry = self.entries[name]
        tensor = TensorOnDisk(self._dtype(name), entry.size, self._chunks(name))
        row = entry.size[1:].numel()
        rows = entry.size[0] if rows is None else rows
        held = sum(
            max(0, min(chunk.sizes[0], rows - chunk.offsets[0])) * chunk.sizes[1:].numel()
            for chunk in entry.chunks
        )
        if held != rows * row:
            some = f"{held // row:,} of {rows:,} rows"
            raise RunFailed(f"{self.checkpoint} holds {some} of {name}")
        return tensor

    def _chunks(self, name: str) -> list[Chunk]:
        chunks = []
        for chunk in self.entries[name].chunks:
            if chunk.sizes.numel():  # a rank may have no part of a small tensor
                info = self._metadata.storage_data[MetadataIndex(name, chunk.offsets)]
                file = self.checkpoint / info.relative_path
                ends = map(add, chunk.offsets, chunk.sizes)
                part = tuple(map(slice, chunk.offsets, ends))
                chunks.append(Chunk(file, numbers_offset(file, info), part))
        return chunks
