"""Folders that a command creates, and deletes again if it fails. Names that others give."""

import hashlib
import os
from pathlib import Path, PurePath

from fsdp_trainer.base.safe_text import visible

LONGEST_NAME = 255
"""Bytes of the name of a file that every file system takes, and folders in each other."""
LONGEST_PATH = 3000
"""Bytes of a path to which another folder can be added: Linux takes 4,095."""
ENDINGS = 20
"""Bytes of what is added to a name for a file that is being written."""
KEPT_END = 40
"""Characters at the end of a long name that stay, such as .jsonl.gz."""


class NewFolders:
    """The given folders and their parents that did not exist when this object was created."""

    def __init__(self, *folders: Path):
        self._missing: list[Path] = []
        for folder in folders:
            self._missing += [path for path in (folder, *folder.parents) if not path.exists()]

    def __contains__(self, folder: Path) -> bool:
        return folder in self._missing

    def delete_empty(self) -> None:
        """Delete the folders that exist by now and are empty, the innermost first."""
        for folder in sorted(set(self._missing), key=lambda path: -len(path.parts)):
            try:
                folder.rmdir()
            except OSError:  # it was never created or is not empty
                continue


def user_cache() -> Path:
    """Return the folder for copies of what commands read at addresses."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fsdp_trainer"


def is_possible(name: str) -> bool:
    """Return True for a path that a file system may have, as an untrusted file gives it."""
    if visible(name) != name or "\n" in name or len(name.encode()) > LONGEST_PATH:
        return False  # NUL and half characters are in no name
    try:
        Path(name).expanduser()
    except RuntimeError:  # it begins with the ~ of an unknown user
        return False
    parts = PurePath(name).parts
    return len(parts) <= LONGEST_NAME and all(len(part.encode()) <= LONGEST_NAME for part in parts)


def is_inside(name: str) -> bool:
    path = PurePath(name)
    is_below = bool(path.name) and not path.is_absolute() and ".." not in path.parts
    return is_below and is_possible(name)


def short_name(name: str) -> str:
    """Return a name that leaves room for endings: a long one as a hash and its own end."""
    if len(name.encode()) <= LONGEST_NAME - ENDINGS:
        return name
    return hashlib.blake2b(name.encode(), digest_size=10).hexdigest() + name[-KEPT_END:]
