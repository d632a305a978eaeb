"""Tensors of a checkpoint, to be read by rows, in whatever parts the ranks wrote them."""

from io import BytesIO
from math import prod
from operator import add
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, ZipFile

import torch

from fsdp_trainer.base.torch_private import bounded_copies, numbers_in
from fsdp_trainer.checkpoint.formats.description import Description, StoredPart, read_description
from fsdp_trainer.checkpoint.formats.inert_pickles import plain_tensor
from fsdp_trainer.checkpoint.formats.tensor_files import Chunk, TensorOnDisk, read_number
from fsdp_trainer.errors import UserError

LARGEST_VALUE = 2**26  # bytes


class StoredTensors:
    """All tensors of a checkpoint: weights and the optimizer's state, each with its prefix."""

    def __init__(self, checkpoint: Path | str, description: Description | None = None):
        """description: None to read that of an own checkpoint. Raises UserError and OSError."""
        self.checkpoint = Path(checkpoint)
        self._description = description or read_description(self.checkpoint)
        self.entries = self._description.tensors

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: entry.shape for name, entry in self.entries.items()}

    @property
    def names(self) -> list[str]:
        return [*self.entries, *self._description.values]

    def number(self, name: str) -> float:
        """Return a single number, stored as a tensor or by itself.

        Raises OSError, UserError, and ValueError for anything else.
        """
        if name not in self.entries:
            return float(self.value(name))
        (chunk,) = self._chunks(name)
        return read_number(chunk.file, chunk.offset, self.entries[name].dtype)

    def value(self, name: str) -> Any:
        """Return a value that is no tensor.

        Raises OSError, and ValueError for one of a class that could run code or a damaged one.
        """
        place = self._description.values[name]
        if place.length > LARGEST_VALUE:
            raise ValueError(f"{name} has {place.length:,} bytes")
        with (self.checkpoint / place.file).open("rb") as file:
            file.seek(place.offset)
            content = BytesIO(file.read(place.length))
        try:
            with ZipFile(content) as archive:
                if any(member.compress_type != ZIP_STORED for member in archive.infolist()):
                    raise ValueError(f"{name} is compressed, which torch.save does not do")
            content.seek(0)
            with bounded_copies():
                return torch.load(content, weights_only=True)
        except Exception as error:  # a damaged pickle raises whatever its instructions lead to
            raise ValueError(f"{name}: {error}") from None

    def tensor(self, name: str, rows: int | None = None) -> TensorOnDisk:
        """Return a tensor after checking that its first `rows` rows are stored; None: all rows.

        Raises UserError if the checkpoint holds fewer or is damaged, and OSError.
        """
        if name not in self.entries:
            raise UserError(
                "cannot read the checkpoint", str(self.checkpoint), f"does not hold {name}"
            )
        entry = self.entries[name]
        rows = next(iter(entry.shape), 1) if rows is None else rows
        entry.require_rows(rows, name, self.checkpoint)
        return TensorOnDisk(entry.dtype, entry.shape, self._chunks(name))

    def _chunks(self, name: str) -> list[Chunk]:
        return [self._chunk(name, part) for part in self.entries[name].parts]

    def _chunk(self, name: str, part: StoredPart) -> Chunk:
        """Return a part of a tensor as it lies in its file.

        Raises OSError, and UserError if that is not what the description says.
        """
        file = self.checkpoint / part.place.file
        dtype = self.entries[name].dtype
        try:
            numbers = numbers_in(file, part.place.offset, part.place.length)
            tensor = plain_tensor(numbers.description)
            if (tensor.dtype, tensor.shape) != (dtype, part.sizes):
                raise ValueError("another tensor")
            if (tensor.first + prod(part.sizes)) * dtype.itemsize > numbers.length:
                raise ValueError("fewer numbers")
        except (FileNotFoundError, IsADirectoryError):
            raise UserError(
                "the checkpoint is not complete",
                str(file),
                f"is not there, and {name} is in it: copy it again",
            ) from None
        except (ValueError, RuntimeError) as error:
            line = str(error).partition("\n")[0]
            reason = (
                f"is damaged, or not as the checkpoint describes it. In place of {name}: {line}"
            )
            raise UserError("cannot read the checkpoint", str(file), reason) from None
        position = tuple(map(slice, part.offsets, map(add, part.offsets, part.sizes)))
        return Chunk(file, numbers.offset + tensor.first * dtype.itemsize, position)
