"""Tensors of megatron-core's GPT models, such as Llama, as its distributed checkpoints hold them.

All blocks may be one tensor with a dimension for them in front, whose name has no number.
"""

import math
import re
from collections.abc import Iterator, Mapping

from fsdp_trainer.checkpoint.formats.derived import rows_of
from fsdp_trainer.checkpoint.formats.tensor_files import Chunk, TensorOnDisk
from fsdp_trainer.interop.weights.foreign_tensors import (
    ForeignTensor,
    equal_parts,
    renamed,
    separated,
)
from fsdp_trainer.interop.weights.tensor_names import MEGATRON
from fsdp_trainer.models.config import ModelConfig

WEIGHT = re.compile(r"(embedding\.word_embeddings|decoder|output_layer)\.")
STACKED = re.compile(r"decoder\.layers\.(?!\d)")
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
QUERY_KEY_VALUE = ".self_attention.linear_qkv."
GATE_AND_UP = ".mlp.linear_fc1."
SINGLE = {
    ".self_attention.linear_qkv.layer_norm_weight": ".input_layernorm.weight",
    ".mlp.linear_fc1.layer_norm_weight": ".pre_mlp_layernorm.weight",
    ".mlp.linear_fc1.weight_w": ".mlp.gate.weight",
    ".mlp.linear_fc1.weight_v": ".mlp.up.weight",
}
"""Endings of tensors that are not divided further, and of modules as MEGATRON knows them."""


def megatron_tensors(
    own: Mapping[str, TensorOnDisk], config: ModelConfig
) -> dict[str, ForeignTensor]:
    separate: dict[str, TensorOnDisk] = {}
    for name, tensor in _by_block(own, config):
        if name in VOCABULARY:  # padded
            separate[name] = rows_of(tensor, 0, min(config.vocab_size, *tensor.shape[:1]))
        else:
            separate |= _parts(name, tensor, config)
    return renamed(separate, (MEGATRON,), config)


def _by_block(
    own: Mapping[str, TensorOnDisk], config: ModelConfig
) -> Iterator[tuple[str, TensorOnDisk]]:
    """Yield the weights, those of all blocks one block at a time."""
    for name, tensor in own.items():
        if STACKED.match(name) and tensor.shape[:1] == (config.num_hidden_layers,):
            rest = name.removeprefix("decoder.layers.")
            for block in range(config.num_hidden_layers):
                yield f"decoder.layers.{block}.{rest}", _one_of(tensor, block)
        elif WEIGHT.match(name):
            yield name, tensor


def _one_of(stack: TensorOnDisk, number: int) -> TensorOnDisk:
    chunks = []
    for chunk in stack.chunks:
        numbers, *part = chunk.part
        if numbers.start <= number < numbers.stop:
            count = math.prod(each.stop - each.start for each in part)
            skipped = (number - numbers.start) * count * stack.dtype.itemsize
            chunks.append(Chunk(chunk.file, chunk.offset + skipped, tuple(part)))
    return TensorOnDisk(stack.dtype, tuple(stack.shape[1:]), chunks)


def _parts(name: str, tensor: TensorOnDisk, config: ModelConfig) -> dict[str, TensorOnDisk]:
    """Return a tensor by its name, or its parts if it joins several of Hugging Face's."""
    for ending, new in SINGLE.items():
        if name.endswith(ending):
            return {name.removesuffix(ending) + new: tensor}
    if QUERY_KEY_VALUE in name:
        parts = separated(tensor, config)
        return {name.replace("linear_qkv", part): rows for part, rows in parts.items()}
    if GATE_AND_UP in name:
        return equal_parts(tensor, [name.replace("linear_fc1", part) for part in ("gate", "up")])
    return {name: tensor}
