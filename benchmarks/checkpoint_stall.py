"""What a checkpoint costs training: how long it waits, and how much slower its steps are meanwhile, with sync and async beside each other.

    python -m benchmarks.checkpoint_stall [--repeat 3] [--ranks 2] [--width 384] [--check]

Each round trains the same steps with sync and with async; their losses must be equal. Per checkpoint: stall = stall_seconds of its event; lost =
stall + what the half of the steps after it took longer than the half before the next one. The last checkpoint, beside which nothing is trained, is
not counted.
"""

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import arguments, finish, in_turn, ratio, spread

EVERY = 8
SAVES = 2
STEPS = EVERY * (SAVES + 1)
WAYS = ("sync", "async")


def train(way: str, ranks: int, width: int) -> dict[str, Any]:
    """One run: seconds per checkpoint, its size in MiB per rank, and the losses."""
    with tempfile.TemporaryDirectory() as folder:
        return train_in(Path(folder), way, ranks, width)


def train_in(folder: Path, way: str, ranks: int, width: int) -> dict[str, Any]:
    """The same, in an empty folder."""
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
        "losses": [line["loss"] for line in metrics],
    }


def main() -> None:
    """Measure in turn, check that the losses agree, and write it down."""
    given = arguments(__doc__, repeat=3, ranks=2, width=384)
    runs = in_turn({way: partial(train, way, given.ranks, given.width) for way in WAYS}, given.repeat)
    assert all(run["losses"] == runs["sync"][0]["losses"] for way in WAYS for run in runs[way]), "the losses differ"

    def compare(what: str) -> dict[str, dict[str, float]]:
        return {way: spread([run[what] for run in runs[way]]) for way in WAYS}

    stalls = ratio(*([run["stall"] for run in runs[way]] for way in WAYS))
    result = {
        "what": f"{given.ranks} ranks over gloo, {runs['sync'][0]['mib']:.0f} MiB of checkpoint a rank",
        "rounds": f"{given.repeat} of {SAVES} checkpoints",
        "step_seconds": compare("step"),
        "stall_seconds": compare("stall") | {"sync/async": stalls},
        "lost_seconds": compare("lost"),
        "seconds_until_committed": compare("until_committed"),
    }
    finish("checkpoint_stall", result, {"stall sync/async": stalls["median"]}, given.check)


if __name__ == "__main__":
    main()
