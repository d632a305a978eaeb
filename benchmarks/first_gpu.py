"""The first run on a GPU: everything that only a GPU can show, most informative first.

    python -m benchmarks.first_gpu [--device cpu] [--only 1,4]

Ten steps on one GPU, each with a time limit, in at most 25 minutes. The other steps are still run
if a step fails or takes too long. benchmarks/results/MACHINE/first-gpu-DATE.json is rewritten after
every step: machine and versions, then each step's commands with exit codes, seconds and the end of
their output, and figures computed from the runs. The exit code is 1 if a step failed.

--device cpu: the same steps with tiny models, which only shows that they run. Tests that need a GPU
are skipped, the steps may take eight times as long, and the file is runs/first-gpu-on-a-cpu.json.
"""

import contextlib
import json
import os
import statistics
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
from fsdp_trainer.config.devices import has_gpus
from fsdp_trainer.config.schema import Launch

MACHINE_SECONDS = 30
"""Time limit for describing the machine, so that a hanging GPU driver does not block the rest."""
CPU_LIMITS = 8
"""Factor for each step's limit on a CPU, which compiles slowly and may be shared."""
TAIL = 20_000  # characters of a command's output that are kept
TRAIN = ("-m", "fsdp_trainer")
AT_ONCE = str(max(1, min(12, (os.cpu_count() or 1) // 2)))
"""Tests that run side by side: most of their time is starting processes, and models are tiny."""
TESTS = (
    *("-m", "pytest", "-v", "-p", "no:cacheprovider", "-n", AT_ONCE, "--durations=5"),
    *("-m", "gpu"),
)
GPU_TESTS = (
    "tests/project/test_gpu.py",
    "tests/parallel/test_compile.py",
    "tests/checkpoint/test_huggingface.py",
)
NUMBERS = "head_adds_up or rounding_bits"
NEAR = "bf16_run_is_near and not flex and not messages and not offload"
WAITS = "waits and not flex and not offload"
REST = f"not ({NUMBERS}) and not ({NEAR}) and not ({WAITS})"
PACKAGES = ("torchao", "triton", "transformers", "nvidia-nccl-cu13", "nvidia-cudnn-cu13")
SIZES = {
    "cuda": [
        "model=llama3_2_1b",
        "model.vocab_size=128256",
        "batch.seq_len=8192",
        "batch.rows=4",
    ],
    "cpu": ["model=tiny", "model.vocab_size=260", "batch.seq_len=256", "batch.rows=2"],
}


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


def steps(device: str, folder: Path) -> list[Step]:
    """Return all steps. folder: parent folder of the runs."""

    def run(name: str, *overrides: str, code: int = 0, says: str = "") -> Command:
        return Command((*TRAIN, *training(device, folder, name), *overrides), code, says)

    def tests(which: str, *files: str) -> Command:
        # without a GPU the tests are skipped, and pytest exits with 0
        words = (*TESTS, "-k", which, *(files or GPU_TESTS[:1]))
        return Command(words, says=" passed" if gpu else "")

    gpu = device == "cuda"
    one_rank = (f"launch.device={device}", "launch.nproc_per_node=1")
    whole, packed = (
        (["model.attention=documents", "model.attention_kernel=cudnn"], ["model.attention=varlen"])
        if gpu
        else (["model.attention=documents"], ["model.attention=mask"])
    )
    no_checkpoint = "checkpoint.every=null"
    saving = ("checkpoint=async", "checkpoint.every=10", "checkpoint.keep=1")
    too_much = ("batch.rows=64", "batch.micro_rows=64", "activation_checkpoint=none")
    return [
        Step("doctor", 45, (Command((*TRAIN, "doctor", *one_rank)),)),
        Step(
            "kernels compute what a CPU does",
            100,
            (
                tests(NUMBERS),
                tests("every_layout_and_kernel", "tests/models/test_attention.py"),
            ),
        ),
        Step("runs are near those of a CPU", 250, (tests(NEAR),)),
        Step("no step waits for the host", 150, (tests(WAITS),)),
        Step(
            "cuDNN and varlen",
            110,
            (
                run("whole", *whole, "train.steps=30", no_checkpoint),
                run("packed", *packed, "train.steps=30", no_checkpoint),
            ),
            figures=lambda runs: compare_losses(runs / "whole", runs / "packed", 0.02),
        ),
        Step(
            "compiled, profiled",
            100,
            (
                run(
                    "compiled",
                    "compile=enabled",
                    "train.steps=12",
                    "profile.steps=8-10",
                    f"profile.memory={str(gpu).lower()}",
                    no_checkpoint,
                ),
            ),
            figures=lambda runs: pace(runs / "compiled"),
        ),
        Step(
            "a run goes on",
            150,
            (
                run("again", *saving, "train.steps=10"),
                run("again", *saving, "train.steps=20"),
                run("once", *saving, "train.steps=20"),
            ),
            figures=lambda runs: compare_losses(runs / "again", runs / "once", 0.02),
        ),
        Step(
            "out of memory",
            45,
            (
                run(
                    "greedy",
                    *(too_much if gpu else ()),
                    "train.steps=2",
                    no_checkpoint,
                    code=1 if gpu else 0,
                    says="ran out of memory" if gpu else "",
                ),
            ),
        ),
        Step("flex, float8, offload, messages, the rest", 330, (tests(REST, *GPU_TESTS),)),
        Step("how near the ceilings", 160, (Command(("-m", "benchmarks.gpu", *benchmark(gpu))),)),
    ]


def benchmark(gpu: bool) -> tuple[str, ...]:
    """Return the arguments of benchmarks.gpu."""
    return ("--parts", "ceilings,mfu") if gpu else ("--small", "1", "--parts", "ceilings")


def training(device: str, folder: Path, name: str) -> list[str]:
    """Return the overrides that all runs share."""
    return [
        *SIZES[device],
        f"launch.device={device}",
        "launch.nproc_per_node=1",
        "batch.micro_rows=1",
        "tokenizer.path=demo:bytes",
        f"data.path={folder}/docs.jsonl",
        f"data.cache={folder}/cache",
        "data.too_long=split",
        "schedule=constant",
        "logging.every=1",
        f"run.root={folder}",
        f"run.name={name}",
    ]


def write_documents(path: Path, count: int = 600) -> None:
    """Write texts of 500 to 6,000 letters."""
    random = np.random.default_rng(0)
    with path.open("w") as file:
        for length in random.integers(500, 6000, count).tolist():
            text = random.integers(97, 107, length, np.uint8).tobytes().decode()
            file.write(json.dumps({"text": text}) + "\n")


# --- figures of runs ----------------------------------------------------------------------------


def pace(run: Path) -> dict[str, Any]:
    """Return seconds and memory of a run's steps, and its compilation events."""
    lines = metrics(run)
    seconds = [line["step_seconds"] for line in lines]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return {
        "first_step_seconds": seconds[0],
        "median_step_seconds": statistics.median(seconds[len(seconds) // 2 :]),
        "longest_of_the_second_half": max(seconds[len(seconds) // 2 :]),
        "memory_gib": lines[-1]["memory_gib"],
        "compilations": [event for event in events if event["event"] == "compile"],
    }


def compare_losses(one: Path, other: Path, tolerance: float) -> dict[str, Any]:
    """Return the largest relative difference of two runs' losses, and both runs' pace.

    Raises AssertionError if it exceeds the tolerance.
    """
    losses = [np.array([line["loss"] for line in metrics(run)]) for run in (one, other)]
    assert len(losses[0]) == len(losses[1]), "they have different numbers of steps"
    difference = float(np.max(np.abs(losses[0] - losses[1]) / losses[1]))
    figures = {"largest_difference": difference, one.name: pace(one), other.name: pace(other)}
    assert difference <= tolerance, f"losses differ by {difference:.2%}: {figures}"
    return figures


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
    """Run all steps, or those that --only names."""
    given = arguments(__doc__, repeat=1, device="cuda", only="", describe=0)
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
        about |= describe_in_process(folder)
        path = RESULTS / about["machine"]["kind"] / f"first-gpu-{time.strftime('%Y-%m-%d')}.json"
        if given.device == "cpu":  # not a result, since it shows nothing about a GPU
            path = ROOT / "runs" / "first-gpu-on-a-cpu.json"
        table = steps(given.device, folder)
        if given.device == "cpu":
            table = [replace(step, limit=CPU_LIMITS * step.limit) for step in table]
        if given.only:
            table = [table[int(number) - 1] for number in given.only.split(",")]
        passed = run_steps(table, folder, about, path)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
