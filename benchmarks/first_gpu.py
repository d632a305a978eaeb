"""The first ten minutes on a GPU: what is broken, and how fast it is beside what was predicted.

    python -m benchmarks.first_gpu [--part broken] [--device cpu] [--only 1,3]

Two parts of at most five minutes each, which may be two commands: `broken` runs all tests that need a
GPU side by side, and every layout on two ranks that share it; `fast` trains eight blocks of
Llama-3.1-8B's shape beside a plain Hugging Face script, and generates. Each step has a time limit;
the others are still run if one fails or takes too long. benchmarks/results/MACHINE/
first-gpu-PART-DATE.json is rewritten after every step: machine, versions and predictions (those of
benchmarks.step_budget, made before), then each step's commands with exit codes, seconds and the end
of their output. The exit code is 1 if a step failed.

--device cpu: the same steps with tiny models, which only shows that they run. Tests that need a GPU
are skipped, the steps may take eight times as long, and the file is runs/first-gpu-on-a-cpu.json.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import RESULTS, ROOT, arguments, machine, python_process, versions
from benchmarks.step_budget import COLUMNS, measured, predictions
from fsdp_trainer.config.devices import has_gpus
from fsdp_trainer.config.schema import Launch

MACHINE_SECONDS = 30
"""Time limit for describing the machine, so that a hanging GPU driver does not block the rest."""
CPU_LIMITS = 8
"""Factor for each step's limit on a CPU, which compiles slowly and may be shared."""
TAIL = 20_000  # characters of a command's output that are kept
TRAIN = ("-m", "fsdp_trainer")
AT_ONCE = str(max(1, min(12, (os.cpu_count() or 1) * 3 // 4)))
"""Tests that run side by side: most of their time is starting processes, and models are tiny."""
GPU_TESTS = (
    "tests/project/test_gpu.py",
    "tests/parallel/test_compile.py",
    "tests/checkpoint/test_huggingface.py",
    "tests/models/test_attention.py",
)
TESTS = (
    *("-m", "pytest", "-v", "-p", "no:cacheprovider", "-n", AT_ONCE, "--durations=5"),
    *("-m", "gpu", *GPU_TESTS),
)
PACKAGES = (
    "torchao",
    "triton",
    "transformers",
    "liger-kernel",
    "nvidia-nccl-cu13",
    "nvidia-cudnn-cu13",
)
SIZES = {
    "cuda": [
        "model=llama3_2_1b",
        "model.vocab_size=128256",
        "batch.seq_len=8192",
        "batch.rows=64",
        "batch.micro_rows=64",
        "activation_checkpoint=none",
    ],
    "cpu": ["model=tiny", "model.vocab_size=260", "batch.seq_len=256", "batch.rows=2"],
}
"""A run that is too large for a GPU, and a small one."""


@dataclass(frozen=True)
class Command:
    """Arguments of Python, with the expected exit code and a text that the output must contain."""

    words: tuple[str, ...]
    code: int = 0
    says: str = ""


@dataclass(frozen=True)
class Step:
    """Commands that are run one after the other, with `limit` seconds for all of them.

    figures: called with the runs' folder after the last command; raises AssertionError if the runs
    are wrong.
    """

    name: str
    limit: int
    commands: tuple[Command, ...]
    figures: Callable[[Path], dict[str, Any]] | None = field(default=None, repr=False)


def steps(device: str, folder: Path) -> dict[str, list[Step]]:
    """Return the steps of each part. folder: parent folder of the runs."""
    gpu = device == "cuda"
    doctor = ("doctor", f"launch.device={device}", "launch.nproc_per_node=1")
    greedy = Command(
        (*TRAIN, *training(device, folder)),
        code=1 if gpu else 0,
        says="ran out of memory" if gpu else "",
    )
    # without a GPU the tests are skipped, and pytest exits with 0
    tests = Command(TESTS, says=" passed" if gpu else "")
    some = () if gpu else ("--device", "cpu", "--only", "tensor,ring")

    def benchmark(part: str) -> tuple[Command, ...]:
        small = () if gpu else ("--small", "1")
        return (Command(("-m", "benchmarks.gpu", *small, "--parts", part)),)

    return {
        "broken": [
            Step("doctor", 20, (Command((*TRAIN, *doctor)),)),
            Step("all tests that need a GPU", 140, (tests,)),
            Step("two ranks", 85, (Command(("-m", "benchmarks.two_ranks", *some)),)),
            Step("out of memory", 25, (greedy,)),
        ],
        "fast": [
            Step("eight blocks of 8B", 205, benchmark("mfu"), figures=lambda _: beside_predicted()),
            Step("generation", 30, benchmark("generation")),
            Step("how near the ceilings", 30, benchmark("ceilings")),
        ],
    }


def training(device: str, folder: Path) -> list[str]:
    """Return the overrides of the run of SIZES."""
    return [
        *SIZES[device],
        f"launch.device={device}",
        "launch.nproc_per_node=1",
        "tokenizer.path=demo:bytes",
        f"data.path={folder}/docs.jsonl",
        "data.too_long=split",
        "train.steps=2",
        "checkpoint.every=null",
        f"run.root={folder}",
        "run.name=greedy",
    ]


def beside_predicted() -> dict[str, Any]:
    """Return what was predicted and, where the newest results have it, what was measured."""
    return {
        name: {"predicted": predicted, "measured": measured(*COLUMNS[name][::3])}
        for name, predicted in predictions().items()
    }


def write_documents(path: Path, count: int = 600) -> None:
    """Write texts of 500 to 6,000 letters."""
    random = np.random.default_rng(0)
    with path.open("w") as file:
        for length in random.integers(500, 6000, count).tolist():
            text = random.integers(97, 107, length, np.uint8).tobytes().decode()
            file.write(json.dumps({"text": text}) + "\n")


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


# --- running ------------------------------------------------------------------------------------


def run_command(command: Command, seconds: float, folder: Path) -> dict[str, Any]:
    """Run one command and return its result. Its processes are killed after `seconds`."""
    began = time.monotonic()
    output, code = folder / "output.txt", None
    late = contextlib.suppress(subprocess.TimeoutExpired)
    with python_process(command.words, output) as process, late:
        code = process.wait(seconds)
    text = output.read_text(errors="replace")
    return {
        "command": " ".join(["python", *command.words]),
        "exit_code": code,
        "passed": code == command.code and command.says in text,
        "seconds": round(time.monotonic() - began, 1),
        "output": text[-TAIL:],
    }


def run_step(step: Step, folder: Path) -> dict[str, Any]:
    """Run a step's commands within its time limit and return the results."""
    ends_at = time.monotonic() + step.limit
    result: dict[str, Any] = {"name": step.name, "limit": step.limit, "commands": []}
    for command in step.commands:
        result["commands"].append(run_command(command, ends_at - time.monotonic(), folder))
        if result["commands"][-1]["exit_code"] is None:
            break
    passed = all(done["passed"] for done in result["commands"])
    if passed and step.figures:
        try:
            result["figures"] = step.figures(folder)
        except Exception as error:  # the other steps are still to be run
            result["figures"] = f"{type(error).__name__}: {error}"
            passed = False
    late = result["commands"][-1]["exit_code"] is None
    result["state"] = "passed" if passed else "out of time" if late else "failed"
    result["seconds"] = round(sum(done["seconds"] for done in result["commands"]), 1)
    return result


def run_steps(table: list[Step], folder: Path, about: dict[str, Any], path: Path) -> bool:
    """Run all steps, writing `path` before and after each. Returns True if all passed."""
    done: list[dict[str, Any]] = []
    for number, step in enumerate(table, 1):
        # if the machine crashes, the file names the step
        write(path, about, [*done, {"name": step.name, "state": "running"}])
        done.append(run_step(step, folder))
        write(path, about, done)
        line = f"{number}/{len(table)}  {step.name}: {done[-1]['state']}"
        print(f"{line}, {done[-1]['seconds']:.0f} s of {step.limit}", flush=True)
    failed = [result for result in done if result["state"] != "passed"]
    for result in failed:
        commands = result["commands"]
        bad = next((done for done in commands if not done["passed"]), commands[-1])
        print(f"\n{result['name']}: {result['state']}\n{bad['command']}")
        print(result["figures"] if "figures" in result else bad["output"][-2000:])
    print(f"\n{len(done) - len(failed)} of {len(done)} passed; everything is in {path}")
    return not failed


def write(path: Path, about: dict[str, Any], done: list[dict[str, Any]]) -> None:
    """Write the results so far, atomically."""
    states = [result["state"] for result in done]
    summary = {state: states.count(state) for state in sorted(set(states))}
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps({**about, "summary": summary, "steps": done}, indent=1) + "\n")
    new.replace(path)


def describe() -> dict[str, Any]:
    """Return the machine as this process sees it, and the versions of the packages involved."""
    import torch

    cuda = torch.cuda.is_available()
    facts: dict[str, Any] = {"machine": machine(), "versions": versions(*PACKAGES)}
    facts["versions"]["cuda"] = torch.version.cuda or "none"
    if cuda:
        facts["versions"]["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        facts["machine"]["memory_gib"] = torch.cuda.get_device_properties(0).total_memory / 2**30
    driver = Path("/proc/driver/nvidia/version")
    if driver.is_file():
        facts["machine"]["driver"] = driver.read_text().splitlines()[0]
    return facts


def describe_in_process(folder: Path) -> dict[str, Any]:
    """Return the result of `describe` in another process, so that this one never uses the GPU."""
    command = Command(("-m", "benchmarks.first_gpu", "--describe", "1"))
    answer = run_command(command, MACHINE_SECONDS, folder)
    try:
        return json.loads(answer["output"].splitlines()[-1])
    except (ValueError, IndexError):
        return {"machine": {"kind": "unknown"}, "not_described": answer}


def main() -> None:
    """Run all steps, those of a part, or those that --only names."""
    given = arguments(__doc__, repeat=1, device="cuda", part="", only="", describe=0)
    if given.describe:
        return print(json.dumps(describe()))
    if given.device == "cuda" and not has_gpus(Launch()):
        sys.exit(
            "this machine has no GPU. To see whether the steps run at all:  "
            "make first-gpu ARGS=--device=cpu"
        )
    with tempfile.TemporaryDirectory(prefix="first-gpu-") as name:
        folder = Path(name)
        write_documents(folder / "docs.jsonl")
        about = {"date": time.strftime("%Y-%m-%d %H:%M"), "device": given.device}
        about |= describe_in_process(folder) | {"predicted": predictions()}
        stem = "-".join(filter(None, ("first-gpu", given.part, time.strftime("%Y-%m-%d"))))
        path = RESULTS / about["machine"]["kind"] / f"{stem}.json"
        if given.device == "cpu":  # not a result, since it shows nothing about a GPU
            path = ROOT / "runs" / "first-gpu-on-a-cpu.json"
        parts = steps(given.device, folder)
        if given.part and given.part not in parts:
            sys.exit(f"--part={given.part}: there are only {' and '.join(parts)}")
        table = parts[given.part] if given.part else [*parts["broken"], *parts["fast"]]
        if given.device == "cpu":
            table = [replace(step, limit=CPU_LIMITS * step.limit) for step in table]
        if given.only:
            table = [table[int(number) - 1] for number in given.only.split(",")]
        passed = run_steps(table, folder, about, path)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
