"""The folder that a verb writes, which must not exist yet."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fsdp_trainer.errors import RunFailed, UserError


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


@contextmanager
def writing_export(out: Path, use: str = "FOLDER") -> Iterator[None]:
    """Make the folder above an export. Raises RunFailed in place of OSError. use: for `out`."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise RunFailed(f"cannot write the export {out}: {error}. Use  out={use}") from None
