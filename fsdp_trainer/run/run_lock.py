"""The lock on a run's folder, which lets only one run at a time write into it."""

import fcntl
import json
import os
import shutil
import socket
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from fsdp_trainer.base.process import wait_until
from fsdp_trainer.checkpoint.atomic_files import put_back, replaced
from fsdp_trainer.config.paths import CERTIFICATE, LAG_SECONDS
from fsdp_trainer.config.schema import Run
from fsdp_trainer.errors import UserError

LOCK = ".lock"
LOCK_SECONDS = 120.0
"""Seconds that a restarted run waits for the lock: rank 0 of the previous attempt, if its host lost
its connection, holds the lock until its torchrun gives up."""
LOOK_SECONDS = 1.0
"""Seconds that a group of ranks waits for its lock: others look at it, see `are_groups_beside`."""
NOT_OF_A_RUN = (LOCK, "jobs", "sweep.jsonl", "output.log", CERTIFICATE)
"""Files that a sweep, a launch script or `prove` writes into the folder before the run begins."""


@dataclass
class RunLock:
    """The content of a folder's lock file: the attempt that trains in the folder."""

    launchers: list[str]
    """The launchers of all nodes, see World."""
    attempt: int = 0
    """Number of earlier attempts by these launchers."""
    group: int | None = None
    """The group of ranks that the lock is for; None: the run has a single one."""

    @classmethod
    def read(cls, run: Path, group: int | None = None) -> "RunLock":
        """Read the lock file of a run's folder; without one, the list of launchers is empty."""
        content = read_lock_file(run / name_of_lock(group))
        return cls(content.get("launchers", []), content.get("attempt", 0), group)

    def is_visible_in(self, run: Path, timeout: float) -> bool:
        """Wait for this lock to be visible on this node; return False if it is not.

        Network file systems show with a delay what another node has written. Waits at most
        LAG_SECONDS, or `timeout` seconds if that is less.
        """

        def is_visible() -> bool:
            return RunLock.read(run, self.group) == self

        return wait_until(is_visible, min(LAG_SECONDS, timeout))

    def acquire(self, cfg: Run, resume: str, folder: Path) -> ExitStack:
        """Create the run's folder and return its lock file, locked.

        Rank 0 calls it before any rank writes into the folder. The system releases the lock when
        the file is closed or the process ends in any way. Raises UserError if another process holds
        it, or, with checkpoint.resume=never, if the folder holds a run that run.overwrite does not
        allow to delete. resume: checkpoint.resume.
        """
        patience = LOCK_SECONDS if self.attempt else 0 if self.group is None else LOOK_SECONDS
        try:
            # closed on failure: the process of a notebook continues, and may try again
            with ExitStack() as files:
                if self.group is not None:
                    files.enter_context(lock_folder(folder, LOCK, patience, fcntl.LOCK_SH))
                file = lock_folder(folder, name_of_lock(self.group), patience)
                files.enter_context(file)
                if resume == "never":
                    empty_folder(folder, cfg.overwrite)
                if self.group is None:
                    restore_replaced_checkpoints(folder)
                self._write(file)
                return files.pop_all()
        except OSError as error:
            raise UserError(
                "the run's folder cannot be used",
                f"run.root={cfg.root}",
                f"{error}. Use  run.root=FOLDER",
            ) from None

    def _write(self, file: TextIO) -> None:
        since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
        file.truncate(0)
        content = {"launchers": self.launchers, "attempt": self.attempt}
        file.write(json.dumps(content | holder))
        file.flush()
        os.fsync(file.fileno())  # makes it visible to other nodes on NFS, see is_visible_in


def name_of_lock(group: int | None) -> str:
    """Return the name of the lock file of a group of ranks; None: of a run with a single one.

    Groups lock the file of a single one together, so that neither can train beside the other.
    """
    return LOCK if group is None else f"{LOCK}-{group}"


def are_groups_beside(run: Path, group: int) -> bool:
    for path in run.glob(name_of_lock(None) + "-*"):
        if path.name == name_of_lock(group):
            continue
        with suppress(FileNotFoundError), path.open() as file:
            if not try_lock(file, fcntl.LOCK_SH):
                return True
    return False


def lock_folder(
    run: Path, name: str = LOCK, patience: float = 0.0, mode: int = fcntl.LOCK_EX
) -> TextIO:
    """Create the run's folder and return the lock file `name` in it, locked.

    mode: LOCK_EX, or LOCK_SH for a lock that several processes may hold. Starts again if a start
    that was refused deletes the file meanwhile. Raises UserError if another process still holds the
    lock after `patience` seconds, and OSError.
    """
    while True:
        run.mkdir(parents=True, exist_ok=True)
        try:
            file = (run / name).open("a")  # does not truncate: another run may own it until locked
        except FileNotFoundError:
            if run.is_dir():
                raise
            continue
        with ExitStack() as stack:
            stack.enter_context(file)
            if not wait_until(partial(try_lock, file, mode), patience):
                reason = f"{describe_holder(run / name)}. Use  run.name=NEW  or wait"
                raise UserError("the run's folder is in use", str(run), reason)
            if is_open_file(run / name, file):
                stack.pop_all()
                return file


def is_open_file(path: Path, file: TextIO) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def clear_unused(run: Path) -> bool:
    """Delete the lock file if it is the only file in the folder; return True if it was deleted.

    The caller must hold the lock.
    """
    if [path.name for path in run.iterdir()] != [LOCK]:
        return False
    (run / LOCK).unlink()
    return True


def try_lock(file: TextIO, mode: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(file, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_lock_file(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def describe_holder(file: Path) -> str:
    holder = read_lock_file(file)
    if "pid" not in holder:
        return "another process trains in it"
    return f"process {holder['pid']} on {holder['host']} trains in it, since {holder['since']}"


def empty_folder(run: Path, overwrite: bool) -> None:
    """Delete an earlier run in the folder. Raises UserError unless run.overwrite allows it."""
    used = [path for path in run.iterdir() if path.name not in NOT_OF_A_RUN]
    if used and not overwrite:
        reason = (
            "holds an earlier run. Use  run.name=NEW,  run.overwrite=true  to delete it,  "
            "or  checkpoint.resume=auto  to resume"
        )
        raise UserError("the run's folder is in use", str(run), reason)
    for path in used:
        is_folder = path.is_dir() and not path.is_symlink()
        shutil.rmtree(path) if is_folder else path.unlink()


def restore_replaced_checkpoints(run: Path) -> None:
    """Rename each checkpoint back to its name if a kill interrupted its replacement."""
    for older in (run / "checkpoints").glob(replaced(Path("step-*")).name):
        put_back(older.with_name(older.stem.removeprefix(".")))
