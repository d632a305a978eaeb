"""Random weights as a function of (seed, parameter name, position): the same for every number of ranks, and each rank draws only its own part."""

import hashlib

import torch
from torch import Tensor, nn

BLOCK = 1 << 16  # elements drawn from one generator


def draw_normal(seed: int, name: str, start: int, count: int, std: float) -> Tensor:
    """[count] float32: elements start … start + count of the endless normal sequence that (seed, name) stand for."""
    pieces = []
    for block in range(start // BLOCK, -(-(start + count) // BLOCK)):
        digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        first, last = max(start - block * BLOCK, 0), min(start + count - block * BLOCK, BLOCK)
        pieces.append(torch.randn(BLOCK, generator=generator)[first:last])  # the whole block: a shorter draw would differ
    return torch.cat(pieces).mul_(std) if pieces else torch.empty(0)


@torch.no_grad()
def initialize(name: str, local: Tensor, first_row: int, row_elements: int, seed: int, std: float) -> None:
    """Fill `local`, rows first_row … of parameter `name`: norms with 1, biases with 0, all else from N(0, std²)."""
    if name.endswith("norm.weight"):
        local.fill_(1.0)
    elif name.endswith(".bias"):
        local.zero_()
    else:
        local.copy_(draw_normal(seed, name, first_row * row_elements, local.numel(), std).view(local.shape))


def initialize_whole(model: nn.Module, seed: int, std: float) -> None:
    """Fill an unsharded model."""
    for name, parameter in model.named_parameters():
        initialize(name, parameter, 0, parameter[0].numel(), seed, std)
