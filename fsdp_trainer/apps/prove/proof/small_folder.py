"""A small copy of an architecture with random weights, as a Hugging Face folder."""

import shutil
from math import lcm
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from fsdp_trainer.apps.prove.proof.recordings import BIAS
from fsdp_trainer.base.round_up import round_up
from fsdp_trainer.checkpoint.formats.headers import SINGLE
from fsdp_trainer.checkpoint.huggingface import tensor_parts, tensor_shapes
from fsdp_trainer.models.config import ModelConfig, has_tower
from fsdp_trainer.models.from_config.resolve import with_trained_head
from fsdp_trainer.models.hf.further_blocks import copies_in_head
from fsdp_trainer.models.hf.hf_config import config_object, quiet_transformers
from fsdp_trainer.models.hf.new_model import meta_decoder
from fsdp_trainer.models.hf.probe import shrunk
from fsdp_trainer.models.hf.read_architecture import read_architecture

DEVIATION = 0.1
"""Of the numbers of a matrix: with transformers' 0.02 a narrow model hardly looks at its input, and
faults would not show."""
BESIDE = (".json", ".jinja", ".model", ".txt")
DENSE = "first_k_dense_replace"
"""transformers' name of the number of blocks without experts before those with some."""
WIDTH = 64
NARROW = {
    "intermediate_size": 256, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64, "q_lora_rank": 64, "kv_lora_rank": 64,
}  # fmt: skip
"""The largest widths of what this program's decoder computes. The vocabulary, which stays, makes
wide copies slow."""
OWN_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def write_small_folder(
    config: ModelConfig, out: Path, vocabulary: int, blocks: int, seed: int = 0
) -> None:
    """Write a folder with few, narrow blocks of the same architecture and with random weights.

    vocabulary: number of its tokens. blocks: the least number of blocks.
    """
    raw = config.source if config.by_transformers else config.to_hf("float32")
    with quiet_transformers():
        known = config_object({**raw, "model_type": raw.get("model_type")}, config.folder)
        small = shrunk(known, narrow=True, blocks=blocks)
        text, own = small.get_text_config(decoder=True), known.get_text_config(decoder=True)
        more = {name: known_id(getattr(own, name, None), vocabulary) for name in OWN_TOKENS}
        if getattr(text, DENSE, 0):  # else no block would have experts
            more[DENSE] = 1
        if not config.by_transformers:
            more |= narrow_widths(config, text)
        for name, value in {**more, "vocab_size": vocabulary}.items():
            setattr(text, name, value)
        auto: Any = transformers.AutoModelForCausalLM
        if config.by_transformers and has_tower(raw):
            auto = transformers.AutoModelForImageTextToText
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = auto.from_config(small, dtype=torch.float32)
            spread(model)
        transformers.utils.logging.disable_progress_bar()
        model.save_pretrained(out)


def known_id(token: Any, vocabulary: int) -> Any:
    """Return the id of a special token; None for one that another tokenizer does not have."""
    return None if isinstance(token, int) and token >= vocabulary else token


def narrow_widths(config: ModelConfig, text: Any) -> dict[str, int]:
    """Return widths of a narrow copy. text: the configuration, with few heads."""
    # transformers wants a width that the number of heads divides
    heads = text.num_attention_heads
    limits = NARROW | {"hidden_size": round_up(WIDTH, lcm(16, heads))}
    lists_factors = "long_factor" in (config.rope_scaling or {})  # one for each channel
    if config.family_spec.qk_norm == "whole":  # OLMoE's class has norms as wide as the model
        limits["head_dim"] = limits["hidden_size"] // heads
    elif not lists_factors and not config.is_latent:
        limits["head_dim"] = WIDTH
    widths = {name: getattr(text, name, None) or 0 for name in limits}
    return {name: min(limits[name], width) for name, width in widths.items() if width}


def add_head(folder: Path) -> None:
    """Add a head for further tokens with random weights to a folder."""
    config = with_trained_head(read_architecture(folder), mtp=1.0)
    model, copies = meta_decoder(config), copies_in_head(config)
    tensors = load_file(folder / SINGLE)
    for name, shape in tensor_shapes(model, tensor_parts(model, config.vocab_size)).items():
        if name in copies:
            tensors[name] = tensors[copies[name]].clone()
        elif name not in tensors:
            tensors[name] = torch.randn(shape) * DEVIATION + (len(shape) == 1)
    save_file(tensors, folder / SINGLE, {"format": "pt"})


@torch.no_grad()
def spread(model: nn.Module) -> None:
    """Give matrices a deviation of DEVIATION, and change vectors and routers' biases a little."""
    for name, buffer in model.named_buffers():
        if name.endswith(BIAS):
            buffer.add_(torch.randn_like(buffer), alpha=DEVIATION / 5)
    for parameter in model.parameters():
        if parameter.ndim < 2:
            parameter.add_(torch.randn_like(parameter), alpha=DEVIATION / 2)
        elif deviation := float(parameter.std()):
            parameter.mul_(DEVIATION / deviation)


def copy_small_files(source: Path, out: Path) -> None:
    """Copy what lies beside the weights: tokenizer, template, processor, settings."""
    for file in source.iterdir():
        is_small = file.suffix in BESIDE and not file.name.endswith(".index.json")
        if is_small and file.is_file() and not (out / file.name).exists():
            shutil.copyfile(file, out / file.name)
