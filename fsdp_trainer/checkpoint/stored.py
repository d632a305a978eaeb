"""Where in a checkpoint's files the numbers of a tensor lie, so that they can be read by pieces, without loading it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from fsdp_trainer.errors import RunFailed


@dataclass
class Rows:
    """`count` rows of a tensor from `first` on, that lie together in a file from byte `offset` on."""

    file: Path
    offset: int
    first: int
    count: int


class StoredTensors:
    """The tensors of a checkpoint. Shards are some of a tensor's rows, each stored by torch.save in a part of a file."""

    def __init__(self, checkpoint: Path):
        self.checkpoint, self._reader = checkpoint, FileSystemReader(checkpoint)
        self._metadata = self._reader.read_metadata()

    @property
    def names(self) -> list[str]:
        """Of weights and of the optimizer's state, each with its prefix."""
        return list(self._metadata.state_dict_metadata)

    def entry(self, name: str) -> tuple[torch.dtype, torch.Size]:
        """Number format and shape."""
        stored = cast(TensorStorageMetadata, self._metadata.state_dict_metadata[name])
        return stored.properties.dtype, stored.size

    def rows(self, name: str, until: int) -> Iterator[Rows]:
        """The first `until` rows of a tensor, in order. Raises RunFailed where the checkpoint does not hold all of them."""
        stored, found = cast(TensorStorageMetadata, self._metadata.state_dict_metadata[name]), 0
        for chunk in sorted(stored.chunks, key=lambda chunk: chunk.offsets):
            assert chunk.sizes[1:] == stored.size[1:], f"{name} is sharded by more than rows"
            first, last = chunk.offsets[0], min(chunk.offsets[0] + chunk.sizes[0], until)
            if first < last:
                part = self._metadata.storage_data[MetadataIndex(name, chunk.offsets)]
                path = self.checkpoint / part.relative_path
                with path.open("rb") as file:
                    archive: Any = torch._C.PyTorchFileReader(self._reader._slice_file(file, part))
                    yield Rows(
                        path, part.offset + archive.get_record_offset("data/0"), first, last - first
                    )
                found += last - first
        if found != until:
            raise RunFailed(f"{self.checkpoint} holds {found:,} of {until:,} rows of {name}")
