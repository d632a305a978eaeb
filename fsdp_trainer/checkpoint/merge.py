"""Adapters merged into the matrices that they adapt, as tensors that are read by rows."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_trainer.checkpoint.stream import TensorOnDisk, as_tensor
from fsdp_trainer.models.adapter_spec import MAGNITUDE, A, AdapterSpec, B

BLOCK_ROWS = 64
"""Rows that are multiplied at once, from a multiple of it on: a product's last bits may depend on
its shape, and a row must not depend on the rows that are read with it."""


@dataclass
class MergedWeight(TensorOnDisk):
    """W + scale · B·A in float32, [out, in]; DoRA: with rows of the trained lengths.

    base: W. a: [rank, in]. b: [out, rank]. magnitude: [out], or None.
    """

    base: TensorOnDisk
    a: TensorOnDisk
    b: TensorOnDisk
    magnitude: TensorOnDisk | None
    scale: float

    def read_rows(self, first: int, last: int, buffer: Tensor) -> Tensor:
        """Read and merge rows `first` to `last` into `buffer`, uint8; return them."""
        rows = as_tensor(buffer, self.dtype, (last - first, *self.shape[1:]))
        a = read_whole(self.a, 0, self.a.shape[0]).double()
        for start in range(first - first % BLOCK_ROWS, last, BLOCK_ROWS):
            end = min(start + BLOCK_ROWS, self.shape[0])
            block = self._block(start, end, a)
            begin = max(first, start)
            stop = min(last, end)
            rows[begin - first : stop - first] = block[begin - start : stop - start]
        return rows

    def _block(self, first: int, last: int, a: Tensor) -> Tensor:
        """Return merged rows: [last - first, in] float64."""
        block = read_whole(self.base, first, last).double()
        block.addmm_(read_whole(self.b, first, last).double(), a, alpha=self.scale)
        if self.magnitude is not None:
            lengths = torch.linalg.vector_norm(block, dim=1)
            block *= (read_whole(self.magnitude, first, last).double() / lengths).unsqueeze(1)
        return block


def read_whole(tensor: TensorOnDisk, first: int, last: int) -> Tensor:
    """Return rows `first` to `last` in memory of their own."""
    buffer = torch.empty((last - first) * tensor.row_bytes, dtype=torch.uint8)
    return tensor.read_rows(first, last, buffer)


def merged(tensors: Mapping[str, TensorOnDisk], spec: AdapterSpec) -> dict[str, TensorOnDisk]:
    """Return the weights of a model without adapters. tensors: those with them, by name."""
    weights = {name: tensor for name, tensor in tensors.items() if ".lora_" not in name}
    for layer in spec.layers:
        base = weights[f"{layer}.weight"]
        a = tensors[f"{layer}.{A}.weight"]
        b = tensors[f"{layer}.{B}.weight"]
        magnitude = tensors.get(f"{layer}.{MAGNITUDE}")
        scale = spec.scale(layer)
        weights[f"{layer}.weight"] = MergedWeight(
            torch.float32, base.shape, [], base, a, b, magnitude, scale
        )
    return weights
