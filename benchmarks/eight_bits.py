"""Validation losses of runs whose messages are 8-bit numbers, beside one that sends them exactly.

Two ranks on this machine. Prints a Markdown table.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import evaluations, print_losses

STEPS = 300
MODEL = [
    "model=tiny", "precision=fp32", "tokenizer.path=demo:bytes", "data.path=demo:backwards",
    "data.validation=0.05", "batch.seq_len=128", "batch.rows=8", "batch.micro_rows=4",
    "optim.lr=2e-3", "schedule.warmup_steps=20", "checkpoint.every=null", "launch.device=cpu",
    f"train.steps={STEPS}", "train.validate_every=50",
]  # fmt: skip
WAYS = {
    "exact": [],
    "weights": ["sharding.quantize=weights"],
    "gradients": ["sharding.quantize=gradients"],
    "both": ["sharding.quantize=both"],
    "both, with error feedback": ["sharding.quantize=both", "sharding.error_feedback=true"],
}


def validation_losses(folder: Path, name: str, *overrides: str) -> dict[int, float]:
    """Train on two ranks, and return the validation losses by step."""
    command = ["torchrun", "--standalone", "--nproc-per-node=2", "-m", "fsdp_trainer", "train"]
    place = [f"run.root={folder}", f"run.name={name}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *place, *MODEL, *overrides], env=env, check=True, stdout=sys.stderr)
    return evaluations(folder / name)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        columns = {
            name: validation_losses(Path(folder), name.replace(", ", "-").replace(" ", "-"), *words)
            for name, words in WAYS.items()
        }
    print_losses(columns, ".4f")


if __name__ == "__main__":
    main()
