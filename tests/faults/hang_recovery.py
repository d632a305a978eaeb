"""Ranks that hang under a real `torchrun --max-restarts=1`, with the watchdog and without it.

`python tests/faults/hang_recovery.py` prints a table.
"""

import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from stored import newest
from world import SMALL, Run

from fsdp_trainer.checkpoint.digest import weights_digest

INJECT, ROOT = Path(__file__).parent / "inject", Path(__file__).parents[2]
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--nproc_per_node=2",
    "--max-restarts=1",
    "--rdzv_backend=c10d",
    "--rdzv_endpoint=127.0.0.1:0",
]
FAULTS = {
    "stopped (SIGSTOP)": "rank=1 phase=forward step=8 do=stop",
    "holds a lock": "rank=1 phase=backward step=8 do=lock",
    # not at a step that is saved, where a rank may wait for launch.timeout
    "skips a collective": "rank=1 phase=agree step=7 do=skip",
}
SLOW = "rank=1 phase=forward step=* do=slow"
LIMIT_SECONDS = 150.0


@dataclass
class Hang:
    """The outcome of a run in which a rank hung.

    noticed, resumed: seconds from the fault until the watchdog found it, and until training
    resumed; None: never. said: output of torchrun and the ranks.
    """

    run: Run
    code: int
    noticed: float | None
    resumed: float | None
    said: str

    @property
    def told(self) -> dict:
        """The watchdog's event, {} if there is none."""
        return (self.run.event("hang") or [{}])[0]


def words(folder: Path, *more: str) -> list[str]:
    """Return the command line of a small run that commits a checkpoint every 4 steps.

    Its launch.timeout of 30 s is also the time that torchrun waits for ranks to end.
    """
    data = [
        "data.path=demo:backwards",
        "tokenizer.path=demo:bytes",
        f"data.cache={folder.parent / 'data'}",
    ]
    own = [
        "train.steps=12",
        "checkpoint.every=4",
        "launch.timeout=30s",
        f"run.root={folder.parent}",
        f"run.name={folder.name}",
    ]
    return [*TORCHRUN, "-m", "fsdp_trainer", *SMALL, *data, *own, *more]


def hang(folder: Path, fault: str, *more: str) -> Hang:
    """Run with a fault until the end, or kill the run after LIMIT_SECONDS."""
    notes = folder.with_suffix(".faults")
    path = os.pathsep.join([str(INJECT), str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
        "FAULTS_FOLDER": str(notes),
    } | ({"FAULTS": fault} if fault else {})
    process = subprocess.Popen(
        words(folder, *more), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        said, _ = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        for file in notes.glob("pid.*"):
            with suppress(ProcessLookupError):
                os.kill(int(file.read_text()), 9)
        said, _ = process.communicate()
    run, happened = Run(folder), notes / "fault.0"
    began = float(happened.read_text()) if happened.exists() else time.time()

    def since(name: str) -> float | None:
        return next((event["time"] - began for event in run.event(name)), None)

    return Hang(run, process.returncode, since("hang"), since("resume"), said)


def main() -> int:
    def seconds(value: float | None) -> str:
        return "never" if value is None else f"{value:.1f} s"

    with tempfile.TemporaryDirectory() as folder:
        whole = weights_digest(newest(hang(Path(folder) / "whole", "").run))
        print(
            "| rank 1 … | watchdog | found | training again | named | weights' digest "
            "equal |\n|---|---|---|---|---|---|"
        )
        for i, (name, fault) in enumerate(FAULTS.items()):
            for watched in ("true", "false"):
                outcome = hang(
                    Path(folder) / f"run-{i}-{watched}", fault, f"launch.watchdog={watched}"
                )
                equal = (
                    "yes"
                    if outcome.code == 0 and weights_digest(newest(outcome.run)) == whole
                    else f"exit code {outcome.code}"
                )
                named = (
                    (
                        f"rank {outcome.told['rank']}, {outcome.told['phase']} of step "
                        f"{outcome.told['step']}: {outcome.told['why']}"
                    )
                    if outcome.told
                    else "no"
                )
                print(
                    (
                        f"| {name} | {watched} | {seconds(outcome.noticed)} | "
                        f"{seconds(outcome.resumed)} | {named} | {equal} |"
                    ),
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
