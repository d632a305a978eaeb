"""Common parts of the benchmarks that compare with trl."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import train_step
from benchmarks.harness import in_turn, print_result, ratio, run_ranks, spread

USED = ("memory_mib", "memory_above_imports_mib", "processor_seconds")
PACKAGES = ("transformers", "accelerate", "trl")
OURS = "fsdp_trainer"


def ways_to_measure(ways: tuple[str, ...], small: bool) -> list[str]:
    """Return the ways that can be measured: without trl only ours, and only if `small`."""
    if importlib.util.find_spec("trl"):
        return list(ways)
    how = "trl is not installed:  pip install -c constraints.txt -e '.[bench]'"
    if not small:
        sys.exit(how)
    skipped = [way for way in ways if way != OURS]
    print(f"skipped: {', '.join(skipped)}; {how}")
    return [OURS]


def in_rounds(
    measure: Callable[[str, int], dict[str, Any]], ways: list[str], ranks: str, repeat: int
) -> dict[int, dict[str, list[dict[str, Any]]]]:
    """Return `repeat` results of `measure` for each number of ranks and each way.

    ranks: numbers of ranks, such as "1,2".
    """
    numbers = [int(number) for number in ranks.split(",")]
    each = {(number, way): partial(measure, way, number) for number in numbers for way in ways}
    measured = in_turn(each, repeat)
    return {number: {way: measured[number, way] for way in ways} for number in numbers}


def run_task(module: str, folder: Path, ranks: int, task: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a task in new processes on all cores; return the result that each rank printed."""
    out = folder / f"out-{time.monotonic_ns()}"
    file = folder / "task.json"
    file.write_text(json.dumps({**task, "folder": str(folder), "out": str(out)}))
    if ranks > 1:
        return run_ranks(module, ranks, "--task", str(file))
    # without torchrun, because under it accelerate would wrap the model
    line = [sys.executable, "-m", module, "--task", str(file)]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(line)} failed:\n{done.stderr[-4000:]}")
    return [json.loads(done.stdout.splitlines()[-1])]


def answer_task(file: str, programs: dict[str, Callable[[dict[str, Any]], dict[str, Any]]]) -> None:
    """Run the program of a task's way in this process, print its result, and end the process."""
    task = json.loads(Path(file).read_text())
    with contextlib.redirect_stdout(sys.stderr):
        result = programs[task["way"]](task)
    print_result(result)
    os._exit(0)  # torch's threads may abort the interpreter's end


def our_lines(task: dict[str, Any], keys: list[str]) -> list[dict[str, Any]]:
    """Train with this trainer in this process; return the lines of its metrics."""
    from fsdp_trainer.cli import main as fsdp_trainer

    how = ["precision=fp32", "checkpoint.every=null", "logging.every=1", "schedule=constant"]
    where = [f"data.cache={task['out']}/cache", f"run.root={task['out']}", "run.name=run"]
    code = fsdp_trainer(["train", *keys, *how, "schedule.warmup_steps=0", *where])
    assert code == 0
    records = Path(task["out"], "run", "metrics.jsonl").read_text().splitlines()
    return [json.loads(record) for record in records]


def trl_options(task: dict[str, Any]) -> dict[str, Any]:
    """Return the options that all trainers of trl share in these benchmarks."""
    options = {"output_dir": task["out"], "logging_steps": 1, "lr_scheduler_type": "constant"}
    quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True}
    return {
        **options,
        **quiet,
        "use_cpu": True,
        "bf16": False,
        "ddp_find_unused_parameters": False,
        **task["options"],
    }


def step_clock() -> Any:
    """Return a callback of transformers' Trainer that appends each step's seconds to `seconds`."""
    import transformers

    class StepClock(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.started = 0.0

        def on_train_begin(self, *args: Any, **options: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *args: Any, **options: Any) -> None:
            now = time.perf_counter()
            self.seconds.append(now - self.started)
            self.started = now

    return StepClock()


@contextlib.contextmanager
def timed_method(owner: Any, name: str) -> Iterator[list[float]]:
    """Yield a list to which each call of a method in the block appends its seconds."""
    method, seconds = getattr(owner, name), []

    def call(*args: Any, **options: Any) -> Any:
        started = time.perf_counter()
        result = method(*args, **options)
        seconds.append(time.perf_counter() - started)
        return result

    setattr(owner, name, call)
    try:
        yield seconds
    finally:
        setattr(owner, name, method)


class Usage:
    """Memory and processor time that this process uses from the creation of this object."""

    def __init__(self) -> None:
        self.processor, self.resident = time.process_time(), resident()

    def figures(self, peak: float) -> dict[str, float]:
        """Return the peak in MiB, its excess over the start, and processor seconds of all threads.

        peak: peak memory in MiB.
        """
        return {
            "memory_mib": peak,
            "memory_above_imports_mib": peak - self.resident,
            "processor_seconds": time.process_time() - self.processor,
        }


def resident() -> float:
    """Return this process's resident memory in MiB, 0 if the system does not report it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
    return 0.0


def shrink_model() -> None:
    """Replace the sizes of benchmarks.train_step's model by tiny ones."""
    tiny = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    train_step.SIZES.update(tiny, num_attention_heads=2, num_key_value_heads=1)


def compare(
    runs: dict[str, list[dict[str, Any]]], figures: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    """Return for each figure the spread of every way, and of the ratio of ours to every other."""
    compared = {}
    for figure in figures:
        values = {way: [run[figure] for run in each] for way, each in runs.items()}
        others = [way for way in values if way != OURS]
        compared[figure] = {way: spread(each) for way, each in values.items()}
        compared[figure]["ratio"] = {way: ratio(values[OURS], values[way]) for way in others}
    return compared
