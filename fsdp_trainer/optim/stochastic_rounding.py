"""Stochastic rounding from float32 to bfloat16.

The random bits are a function of a number's position, not of a generator's state, so that they do
not depend on ranks, sharding or restarts.
"""

import hashlib
import struct

import torch
from torch import Tensor

# multipliers of the 32-bit mixer lowbias32 (Wellons 2018, "Prospecting for hash functions"), and
# the golden ratio's, as int32
FIRST = 0x7FEB352D
SECOND = 0x846CA68B - 2**32
GOLDEN = 0x9E3779B1 - 2**32


def key_of(seed: int, name: str) -> tuple[int, int]:
    digest = hashlib.blake2b(f"{seed}/rounding/{name}".encode(), digest_size=8).digest()
    return struct.unpack("<ii", digest)


def element_numbers(
    part: tuple[slice, ...], shape: torch.Size, start: int, count: int, device: torch.device
) -> Tensor:
    """Return the flat indices of elements in the complete parameter, modulo 2³²: [count] int32.

    part: slices of the parameter of `shape` that this rank holds; start, count: first element in
    the part and number of elements. Elements are counted row by row in both.
    """
    sizes = [piece.stop - piece.start for piece in part]
    if sizes[1:] == list(shape[1:]):  # complete rows are contiguous in the parameter, too
        first = part[0].start * shape[1:].numel() + start
        numbers = torch.arange(count, dtype=torch.int32, device=device)
        return numbers.add_((first + 2**31) % 2**32 - 2**31)
    rest = torch.arange(start, start + count, device=device)
    numbers = torch.zeros_like(rest)
    stride = 1
    for piece, size, whole in zip(reversed(part), reversed(sizes), reversed(shape), strict=True):
        numbers += (rest % size + piece.start) * stride
        rest //= size
        stride *= whole
    return numbers.to(torch.int32)


def random_bits(key: tuple[int, int], step: Tensor, numbers: Tensor) -> Tensor:
    """Return 32 random bits for each element of a parameter in one optimizer step: [n] int32.

    key: key of the parameter; step: scalar on the device, to avoid synchronisation; numbers: [n]
    int32 from `element_numbers`, overwritten. The bits are the same on any device.
    """
    bits = numbers
    bits += key[0]  # the sequence repeats after 2³² elements
    bits ^= (bits >> 16) & 0xFFFF
    bits *= FIRST
    bits += step.to(torch.int32) * GOLDEN + key[1]
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= SECOND
    bits ^= (bits >> 16) & 0xFFFF
    return bits


def round_to_bfloat16(numbers: Tensor, bits: Tensor) -> Tensor:
    """Round [n] float32 to bfloat16 stochastically, so that the expected value is unchanged.

    Adds the low 16 of `bits` [n] int32 and truncates (Gupta et al. 2015): the probability of
    rounding away from zero is the distance to the truncated number, as a share of the step between
    bfloat16 numbers. Both arguments are overwritten.
    """
    pattern = numbers.view(torch.int32)
    pattern += bits.bitwise_and_(0xFFFF)
    pattern &= -0x10000
    return numbers.bfloat16()
