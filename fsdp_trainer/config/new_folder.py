"""The folder that a verb writes, which must not exist yet."""

from pathlib import Path

from fsdp_trainer.errors import Problem, UserError


def new_folder(given: str) -> Path:
    """Return the folder to write. Raises UserError unless it is new or empty."""
    out = Path(given).expanduser()
    if not out.name:
        problem = Problem(f"out={given}", "is no name of a new folder; choose another one")
        raise UserError("the result is a new folder", [problem])
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        problem = Problem(f"out={given}", "exists; choose another folder or delete it")
        raise UserError("something would be overwritten", [problem])
    return out
