"""Common parts of all benchmarks: measuring ways in turn, and storing results with their spread.

    python -m benchmarks.NAME [--repeat N] [--check]

A result is stored in benchmarks/results/MACHINE/NAME.json, with the machine and the versions. With
--check the stored result is not replaced but compared with: the exit code is 1 if even the best
round of a figure is more than 10% worse than the stored median. Compared figures are ratios of two
ways measured in turn, because ratios are stable when a shared machine's speed drifts and seconds
are not. They do depend on the processor, so each has results of its own; where there is none, a
result of another one with as many cores is compared with.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
WORSE = 0.10
T = TypeVar("T")


def arguments(about: str | None, repeat: int, **more: Any) -> argparse.Namespace:
    """Parse the command line: --repeat, --check, and each of `more` as --NAME with its default."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument(
        "--repeat", type=int, default=repeat, help="rounds; each measures every way once"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare with the stored result instead of replacing it",
    )
    for name, default in more.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return parser.parse_args()


def in_turn(ways: dict[str, Callable[[], T]], repeat: int) -> dict[str, list[T]]:
    """Return `repeat` results of each way. Each round measures all, in alternating order."""
    measured: dict[str, list[T]] = {name: [] for name in ways}
    for turn in range(repeat):
        for name in list(ways)[:: 1 if turn % 2 else -1]:
            measured[name].append(ways[name]())
    return measured


def spread(values: list[float]) -> dict[str, float]:
    """Return minimum, median and maximum, to four significant digits."""
    figures = {"minimum": min(values), "median": statistics.median(values), "maximum": max(values)}
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


def ratio(one: list[float], other: list[float]) -> dict[str, float]:
    """Return the spread of one / other, round by round."""
    return spread([a / b for a, b in zip(one, other, strict=True)])


def inverse(spread: dict[str, float]) -> dict[str, float]:
    """Return the spread of 1 / value."""
    return {
        "minimum": 1 / spread["maximum"],
        "median": 1 / spread["median"],
        "maximum": 1 / spread["minimum"],
    }


def machine() -> dict[str, Any]:
    """Return a description of this machine; `kind` is the name of its folder of results."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        kind = f"{torch.cuda.device_count()}x-{name}"
    else:
        match = (
            re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
            if sys.platform == "linux"
            else None
        )
        name = match[1] if match else platform.processor()
        kind = f"{os.cpu_count()}-cpu-cores-{name}"
    kind = re.sub(r"[^a-z0-9]+", "-", kind.lower())
    return {
        "kind": kind,
        "processor": name,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
    }


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python, torch and the given packages."""
    installed = {"python": platform.python_version(), "torch": torch.__version__}
    for package in packages:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            installed[package] = "not installed"
    return installed


def torchrun(ranks: int) -> list[str]:
    """Return the command that starts ranks on this machine; what they run is appended."""
    module = ["-m", "torch.distributed.run", "--standalone"]
    return [sys.executable, *module, f"--nproc-per-node={ranks}"]


def run_ranks(module: str, ranks: int, *args: str, env: dict[str, str] | None = None) -> list[dict]:
    """Run `python -m module` under torchrun; return the JSON objects that its ranks print.

    Each object is one line of output. The ranks share the cores by OMP_NUM_THREADS.
    """
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
    with TemporaryDirectory() as folder:
        command = [
            *torchrun(ranks),
            "--redirects=1",  # to a file for each rank: lines could run together in one pipe
            f"--log-dir={folder}",
            "-m",
            module,
            *args,
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **threads, **(env or {})}
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
        outputs = [file.read_text() for file in sorted(Path(folder).rglob("stdout.log"))]
    lines = [line for output in outputs for line in output.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


@contextlib.contextmanager
def python_process(words: Sequence[str], output: Path) -> Iterator[subprocess.Popen]:
    """Start Python with these arguments; at the end of the context kill it and what it started.

    output: file for what it prints. A pipe would stay open as long as a process that outlives it.
    """
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def print_result(result: dict[str, Any]) -> None:
    """Print a result for `run_ranks` in a single write.

    print would write the line's end separately, possibly after another rank's text.
    """
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


def wait_for_device() -> None:
    """Wait until the GPU, if there is one, is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rank_memory() -> float:
    """Return this process's peak memory in MiB: allocated on a GPU, resident on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        1024 if sys.platform == "linux" else 2**20
    )


def result_path(name: str) -> Path:
    """Return the path of the stored result for this kind of machine."""
    return RESULTS / machine()["kind"] / f"{name}.json"


def comparable_result(name: str) -> Path | None:
    """Return the path of the stored result for this kind of machine, or for a similar one.

    A similar one has as many cores and another processor. None if there is no result.
    """
    own = result_path(name)
    cores, number_of, _ = own.parent.name.partition("-cpu-cores-")
    similar = sorted(RESULTS.glob(f"{cores}{number_of}*/{name}.json")) if number_of else []
    return next((path for path in (own, *similar) if path.exists()), None)


def finish(
    name: str,
    result: dict[str, Any],
    compared: dict[str, float | dict[str, float]],
    check: bool,
    packages: tuple[str, ...] = (),
) -> None:
    """Print a result, and store it or, with `check`, compare it with the stored one and exit.

    result: measurements, JSON. compared: figures by name, of which larger is better; each a number
    or its spread over the rounds, of which the median is stored.
    """
    about, path = machine(), result_path(name)
    written = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": about,
        "versions": versions(*packages),
        **result,
        "compared": {figure: of_rounds(value, "median") for figure, value in compared.items()},
    }
    print(json.dumps(written, indent=1))
    if not check:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(written, indent=1) + "\n")
        return
    stored_path = comparable_result(name)
    if stored_path is None:
        sys.exit(f"{name}: there is no stored result of this kind of machine, {path}")
    before = json.loads(stored_path.read_text())
    processor = before["machine"].get("processor")
    if processor != about.get("processor"):
        print(f"{name}: the stored result is of another processor, {processor}", file=sys.stderr)
    stored = {figure: of_rounds(value, "median") for figure, value in before["compared"].items()}
    best = {figure: of_rounds(value, "maximum") for figure, value in compared.items()}
    worse = [
        figure
        for figure, value in best.items()
        if figure in stored and value < stored[figure] * (1 - WORSE)
    ]
    for figure in worse:
        now = of_rounds(compared[figure], "median")
        print(
            f"{name}: {figure} was {stored[figure]:.3g}, is {now:.3g}, {best[figure]:.3g} at best",
            file=sys.stderr,
        )
    sys.exit(1 if worse else 0)


def of_rounds(value: float | dict[str, float], name: str) -> float:
    """Return the minimum, median or maximum of a figure; a number without rounds is its own."""
    return value[name] if isinstance(value, dict) else value


def evaluations(run: Path) -> dict[int, float]:
    """Return the validation losses of a run by step."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return {e["step"]: e["loss"] for e in events if e["event"] == "evaluation"}


def print_losses(columns: dict[str, dict[int, float]], digits: str) -> None:
    """Print a Markdown table of losses by step, a column for each run. digits: their format."""
    print("| step | " + " | ".join(columns) + " |")
    print("|---|" + "---|" * len(columns))
    for step in sorted(next(iter(columns.values()))):
        values = (f"{losses[step]:{digits}}" for losses in columns.values())
        print(f"| {step} | " + " | ".join(values) + " |")
