"""Weights that were read with numbers that are not finite, which no step can make better."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_trainer.base.distributed import gather, local_part
from fsdp_trainer.checkpoint.huggingface import stored_tensors
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.decoder import Decoder

SHOWN = 5


def broken_weights(model: Decoder, folder: Path | None) -> str:
    """Return a line for each weight that has a number that is not finite; "" if none has.

    Collective. folder: that the weights were read from; None: they were drawn.
    """
    own = [
        name
        for name, weight in model.named_weights().items()
        if weight.dtype.is_floating_point and not local_part(weight).float().isfinite().all()
    ]
    names = sorted(set().union(*gather(own)))
    files = stored(model, folder) if names and folder else {}
    lines = [f"{name} in {file_of(files, name, folder)}" for name in names[:SHOWN]]
    if len(names) > SHOWN:
        lines.append(f"and {len(names) - SHOWN:,} others")
    return "\n".join(lines)


def stored(model: Decoder, folder: Path) -> Mapping[str, Any]:
    try:
        return stored_tensors(folder, model.config)[0]
    except (OSError, UserError):
        return {}


def file_of(files: Mapping[str, Any], name: str, folder: Path | None) -> str:
    chunks = getattr(files.get(name), "chunks", None)
    return str(chunks[0].file if chunks else folder or "the random weights")
