"""Adapters merged into the matrices that they adapt, as tensors that are read by rows."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_trainer.checkpoint.formats.derived import by_matrix, rows_of, stacked_like, transposed
from fsdp_trainer.checkpoint.formats.tensor_files import TensorOnDisk, read_whole
from fsdp_trainer.config.parts.families import is_stacked
from fsdp_trainer.models.adapters.adapter_spec import (
    MAGNITUDE,
    A,
    AdapterSpec,
    B,
    adapter_name,
    matrix_name,
)
from fsdp_trainer.models.config import ModelConfig

BLOCK_ROWS = 64
"""Rows that are multiplied at once, beginning at a multiple of this number. The last bits of a
product may depend on its shape, and a row must not depend on the rows that are read with it."""


@dataclass
class MergedWeight(TensorOnDisk):
    """W + scale · B·A in float32, [out, in]; with DoRA, its rows rescaled to the trained norms.

    base: W. a: [rank, in]. b: [out, rank]. magnitude: [out], or None.
    """

    base: TensorOnDisk
    a: TensorOnDisk
    b: TensorOnDisk
    magnitude: TensorOnDisk | None
    scale: float

    def fill(self, rows: Tensor, first: int, last: int) -> None:
        a = read_whole(self.a, 0, self.a.shape[0]).double()
        for number, begin, end, place in by_matrix(first, last, BLOCK_ROWS):
            start = number * BLOCK_ROWS
            block = self._block(start, min(start + BLOCK_ROWS, self.shape[0]), a)
            rows[place] = block[begin:end]

    def _block(self, first: int, last: int, a: Tensor) -> Tensor:
        """Return merged rows: [last - first, in] float64."""
        block = read_whole(self.base, first, last).double()
        block.addmm_(read_whole(self.b, first, last).double(), a, alpha=self.scale)
        if self.magnitude is not None:
            lengths = torch.linalg.vector_norm(block, dim=1)
            block *= (read_whole(self.magnitude, first, last).double() / lengths).unsqueeze(1)
        return block


@dataclass
class MergedStack(TensorOnDisk):
    """W + scale · B·A of each expert in float32, as one matrix of all experts' rows, [rows, in].

    base, a, b: stacked, as matrices of all rows. experts: their number. is_transposed: W is kept
    as [in, out], and so is the sum.
    """

    base: TensorOnDisk
    a: TensorOnDisk
    b: TensorOnDisk
    experts: int
    scale: float
    is_transposed: bool

    def as_matrix(self) -> TensorOnDisk:
        return self

    def fill(self, rows: Tensor, first: int, last: int) -> None:
        height = self.shape[0] // self.experts
        for expert, begin, end, place in by_matrix(first, last, height):
            base = rows_of(self.base, expert * height, height)
            shape = (height, self.shape[1])
            own = MergedWeight(self.dtype, shape, [], base, *self.adapter(expert), None, self.scale)
            rows[place] = read_whole(own, begin, end)

    def adapter(self, expert: int) -> tuple[TensorOnDisk, TensorOnDisk]:
        """Return A and B of an expert; Bᵀ and Aᵀ, whose product is (B·A)ᵀ, if W is transposed."""
        a, b = (
            rows_of(matrix, expert * rows, rows)
            for matrix in (self.a, self.b)
            for rows in [matrix.shape[0] // self.experts]
        )
        return (transposed(b), transposed(a)) if self.is_transposed else (a, b)


def merged(
    tensors: Mapping[str, TensorOnDisk], spec: AdapterSpec, config: ModelConfig
) -> dict[str, TensorOnDisk]:
    is_transposed = config.family_spec.clamped_experts
    weights = {name: tensor for name, tensor in tensors.items() if ".lora_" not in name}
    for layer in spec.layers:
        name = matrix_name(layer)
        base = weights[name]
        a, b = (tensors[adapter_name(layer, matrix)] for matrix in (A, B))
        scale = spec.scale(layer)
        if is_stacked(layer):
            rows = base.as_matrix()
            stacks = rows, a.as_matrix(), b.as_matrix(), base.shape[0]
            matrix = MergedStack(torch.float32, rows.shape, [], *stacks, scale, is_transposed)
            weights[name] = stacked_like(base, matrix)
        else:
            magnitude = tensors.get(adapter_name(layer, MAGNITUDE))
            weights[name] = MergedWeight(
                torch.float32, base.shape, [], base, a, b, magnitude, scale
            )
    return weights
