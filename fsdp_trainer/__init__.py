"""Native PyTorch FSDP2 training of large language models, configured by Hydra."""

import importlib
from typing import Any

from fsdp_trainer.version import __version__ as __version__


def train(overrides: list[str], config_dir: str | None = None) -> int:
    """Train as `fsdp-trainer train OVERRIDES` does: `train(["+recipe=quickstart", "run.seed=1"])`.

    Returns the exit code of the command line. Raises UserError for a mistake in the configuration
    or the input.
    """
    return importlib.import_module("fsdp_trainer.cli").run_verb(
        "train", list(overrides), config_dir
    )


def __getattr__(name: str) -> Any:
    """Import `load_model` at its first use: it needs torch, and a wrong key is reported without."""
    if name == "load_model":
        return importlib.import_module("fsdp_trainer.checkpoint.load").load_model
    raise AttributeError(f"module 'fsdp_trainer' has no attribute '{name}'")
