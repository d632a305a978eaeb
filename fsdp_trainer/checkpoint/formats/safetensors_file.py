"""Writing of safetensors files: the header first, then the numbers, a few pieces at a time."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fsdp_trainer.checkpoint.formats.tensor_files import (
    DTYPES,
    StoredBytes,
    TensorOnDisk,
    as_tensor,
    write,
)

NAMES = {dtype: name for name, dtype in DTYPES.items()} | {
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.float64: "F64", torch.uint8: "U8", torch.bool: "BOOL"},
}


@dataclass
class ExportPiece:
    """Rows `first` to `last` of a tensor, to be written as `dtype` at byte `offset` of a file."""

    source: TensorOnDisk
    first: int
    last: int
    dtype: torch.dtype
    file: int
    offset: int


def write_header(
    file: BinaryIO, tensors: Mapping[str, TensorOnDisk], metadata: dict[str, str] | None = None
) -> dict[str, tuple[int, int]]:
    """Write the header of a safetensors file and extend the file to its final size.

    Returns for each tensor the file's descriptor and the byte in it at which the tensor begins.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"} | (metadata or {})}
    starts = {}
    end = 0
    for name, tensor in tensors.items():
        starts[name] = end
        end = end + tensor.nbytes
        number_format, shape = NAMES.get(tensor.dtype), tensor.shape
        if isinstance(tensor, StoredBytes):
            number_format, shape = tensor.number_format, tensor.stored_shape
        header[name] = {
            "dtype": number_format,
            "shape": list(shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    file.truncate(8 + len(text) + end)
    return {name: (file.fileno(), 8 + len(text) + start) for name, start in starts.items()}


def export_piece(piece: ExportPiece, buffer: Tensor) -> None:
    """Read, convert and write a piece.

    buffer: uint8; one half is for reading, the other for converting.
    """
    read_into, convert_into = buffer.chunk(2)
    rows = piece.source.read_rows(piece.first, piece.last, read_into)
    if rows.dtype != piece.dtype:
        rows = as_tensor(convert_into, piece.dtype, tuple(rows.shape)).copy_(rows)
    write(piece.file, piece.offset, rows)
