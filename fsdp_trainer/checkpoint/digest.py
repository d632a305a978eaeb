"""One short name for all weights of a checkpoint, whatever number of ranks wrote it: equal digests are equal weights, to the last bit."""

import hashlib
from pathlib import Path

import torch

from fsdp_trainer.checkpoint.state import WEIGHTS
from fsdp_trainer.checkpoint.stored import StoredTensors
from fsdp_trainer.checkpoint.stream import PIECE_BYTES, read


def weights_digest(checkpoint: Path) -> str:
    """The first 16 hexadecimal digits of SHA-256 over name, number format, shape and bytes of every weight, in the order of their names.

    Memory: one piece of a tensor. Raises RunFailed for a checkpoint that lacks rows, OSError for files that cannot be read.
    """
    digest, stored, buffer = (
        hashlib.sha256(),
        StoredTensors(checkpoint),
        torch.empty(PIECE_BYTES, dtype=torch.uint8),
    )
    for name in sorted(name for name in stored.names if name.startswith(WEIGHTS)):
        dtype, shape = stored.entry(name)
        digest.update(f"{name.removeprefix(WEIGHTS)} {dtype} {list(shape)}\n".encode())
        for rows in stored.rows(name, shape[0]):
            end = rows.offset + rows.count * shape[1:].numel() * dtype.itemsize
            with rows.file.open("rb", 0) as file:
                for offset in range(rows.offset, end, PIECE_BYTES):
                    piece = buffer[: end - offset]
                    read(rows.file, file.fileno(), offset, piece)
                    digest.update(piece.numpy().data)
    return digest.hexdigest()[:16]
