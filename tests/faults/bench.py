"""Runs that may be killed, with each rank in a new process forked from one that imported torch."""

import hashlib
import json
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path

from stored import newest, stored
from world import PRELOAD, SMALL, Run

from fsdp_trainer.launch.nodes import free_port

INJECT = Path(__file__).parent / "inject"
GRACE_SECONDS = 10.0  # time for other ranks to end after the first failure; as in launch/start.py


@dataclass
class Attempt:
    """One start of a run. codes: exit code of each rank, or minus the signal that killed it."""

    codes: list[int]
    seconds: float
    out: str


@dataclass
class Broken(Run):
    """A run and the attempts that it took."""

    attempts: list[Attempt] = field(default_factory=list)

    @property
    def digest(self) -> str:
        return digest_of(newest(self))


class Bench:
    """A runner that repeats a training command until it succeeds."""

    def __init__(self):
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)

    def train(
        self,
        folder: Path,
        *overrides: str,
        ranks: int | list[int] = 2,
        faults: str = "",
        attempts: int = 4,
    ) -> Broken:
        """Train into `folder`.

        ranks: number of ranks in each attempt; the last number is used for all further ones.
        faults: see breaks.py. attempts: largest number of attempts. Raises AssertionError if none
        succeeds.
        """
        worlds = ranks if isinstance(ranks, list) else [ranks]
        run, words = Broken(folder), ["train", *self.words(folder), *overrides]
        for number in range(attempts):
            run.attempts.append(
                self.attempt(
                    words,
                    worlds[min(number, len(worlds) - 1)],
                    faults,
                    folder.with_suffix(".faults"),
                )
            )
            if not any(run.attempts[-1].codes):
                return run
            assert 2 not in run.attempts[-1].codes, run.attempts[-1].out
        raise AssertionError("\n".join(f"{a.codes}\n{a.out}" for a in run.attempts))

    def words(self, folder: Path) -> list[str]:
        """Return the overrides for a small model trained into `folder`."""
        return [*SMALL, f"run.root={folder.parent}", f"run.name={folder.name}"]

    def attempt(self, words: list[str], ranks: int, faults: str, notes: Path) -> Attempt:
        """Start all ranks and wait until they have ended. notes: folder for output and faults."""
        notes.mkdir(exist_ok=True)
        for old in notes.glob("pid.*"):
            old.unlink()
        env = {
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "FAULTS_FOLDER": str(notes),
        }
        env |= {"FAULTS": faults} if faults else {}
        processes = [
            self.context.Process(
                target=rank,
                args=(words, env | {"RANK": str(r), "LOCAL_RANK": str(r)}, notes / f"out.{r}"),
            )
            for r in range(ranks)
        ]
        began, deadline = time.monotonic(), time.monotonic() + 120
        for process in processes:
            process.start()
        while any(process.exitcode is None for process in processes):
            connection.wait(
                [process.sentinel for process in processes if process.exitcode is None], timeout=0.5
            )
            if any(process.exitcode for process in processes):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if time.monotonic() > deadline:
                for process in processes:
                    process.kill()
        codes = [process.exitcode or 0 for process in processes]
        text = "".join(
            (notes / f"out.{r}").read_text() for r in range(ranks) if (notes / f"out.{r}").exists()
        )
        return Attempt(codes, time.monotonic() - began, text)


def rank(words: list[str], env: dict[str, str], out: Path) -> None:
    """Run the command line as one rank and end the process. out: file for its output."""
    import torch

    from fsdp_trainer.base import phases
    from fsdp_trainer.cli import main

    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ.update(env)
    torch.set_num_threads(1)
    if "FAULTS" in env:
        sys.path.insert(0, str(INJECT))
        import breaks

        breaks.wrap(phases)
    code = main(words)
    sys.stdout.flush()
    os._exit(code)


def digest_of(checkpoint: Path) -> str:
    """Return the SHA-256 of a checkpoint's weights, moments, step counts and data position."""
    digest = hashlib.sha256()
    for name, tensor in sorted(stored(checkpoint).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.numpy().tobytes() if tensor.numel() else b"")
    progress = json.loads((checkpoint / "trainer.json").read_text())
    digest.update(
        json.dumps(
            {key: progress[key] for key in ("step", "rows", "tokens", "supervised_tokens")}
        ).encode()
    )
    return digest.hexdigest()
