"""Validation losses of groups that average every so many steps, beside one that does in each step.

Two groups of one rank each, on this machine. Prints a Markdown table.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import evaluations, print_losses

STEPS = 300
EVERY = (1, 10, 50)
MODEL = [
    "model=tiny", "precision=fp32", "tokenizer.path=demo:bytes", "data.path=demo:backwards",
    "data.validation=0.05", "batch.seq_len=128", "batch.rows=8", "batch.micro_rows=2",
    "optim.lr=2e-3", "schedule.warmup_steps=20", "checkpoint.every=null", "launch.device=cpu",
    f"train.steps={STEPS}", "train.validate_every=50", "launch.groups=2", "replicas.min=2",
]  # fmt: skip


def validation_losses(folder: Path, name: str, *overrides: str) -> dict[int, float]:
    """Train, and return the validation losses by step."""
    command = [sys.executable, "-m", "fsdp_trainer", "train", f"run.root={folder}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, f"run.name={name}", *MODEL, *overrides], env=env, check=True, stdout=sys.stderr
    )
    return evaluations(folder / name)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        columns = {"sync": validation_losses(root, "sync", "replicas.method=sync")}
        for every in EVERY:
            words = ["replicas.method=diloco", f"replicas.every={every}"]
            columns[f"every {every}"] = validation_losses(root, f"every-{every}", *words)
    print_losses(columns, ".3f")


if __name__ == "__main__":
    main()
