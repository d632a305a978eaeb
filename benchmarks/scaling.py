"""Step time as the model, the rows or the number of ranks grow, against floating-point operations.

    python -m benchmarks.scaling [--repeat 2] [--check]

Also draws a figure.

- layers, width, row length, vocabulary: one rank, one row a step; the other sizes are those of
  BASE. Expected: seconds in proportion to the operations of the causal formula
  (observe/flops.py), a slope of 1 in logarithms. Constant overheads make it flatter.
- ranks: 1, 2 and 4 ranks with one thread each share the same rows. Expected: the speed-up of
  independent matrix products in as many processes in the same round. It may be less than the number
  of processes if cores share execution units or the machine is shared.
"""

import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import fsdp_trainer
from benchmarks.harness import arguments, finish, in_turn, machine, ratio, result_path, spread
from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.models.from_config.resolve import resolve_model
from fsdp_trainer.observe.flops import causal_flops

BASE = {"layers": 4, "width": 256, "row length": 512, "vocabulary": 2048}
SWEEPS = {
    "layers": [2, 4, 8, 16],
    "width": [128, 256, 512, 1024],
    "row length": [512, 1024, 2048, 4096],
    "vocabulary": [2048, 8192, 32768, 131072],
}
RANKS = [1, 2, 4]
STEPS, WARM = 5, 2  # optimizer steps in all, and untimed ones at the start


def main() -> None:
    """Measure, print, draw and store the result."""
    given = arguments(__doc__, repeat=2, product=0)
    if given.product:
        return print(product_rate())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # one document per row, of letters only
        letters = np.random.default_rng(0).integers(97, 123, (40, 4200), np.uint8)
        (folder / "texts.jsonl").write_text(
            "".join(json.dumps({"text": bytes(row).decode()}) + "\n" for row in letters)
        )
        points = {
            (what, value): BASE | {what: value}
            for what, values in SWEEPS.items()
            for value in values
        }
        unlike = {
            tuple(shape.values()): shape for shape in points.values()
        }  # the base is a point of every sweep
        seconds = in_turn(
            {
                key: (lambda shape=shape: step_seconds(folder, shape, 1, 1))
                for key, shape in unlike.items()
            },
            given.repeat,
        )
        wide = BASE | {"width": 512}
        worlds = {("ranks", n): (lambda n=n: step_seconds(folder, wide, n, 4)) for n in RANKS}
        worlds |= {("products", n): (lambda n=n: 1 / products_at_once(n)) for n in RANKS}
        durations = in_turn(worlds, given.repeat)
    measured = {
        point: statistics.median(seconds[tuple(shape.values())]) for point, shape in points.items()
    }
    result: dict[str, Any] = {
        "what": f"base {BASE}, float32, medians of {given.repeat} rounds of {STEPS - WARM} steps"
    }
    for what, values in SWEEPS.items():
        operations = [flops(points[what, value]) for value in values]
        taken_by = [measured[what, value] for value in values]
        result[what] = {
            "values": values,
            "seconds": [float(f"{t:.4g}") for t in taken_by],
            "flops": operations,
        }
        for name, points_of in (("slope", slice(None)), ("slope_of_the_last_two", slice(-2, None))):
            result[what][name] = round(
                float(np.polyfit(np.log(operations[points_of]), np.log(taken_by[points_of]), 1)[0]),
                3,
            )
    result["ranks"] = {
        "values": RANKS,
        "seconds": {n: spread(durations["ranks", n]) for n in RANKS},
    }
    result["ranks"] |= {
        f"{kind}_times_faster": {n: ratio(durations[kind, 1], durations[kind, n]) for n in RANKS}
        for kind in ("ranks", "products")
    }
    if not given.check:
        draw(result, result_path("scaling").with_suffix(".svg"))
    finish(
        "scaling",
        result,
        {"2 ranks, times faster": result["ranks"]["ranks_times_faster"][2]},
        given.check,
    )


def overrides(shape: dict[str, int]) -> list[str]:
    """Return the overrides for a model and rows of this shape."""
    width, row = shape["width"], shape["row length"]
    sizes = {"hidden_size": width, "intermediate_size": width * 11 // 4, "head_dim": 32}
    sizes |= {
        "num_attention_heads": width // 32,
        "num_key_value_heads": width // 64,
        "num_hidden_layers": shape["layers"],
    }
    sizes |= {
        "vocab_size": shape["vocabulary"],
        "tie_word_embeddings": "false",
        "max_position_embeddings": row,
    }
    return [
        "model=tiny",
        *(f"model.{key}={value}" for key, value in sizes.items()),
        f"batch.seq_len={row}",
        "precision=fp32",
    ]


def step_seconds(folder: Path, shape: dict[str, int], ranks: int, rows: int) -> float:
    """Return the median step of a run in seconds.

    rows: rows of a step; 1: it runs in this process, otherwise in ranks with one thread each.
    """
    data = [
        f"data.path={folder}/texts.jsonl",
        "tokenizer.path=demo:bytes",
        "data.too_long=split",
        f"batch.rows={rows}",
    ]
    how = [
        f"train.steps={STEPS}",
        "checkpoint.every=null",
        f"launch.nproc_per_node={ranks}",
        f"run.root={folder}/runs",
    ]
    given = [*overrides(shape), *data, *how, "run.overwrite=true", "checkpoint.resume=never"]
    if rows == 1:
        with contextlib.redirect_stdout(io.StringIO()):
            fsdp_trainer.train(given)
    else:
        command = [sys.executable, "-m", "fsdp_trainer", *given]
        subprocess.run(
            command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    lines = (folder / "runs/run/metrics.jsonl").read_text().splitlines()
    return statistics.median(json.loads(line)["step_seconds"] for line in lines[WARM:])


def products_at_once(processes: int) -> float:
    """Return the total GFLOP/s of matrix products in simultaneous processes of one thread each."""
    command = [sys.executable, "-m", "benchmarks.scaling", "--product", "1"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, env=env) for _ in range(processes)]
    return sum(float(process.communicate()[0]) for process in started)


def product_rate() -> float:
    """Return one thread's GFLOP/s over two seconds, after one in which others may be starting."""
    import torch

    a, b = torch.randn(2, 1024, 1024)
    for seconds in (1.0, 2.0):
        done, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < seconds:
            a @ b
            done += 1
        rate = done * 2 * 1024**3 / (time.perf_counter() - begun) / 1e9
    return rate


def flops(shape: dict[str, int]) -> float:
    """Return the operations of one step on one full row that is a single document."""
    model = resolve_model(compose("train", overrides(shape), inputs=False).model)
    return causal_flops(model, shape["row length"], shape["row length"] ** 2)


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw a panel for each quantity: the measured points and the expected line.

    The line is in proportion to the operations through the last point; for ranks, that of matrix
    products through the first.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams |= {"svg.hashsalt": "scaling", "svg.fonttype": "none"}
    figure, panels = pyplot.subplots(1, len(SWEEPS) + 1, figsize=(16, 3.4), constrained_layout=True)
    for panel, what in zip(panels, [*SWEEPS, "ranks"], strict=True):
        one = result[what]
        values = one["values"]
        if what == "ranks":
            seconds = [one["seconds"][ranks]["median"] for ranks in values]
            expected = [
                seconds[0] / one["products_times_faster"][ranks]["median"] for ranks in values
            ]
            panel.set_title("ranks, one thread each")
        else:
            seconds = one["seconds"]
            expected = [seconds[-1] * operations / one["flops"][-1] for operations in one["flops"]]
            panel.set_title(f"{what}: slope at last {one['slope_of_the_last_two']:.2f}")
        panel.loglog(
            values,
            expected,
            "--",
            color="gray",
            label="in proportion" if what != "ranks" else "as matrix products",
        )
        panel.loglog(values, seconds, "o-", label="measured")
        panel.set_xticks(values, [f"{value:,}" for value in values])
        panel.minorticks_off()
        panel.set_xlabel(what)
        panel.legend(frameon=False)
    panels[0].set_ylabel("seconds a step")
    figure.suptitle(f"{machine()['processor']}, {machine()['cores']} cores, float32")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
