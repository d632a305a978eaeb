"""What a checkpoint costs training: how long it waits, and how much slower its steps are meanwhile, with sync and async beside each other.

    python -m benchmarks.checkpoint_stall [--repeat 5] [--ranks 2] [--width 384] [--out benchmarks/results/checkpoint_stall.json]

Each round trains the same steps with sync and with async. Per checkpoint: stall = stall_seconds of its event; lost = stall + what the half
of the steps after it took longer than the half before the next one. The last checkpoint, beside which nothing is trained, is not counted.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

EVERY = 8
SAVES = 2
STEPS = EVERY * (SAVES + 1)
WAYS = ("sync", "async")


def train(folder: Path, way: str, ranks: int, width: int) -> dict[str, float]:
    """One run: seconds per checkpoint, and its size in MiB per rank."""
    model = [f"model.hidden_size={width}", f"model.intermediate_size={width * 11 // 4}", "model.num_hidden_layers=8", "model.head_dim=64"]
    shape = ["batch.seq_len=64", f"batch.rows={ranks}", f"train.steps={STEPS}", "precision=fp32", "logging.every=1"]
    data = ["data.path=demo:backwards", "data.too_long=truncate", "tokenizer.path=demo:bytes"]
    how = [f"run.root={folder}", f"run.name={way}", f"checkpoint={way}", f"checkpoint.every={EVERY}", f"launch.nproc_per_node={ranks}"]
    command = [sys.executable, "-m", "fsdp_trainer", "model=tiny", *model, *shape, *data, *how]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    metrics, events = ([json.loads(x) for x in (folder / way / f).read_text().splitlines()] for f in ("metrics.jsonl", "events.jsonl"))
    saves = [e for e in events if e["event"] == "checkpoint" and e["step"] < STEPS]
    seconds = [line["step_seconds"] for line in metrics]
    after = sum(sum(seconds[e["step"] :][: EVERY // 2]) for e in saves)
    undisturbed = sum(sum(seconds[e["step"] :][EVERY // 2 : EVERY]) for e in saves)
    stall = sum(e["stall_seconds"] for e in saves)
    size = sum(f.stat().st_size for f in next((folder / way / "checkpoints").glob("step-*")).glob("*.distcp"))
    return {
        "stall": stall / SAVES,
        "lost": (stall + after - undisturbed) / SAVES,
        "until_committed": sum(e["seconds"] for e in saves) / SAVES,
        "step": undisturbed / SAVES / (EVERY // 2),
        "mib": size / ranks / 2**20,
    }


def spread(values: list[float]) -> dict[str, float]:
    """Of the rounds."""
    return {"median": round(statistics.median(values), 3), "lowest": round(min(values), 3), "highest": round(max(values), 3)}


def main() -> None:
    """Measure, print the table and write it down."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rounds: list[dict[str, dict[str, float]]] = []
    for turn in range(arguments.repeat):
        with tempfile.TemporaryDirectory() as folder:
            order = WAYS if turn % 2 else WAYS[::-1]
            rounds.append({way: train(Path(folder), way, arguments.ranks, arguments.width) for way in order})

    def compare(what: str) -> dict[str, dict[str, float]]:
        return {way: spread([r[way][what] for r in rounds]) for way in WAYS}

    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} shared CPU cores, {platform.system()}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "what": f"{arguments.ranks} ranks over gloo, {rounds[0]['sync']['mib']:.0f} MiB of checkpoint a rank, {arguments.repeat} rounds of {SAVES} checkpoints",
        "step_seconds": compare("step"),
        "stall_seconds": compare("stall") | {"sync/async": spread([r["sync"]["stall"] / r["async"]["stall"] for r in rounds])},
        "lost_seconds": compare("lost"),
        "seconds_until_committed": compare("until_committed"),
    }
    print(json.dumps(result, indent=1))
    if arguments.out:
        arguments.out.parent.mkdir(exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
