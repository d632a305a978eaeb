"""Tensors derived from others while these are read: parts, transposes, stacks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Lock

from torch import Tensor

from fsdp_trainer.checkpoint.formats.tensor_files import TensorOnDisk, as_tensor, read_whole


@dataclass
class SomeRows(TensorOnDisk):
    """Some rows of another tensor, from `first_row` on."""

    source: TensorOnDisk
    first_row: int

    def read_rows(self, first: int, last: int, buffer: Tensor) -> Tensor:
        return self.source.read_rows(self.first_row + first, self.first_row + last, buffer)


def rows_of(source: TensorOnDisk, first: int, count: int) -> SomeRows:
    return SomeRows(source.dtype, (count, *source.shape[1:]), source.chunks, source, first)


@dataclass
class Columns(TensorOnDisk):
    """Some columns of a matrix, from `first_column` on."""

    source: TensorOnDisk
    first_column: int

    def fill(self, rows: Tensor, first: int, last: int) -> None:
        end = self.first_column + self.shape[1]
        rows.copy_(read_whole(self.source, first, last)[:, self.first_column : end])


@dataclass
class Transposed(TensorOnDisk):
    """A small matrix, transposed. Reading any of its rows reads the complete matrix."""

    matrix: TensorOnDisk

    def fill(self, rows: Tensor, first: int, last: int) -> None:
        columns = read_whole(self.matrix, 0, self.matrix.shape[0])[:, first:last]
        rows.copy_(columns.T)


def transposed(matrix: TensorOnDisk) -> Transposed:
    return Transposed(matrix.dtype, matrix.shape[::-1], matrix.chunks, matrix)


@dataclass
class Stacked(TensorOnDisk):
    """Matrices of one shape, [matrices, rows, columns], as a view of one matrix of all rows."""

    matrix: TensorOnDisk

    def as_matrix(self) -> TensorOnDisk:
        return self.matrix

    def read_rows(self, first: int, last: int, buffer: Tensor) -> Tensor:
        """Read matrices `first` to `last` into `buffer`, uint8; return them."""
        rows = self.shape[1]
        numbers = self.matrix.read_rows(first * rows, last * rows, buffer)
        return numbers.view(-1, *self.shape[1:])


def by_matrix(first: int, last: int, height: int) -> Iterator[tuple[int, int, int, slice]]:
    """Yield (number, begin, end, place) of each matrix that has some rows of a matrix of all.

    begin, end: of its own rows. place: where they are among rows `first` to `last` of all.
    """
    for number in range(first // height, -(-last // height)):
        before = first - number * height
        begin, end = max(before, 0), min(last - number * height, height)
        yield number, begin, end, slice(begin - before, end - before)


@dataclass
class JoinedRows(TensorOnDisk):
    """Matrices of one shape, one below the other."""

    matrices: list[TensorOnDisk]

    def read_rows(self, first: int, last: int, buffer: Tensor) -> Tensor:
        height = self.matrices[0].shape[0]
        for number, begin, end, place in by_matrix(first, last, height):
            self.matrices[number].read_rows(begin, end, buffer[place.start * self.row_bytes :])
        return as_tensor(buffer, self.dtype, (last - first, *self.shape[1:]))


def stacked_like(whole: TensorOnDisk, matrix: TensorOnDisk) -> Stacked:
    """Return a matrix of all rows as stacked matrices, of the number and height of `whole`'s."""
    shape = (*whole.shape[:2], *matrix.shape[1:])
    return Stacked(matrix.dtype, shape, matrix.chunks, matrix)


def stack_of(matrices: Sequence[TensorOnDisk]) -> Stacked:
    count = len(matrices)
    rows, columns = matrices[0].shape
    dtype = matrices[0].dtype
    chunks = [chunk for matrix in matrices for chunk in matrix.chunks]
    joined = JoinedRows(dtype, (count * rows, columns), chunks, list(matrices))
    return Stacked(dtype, (count, rows, columns), chunks, joined)


class PartCache:
    """A cache of the last parts of tensors, which threads converting pieces of one read once."""

    def __init__(self, count: int):
        self.count = count
        self._parts: dict[tuple[int, int, int], tuple[TensorOnDisk, Tensor]] = {}
        self._lock = Lock()

    def rows(self, tensor: TensorOnDisk, first: int, last: int) -> Tensor:
        key = id(tensor), first, last  # the cache keeps the tensor: no other one gets its id
        with self._lock:
            part = self._parts.pop(key, None)
            if part is None:
                part = tensor, read_whole(tensor, first, last)
            self._parts[key] = part  # last in the order of use
            if len(self._parts) > self.count:
                del self._parts[next(iter(self._parts))]
            return part[1]
