"""4-bit weights, made of others as these are read: a few rows at a time, never a whole matrix."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_trainer.checkpoint.derived import stacked_like
from fsdp_trainer.checkpoint.stream import TensorOnDisk, as_tensor, piece_bytes, row_ranges
from fsdp_trainer.models.four_bit import decode, encode, encoded_columns

TEMPORARIES = 8  # bytes that encoding needs at once for a byte of its input


@dataclass
class EncodedTensor(TensorOnDisk):
    """A matrix of the disk as `Linear4` keeps it: [rows, encoded_columns] uint8."""

    original: TensorOnDisk

    def read_rows(self, first: int, last: int, buffer: Tensor) -> Tensor:
        """Read rows of the original, encode them into `buffer`, uint8; return them there."""
        rows = as_tensor(buffer, self.dtype, (last - first, *self.shape[1:]))
        for start, numbers in originals(self.original, first, last):
            rows[start - first : start - first + len(numbers)] = encode(numbers)
        return rows


@dataclass
class DecodedTensor(TensorOnDisk):
    """A matrix of the disk as a 4-bit model computes with it: encoded, and decoded to `dtype`."""

    original: TensorOnDisk

    def read_rows(self, first: int, last: int, buffer: Tensor) -> Tensor:
        """Read rows of the original, round them into `buffer`, uint8; return them there."""
        rows = as_tensor(buffer, self.dtype, (last - first, *self.shape[1:]))
        for start, numbers in originals(self.original, first, last):
            rounded = decode(encode(numbers), numbers.shape[1], self.dtype)
            rows[start - first : start - first + len(numbers)] = rounded
        return rows


def encoded(original: TensorOnDisk) -> TensorOnDisk:
    """Return a matrix of the disk, or a stack, in 4 bits a number, as it is kept in training."""
    if len(original.shape) == 3:
        return stacked_like(original, encoded(original.as_matrix()))
    rows, columns = original.shape
    shape = rows, encoded_columns(columns)
    return EncodedTensor(torch.uint8, shape, original.chunks, original)


def as_trained_on(original: TensorOnDisk, dtype: torch.dtype) -> TensorOnDisk:
    """Return a matrix of the disk, or a stack, with the numbers that a 4-bit model has for it.

    dtype: in which it computes.
    """
    if len(original.shape) == 3:
        return stacked_like(original, as_trained_on(original.as_matrix(), dtype))
    return DecodedTensor(dtype, original.shape, original.chunks, original)


def originals(tensor: TensorOnDisk, first: int, last: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the rows from `first` to `last`, a piece at a time, each with its first row's number.

    In memory of its own, which the next piece uses again. Raises OSError.
    """
    buffer = torch.empty(piece_bytes([tensor.row_bytes]), dtype=torch.uint8)
    for start, end in row_ranges(first, last, TEMPORARIES * tensor.row_bytes):
        yield start, tensor.read_rows(start, end, buffer)
