"""Random weights as a function of seed, parameter name and position, for any layout of ranks."""

import hashlib
import math
import re

import torch
from torch import Tensor

from fsdp_trainer.distributed import local_part, local_slice
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder

VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
BLOCK = 1 << 16  # elements drawn from one generator


@torch.no_grad()
def initialize_weights(model: Decoder, seed: int) -> None:
    """Fill this rank's part of every parameter, and draw only the rows that it has a part of."""
    for name, parameter in model.named_parameters():
        local = local_part(parameter)
        part = local_slice(parameter)
        initialize_part(model.config, name, local, part, parameter.shape, seed)


def initialize_part(
    config: ModelConfig,
    name: str,
    local: Tensor,
    part: tuple[slice, ...],
    shape: tuple[int, ...],
    seed: int,
) -> None:
    """Fill `local`, which is `part` of a parameter of `shape`.

    Norms scale by 1, biases and the padding of the vocabulary are 0, all else is from N(0,
    init_std²).
    """
    if name.endswith("norm.weight"):
        local.fill_(1.0 - config.family_spec.norm_offset)
    elif name.endswith(".bias"):
        local.zero_()
    else:
        local.copy_(draw_part(seed, name, part, shape, init_std(config, name)))
    if name in VOCABULARY:
        local[max(0, config.vocab_size - part[0].start) :] = 0


def draw_part(
    seed: int, name: str, part: tuple[slice, ...], shape: tuple[int, ...], std: float
) -> Tensor:
    """Return `part` of a float32 parameter from N(0, std²): its rows are drawn whole, then cut."""
    row = math.prod(shape[1:])
    first = part[0].start
    count = part[0].stop - first
    rows = draw_normal(seed, name, first * row, count * row, std)
    return rows.view(-1, *shape[1:])[:, *part[1:]]


def draw_normal(seed: int, name: str, start: int, count: int, std: float) -> Tensor:
    """Return elements start … start + count of (seed, name)'s endless sequence: [count] float32."""
    pieces = []
    for block in range(start // BLOCK, -(-(start + count) // BLOCK)):
        digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        first = max(start - block * BLOCK, 0)
        last = min(start + count - block * BLOCK, BLOCK)
        # always the whole block: a shorter draw has other numbers
        pieces.append(torch.randn(BLOCK, generator=generator)[first:last])
    return torch.cat(pieces).mul_(std) if pieces else torch.empty(0)


def init_std(config: ModelConfig, name: str) -> float:
    """Return the standard deviation of a matrix.

    Matrices that add to the residual stream may start smaller, so that it does not grow with depth:
    `depth` scales all of them by 1/√(2·blocks) (GPT-2, §2.3), `layer` those of block i, counted
    from 1, by 1/√(2·i) (as in OLMo and torchtitan).
    """
    adds = re.fullmatch(r"model\.layers\.(\d+)\.(self_attn\.o_proj|mlp\.down_proj)\.weight", name)
    if adds is None or config.initializer == "plain":
        return config.initializer_range
    blocks = config.num_hidden_layers if config.initializer == "depth" else int(adds[1]) + 1
    return config.initializer_range / math.sqrt(2 * blocks)
