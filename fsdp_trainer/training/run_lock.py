"""The lock on a run's folder: one run at a time writes into it."""

import fcntl
import json
import os
import shutil
import socket
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from fsdp_trainer.checkpoint.files import put_back, replaced
from fsdp_trainer.config.paths import LAG_SECONDS
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.process import wait_until

LOCK = ".lock"
LOCK_SECONDS = 120.0
"""How long a restarted run waits for the lock: rank 0 of the attempt before, on a host that was cut
off, holds it until its torchrun gives up."""
NOT_OF_A_RUN = (LOCK, "jobs", "sweep.jsonl", "output.log")
"""Files that a sweep or a launch script leaves in the folder before the run begins."""


@dataclass
class RunLock:
    """The run that trains in a folder, as the folder's lock file says."""

    launchers: list[str]
    """The launchers of all nodes, see World."""
    attempt: int = 0
    """The number of earlier starts of the run by these launchers."""

    @classmethod
    def read(cls, run: Path) -> "RunLock":
        """Return what the lock file of a run's folder says; no launchers if there is none."""
        content = read_lock_file(run)
        return cls(content.get("launchers", []), content.get("attempt", 0))

    def is_visible_in(self, run: Path, timeout: float) -> bool:
        """Return whether this node sees the lock, at most `timeout` seconds after it was taken.

        Network file systems show late what another node has written.
        """
        return wait_until(lambda: RunLock.read(run) == self, min(LAG_SECONDS, timeout))

    def acquire(self, cfg: TrainConfig, run: Path) -> TextIO:
        """Make the run's folder and return its locked file. Rank 0 calls it, before anyone writes.

        The system releases the lock when the file is closed or the process ends, however it does.
        Raises UserError if another process holds it, or, with checkpoint.resume=never, for a used
        folder that run.overwrite does not allow to be emptied.
        """
        try:
            file = lock_folder(run, LOCK_SECONDS if self.attempt else 0)
            try:
                if cfg.checkpoint.resume == "never":
                    empty_folder(cfg, run)
                restore_replaced_checkpoints(run)
                self._write(file)
            except BaseException:
                file.close()  # a notebook's process lives on, and may try again
                raise
            return file
        except OSError as error:
            problem = Problem(f"run.root={cfg.run.root}", f"{error}. Use  run.root=FOLDER")
            raise UserError("the run's folder cannot be used", [problem]) from None

    def _write(self, file: TextIO) -> None:
        since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
        file.truncate(0)
        file.write(json.dumps(asdict(self) | holder))
        file.flush()
        os.fsync(file.fileno())  # for NFS to show it to the other nodes, see is_visible_in


def lock_folder(run: Path, patience: float) -> TextIO:
    """Make the run's folder and return its file, locked; anew where a refused start has deleted it.

    Raises UserError if another process still holds it after `patience` seconds, and OSError.
    """
    while True:
        run.mkdir(parents=True, exist_ok=True)
        try:
            file = (run / LOCK).open("a")  # keeps the content, which is another run's until locked
        except FileNotFoundError:
            if run.is_dir():
                raise
            continue
        with ExitStack() as stack:
            stack.enter_context(file)
            if not wait_until(partial(try_lock, file), patience):
                reason = f"{describe_holder(run)}. Use  run.name=NEW  or wait"
                raise UserError("the run's folder is in use", [Problem(str(run), reason)])
            if is_open_file(run / LOCK, file):
                stack.pop_all()
                return file


def is_open_file(path: Path, file: TextIO) -> bool:
    """Return True if a path is still that of an open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def clear_unused(run: Path) -> bool:
    """Empty a folder that holds nothing but its lock, which the caller has. Returns True if so."""
    if [path.name for path in run.iterdir()] != [LOCK]:
        return False
    (run / LOCK).unlink()
    return True


def try_lock(file: TextIO) -> bool:
    """Lock an open file, unless another process holds the lock. Returns whether it is locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_lock_file(run: Path) -> dict[str, Any]:
    """Return what the process that holds the lock wrote; empty if nobody has, or is about to."""
    try:
        return json.loads((run / LOCK).read_text())
    except (OSError, ValueError):
        return {}


def describe_holder(run: Path) -> str:
    """Return a sentence about the process that holds the lock."""
    holder = read_lock_file(run)
    if "pid" not in holder:
        return "another process trains in it"
    return f"process {holder['pid']} on {holder['host']} trains in it, since {holder['since']}"


def empty_folder(cfg: TrainConfig, run: Path) -> None:
    """Delete an earlier run. Raises UserError unless run.overwrite allows it."""
    used = [path for path in run.iterdir() if path.name not in NOT_OF_A_RUN]
    if used and not cfg.run.overwrite:
        reason = (
            "holds an earlier run. Use  run.name=NEW,  run.overwrite=true  to delete it,  "
            "or  checkpoint.resume=auto  to go on"
        )
        raise UserError("the run's folder is in use", [Problem(str(run), reason)])
    for path in used:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def restore_replaced_checkpoints(run: Path) -> None:
    """Give a checkpoint its name back whose replacement was killed halfway."""
    for older in (run / "checkpoints").glob(replaced(Path("step-*")).name):
        put_back(older.with_name(older.stem.removeprefix(".")))
