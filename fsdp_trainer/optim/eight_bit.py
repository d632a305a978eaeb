"""Encoding of numbers in 8 bits (Dettmers et al. 2022).

A block shares a scale, and the values of the codes are dense near zero.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_trainer.base.distributed import to_device


@lru_cache
def values(signed: bool) -> tuple[float, ...]:
    """Return the values of the 256 codes, in [-1, 1] if signed, else in [0, 1].

    They cover seven decades, each with twice as many values as the next smaller one.
    """
    numbers = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (0 if signed else 1)) + 1)
        means = (10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2).tolist()
        numbers += means + [-mean for mean in means if signed]
    return tuple(sorted(numbers))


class Table(NamedTuple):
    """Lookup tables for encoding and decoding.

    values: [256], value of each code. middles: [256], upper bound of the numbers nearest to each
    value. starts: [65536], smallest possible code of a float32, by its upper 16 bits.
    """

    values: Tensor
    middles: Tensor
    starts: Tensor


@lru_cache
def table(signed: bool, device: torch.device) -> Table:
    """Return the table on a device, created once."""
    code = torch.tensor(values(signed))
    middles = (code[1:] + code[:-1]) / 2
    upper = torch.arange(1 << 16, dtype=torch.int32) << 16
    # the smallest of the float32 numbers with these upper 16 bits
    smallest = torch.where(upper < 0, upper | 0xFFFF, upper).view(torch.float32)
    starts = torch.bucketize(smallest, middles, out_int32=True)
    largest = torch.cat([middles, torch.tensor([torch.inf])])
    return Table(to_device(code, device), to_device(largest, device), to_device(starts, device))


def encode(numbers: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Return codes of the nearest values, and scales: [blocks, block] uint8, [blocks, 1] float32.

    numbers: [blocks, block] float32; a block's scale is its largest absolute value. Among numbers
    with the same upper 16 bits there is at most one middle, so a lookup and a comparison replace a
    binary search of 8 steps.
    """
    known = table(signed, numbers.device)
    scale = numbers.abs().amax(1, keepdim=True)
    shares = (numbers / scale.clamp_min(torch.finfo(torch.float32).tiny)).view(-1)
    codes = known.starts.index_select(0, (shares.view(torch.int32) >> 16).bitwise_and_(0xFFFF))
    codes += shares > known.middles.index_select(0, codes)
    return codes.to(torch.uint8).view_as(numbers), scale


def decode(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    shares = table(signed, codes.device).values.index_select(0, codes.flatten().int())
    return shares.view_as(codes) * scale
