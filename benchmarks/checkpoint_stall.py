"""Time that a checkpoint costs training, by waiting and by slower steps, compared with `dcp.save`.

    python -m benchmarks.checkpoint_stall [--repeat 3] [--ranks 2] [--width 896] [--check]

One run whose checkpoints are written in turn by a plain `torch.distributed.checkpoint.save` between
two steps, by checkpoint=sync and by checkpoint=async. Lost seconds of a checkpoint = the time that
training waited + the additional time of the steps in the first half of the interval to the next
checkpoint, relative to the median of the nearby steps in the second halves before and after. On a
shared machine a single figure means little: use the median, and check that step times are steady.
"""

import json
import os
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from benchmarks.harness import arguments, finish, ratio, run_ranks, spread
from fsdp_trainer.__main__ import run
from fsdp_trainer.checkpoint.store import CheckpointStore

EVERY = 4
WAYS = ("dcp.save", "sync", "async")


class Stores:
    """A replacement of CheckpointStore.save that uses the ways in turn.

    The first checkpoint of each way, which makes plans and buffers, is not counted.
    """

    def __init__(self) -> None:
        self.save, self.sync = CheckpointStore.save, None

    def __call__(
        self,
        store: CheckpointStore,
        step: int,
        state: dict[str, Tensor],
        progress: dict[str, Any],
        _: float,
    ) -> None:
        way = way_of(step)
        store.wait()
        dist.barrier()
        if way == "dcp.save":
            started = perf_counter()
            folder = store.folder / f"plain-{step}"
            dcp.save(state, checkpoint_id=folder)
            seconds = perf_counter() - started
            if dist.get_rank() == 0:
                times = {"seconds": seconds, "stall_seconds": seconds}
                store.on_commit({"step": step, "path": str(folder), **times})
        elif way == "async":
            self.save(store, step, state, progress, perf_counter())
        else:
            self.sync = self.sync or CheckpointStore(
                store.run, replace(store.cfg, mode="sync"), 0, store.write_assets, store.on_commit
            )
            self.save(self.sync, step, state, progress, perf_counter())


def way_of(step: int) -> str:
    """Return the way in which the checkpoint after a step is written."""
    return WAYS[(step // EVERY - 1) % len(WAYS)]


def as_rank() -> None:
    """Train as one rank with the arguments of the command line."""
    stores = Stores()
    with patch.object(CheckpointStore, "save", lambda *args: stores(*args)):
        run()


def measure(folder: Path, repeat: int, ranks: int, width: int) -> dict[str, Any]:
    """Return each way's figures, a list with one value per round, and figures of the run."""
    model = [
        f"model.hidden_size={width}",
        f"model.intermediate_size={width * 11 // 4}",
        "model.num_hidden_layers=6",
        "model.head_dim=64",
    ]
    steps = EVERY * (len(WAYS) * (repeat + 1) + 1)
    shape = [
        "batch.seq_len=64",
        f"batch.rows={ranks}",
        f"train.steps={steps}",
        "precision=fp32",
        "logging.every=1",
    ]
    data = ["data.path=demo:backwards", "data.too_long=truncate", "tokenizer.path=demo:bytes"]
    how = [f"run.root={folder}", "run.name=run", "checkpoint=async", f"checkpoint.every={EVERY}"]
    run_ranks(
        "benchmarks.checkpoint_stall",
        ranks,
        "train",
        "model=tiny",
        *model,
        *shape,
        *data,
        *how,
        env={"IN_TURN": "1"},
    )
    metrics, events = (
        [json.loads(x) for x in (folder / "run" / f).read_text().splitlines()]
        for f in ("metrics.jsonl", "events.jsonl")
    )
    seconds = [line["step_seconds"] for line in metrics]
    counted = [
        e for e in events if e["event"] == "checkpoint" and EVERY * len(WAYS) < e["step"] < steps
    ]
    figures: dict[str, Any] = {
        way: {"stall": [], "slower": [], "lost": [], "until_committed": []} for way in WAYS
    }
    half = EVERY // 2
    for event in counted:
        step, stall = event["step"], event["stall_seconds"]
        usual = statistics.median(seconds[step - half : step] + seconds[step + half : step + EVERY])
        slower = sum(seconds[step : step + half]) - usual * half
        for name, value in {
            "stall": stall,
            "slower": slower,
            "lost": stall + slower,
            "until_committed": event["seconds"],
        }.items():
            figures[way_of(step)][name].append(value)
    size = sum(
        f.stat().st_size
        for f in next((folder / "run" / "checkpoints").glob("plain-*")).glob("*.distcp")
    )
    return figures | {"steps": seconds[EVERY * len(WAYS) :], "mib": size / ranks / 2**20}


def main() -> None:
    """Measure, print and store the result."""
    given = arguments(__doc__, repeat=3, ranks=2, width=896)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), given.repeat, given.ranks, given.width)
    compared = {
        f"dcp.save/{way}": ratio(figures["dcp.save"]["lost"], figures[way]["lost"])
        for way in WAYS[1:]
    }
    result = {
        "what": f"{given.ranks} ranks over gloo, {figures['mib']:.0f} MiB of checkpoint a rank",
        "rounds": given.repeat,
        "step_seconds": spread(figures["steps"]),
        **{
            f"{name}_seconds": {way: spread(figures[way][name]) for way in WAYS}
            for name in figures["sync"]
        },
        "lost_of_dcp_save": {
            way: ratio(figures[way]["lost"], figures["dcp.save"]["lost"]) for way in WAYS[1:]
        },
    }
    finish(
        "checkpoint_stall",
        result,
        {f"lost {name}": each for name, each in compared.items()},
        given.check,
    )


if __name__ == "__main__":
    as_rank() if os.environ.get("IN_TURN") else main()
