"""Encoding of messages between ranks in 8-bit numbers.

A part of a message is cut into blocks of BLOCK numbers. A block is sent as a scale, its largest
magnitude divided by LARGEST, and for each number the nearest multiple of that. A decoded number
differs from the original by at most half a scale, and by float32's rounding.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256
"""Numbers that share a scale."""
SCALE_BYTES = 4
LARGEST = 127
BYTES = (BLOCK + SCALE_BYTES) / BLOCK
"""Bytes sent for a number."""
CHUNK = 2**22
"""Numbers that are encoded or decoded at a time: temporary tensors are no larger."""


def encode(parts: Tensor) -> Tensor:
    """Return parts of a message as uint8 [parts, bytes]: of each all codes, then all scales.

    parts: [parts, numbers of each], of a floating-point format. No number of a block that is not
    finite is finite when decoded.
    """
    count, size = parts.shape
    blocks = -(-size // BLOCK)
    encoded = parts.new_empty(count, blocks * (BLOCK + SCALE_BYTES), dtype=torch.uint8)
    for rows, columns in chunks(count, size):
        numbers = parts[rows, columns].float()
        numbers = F.pad(numbers, (0, -numbers.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
        scales = numbers.abs().amax(-1) / LARGEST
        codes = numbers.div_(torch.where(scales > 0, scales, 1.0)[..., None]).round_()
        own = encoded[rows]
        first, end = columns.start, columns.start + codes[0].numel()
        own[:, first:end] = codes.to(torch.int8).flatten(1).view(torch.uint8)
        first, end = (blocks * BLOCK + SCALE_BYTES * number // BLOCK for number in (first, end))
        own[:, first:end] = scales.view(torch.uint8)
    return encoded


def decode(encoded: Tensor, out: Tensor) -> None:
    """Write the numbers of encoded parts to `out`, [parts, numbers of each], of any format."""
    blocks = encoded.shape[1] // (BLOCK + SCALE_BYTES)
    codes, scales = encoded.split([blocks * BLOCK, blocks * SCALE_BYTES], dim=1)
    for rows, columns in chunks(*out.shape):
        part = out[rows, columns]
        first, end = columns.start // BLOCK, -(-columns.stop // BLOCK)
        factors = scales[rows, SCALE_BYTES * first : SCALE_BYTES * end].contiguous()
        numbers = codes[rows, BLOCK * first : BLOCK * end].contiguous().view(torch.int8)
        numbers = numbers.unflatten(1, (-1, BLOCK)) * factors.view(torch.float32)[..., None]
        part.copy_(numbers.flatten(1)[:, : part.shape[1]])


def chunks(count: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of the rows and of the columns of [count, size], whole blocks at a time."""
    rows = max(1, CHUNK // max(size, 1))
    for row in range(0, count, rows):
        for column in range(0, size, CHUNK):
            yield slice(row, min(row + rows, count)), slice(column, min(column + CHUNK, size))
