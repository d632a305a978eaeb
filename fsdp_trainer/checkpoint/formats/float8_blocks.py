"""Matrices in float8 with a scale for each block of 128 × 128 numbers (DeepSeek-V3, 2024, §3.3.2),
decoded as they are read."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_trainer.checkpoint.formats.derived import rows_of
from fsdp_trainer.checkpoint.formats.tensor_files import TensorOnDisk, read_whole

SIDE = 128
FLOAT8 = "F8_E4M3"
"""The name of the number format in a safetensors file."""
SCALES = "_scale_inv"
"""Suffix of a matrix's name that makes the name of its scales."""


@dataclass
class Float8Matrix(TensorOnDisk):
    """A float8 matrix, decoded to bfloat16.

    codes: [rows, columns] uint8. scales: [rows / 128, columns / 128] float32. number_format:
    safetensors' name of the decoded format.
    """

    codes: TensorOnDisk
    scales: TensorOnDisk
    number_format: str = "BF16"

    def whole_rows(self, first: int, count: int) -> TensorOnDisk:
        return rows_of(self, first, count)

    def fill(self, rows: Tensor, first: int, last: int) -> None:
        """Read rows `first` to `last`, decode them into `rows`."""
        columns = self.shape[1]
        codes = read_whole(self.codes, first, last).view(torch.float8_e4m3fn)
        block = first // SIDE
        scales = read_whole(self.scales, block, -(-last // SIDE))
        of_rows = scales.repeat_interleave(SIDE, 0)[first - block * SIDE :][: last - first]
        rows.copy_(codes.float() * of_rows.repeat_interleave(SIDE, 1)[:, :columns])
