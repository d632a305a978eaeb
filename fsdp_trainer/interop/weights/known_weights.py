"""Weights of other tools that are read as those of a Hugging Face folder."""

from collections.abc import Callable
from pathlib import Path

from fsdp_trainer.interop.folders.other_weights import kind_of_weights
from fsdp_trainer.interop.weights.foreign_tensors import ForeignTensor
from fsdp_trainer.interop.weights.gguf_weights import gguf_tensors
from fsdp_trainer.interop.weights.sharded_state import sharded_tensors
from fsdp_trainer.interop.weights.torch_files import meta_tensors, torch_tensors
from fsdp_trainer.interop.weights.zero_partitions import zero_tensors
from fsdp_trainer.models.config import ModelConfig

READERS: dict[str, Callable[[Path, ModelConfig], dict[str, ForeignTensor]]] = {
    "gguf": gguf_tensors,
    "meta": meta_tensors,
    "sharded": sharded_tensors,
    "torch": torch_tensors,
    "zero": zero_tensors,
}
"""By the kinds of other_weights.py: a function from folder and architecture to the tensors."""


def other_tensors(folder: Path, config: ModelConfig) -> dict[str, ForeignTensor] | None:
    kind = kind_of_weights(folder)
    return READERS[kind](folder, config) if kind else None
