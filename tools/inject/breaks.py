"""Faults injected into a real run from outside, at the product's named phases.

Set FAULTS="rank=1 phase=shards step=4 do=kill; rank=0 phase=data step=9 do=stop", and put this
folder on PYTHONPATH. FAULTS_FOLDER holds the time of each fault that has happened, and each rank's
process id. A fault happens once, however often the run is started, but with step=* at every step.
A process that is no rank of a launcher, but trains alone, needs FAULTS_RANK=0.
"""

import importlib.abc
import importlib.util
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

MODULE = "fsdp_trainer.base.phases"
_of_thread = threading.local()


def when_imported() -> None:
    """Arrange that in ranks `wrap` is called when the trainer imports its phases."""
    if "FAULTS" in os.environ and {"RANK", "FAULTS_RANK"} & os.environ.keys():
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
    """Replace the function that enters a phase by one that also triggers the faults in FAULTS."""
    faults = [
        dict(word.split("=") for word in fault.split())
        for fault in os.environ["FAULTS"].split(";")
        if fault.strip()
    ]
    folder = Path(os.environ["FAULTS_FOLDER"])
    rank = os.environ.get("RANK") or os.environ["FAULTS_RANK"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"pid.{rank}").write_text(str(os.getpid()))

    enter = phases.ThreadPhase.enter

    def enter_and_break(thread, phase, step=None):
        enter(thread, phase, step)  # first, so that all listeners have seen the phase
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
    """Return True if a fault has not happened before, and record that it has."""
    try:
        with (folder / f"fault.{number}").open("x") as file:
            file.write(str(time.time()))
    except FileExistsError:
        return False
    return True


def kill(_folder: Path) -> None:
    """Kill this process, as if its machine were lost."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_all(folder: Path) -> None:
    """Kill all ranks, as in a power cut."""
    for file in folder.glob("pid.*"):
        pid = int(file.read_text())
        if pid != os.getpid() and alive(pid):
            os.kill(pid, signal.SIGKILL)
    kill(folder)


def alive(pid: int) -> bool:
    """Return True if the process still looks like a rank: Python, of this user."""
    try:
        return (
            Path(f"/proc/{pid}/stat").stat().st_uid == os.getuid()
            and b"python" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
    except OSError:
        return False


def stop(_folder: Path) -> None:
    """Suspend this process by SIGSTOP."""
    os.kill(os.getpid(), signal.SIGSTOP)


def terminate(_folder: Path) -> None:
    """Send this process SIGTERM, as a scheduler does."""
    os.kill(os.getpid(), signal.SIGTERM)


def interrupt(_folder: Path) -> None:
    """Send this process SIGINT, as Ctrl-C does."""
    os.kill(os.getpid(), signal.SIGINT)


def usr1(_folder: Path) -> None:
    """Send this process SIGUSR1, as Slurm does before a job's time is over."""
    os.kill(os.getpid(), signal.SIGUSR1)


def full(_folder: Path) -> None:
    """Limit files to 4 KiB until this thread's next phase: writes fail as on a full disk."""
    _of_thread.limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, _of_thread.limits[1]))


def slow(_folder: Path) -> None:
    """Delay this rank, so that the others must wait."""
    time.sleep(0.2)


def lock(_folder: Path) -> None:
    """Wait for a lock that is never released."""
    held = threading.Lock()
    held.acquire()
    held.acquire()


def skip(_folder: Path) -> None:
    """Skip this rank's next all-reduce."""
    import torch.distributed as dist

    real = dist.all_reduce

    def leave_out(*_args, **_options):
        dist.all_reduce = real

    dist.all_reduce = leave_out


DEEDS = {
    "lock": lock,
    "skip": skip,
    "kill": kill,
    "kill_all": kill_all,
    "stop": stop,
    "term": terminate,
    "interrupt": interrupt,
    "usr1": usr1,
    "full": full,
    "slow": slow,
}
