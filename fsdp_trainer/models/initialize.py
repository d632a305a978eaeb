"""Random weights as a function of (seed, parameter name, position): the same for every number of ranks, and each rank draws only its own part."""

import hashlib
import math
import re

import torch
from torch import Tensor

from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder

VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
BLOCK = 1 << 16  # elements drawn from one generator


def draw_normal(seed: int, name: str, start: int, count: int, std: float) -> Tensor:
    """[count] float32: elements start … start + count of the endless normal sequence that (seed, name) stand for."""
    pieces = []
    for block in range(start // BLOCK, -(-(start + count) // BLOCK)):
        digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        first, last = max(start - block * BLOCK, 0), min(start + count - block * BLOCK, BLOCK)
        pieces.append(
            torch.randn(BLOCK, generator=generator)[first:last]
        )  # the whole block: a shorter draw would differ
    return torch.cat(pieces).mul_(std) if pieces else torch.empty(0)


@torch.no_grad()
def initialize(
    config: ModelConfig, name: str, local: Tensor, first_row: int, row_elements: int, seed: int
) -> None:
    """Fill `local`, rows first_row … of parameter `name`: norms so that they scale by 1, biases and padding with 0, all else from N(0, std²)."""
    if name.endswith("norm.weight"):
        local.fill_(1.0 - config.form.norm_offset)
    elif name.endswith(".bias"):
        local.zero_()
    else:
        local.copy_(
            draw_normal(
                seed, name, first_row * row_elements, local.numel(), deviation(config, name)
            ).view(local.shape)
        )
    if name in VOCABULARY:
        local[max(0, config.vocab_size - first_row) :] = 0


def deviation(config: ModelConfig, name: str) -> float:
    """Standard deviation of a matrix. What adds to the residual stream may start smaller, so that the stream does not grow with depth:

    `depth`: all by 1/√(2·blocks) (GPT-2, §2.3); `layer`: block i, counted from 1, by 1/√(2·i) (as in OLMo and torchtitan).
    """
    adds = re.fullmatch(r"model\.layers\.(\d+)\.(self_attn\.o_proj|mlp\.down_proj)\.weight", name)
    if adds is None or config.initializer == "plain":
        return config.initializer_range
    blocks = config.num_hidden_layers if config.initializer == "depth" else int(adds[1]) + 1
    return config.initializer_range / math.sqrt(2 * blocks)


def initialize_whole(model: Decoder, seed: int) -> None:
    """Fill an unsharded model."""
    for name, parameter in model.named_parameters():
        initialize(model.config, name, parameter, 0, parameter[0].numel(), seed)
