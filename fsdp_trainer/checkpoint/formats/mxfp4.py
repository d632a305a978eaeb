"""Experts in MXFP4 (OCP Microscaling Formats 1.0), as GPT-OSS is published, read as bfloat16.

A number has 4 bits. 32 consecutive numbers share a power of two, which has 8 bits.
"""

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from fsdp_trainer.checkpoint.formats.derived import PartCache, by_matrix
from fsdp_trainer.checkpoint.formats.tensor_files import HuggingFaceTensor, TensorOnDisk, as_tensor

BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the names of the two tensors that are stored for one."""
BYTES = 16
"""Bytes of a block: 32 numbers, two in a byte, the first in its lower half."""
NUMBERS = 2 * BYTES
CACHED_TENSORS = 4
"""Number of cached tensors: blocks and scales of two experts, as threads read adjacent pieces."""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BIAS = 127
"""The bias of the exponents: a scale of 127 is 2⁰."""


@dataclass
class Mxfp4Tensor(HuggingFaceTensor):
    """Matrices of experts, [experts, in, out], each of which is stored transposed.

    blocks: [experts, out, in / 32, 16] uint8; scales: [experts, out, in / 32] uint8. cache: holds
    the experts of which threads are decoding pieces.
    """

    blocks: TensorOnDisk
    scales: TensorOnDisk
    cache: PartCache

    def as_matrix(self) -> "Mxfp4Tensor":
        return replace(self, shape=(prod(self.shape[:-1]), self.shape[-1]))

    def read_rows(self, first: int, last: int, buffer: Tensor) -> Tensor:
        """Read rows of the matrix of all rows, decode them into `buffer`, uint8; return them."""
        rows = as_tensor(buffer, self.dtype, (last - first, self.shape[-1]))
        of_expert = NUMBERS * self.scales.shape[-1]
        for expert, start, stop, place in by_matrix(first, last, of_expert):
            rows[place] = self.read_expert(expert, start, stop)
        return rows

    def read_expert(self, expert: int, start: int, stop: int) -> Tensor:
        """Return rows of one expert's matrix.

        The complete expert is read, once, because every stored row is a column of it.
        """
        blocks, scales = (
            self.cache.rows(tensor, expert, expert + 1)[0] for tensor in (self.blocks, self.scales)
        )
        first, last = start // NUMBERS, -(-stop // NUMBERS)
        columns = decode(blocks[:, first:last], scales[:, first:last])
        return columns.T[start - first * NUMBERS : stop - first * NUMBERS]


def decode(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of consecutive blocks: [..., blocks · 32] bfloat16.

    blocks: [..., blocks, 16]; scales: [..., blocks].
    """
    positive = torch.tensor(MAGNITUDES, dtype=torch.bfloat16)
    values = torch.cat([positive, -positive])  # the highest of 4 bits is the sign
    halves = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    exponents = scales.int().unsqueeze(-1) - BIAS
    return torch.ldexp(values[halves.int()], exponents).to(torch.bfloat16).flatten(-2)


def join_mxfp4(tensors: dict[str, HuggingFaceTensor]) -> dict[str, HuggingFaceTensor]:
    """Return the tensors of a folder, with each pair of blocks and scales joined into one."""
    joined = dict(tensors)
    cache = PartCache(CACHED_TENSORS)
    for name, blocks in tensors.items():
        whole = name.removesuffix(BLOCKS)
        scales = tensors.get(f"{whole}{SCALES}")
        if name == whole or scales is None or not _fit(blocks, scales):
            continue
        del joined[name], joined[f"{whole}{SCALES}"]
        experts, columns, count = scales.shape
        shape = experts, NUMBERS * count, columns
        codes = blocks, scales, cache
        joined[whole] = Mxfp4Tensor(torch.bfloat16, shape, blocks.chunks, "BF16", *codes)
    return joined


def _fit(blocks: HuggingFaceTensor, scales: HuggingFaceTensor) -> bool:
    are_bytes = blocks.number_format == scales.number_format == "U8"
    return are_bytes and len(scales.shape) == 3 and blocks.shape == (*scales.shape, BYTES)
