"""An update with states in memory, on the host and on a disk, and DeepSpeed's on the same shapes.

    python -m benchmarks.offload [--repeat 5] [--check]

One rank on a CPU, where device and host are the same memory. A round is one update of each way, and
a measurement of the disk. DeepSpeed is measured if it can be imported; FOLDER_OF_DEEPSPEED may name
a folder that holds it. Without libaio, or without a compiler, it has no update from a disk.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness import arguments, finish, in_turn, ratio, spread
from fsdp_trainer.apps.doctor.state_disk import rate
from fsdp_trainer.checkpoint.state import stored_parameters
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.config.schema import Batch, Optim, Precision, Sharding
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.from_config.initialize import initialize_weights
from fsdp_trainer.optim.offload.offloaded_optimizer import DiskOptimizer, OffloadedOptimizer
from fsdp_trainer.optim.offload.parts import parts_in_memory
from fsdp_trainer.optim.offload.weight_copies import WeightCopies, weights_changed
from fsdp_trainer.optim.optimizer_interface import TrainerOptimizer
from fsdp_trainer.optim.optimizers import build_optimizer
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.materialize import allocate
from fsdp_trainer.parallel.parallelize import Computation, parallelize

SHAPE = ModelConfig(
    hidden_size=2048, intermediate_size=5504, num_hidden_layers=4, vocab_size=8000, head_dim=128
)
DISK_BYTES = 2**30
FINE = torch.zeros((), dtype=torch.bool)


def main() -> None:
    """Measure, print and store the result."""
    given = arguments(__doc__, repeat=5)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        ways: dict[str, Callable[[], float]] = {
            offload: update(offload, folder / offload) for offload in ("none", "cpu", "disk")
        }
        for place in ("cpu", "nvme"):
            if deepspeed := deepspeed_update(place, folder):
                ways[f"deepspeed {place}"] = deepspeed
        for step in ways.values():
            step()  # creates states and warms up
        ways["disk rate"] = lambda: rate(folder / "probe", DISK_BYTES)
        timings = in_turn(ways, given.repeat)
    rates = timings.pop("disk rate")
    moved = 2 * 12 * SHAPE.parameters()
    result: dict[str, Any] = {
        "what": f"{SHAPE.parameters():,} parameters, float32, AdamW, {given.repeat} rounds",
        "disk_gb_a_second": spread([each / 1e9 for each in rates]),
    }
    for way, seconds in timings.items():
        result[way] = {"seconds": spread(seconds), "of_memory": ratio(seconds, timings["none"])}
    reached = [moved / seconds for seconds in timings["disk"]]
    result["disk"]["gb_a_second"] = spread([each / 1e9 for each in reached])
    result["disk"]["of_the_disk"] = ratio(reached, rates)
    compared = {
        "update in memory / on the host": ratio(timings["none"], timings["cpu"]),
        "rate of updates / rate of the disk": ratio(reached, rates),
    }
    for ours, theirs in (("cpu", "deepspeed cpu"), ("disk", "deepspeed nvme")):
        if theirs in timings:
            compared[f"{theirs} / {ours}"] = ratio(timings[theirs], timings[ours])
    finish("offload", result, compared, given.check)


def update(offload: str, folder: Path) -> Callable[[], float]:
    """Return a function that times an update with states in a place, in seconds."""
    layout = Layout(Sharding(), 1, Batch())
    dims = Dims(layout, "cpu", 600)
    precision = Precision(param_dtype="bfloat16")
    with torch.device("meta"):
        model = Decoder(SHAPE)
    model = parallelize(model, dims, Computation(Sharding(), precision, offload=offload))
    allocate(model, torch.device("cpu"))
    optimizer = build_optimizer(model, Optim())
    named = stored_parameters(model)
    if offload != "none":
        optimizer = elsewhere(offload, model, optimizer, named, folder)
    initialize_weights(model, 0)
    weights_changed(model)
    gradients = {p: torch.randn_like(p) for p in named.values()}

    def step() -> float:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        started = time.perf_counter()
        optimizer.step_unless(FINE)
        return time.perf_counter() - started

    return step


def elsewhere(
    offload: str,
    model: Decoder,
    optimizer: TrainerOptimizer,
    named: dict[str, nn.Parameter],
    folder: Path,
) -> TrainerOptimizer:
    """Return an optimizer with its states in a place."""
    copies = WeightCopies(model, on_host=False)
    if offload == "cpu":
        return OffloadedOptimizer(optimizer, copies, parts_in_memory(named, whole=False))
    folder.mkdir()
    return DiskOptimizer(optimizer, copies, named, folder, pinned=False)


def deepspeed_update(place: str, folder: Path) -> Callable[[], float] | None:
    """Return a function that times DeepSpeed's update in another process; None: not possible here.

    place: cpu or nvme.
    """
    path = os.environ.get("FOLDER_OF_DEEPSPEED")
    if not path and not find_spec("deepspeed"):
        return None
    command = [sys.executable, "-m", "benchmarks.deepspeed_update", place, str(folder), path or ""]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    requests, answers = process.stdin, process.stdout
    assert requests is not None
    assert answers is not None

    def step() -> float:
        print("step", file=requests, flush=True)
        for line in answers:
            if line.startswith("seconds "):
                return float(line.split()[1])
        raise RuntimeError(f"DeepSpeed's update ({place}) has ended")

    try:
        step()
    except (RuntimeError, BrokenPipeError) as error:
        print(error, file=sys.stderr)
        return None
    return step


if __name__ == "__main__":
    main()
