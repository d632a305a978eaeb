"""Numbers in 8 bits each: blocks share a scale, and codes stand for values that are dense near zero (Dettmers et al. 2022)."""

from functools import lru_cache
from typing import NamedTuple

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


class Table(NamedTuple):
    """values: [256] that codes stand for; middles: [256], the largest number that is still nearest to each; starts: [65536], see `encode`."""

    values: Tensor
    middles: Tensor
    starts: Tensor


@lru_cache
def table(signed: bool, device: torch.device) -> Table:
    """Made once for each device."""
    code = torch.tensor(values(signed))
    middles = (code[1:] + code[:-1]) / 2
    upper = torch.arange(1 << 16, dtype=torch.int32) << 16
    least = torch.where(upper < 0, upper | 0xFFFF, upper).view(
        torch.float32
    )  # of the numbers that begin with these 16 bits
    starts = torch.bucketize(least, middles, out_int32=True)
    return Table(
        code.to(device),
        torch.cat([middles, torch.tensor([torch.inf])]).to(device),
        starts.to(device),
    )


def encode(numbers: Tensor, block: int, signed: bool) -> tuple[Tensor, Tensor]:
    """[n] float32 → [n] uint8 codes of the nearest values, [n / block] float32 scales: each block's largest absolute value.

    At most one middle lies between two numbers of the same upper 16 bits: a look-up and a comparison do what a search of 8 steps would.
    """
    known = table(signed, numbers.device)
    blocks = numbers.view(-1, block)
    scale = blocks.abs().amax(1)
    shares = (blocks / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).view(-1)
    codes = known.starts.index_select(0, (shares.view(torch.int32) >> 16).bitwise_and_(0xFFFF))
    codes += shares > known.middles.index_select(0, codes)
    return codes.to(torch.uint8), scale


def decode(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    """[n] float32 of what `encode` gave."""
    found = table(signed, codes.device).values.index_select(0, codes.int())
    return (found.view(len(scale), -1) * scale[:, None]).view(-1)
