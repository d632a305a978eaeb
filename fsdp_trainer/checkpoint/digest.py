"""One short name for all weights of a checkpoint: equal digests are equal weights, bit by bit."""

import hashlib
from pathlib import Path

from fsdp_trainer.checkpoint.base import require_unchanged, weights_on_disk
from fsdp_trainer.checkpoint.stream import as_bytes
from fsdp_trainer.models.config import ModelConfig


def weights_digest(checkpoint: Path) -> str:
    """Return the first 16 hexadecimal digits of SHA-256 over all weights, in order of their names.

    Name, number format, shape and bytes of each count; what ranks wrote which part does not.
    Memory: one piece of a tensor. Raises RunFailed for a checkpoint that lacks rows, and OSError.
    """
    config = ModelConfig.from_hf(checkpoint / "hf")
    require_unchanged(config, checkpoint)
    digest = hashlib.sha256()
    for name, tensor in sorted(weights_on_disk(config, checkpoint).items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        for piece in tensor.pieces():
            digest.update(as_bytes(piece))
    return digest.hexdigest()[:16]
