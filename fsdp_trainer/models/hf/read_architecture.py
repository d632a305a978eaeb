"""The architecture of a folder, for either implementation. Does not import torch."""

import logging
from importlib.util import find_spec
from pathlib import Path

from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.config import (
    AUTO,
    ModelConfig,
    needs_transformers,
    read_config_file,
    why_unknown,
)

INSTALL = "pip install 'fsdp_trainer[hf]'"


def read_architecture(folder: str | Path, implementation: str = AUTO) -> ModelConfig:
    """Return the architecture that `folder/config.json` describes.

    implementation: value of model.implementation. Raises UserError.
    """
    path = Path(folder) / "config.json"
    raw = read_config_file(path)
    if not needs_transformers(raw, implementation):
        return ModelConfig.from_hf(folder)
    if problem := missing_extra(raw.get("model_type"), why_unknown(raw)):
        raise UserError(f"{path} describes a model that is not supported", [problem])
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # libraries that transformers imports complain of each other
    try:
        # imports transformers
        from fsdp_trainer.models.hf.hf_folder import read_hf_config
    finally:
        logging.disable(before)
    return read_hf_config(Path(folder), raw)


def stored_vocabulary(folder: str | Path) -> int:
    """Return the vocabulary of a folder's model, whatever computes it. Raises UserError."""
    raw = read_config_file(Path(folder) / "config.json")
    parts = [part for part in (raw.get("text_config"), raw) if isinstance(part, dict)]
    named = [part["vocab_size"] for part in parts if type(part.get("vocab_size")) is int]
    return named[0] if named else read_architecture(folder).vocab_size


def missing_extra(kind: object, otherwise: str = "") -> Problem | None:
    """Return the problem that transformers is not installed, or None if it is.

    kind: model_type of the folder. otherwise: what else can be done.
    """
    if find_spec("transformers"):
        return None
    reason = f"transformers' class computes it, and transformers is not installed:\n  {INSTALL}"
    return Problem(f"model_type={kind}", f"{reason}\n{otherwise}".strip())
