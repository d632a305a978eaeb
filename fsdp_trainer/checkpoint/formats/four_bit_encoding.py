"""Encoding of weights in 4 bits while they are read, a few rows at a time, no complete matrix."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_trainer.checkpoint.formats.derived import stacked_like
from fsdp_trainer.checkpoint.formats.tensor_files import (
    TensorOnDisk,
    piece_bytes,
    row_ranges,
)
from fsdp_trainer.models.four_bit import decode, encode, encoded_columns

TEMPORARIES = 8  # bytes that encoding needs at once for a byte of its input


@dataclass
class EncodedTensor(TensorOnDisk):
    """A matrix on disk, encoded as `Linear4` keeps it: [rows, encoded_columns] uint8."""

    original: TensorOnDisk

    def fill(self, rows: Tensor, first: int, last: int) -> None:
        for start, numbers in originals(self.original, first, last):
            rows[start - first : start - first + len(numbers)] = encode(numbers)


@dataclass
class DecodedTensor(TensorOnDisk):
    """A matrix on disk, encoded and decoded to `dtype`, as a 4-bit model computes with it."""

    original: TensorOnDisk

    def fill(self, rows: Tensor, first: int, last: int) -> None:
        for start, numbers in originals(self.original, first, last):
            rounded = decode(encode(numbers), numbers.shape[1], self.dtype)
            rows[start - first : start - first + len(numbers)] = rounded


def encoded(original: TensorOnDisk) -> TensorOnDisk:
    """Return a matrix on disk, or a stack of them, encoded in 4 bits a number as in training."""
    if len(original.shape) == 3:
        return stacked_like(original, encoded(original.as_matrix()))
    rows, columns = original.shape
    shape = rows, encoded_columns(columns)
    return EncodedTensor(torch.uint8, shape, original.chunks, original)


def as_trained_on(original: TensorOnDisk, dtype: torch.dtype) -> TensorOnDisk:
    """Return a matrix on disk, or a stack of them, rounded to what 4 bits can hold.

    dtype: number format of the result, in which the 4-bit model computes.
    """
    if len(original.shape) == 3:
        return stacked_like(original, as_trained_on(original.as_matrix(), dtype))
    return DecodedTensor(dtype, original.shape, original.chunks, original)


def originals(tensor: TensorOnDisk, first: int, last: int) -> Iterator[tuple[int, Tensor]]:
    """Yield rows `first` to `last` in pieces, each with the number of its first row.

    The next piece overwrites the memory of a piece. Raises OSError.
    """
    buffer = torch.empty(piece_bytes([tensor.row_bytes]), dtype=torch.uint8)
    for start, end in row_ranges(first, last, TEMPORARIES * tensor.row_bytes):
        yield start, tensor.read_rows(start, end, buffer)
