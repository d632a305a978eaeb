"""Locked folders of the cache: each part is made once, and parts survive a crash."""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from fsdp_trainer.base.folders import NewFolders
from fsdp_trainer.data.store.fingerprint import HASHES
from fsdp_trainer.errors import UserError

LOCK = "lock"
POLL_SECONDS = 0.2
OLD_SECONDS = 24 * 3600.0


@contextmanager
def removed_if_refused(root: Path) -> Iterator[None]:
    """Delete a new cache if the data is refused and it holds nothing but file hashes."""
    new = NewFolders(root, root / "remote")
    try:
        yield
    except UserError:
        if root in new and root.is_dir() and {path.name for path in root.iterdir()} == {HASHES}:
            (root / HASHES).unlink(missing_ok=True)
        new.delete_empty()
        raise


@contextmanager
def locked_folder(folder: Path, shared: bool, waits: Callable[[], None]) -> Iterator[bool]:
    """Lock `folder`, shared or exclusively, and make it if it is missing.

    Yields True if this process holds it exclusively. If the file system has no locks, all processes
    proceed: they write the same content and publish it by renaming. waits: called repeatedly while
    another process holds the lock.
    """
    while True:
        lock = _open_lock(folder)
        if lock is None:
            continue  # the process that held it has finished and deleted the folder
        with lock:
            while (locked := _locked(lock, shared)) is False:
                waits()
                time.sleep(POLL_SECONDS)
            if _is_there(lock, folder / LOCK):
                try:
                    yield bool(locked) and not shared
                except UserError:
                    if shared and _locked(lock, shared=False) and os.listdir(folder) == [LOCK]:
                        shutil.rmtree(folder, ignore_errors=True)
                    raise
                return


def _open_lock(folder: Path) -> TextIO | None:
    """Return the folder's lock file, opened; None if the folder was deleted in the meantime."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return open(folder / LOCK, "a+")
    except OSError as error:
        is_deleted = isinstance(error, FileNotFoundError) and folder.parent.is_dir()
        if is_deleted and str(error.filename) == str(folder / LOCK):
            return None
        reason = f"the tokenized data cannot be kept there: {error}.\nUse  data.cache=FOLDER"
        raise UserError(
            "the data cannot be prepared", f"data.cache={folder.parent}", reason
        ) from None


def _locked(lock: TextIO, shared: bool) -> bool | None:
    """Return whether the lock was acquired; None if the file system has no locks."""
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_there(lock: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock.fileno()), path.stat())
    except OSError:
        return False


def clear_leftovers(root: Path, but: Path) -> None:
    """Delete unfinished parts of killed runs that were not resumed for a day, except `but`."""
    for lock in root.glob(f".*/{LOCK}"):
        folder = lock.parent
        try:
            if folder != but and time.time() - folder.stat().st_mtime > OLD_SECONDS:
                with open(lock, "a+") as opened:
                    if _locked(opened, shared=False):
                        shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue
