"""Weights of GGUF files. The package gguf knows the formats of the numbers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdp_trainer.base.distributed import whole_slice
from fsdp_trainer.checkpoint.formats.tensor_files import Chunk, TensorOnDisk, as_tensor
from fsdp_trainer.checkpoint.other_tools.foreign_tensors import ForeignTensor, renamed
from fsdp_trainer.checkpoint.other_tools.tensor_names import GGUF
from fsdp_trainer.config.other_tools.gguf_description import ROPE_FACTORS, gguf_files, open_gguf
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.config import ModelConfig

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass
class QuantizedRows(TensorOnDisk):
    """A tensor in blocks of few bits, read as float32."""

    stored: Any
    """The tensor of gguf's reader; its `data` are mapped, [rows, bytes]."""

    def read_rows(self, first: int, last: int, buffer: Tensor) -> Tensor:
        """Decode rows `first` to `last` into `buffer`, uint8; return them."""
        import gguf

        stored = self.stored.data.reshape(self.shape[0], -1)[first:last]
        numbers = gguf.quants.dequantize(stored, self.stored.tensor_type)
        rows = as_tensor(buffer, self.dtype, (last - first, *self.shape[1:]))
        return rows.copy_(torch.from_numpy(numbers.astype(np.float32)).view(rows.shape))


def gguf_tensors(folder: Path, config: ModelConfig) -> dict[str, ForeignTensor]:
    """Return the tensors of a GGUF file, or of a folder with one, by Hugging Face's names.

    Raises UserError.
    """
    tensors, files = {}, gguf_files(folder)
    for file in files:
        for stored in open_gguf(file).tensors:
            if stored.name == ROPE_FACTORS:
                _require_factors(file, stored.data, config)
            else:
                tensors[stored.name] = _on_disk(file, stored)
    return renamed(tensors, (GGUF,), config)


def _on_disk(file: Path, stored: Any) -> TensorOnDisk:
    shape = tuple(int(size) for size in reversed(stored.shape))
    chunks = [Chunk(file, int(stored.data_offset), whole_slice(shape))]
    if stored.tensor_type.name in PLAIN:
        return TensorOnDisk(PLAIN[stored.tensor_type.name], shape, chunks)
    return QuantizedRows(torch.float32, shape, chunks, stored)


def _require_factors(file: Path, stored: np.ndarray, config: ModelConfig) -> None:
    """Raise UserError unless the divisors of frequencies are those of the configuration."""
    from fsdp_trainer.checkpoint.formats.gguf_file import rope_factors

    expected = next(rope_factors(config), None)
    if expected is None or not np.allclose(stored.reshape(-1), expected, rtol=1e-4):
        reason = (
            f"scales positions by {ROPE_FACTORS} in another way than Llama 3.1 does.\nWrite the"
            " model's config.json beside it"
        )
        raise UserError("cannot read the model", [Problem(str(file), reason)])
