"""Faults put into a real run from outside: the product has no hook for them but the names of its
phases.

FAULTS="rank=1 phase=shards step=4 do=kill; rank=0 phase=data step=9 do=stop" with this folder on
PYTHONPATH. FAULTS_FOLDER remembers which have happened, with the time: none happens twice, whatever
is started again, but step=* at every step. It also has each rank's process id."""

import importlib.abc
import importlib.util
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

MODULE = "fsdp_trainer.phases"
_of_thread = threading.local()


def when_imported() -> None:
    """Wrap the entry into a phase as soon as the trainer imports it, in ranks."""
    if "FAULTS" in os.environ and "RANK" in os.environ:
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        self.execute, spec.loader = spec.loader.exec_module, self
        return spec

    def exec_module(self, module):
        self.execute(module)
        wrap(module)


def wrap(phases) -> None:
    """Break what FAULTS says whenever a phase begins."""
    faults = [
        dict(word.split("=") for word in fault.split())
        for fault in os.environ["FAULTS"].split(";")
        if fault.strip()
    ]
    folder, rank = Path(os.environ["FAULTS_FOLDER"]), os.environ["RANK"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"pid.{rank}").write_text(str(os.getpid()))

    enter = phases.ThreadPhase.enter

    def enter_and_break(thread, phase, step=None):
        enter(thread, phase, step)  # all listeners know of the phase when it breaks
        if hasattr(_of_thread, "limits"):
            resource.setrlimit(resource.RLIMIT_FSIZE, _of_thread.__dict__.pop("limits"))
        for number, fault in enumerate(faults):
            always = fault["step"] == "*"
            now = always or int(fault["step"]) == thread.step
            if (
                now
                and (fault["rank"], fault["phase"]) == (rank, phase)
                and (always or first(folder, number))
            ):
                DEEDS[fault["do"]](folder)

    phases.ThreadPhase.enter = enter_and_break


def first(folder: Path, number: int) -> bool:
    """Whether a fault has not happened before; from now on it has."""
    try:
        with (folder / f"fault.{number}").open("x") as file:
            file.write(str(time.time()))
    except FileExistsError:
        return False
    return True


def kill(_folder: Path) -> None:
    """As a lost machine ends it."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_all(folder: Path) -> None:
    """All ranks, as a power cut does."""
    for file in folder.glob("pid.*"):
        pid = int(file.read_text())
        if pid != os.getpid() and alive(pid):
            os.kill(pid, signal.SIGKILL)
    kill(folder)


def alive(pid: int) -> bool:
    """Whether that is still the rank that wrote down its number."""
    try:
        return (
            Path(f"/proc/{pid}/stat").stat().st_uid == os.getuid()
            and b"python" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
    except OSError:
        return False


def stop(_folder: Path) -> None:
    """Neither dead nor alive."""
    os.kill(os.getpid(), signal.SIGSTOP)


def terminate(_folder: Path) -> None:
    """What a scheduler sends."""
    os.kill(os.getpid(), signal.SIGTERM)


def full(_folder: Path) -> None:
    """No file takes more than 4 KiB until this thread's next phase: the system refuses the write as
    it does on a full disk."""
    _of_thread.limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, _of_thread.limits[1]))


def slow(_folder: Path) -> None:
    """A rank that others must wait for."""
    time.sleep(0.2)


def lock(_folder: Path) -> None:
    """Waits for a lock that nobody gives back."""
    held = threading.Lock()
    held.acquire()
    held.acquire()


def hoard(_folder: Path) -> None:
    """Asks for more memory than an address can name: the system's own refusal."""
    import torch

    torch.empty(2**50, dtype=torch.uint8)


def skip(_folder: Path) -> None:
    """Leaves out its next all-reduce."""
    import torch.distributed as dist

    real = dist.all_reduce

    def leave_out(*_args, **_options):
        dist.all_reduce = real

    dist.all_reduce = leave_out


DEEDS = {
    "lock": lock,
    "hoard": hoard,
    "skip": skip,
    "kill": kill,
    "kill_all": kill_all,
    "stop": stop,
    "term": terminate,
    "full": full,
    "slow": slow,
}
