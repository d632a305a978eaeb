"""Hugging Face's names and order for tensors that other tools have saved under their own."""

import re
from collections.abc import Callable, Iterator, Mapping

from fsdp_trainer.checkpoint.formats.tensor_files import TensorOnDisk
from fsdp_trainer.errors import UserError
from fsdp_trainer.interop.weights.foreign_tensors import (
    ForeignTensor,
    equal_parts,
    foreign,
    renamed,
    separated,
)
from fsdp_trainer.interop.weights.megatron_tensors import megatron_tensors
from fsdp_trainer.interop.weights.tensor_names import META, TORCHTITAN
from fsdp_trainer.models.config import ModelConfig

WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
"""Parts of names that torch's wrappers add."""
META_WEIGHT = re.compile(r"tok_embeddings\.|layers\.|norm\.|output\.|lm_head\.")
STACKED = re.compile(r"(.*\.mlp\.experts\.)(gate_up_proj|down_proj)")
PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
FUSED = ".wqkv."
"""Part of torchtitan's names of joined queries, keys and values."""

Tensors = Mapping[str, TensorOnDisk]


def huggingface_names(tensors: Tensors, config: ModelConfig) -> dict[str, ForeignTensor]:
    """Return the model's tensors among others, by Hugging Face's names.

    Names may have a common prefix and those of torch's wrappers. A name that is not known is kept,
    so that whoever checks the tensors reports it. Raises UserError for a name that is there twice.
    """
    plain: dict[str, TensorOnDisk] = {}
    for name, tensor in tensors.items():
        short = WRAPPERS.sub("", name)
        if short in plain:
            raise UserError(
                "the weights are not clear",
                name,
                f"is there without the names of torch's wrappers too: {short}",
            )
        plain[short] = tensor
    for embedding, translate in BY_EMBEDDING.items():
        matches = [name for name in plain if name == embedding or name.endswith(f".{embedding}")]
        if matches:
            prefix = min(matches, key=len).removesuffix(embedding)
            own = {
                name.removeprefix(prefix): tensor
                for name, tensor in plain.items()
                if name.startswith(prefix)
            }
            return translate(own, config)
    return {name: foreign(tensor) for name, tensor in plain.items()}


def _of_huggingface(own: Tensors, config: ModelConfig) -> dict[str, ForeignTensor]:
    """Return the tensors of the model; a checkpoint may hold other states too."""
    parts = ("model.", "lm_head.", "score.")
    weights = {name: tensor for name, tensor in own.items() if name.startswith(parts)}
    family = config.family_spec
    if any(STACKED.fullmatch(name) for name in weights) and not family.clamped_experts:
        weights = dict(_unstacked(weights, config))
    return {name: foreign(tensor) for name, tensor in weights.items()}


def _unstacked(weights: Tensors, config: ModelConfig) -> Iterator[tuple[str, TensorOnDisk]]:
    """Yield weights as a folder has them; in memory, transformers 5 stacks those of all experts."""
    family = config.family_spec
    for name, tensor in weights.items():
        match = STACKED.fullmatch(name)
        if not match or tensor.shape[:1] != (config.num_experts,):
            yield family.stored_name(name) if ".mlp.gate." in name else name, tensor
            continue
        names = [
            family.stored_expert(match[1] + projection, expert)
            for expert in range(config.num_experts)
            for projection in PROJECTIONS[match[2]]
        ]
        yield from equal_parts(tensor.as_matrix(), names).items()


def _of_meta(own: Tensors, config: ModelConfig) -> dict[str, ForeignTensor]:
    weights = {}
    for name, tensor in own.items():
        if not META_WEIGHT.match(name):
            continue  # of the optimizer or the loader, or a constant
        if FUSED not in name:
            weights[name] = tensor
            continue
        for part, rows in separated(tensor, config).items():
            weights[name.replace(FUSED, f".w{part}.")] = rows
    return renamed(weights, (META, TORCHTITAN), config)


BY_EMBEDDING: dict[str, Callable[[Tensors, ModelConfig], dict[str, ForeignTensor]]] = {
    "model.embed_tokens.weight": _of_huggingface,
    "tok_embeddings.weight": _of_meta,
    "embedding.word_embeddings.weight": megatron_tensors,
}
"""By the name of the embedding: what returns the model's tensors by Hugging Face's names."""
