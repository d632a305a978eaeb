"""A short digest of all weights of a checkpoint: equal digests mean bitwise equal weights."""

import hashlib
from pathlib import Path

from fsdp_trainer.checkpoint.formats.derived import rows_of
from fsdp_trainer.checkpoint.formats.tensor_files import as_bytes
from fsdp_trainer.checkpoint.frozen_weights import model_config, weights_on_disk


def weights_digest(source: Path) -> str:
    """Return the first 16 hexadecimal digits of SHA-256 over all weights, in order of their names.

    The name, number format, shape and bytes of each weight count, not which rank wrote which part,
    nor rows that only pad the vocabulary. source: a checkpoint or a PEFT folder, whose frozen
    weights are not compared with their own digests (see require_unchanged). Memory: one piece of a
    tensor. Raises RunFailed for a checkpoint that lacks rows, and OSError.
    """
    config = model_config(source)
    digest = hashlib.sha256()
    vocabulary = config.names.vocabulary
    for name, padded in sorted(weights_on_disk(config, source).items()):
        rows = min(config.vocab_size, padded.shape[0]) if name in vocabulary else padded.shape[0]
        tensor = rows_of(padded, 0, rows)
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        for piece in tensor.pieces():
            digest.update(as_bytes(piece))
    return digest.hexdigest()[:16]
