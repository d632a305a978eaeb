"""Native PyTorch FSDP2 training of large language models, configured by Hydra."""

from typing import Any

__version__ = "0.1.0"


def train(overrides: list[str], config_dir: str | None = None) -> int:
    """Train as `fsdp-trainer train OVERRIDES` does: `train(["+recipe=quickstart", "train.steps=20"])`.

    Returns the exit code of the command line. Raises UserError for a mistake in the configuration or the input.
    """
    from fsdp_trainer.cli import run_verb

    return run_verb("train", list(overrides), config_dir)


def __getattr__(name: str) -> Any:
    if (
        name == "load_model"
    ):  # late: it imports torch, and a mistake in the configuration is answered before that
        from fsdp_trainer.checkpoint.load import load_model

        return load_model
    raise AttributeError(f"module 'fsdp_trainer' has no attribute '{name}'")
