"""Weights of GGUF files. The package gguf knows the formats of the numbers."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fsdp_trainer.base.distributed import whole_slice
from fsdp_trainer.checkpoint.formats.tensor_files import Chunk, TensorOnDisk, read
from fsdp_trainer.errors import UserError
from fsdp_trainer.interop.folders.gguf_description import ROPE_FACTORS, gguf_files, open_gguf
from fsdp_trainer.interop.folders.gguf_header import GgufTensor
from fsdp_trainer.interop.weights.foreign_tensors import (
    ForeignTensor,
    equal_parts,
    foreign,
    renamed,
)
from fsdp_trainer.interop.weights.tensor_names import GGUF, GGUF_BY_FAMILY, is_norm
from fsdp_trainer.models.config import ModelConfig

STACK = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight")
GATE_OF_ONE_ROW = "ffn_gate_inp_shexp.weight"
"""A matrix with one row, which releases of llama.cpp keep as a vector or as it is."""
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass
class QuantizedRows(TensorOnDisk):
    """A tensor in blocks of few bits, read as float32."""

    stored: GgufTensor

    def fill(self, rows: Tensor, first: int, last: int) -> None:
        import gguf

        blocks = torch.empty((last - first, self.stored.row_bytes), dtype=torch.uint8)
        read(self.stored.file, self.stored.offset + first * self.stored.row_bytes, blocks)
        numbers = gguf.quants.dequantize(blocks.numpy(), self.stored.kind)
        rows.copy_(torch.from_numpy(numbers.astype(np.float32)).view(rows.shape))


def gguf_tensors(folder: Path, config: ModelConfig) -> dict[str, ForeignTensor]:
    """Return the tensors of a GGUF file, or of a folder with one, by Hugging Face's names.

    Raises UserError.
    """
    tensors: dict[str, TensorOnDisk] = {}
    experts: dict[str, TensorOnDisk] = {}
    family = config.family_spec
    for file in gguf_files(folder):
        for stored in open_gguf(file).tensors.values():
            found = STACK.fullmatch(stored.name)
            if stored.name == ROPE_FACTORS:
                _require_factors(stored, config)
            elif found and config.num_experts:
                stack = f"model.layers.{found[1]}.mlp.experts.{found[2]}_proj"
                names = [family.stored_expert(stack, i) for i in range(config.num_experts)]
                experts |= equal_parts(_on_disk(stored), names)
            else:
                tensors[stored.name] = _on_disk(stored)
    named: dict[str, ForeignTensor] = {}
    names_of_family = GGUF_BY_FAMILY.get(config.family, GGUF)
    for name, tensor in renamed(tensors, (names_of_family,), config).items():
        if is_norm(name) and family.norm_offset:
            shifted = tensor.dtype, tensor.shape, tensor.chunks, tensor, -family.norm_offset
            tensor = foreign(Shifted(*shifted))
        named[family.stored_name(name) if ".mlp.gate." in name else name] = tensor
    return named | {name: foreign(tensor) for name, tensor in experts.items()}


@dataclass
class Shifted(TensorOnDisk):
    """A tensor to whose numbers `offset` is added."""

    source: TensorOnDisk
    offset: float

    def read_rows(self, first: int, last: int, buffer: Tensor) -> Tensor:
        return self.source.read_rows(first, last, buffer).add_(self.offset)


def _on_disk(stored: GgufTensor) -> TensorOnDisk:
    shape = stored.shape[::-1]
    if len(shape) == 3:
        shape = (shape[0] * shape[1], shape[2])
    elif stored.name.endswith(GATE_OF_ONE_ROW) and len(shape) == 1:
        shape = (1, *shape)
    chunks = [Chunk(stored.file, stored.offset, whole_slice(shape))]
    if stored.kind.name in PLAIN:
        return TensorOnDisk(PLAIN[stored.kind.name], shape, chunks)
    _require_decoder(stored)
    return QuantizedRows(torch.float32, shape, chunks, stored)


def _require_decoder(stored: GgufTensor) -> None:
    """Raise UserError for what is no matrix, or in a format that the package gguf does not know."""
    import gguf

    try:
        if len(stored.shape) not in (2, 3):
            raise NotImplementedError
        _, size = gguf.GGML_QUANT_SIZES[stored.kind]
        gguf.quants.dequantize(np.zeros((1, size), np.uint8), stored.kind)
    except NotImplementedError:
        form = f"{list(stored.shape)} in {stored.kind.name}"
        reason = f"has {stored.name} with {form}, which is not read"
        raise UserError("cannot read the model", str(stored.file), reason) from None


def _require_factors(stored: GgufTensor, config: ModelConfig) -> None:
    """Raise UserError unless the divisors of frequencies are those of the configuration."""
    from fsdp_trainer.interop.weights.gguf_file import rope_factors

    expected = next(rope_factors(config), np.empty(0))
    is_same = stored.kind.name == "F32" and stored.shape == expected.shape
    if not is_same or not np.allclose(stored.numbers(), expected, rtol=1e-4):
        reason = (
            f"scales positions by {ROPE_FACTORS} in another way than Llama 3.1 does.\nWrite the"
            " model's config.json beside it"
        )
        raise UserError("cannot read the model", str(stored.file), reason)
