"""One short name for all weights of a checkpoint: equal digests are equal weights, bit by bit."""

import hashlib
from pathlib import Path

import torch

from fsdp_trainer.checkpoint.base import require_unchanged, weights_on_disk
from fsdp_trainer.checkpoint.stream import as_bytes, piece_bytes, row_ranges
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder


def weights_digest(checkpoint: Path) -> str:
    """Return the first 16 hexadecimal digits of SHA-256 over all weights, in order of their names.

    Name, number format, shape and bytes of each count; what ranks wrote which part does not.
    Memory: one piece of a tensor. Raises RunFailed for a checkpoint that lacks rows, and OSError.
    """
    with torch.device("meta"):
        model = Decoder(ModelConfig.from_hf(checkpoint / "hf"))
    require_unchanged(model, checkpoint)
    digest = hashlib.sha256()
    for name, tensor in sorted(weights_on_disk(model, checkpoint).items()):
        shape = list(tensor.shape)
        digest.update(f"{name} {tensor.dtype} {shape}\n".encode())
        buffer = torch.empty(piece_bytes([tensor.row_bytes]), dtype=torch.uint8)
        for first, last in row_ranges(0, shape[0], tensor.row_bytes):
            digest.update(as_bytes(tensor.read_rows(first, last, buffer)))
    return digest.hexdigest()[:16]
