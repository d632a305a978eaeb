"""A step of many kinds of runs with CUDA's operators, without a GPU: `make cuda-shapes`.

    python -m tools.cuda_shapes [--only WORD] [--jobs N]

Tensors have no storage but lie on a GPU, as far as torch can tell, which therefore chooses CUDA's
operators and makes their checks of shapes, number formats, strides and alignments. What answers for
the GPU is a small library with the limits of an H100 (no_gpu.c). Needs gcc, and the build of torch
for CUDA.

A case is a whole step of the trainer, built as for training on 8 ranks: forward, backward,
clipping, update. Printed are its operators for attention, products and updates; the places where
the host would wait for the GPU; what was refused; and its peak of tensors beside that of the
same step with a CPU's operators, which is what `fsdp-trainer rehearse` takes. Other cases compile a
block, forward and backward, to Triton's kernels. All of it, with counts, is in
build/cuda-shapes.json. The exit code is 1 if a case is refused, waits, or calls other
collectives than with a CPU's operators.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from tools.cuda_shapes.cases import CONFIGS, TRANSFORMERS, WAITING, compiled_cases, steps
from tools.cuda_shapes.compiled_block import FUNCTIONS
from tools.cuda_shapes.configs import write_config
from tools.cuda_shapes.host_waits import ROOT
from tools.cuda_shapes.no_gpu import build

BUILD = ROOT / "build"
SHOWN = re.compile(r"attention|attn|mm$|_fused|scaled|grouped")
"""Operators in the table; the file has all."""
NEAR = 1.01
"""Largest ratio of the two peaks that is not pointed at."""


def run(library: str, names: list[str]) -> list[dict[str, Any]]:
    """Run cases in one process. Return the result of each."""
    environment = {
        **os.environ,
        "LD_PRELOAD": library,
        "TRITON_LIBCUDA_PATH": str(Path(library).parent),
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, "-m", "tools.cuda_shapes.run_cases", *names]
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    problem = f"the process ended: {done.stderr[-600:]}"
    results += [{"name": name, "problem": problem, "waits": {}} for name in names[len(results) :]]
    for result in results:
        print(describe(result), flush=True)
    return results


def describe(result: dict[str, Any]) -> str:
    """Return the lines of the table for a case."""
    if result["problem"]:
        return f"REFUSED  {result['name']}\n    {result['problem']}\n    {result.get('place', '')}"
    operators = result.get("operators", ())  # a function that is compiled alone has none
    shown = [name.split("::")[-1] for name in operators if SHOWN.search(name)]
    if "kernels" in result:
        kernels = f"{result['kernels']} Triton kernels for sm_90"
        return f"ok       {result['name']}: {', '.join([kernels, *shown])}"
    line = f"ok       {result['name']}: {', '.join(shown)}"
    lines = [line, *(f"    waits {number} ×  {what}" for what, number in result["waits"].items())]
    if result["name"] in WAITING:
        lines.append(f"    {WAITING[result['name']]}")
    if "peak on a CPU" in result:
        ratio = result["peak"] / result["peak on a CPU"]
        if not 1 / NEAR < ratio < NEAR:
            lines.append(f"    peak of tensors {ratio:.3f} of that with a CPU's operators")
        if not result["same collectives"]:
            lines.append("    OTHER COLLECTIVES than with a CPU's operators")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name has this word")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    names = [name for name in [*steps(), *compiled_cases(), *FUNCTIONS] if options.only in name]
    library = str(build(BUILD / "no-gpu"))
    for name in TRANSFORMERS:
        if f"transformers {name}" in names:
            write_config(name, ROOT / CONFIGS / name)
    parts = [names[i :: 4 * options.jobs] for i in range(4 * options.jobs)]
    with ThreadPoolExecutor(options.jobs) as pool:
        results = [*chain(*pool.map(partial(run, library), filter(None, parts)))]
    results.sort(key=lambda one: names.index(one["name"]))
    file = BUILD / "cuda-shapes.json"
    file.write_text(json.dumps(results, indent=1) + "\n")
    refused = sum(bool(one["problem"]) for one in results)
    waiting = sum(bool(one["waits"]) and one["name"] not in WAITING for one in results)
    others = sum(not one.get("same collectives", True) for one in results)
    print(
        f"{len(results)} cases: {refused} refused, {waiting} wait for the GPU without a reason,"
        f" {others} with other collectives: {file}"
    )
    return int(bool(refused or waiting or others))


if __name__ == "__main__":
    sys.exit(main())
