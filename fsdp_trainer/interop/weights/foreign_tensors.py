"""Tensors of another tool's files, under the names and in the order of Hugging Face's."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from fsdp_trainer.checkpoint.formats.derived import JoinedRows, SomeRows, rows_of
from fsdp_trainer.checkpoint.formats.tensor_files import (
    DTYPES,
    HuggingFaceTensor,
    TensorOnDisk,
    dtype_name,
    read_whole,
)
from fsdp_trainer.errors import UserError
from fsdp_trainer.interop.weights.tensor_names import TensorNames
from fsdp_trainer.models.config import ModelConfig

NUMBER_FORMATS = {dtype: name for name, dtype in DTYPES.items()}


@dataclass
class ForeignTensor(HuggingFaceTensor):
    """A tensor that is read as its `source` is."""

    source: TensorOnDisk

    def read_rows(self, first: int, last: int, buffer: Tensor) -> Tensor:
        return self.source.read_rows(first, last, buffer)

    def as_matrix(self) -> TensorOnDisk:
        return self.source.as_matrix()

    def whole_rows(self, first: int, count: int) -> SomeRows:
        return rows_of(self.source, first, count)


def foreign(source: TensorOnDisk) -> ForeignTensor:
    """Return a tensor that a Hugging Face folder could hold."""
    number_format = NUMBER_FORMATS.get(source.dtype, str(source.dtype))
    return ForeignTensor(source.dtype, tuple(source.shape), source.chunks, number_format, source)


@dataclass
class HalvedHeads(TensorOnDisk):
    """Rows of heads that alternate between their two halves, put back one half after the other."""

    source: TensorOnDisk
    head_rows: int

    def fill(self, rows: Tensor, first: int, last: int) -> None:
        begin = first // self.head_rows * self.head_rows
        end = -(-last // self.head_rows) * self.head_rows
        shape = (-1, self.head_rows // 2, 2, *self.shape[1:])
        pairs = read_whole(self.source, begin, end).view(shape)
        halves = pairs.transpose(1, 2).reshape(end - begin, *self.shape[1:])
        rows.copy_(halves[first - begin : last - begin])


def renamed(
    tensors: Mapping[str, TensorOnDisk], tables: tuple[TensorNames, ...], config: ModelConfig
) -> dict[str, ForeignTensor]:
    """Return tensors by Hugging Face's names, queries and keys in its order.

    tables: the first that knows a name translates it; one that none knows is kept.
    """
    named = {}
    for name, tensor in tensors.items():
        new, pairs = name, False
        for table in tables:
            if known := table.to_huggingface(name):
                new, pairs = known, config.family in table.pairs
                break
        if pairs and re.search(r"\.[qk]_proj\.", new):
            chunks, shape = tensor.chunks, tuple(tensor.shape)
            tensor = HalvedHeads(tensor.dtype, shape, chunks, tensor, config.head_dim)
        named[new] = foreign(tensor)
    return named


def separated(fused: TensorOnDisk, config: ModelConfig) -> dict[str, TensorOnDisk]:
    """Return queries, keys and values, by q, k and v, of a tensor with the rows of all three.

    Its rows are, for each head of keys: the heads of queries that meet it, itself, its values.
    """
    keys, rows = config.num_key_value_heads, config.head_dim
    queries = config.num_attention_heads // keys
    height = keys * (queries + 2) * rows
    if fused.shape[:1] != (height,):
        raise _misfit(fused, f"queries, keys and values of {height:,} rows together")
    separate: dict[str, TensorOnDisk] = {}
    for name, (first, count) in {
        "q": (0, queries),
        "k": (queries, 1),
        "v": (queries + 1, 1),
    }.items():
        starts = [(key * (queries + 2) + first) * rows for key in range(keys)]
        pieces: list[TensorOnDisk] = [rows_of(fused, start, count * rows) for start in starts]
        shape = (keys * count * rows, *fused.shape[1:])
        separate[name] = JoinedRows(fused.dtype, shape, fused.chunks, pieces)
    return separate


def equal_parts(matrix: TensorOnDisk, names: Sequence[str]) -> dict[str, TensorOnDisk]:
    rows = matrix.shape[0] // len(names)
    if rows * len(names) != matrix.shape[0]:
        raise _misfit(matrix, f"{len(names)} matrices of as many rows")
    return {name: rows_of(matrix, i * rows, rows) for i, name in enumerate(names)}


def in_pairs(tensor: Tensor, heads: int) -> Tensor:
    """Return rows such that the two halves of each head alternate, as HalvedHeads undoes it."""
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def joined(parts: list[TensorOnDisk], dimension: int) -> TensorOnDisk:
    """Return tensors as one that is cut into them along a dimension. Raises UserError."""
    shape = list(parts[0].shape)
    for part in parts:
        others = [(own.dtype, *own.shape[:dimension], *own.shape[dimension + 1 :])
                  for own in (parts[0], part)]  # fmt: skip
        if others[0] != others[1]:
            raise _misfit(
                part, f"a part like that of {list(shape)} in {dtype_name(parts[0].dtype)}"
            )
    shape[dimension] = sum(part.shape[dimension] for part in parts)
    chunks, start = [], 0
    for part in parts:
        for chunk in part.chunks:
            place = list(chunk.part)
            held = place[dimension]
            place[dimension] = slice(held.start + start, held.stop + start)
            chunks.append(replace(chunk, part=tuple(place)))
        start += part.shape[dimension]
    return TensorOnDisk(parts[0].dtype, tuple(shape), chunks)


def _misfit(tensor: TensorOnDisk, needed: str) -> UserError:
    form = f"{list(tensor.shape)} in {dtype_name(tensor.dtype)}"
    file = next((str(chunk.file) for chunk in tensor.chunks), "the weights")
    return UserError(
        "the weights do not fit the model", file, f"has a tensor of {form} in place of {needed}"
    )
