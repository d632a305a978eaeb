"""Numbers in 8 bits each: blocks share a scale, and codes stand for values that are dense near zero (Dettmers et al. 2022)."""

from functools import lru_cache

import torch
from torch import Tensor

BLOCK = 256  # numbers that share a scale, at most
LEAST = 64  # a scale for fewer than these would cost more than it saves


def block_of(shape: torch.Size) -> int | None:
    """Numbers in a block of a parameter: the largest power of two that divides its rows; None where it stays in float32.

    A block never crosses rows, so that any sharding by rows has the same blocks.
    """
    row = shape[-1] if len(shape) > 1 else 0
    block = min(row & -row, BLOCK)
    return block if block >= LEAST else None


@lru_cache
def values(signed: bool) -> tuple[float, ...]:
    """The 256 values in [-1, 1] or [0, 1] that codes stand for: seven decades, each with twice as many values as the one below."""
    found = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (0 if signed else 1)) + 1)
        means = (10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2).tolist()
        found += means + [-mean for mean in means if signed]
    return tuple(sorted(found))


@lru_cache
def table(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """[256] values, and [255] the middles between them."""
    code = torch.tensor(values(signed), device=device)
    return code, (code[1:] + code[:-1]) / 2


def encode(numbers: Tensor, block: int, signed: bool) -> tuple[Tensor, Tensor]:
    """[n] float32 → [n] uint8 codes of the nearest values, [n / block] float32 scales: each block's largest absolute value."""
    blocks = numbers.view(-1, block)
    scale = blocks.abs().amax(1)
    middles = table(signed, numbers.device)[1]
    shares = blocks / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    return torch.bucketize(shares, middles, out_int32=True).to(torch.uint8).view(-1), scale


def decode(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    """[n] float32 of what `encode` gave."""
    found = table(signed, codes.device)[0][codes.int()]
    return (found.view(len(scale), -1) * scale[:, None]).view(-1)
