"""The class of a run's training method."""

from pathlib import Path

from fsdp_trainer.config.parts.own_parts import code_at
from fsdp_trainer.methods.method import Method
from fsdp_trainer.methods.stored_columns import RunRows
from fsdp_trainer.training.setup.run_setup import RunSetup


def build_method(setup: RunSetup, rows: RunRows, checkpoint: Path | None) -> Method:
    """Return the run's training method; an objective of the user's own is one for tokens.

    See Method. Collective. Raises UserError.
    """
    method: Method = code_at(setup.cfg.objective.method.build)(setup, rows, checkpoint)
    return method
