"""The folder that a verb writes, which must not exist yet."""

from pathlib import Path

from fsdp_trainer.errors import UserError


def new_folder(given: str) -> Path:
    """Return the folder to write. Raises UserError unless it is new or empty."""
    out = Path(given).expanduser()
    if not out.name:
        raise UserError(
            "the result is a new folder",
            f"out={given}",
            "is no name of a new folder; choose another one",
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(
            "something would be overwritten",
            f"out={given}",
            "exists; choose another folder or delete it",
        )
    return out
