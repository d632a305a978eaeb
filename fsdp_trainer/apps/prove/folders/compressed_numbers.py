"""Matrices in few bits, as compressed-tensors stores them: numbers, and steps between codes.

The package of the format's authors decodes them.
"""

import importlib.util
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp_trainer.checkpoint.formats.derived import rows_of
from fsdp_trainer.checkpoint.formats.tensor_files import (
    DTYPES,
    HuggingFaceTensor,
    TensorOnDisk,
    as_tensor,
    read,
)
from fsdp_trainer.errors import UserError

CODES = DTYPES | {
    "I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip
"""Number formats of what decodes a matrix, by their names in headers."""
FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
STRATEGIES = ("tensor", "channel", "group")
SCALE, PACKED, SHAPE = "_scale", "_packed", "_shape"
"""What follows a matrix's name in the names of the tensors that decode it."""
OF_ACTIVATIONS = re.compile(r"\.(input|output|q|k|v)_(scale|zero_point|global_scale)$")
MANTISSA, LEAST_EXPONENT = 3, -9
"""Of float8 (E4M3): bits after the point, and the exponent of the smallest number."""
Stored = Mapping[str, HuggingFaceTensor]


@dataclass
class CompressedMatrix(HuggingFaceTensor):
    """A matrix in few bits, decoded as it is read. parts: its tensors by their last names."""

    parts: dict[str, HuggingFaceTensor]
    scheme: Any
    compressor: Any

    def whole_rows(self, first: int, count: int) -> TensorOnDisk:
        return rows_of(self, first, count)

    def read_rows(self, first: int, last: int, buffer: Tensor) -> Tensor:
        """Read rows `first` to `last`, decode them into `buffer`, uint8; return them there."""
        rows = as_tensor(buffer, self.dtype, (last - first, self.shape[1]))
        parts = {part: self.part(part, first, last) for part in self.parts}
        if "weight_packed" in parts:
            parts["weight_shape"] = torch.tensor(rows.shape)
        return rows.copy_(self.compressor.decompress(parts, self.scheme)["weight"])

    def part(self, name: str, first: int, last: int) -> Tensor:
        """Return some rows of one of the parts; all, if it is no matrix with as many."""
        stored = self.parts[name]
        has_rows = stored.shape[:1] == self.shape[:1]
        return rows_in_file(stored, first, last) if has_rows else rows_in_file(stored)


@dataclass
class Steps(HuggingFaceTensor):
    """The distance of neighbouring codes at each number of a matrix; 0 if it was not rounded.

    It is of integers; of float8 it is that of the smallest ones.
    """

    matrix: HuggingFaceTensor

    def whole_rows(self, first: int, count: int) -> TensorOnDisk:
        return rows_of(self, first, count)

    def read_rows(self, first: int, last: int, buffer: Tensor) -> Tensor:
        rows = as_tensor(buffer, self.dtype, (last - first, *self.shape[1:]))
        if not isinstance(self.matrix, CompressedMatrix):
            return rows.zero_()
        scales = self.matrix.part("weight_scale", first, last).float().view(-1, 1)
        if self.matrix.scheme.weights.type == "float":
            scales = scales * 2.0**LEAST_EXPONENT
        return rows.view(-1, rows.numel() // max(1, len(scales))).copy_(scales).view_as(rows)


def steps_of(stored: Stored) -> dict[str, Any]:
    """Return the steps of each tensor of a folder, see Steps."""
    return {n: Steps(torch.float32, t.shape, t.chunks, "F32", t) for n, t in stored.items()}


def largest_error(exact: Tensor, steps: Tensor, is_float: bool) -> Tensor:
    """Return by how much rounding to the nearest code changes numbers at most."""
    if is_float:
        exponents = torch.frexp(exact / steps.clamp_min(1e-30)).exponent - 1 - MANTISSA
        steps = steps * torch.ldexp(torch.ones_like(steps), exponents.clamp_min(0))
    return steps / 2


def decoded(stored: Stored, quantization: Mapping[str, Any]) -> dict[str, HuggingFaceTensor]:
    """Return the tensors of a folder, with those of each matrix in few bits joined into one.

    quantization: as in config.json. Raises UserError for what is not decoded here.
    """
    compressor, scheme = decoder_of(quantization)
    plain = {name: t for name, t in stored.items() if not OF_ACTIVATIONS.search(name)}
    for name, scale in stored.items():
        whole = name.removesuffix(SCALE)
        codes = stored.get(whole, stored.get(f"{whole}{PACKED}"))
        if whole == name or codes is None or scale.number_format not in DTYPES:
            continue
        endings = [part for part in ("", PACKED, SCALE, SHAPE) if f"{whole}{part}" in plain]
        parts = {f"weight{end}": plain.pop(f"{whole}{end}") for end in endings}
        given = parts.get("weight_shape")
        shape = tuple(rows_in_file(given).tolist()) if given else codes.shape
        form = scale.dtype, shape, codes.chunks, scale.number_format
        plain[whole] = CompressedMatrix(*form, parts, scheme, compressor)
    return plain


def rows_in_file(stored: HuggingFaceTensor, first: int = 0, last: int | None = None) -> Tensor:
    """Return rows of a tensor in its own number format; all of them without `last`."""
    chunk, dtype, rows = stored.chunks[0], CODES[stored.number_format], [*stored.shape, 1][0]
    last = rows if last is None else last
    row_bytes = dtype.itemsize * math.prod(stored.shape[1:])
    numbers = torch.empty((last - first) * row_bytes, dtype=torch.uint8)
    read(chunk.file, chunk.offset + first * row_bytes, numbers)
    return numbers.view(dtype).view(last - first, *stored.shape[1:])


def decoder_of(quantization: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the package's decoder and scheme of all matrices. Raises UserError if it has none."""
    if not importlib.util.find_spec("compressed_tensors"):
        raise UserError("compressed_tensors is not installed: pip install compressed-tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = QuantizationConfig.model_validate(quantization)
    schemes = [*config.config_groups.values()]
    weights = schemes[0].weights if len(schemes) == 1 else None
    if weights is None or config.format not in FORMATS or weights.strategy not in STRATEGIES:
        raise UserError(f"numbers in {config.format}, {len(schemes)} schemes: not decoded here")
    if not weights.symmetric or weights.actorder:
        raise UserError("numbers with zero points or in another order: not decoded here")
    return BaseCompressor.get_value_from_registry(config.format), schemes[0]
