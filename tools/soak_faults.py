"""The faults of soak.py: those inside a rank, those from outside, and damage between two starts."""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from world import alive, ranks_below

from fsdp_trainer.observe.records import whole_lines

ROOT = Path(__file__).resolve().parents[1]
INJECT = ROOT / "tools/inject"
POLL_SECONDS = 0.01
EVERY = 2
"""Steps between two checkpoints."""
OF_A_STEP = ["data", "forward", "backward", "clip", "update", "log", "agree"]
OF_A_SAVE = ["staging", "shards", "manifest", "rename", "prune"]
OF_RANK_0 = ("rename", "prune", "export")
OF_A_METHOD = {"grpo": ["rollouts", "rewards"], "best": ["validation"]}
INSIDE = {
    "rank killed": "kill",
    "all ranks killed": "kill_all",
    "rank stopped": "stop",
    "SIGTERM to a rank": "term",
    "SIGINT to a rank": "interrupt",
    "SIGUSR1 to a rank": "usr1",
    "disk full": "full",
}
"""Faults inside a rank, as inject/breaks.py calls them."""
SMALL_LIMIT = 1024
"""Bytes of a file at which the disk is full; the smallest column of a cache is about as long."""


def inside_fault(
    draw: random.Random, name: str, newest: int, ranks: int, steps: int, method: str
) -> tuple[str, str]:
    """Return a fault of INSIDE by its name, and its line for FAULTS.

    It happens at a phase of a step soon after `newest`, the last one on record. method: the first
    word of the training's name.
    """
    phases = [*OF_A_STEP, *OF_A_SAVE, *OF_A_METHOD.get(method, []), "export"]
    if name == "disk full":
        phases = ["shards", "manifest", "log", "export"]
    phase, step = draw.choice(phases), min(newest + draw.randint(1, 4), steps)
    if phase in OF_A_SAVE:
        step += -step % EVERY
    if phase in ("prune", "export"):  # there is nothing to delete before
        step = steps
    rank = 0 if phase in OF_RANK_0 else draw.randrange(ranks)
    return name, f"rank={rank} phase={phase} step={step} do={INSIDE[name]}"


@dataclass
class Launch:
    """A start of a run: its process, its folders, and the second start if there is one.

    is_alone: the process is the only rank.
    """

    process: subprocess.Popen
    is_alone: bool
    run: Path
    cache: Path
    again: Callable[[], subprocess.Popen]
    second: subprocess.Popen | None = None

    def steps(self) -> int:
        """Return the last step on record."""
        return len(read_safely(self.run / "metrics.jsonl"))

    def ranks(self) -> dict[str, int]:
        """Return the process ids of the ranks; that of the process itself if it trains alone."""
        if self.is_alone:
            return {"0": self.process.pid}
        with suppress(OSError):
            return ranks_below(self.process.pid)
        return {}


def read_safely(path: Path) -> list[dict]:
    """Return the complete lines of a record that is being written, or whose last line is torn."""
    try:
        return list(whole_lines(path))
    except OSError:
        return []


def is_preparing(launch: Launch) -> bool:
    """Return True while data is tokenized."""
    return any(launch.cache.glob(".*/lock"))


def is_saving(launch: Launch) -> bool:
    """Return True while a checkpoint is written."""
    return any((launch.run / "checkpoints").glob(".*.partial"))


def signal_launcher(number: int) -> Callable[[Launch], None]:
    """Return a fault that sends a signal to the process that the user started."""
    return lambda launch: launch.process.send_signal(number)


def start_second(launch: Launch) -> None:
    """Start the same command a second time."""
    launch.second = launch.again()


def pause_launcher(launch: Launch) -> None:
    """Suspend the launcher, not its ranks, until they have made a step more or ended."""
    launch.process.send_signal(signal.SIGSTOP)
    step, deadline = launch.steps(), time.monotonic() + 20
    while launch.steps() <= step and time.monotonic() < deadline:
        if not any(alive(pid) for pid in launch.ranks().values()):
            break
        time.sleep(POLL_SECONDS)
    launch.process.send_signal(signal.SIGCONT)


def fill_disk(launch: Launch) -> None:
    """Let all ranks write only short files until data is prepared, or for five seconds."""
    limits = {}
    for pid in launch.ranks().values():
        with suppress(OSError):
            limits[pid] = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (SMALL_LIMIT, limits[pid][1]))
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and launch.process.poll() is None and is_preparing(launch):
        time.sleep(POLL_SECONDS)
    for pid, limit in limits.items():
        with suppress(OSError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)


def catches(pid: int, number: int) -> bool:
    """Return True if a process has a handler of its own for a signal."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        return bool(caught >> (number - 1) & 1)
    return False


OUTSIDE: dict[str, Callable[[Launch], None]] = {
    "launcher killed": signal_launcher(signal.SIGKILL),
    "SIGTERM to the launcher": signal_launcher(signal.SIGTERM),
    "SIGINT to the launcher": signal_launcher(signal.SIGINT),
    "SIGUSR1 to the launcher": signal_launcher(signal.SIGUSR1),
    "launcher stopped": pause_launcher,
    "second start": start_second,
    "disk full outside a step": fill_disk,
}
"""Faults from outside."""
QUIET = ("disk full", "disk full outside a step", "launcher stopped", "second start")
"""Faults that a run should survive without an end."""
CONDITIONS: dict[str, Callable[[Launch, int], Any]] = {
    "started": lambda launch, step: launch.ranks() and (launch.run / ".lock").exists(),
    "preparing": lambda launch, step: is_preparing(launch),
    "saving": lambda launch, step: is_saving(launch),
    "step": lambda launch, step: launch.steps() >= step,
    "exporting": lambda launch, step: any(launch.run.glob(".*hf*")) or (launch.run / "hf").exists(),
}


@dataclass
class Outside:
    """A fault that the soak's own process causes once a condition holds."""

    name: str
    condition: str
    step: int
    happened: bool = field(default=False)

    @classmethod
    def draw(cls, draw: random.Random, name: str, newest: int) -> "Outside":
        """Return a fault at a random moment after step `newest`."""
        return cls(name, draw.choice(sorted(CONDITIONS)), newest + draw.randint(1, 3))

    def try_now(self, launch: Launch) -> None:
        """Cause the fault if it is time, but not before the program can answer a signal.

        Files of an earlier start may fulfil the condition from the first moment.
        """
        is_time = CONDITIONS[self.condition](launch, self.step)
        if not self.happened and is_time and catches(launch.process.pid, signal.SIGTERM):
            self.happened = True
            OUTSIDE[self.name](launch)


@dataclass
class Done:
    """The end of a start.

    code: None if it hangs. names: of the faults that happened. pids: of all its ranks.
    """

    code: int | None
    text: str
    names: list[str]
    pids: set[int]


def watched_launch(
    words: list[str],
    folder: Path,
    patience: float,
    run: str,
    ranks: int,
    faults: Sequence[tuple[str, str]] = (),
    outside: Sequence[Outside] = (),
    notes: Path | None = None,
) -> Done:
    """Start a command in `folder`, cause faults in it, and wait until it has ended.

    patience: seconds after which it hangs. run: its name. ranks: number of its ranks. notes: a
    folder for what happens inside ranks.
    """
    temporary = folder / f"tmp-{run}"
    temporary.mkdir(exist_ok=True)
    path = os.pathsep.join([*([str(INJECT)] if faults else []), str(ROOT)])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
    armed = dict(env)
    if faults:
        armed |= {"FAULTS": "; ".join(line for _, line in faults), "FAULTS_FOLDER": str(notes)}
    output = (folder / f"{run}.log").open("w+")

    def start(env: dict[str, str]) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "fsdp_trainer", *words], cwd=folder, env=env,
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip

    alone = ranks == 1
    armed |= {"FAULTS_RANK": "0"} if alone else {}
    places = folder / "runs" / run, folder / f"cache-{run}"
    launch = Launch(start(armed), alone, *places, lambda: start(env))
    pids: set[int] = set()
    code = wait(launch, outside, time.monotonic() + patience, pids)
    output.seek(0)
    text = output.read()
    output.close()
    (folder / f"{run}.log").unlink()
    happened = [name for i, (name, _) in enumerate(faults) if (notes / f"fault.{i}").exists()]
    happened += [fault.name for fault in outside if fault.happened]
    return Done(code, text, happened, pids)


def wait(launch: Launch, outside: Sequence[Outside], deadline: float, pids: set[int]) -> int | None:
    """Cause the outside faults in time, and return the exit code; None if the launch hangs.

    Of two starts, the one that was refused for the other (exit code 2) does not count. pids: gets
    the process ids of the ranks.
    """
    processes = [launch.process]
    while any(process.poll() is None for process in processes):
        pids |= set(launch.ranks().values())
        if launch.is_alone:
            wake(launch.process.pid)
        for fault in outside if launch.process.poll() is None else ():
            fault.try_now(launch)
        processes = [launch.process, *([launch.second] if launch.second else [])]
        if time.monotonic() > deadline:
            kill_all(processes)
            return None
        time.sleep(POLL_SECONDS)
    while any(map(alive, pids)):  # the kernel ends ranks soon after their launcher
        if time.monotonic() > deadline:
            return None
        time.sleep(POLL_SECONDS)
    codes = [process.returncode for process in processes]
    return next((code for code in reversed(codes) if code != 2), 2)


def kill_all(processes: list[subprocess.Popen]) -> None:
    """Kill processes, and wait for their end."""
    for process in processes:
        process.kill()
        process.wait()


def wake(pid: int) -> None:
    """Continue a process that is stopped: the watchdog never kills a rank that trains alone."""
    with suppress(OSError):
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            time.sleep(2)
            os.kill(pid, signal.SIGCONT)


# --- damage between two starts


def one_of(draw: random.Random, files: list[Path]) -> Path | None:
    """Return a file with content; None if there is none."""
    files = [path for path in sorted(files) if path.is_file() and path.stat().st_size]
    return draw.choice(files) if files else None


def flip(file: Path, draw: random.Random) -> str:
    """Flip one bit of a file; return a description."""
    content = bytearray(file.read_bytes())
    place, bit = draw.randrange(len(content)), draw.randrange(8)
    content[place] ^= 1 << bit
    file.write_bytes(content)
    return f"bit {bit} of byte {place} of {file}"


def cut(file: Path, draw: random.Random) -> str:
    """Cut off the end of a file; return a description."""
    size = draw.randrange(file.stat().st_size)
    os.truncate(file, size)
    return f"{file} cut to {size} bytes"


def of_checkpoint(harm: Callable) -> Callable[[Path, Path, random.Random], str | None]:
    """Return a damage to a file of the newest checkpoint."""

    def damage(run: Path, cache: Path, draw: random.Random) -> str | None:
        committed = sorted((run / "checkpoints").glob("step-*[0-9]"))
        file = one_of(draw, [*committed[-1].rglob("*")]) if committed else None
        return file and harm(file, draw)

    return damage


def of_cache(harm: Callable) -> Callable[[Path, Path, random.Random], str | None]:
    """Return a damage to a file of the token cache, of one that is complete."""

    def damage(run: Path, cache: Path, draw: random.Random) -> str | None:
        file = one_of(draw, [*cache.glob("[!.]*/**/*")])
        return file and harm(file, draw)

    return damage


def tear_records(run: Path, cache: Path, draw: random.Random) -> str | None:
    """Cut the last line of a record in its middle, as a power cut may.

    The metrics of a checkpoint's steps are on the disk before the checkpoint is: they stay.
    """
    committed = sorted((run / "checkpoints").glob("step-*[0-9]"))
    saved = int(committed[-1].name.partition("-")[2]) if committed else 0
    later = len(read_safely(run / "metrics.jsonl")) > saved
    file = one_of(draw, [run / "events.jsonl", *([run / "metrics.jsonl"] if later else [])])
    if file is None:
        return None
    content = file.read_bytes()
    last = len(content.rstrip(b"\n").rpartition(b"\n")[2])
    os.truncate(file, len(content) - draw.randint(1, max(1, last)))
    return f"{file} torn"


def lose_cache(run: Path, cache: Path, draw: random.Random) -> str | None:
    """Delete the token cache."""
    if not cache.exists():
        return None
    shutil.rmtree(cache)
    return f"{cache} is gone"


DAMAGE = {
    "bit flipped in a checkpoint": of_checkpoint(flip),
    "checkpoint file cut": of_checkpoint(cut),
    "checkpoint file lost": of_checkpoint(lambda file, draw: (file.unlink(), f"{file} lost")[1]),
    "bit flipped in the cache": of_cache(flip),
    "cache file cut": of_cache(cut),
    "cache lost": lose_cache,
    "record torn": tear_records,
}
