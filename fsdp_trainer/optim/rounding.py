"""Stochastic rounding from float32 to bfloat16, by random bits that are a function of where a number stands, not of a generator's state."""

import hashlib

import torch
from torch import Tensor

# multipliers of the 32-bit mixer lowbias32 (Wellons 2018, "Prospecting for hash functions"), and the golden ratio's, as int32
FIRST, SECOND, GOLDEN = 0x7FEB352D, 0x846CA68B - 2**32, 0x9E3779B1 - 2**32


def key_of(seed: int, name: str) -> tuple[int, int]:
    """Two int32 that stand for (seed, name of a parameter)."""
    digest = hashlib.blake2b(f"{seed}/rounding/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little", signed=True), int.from_bytes(
        digest[4:], "little", signed=True
    )


def random_bits(key: tuple[int, int], step: Tensor, first: int, count: int) -> Tensor:
    """[count] int32, 32 random bits for each of the elements first … first + count of a parameter in one optimizer step.

    key: of the parameter; step: scalar on the device, so that nobody waits for it. The same on any device and for any sharding.
    """
    bits = torch.arange(count, dtype=torch.int32, device=step.device)
    bits += as_int32(first + key[0])  # beyond 2³² elements the sequence begins again
    bits ^= (bits >> 16) & 0xFFFF
    bits *= FIRST
    bits += step.to(torch.int32) * GOLDEN + key[1]
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= SECOND
    bits ^= (bits >> 16) & 0xFFFF
    return bits


def round_to_bfloat16(numbers: Tensor, bits: Tensor) -> Tensor:
    """[n] float32 → bfloat16, up or down with the probability that keeps the mean. The low 16 of `bits` [n] int32 decide; both are overwritten.

    The probability of leaving zero is the fraction that 16 bits hold of the step to the next number (Gupta et al. 2015).
    """
    pattern = numbers.view(torch.int32)
    pattern += bits.bitwise_and_(0xFFFF)
    pattern &= -0x10000
    return numbers.bfloat16()


def as_int32(number: int) -> int:
    """Modulo 2³²."""
    return (number + 2**31) % 2**32 - 2**31
