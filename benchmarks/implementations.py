"""Our decoder, transformers' class in this trainer, and accelerate: useful tokens/s and memory.

    python -m benchmarks.implementations [--repeat 3] [--ranks 2] [--check]

Model, samples and lengths are those of `benchmarks.train_step`: gsm8k's lengths, each program with
its own packing, float32, a Llama that both implementations know. All three see the same samples at
a learning rate of 0, so their mean losses must agree.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import arguments, finish, in_turn, inverse, print_result, ratio, spread
from benchmarks.train_step import (
    STEPS,
    WARM,
    accelerated,
    check_losses,
    ours,
    prepare,
    train_with_accelerate,
)

WAY = "natural"
NATIVE, BY_TRANSFORMERS, ACCELERATE = "native", "transformers", "accelerate"


def main() -> None:
    """Measure, print and store the result, or run one rank's task."""
    given = arguments(__doc__, repeat=3, ranks=2, peer="")
    if given.peer:
        return print_result(train_with_accelerate(json.loads(Path(given.peer).read_text())))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        chosen = "model.implementation="
        ways = {
            NATIVE: lambda: ours(folder, WAY, given.ranks, chosen + NATIVE),
            BY_TRANSFORMERS: lambda: ours(folder, WAY, given.ranks, chosen + BY_TRANSFORMERS),
            ACCELERATE: lambda: accelerated(folder, WAY, given.ranks),
        }
        measured = in_turn(ways, given.repeat)
    first = {program: runs[0]["losses"] for program, runs in measured.items()}
    result: dict[str, Any] = {
        "what": f"{given.ranks} ranks over gloo, {given.repeat} rounds, {STEPS - WARM} timed steps",
        "largest_difference_of_losses": max(
            check_losses(first[program], first[ACCELERATE]) for program in first
        ),
    }
    for what in ("tokens_per_second", "memory_mib"):
        figures = {program: [run[what] for run in runs] for program, runs in measured.items()}
        result[what] = {program: spread(values) for program, values in figures.items()}
        result[f"{what}_ratio"] = {
            program: ratio(figures[program], figures[ACCELERATE])
            for program in (NATIVE, BY_TRANSFORMERS)
        }
    speed, memory = result["tokens_per_second_ratio"], result["memory_mib_ratio"]
    compared = {f"{program}: speed": speed[program] for program in speed}
    compared |= {f"{program}: memory saved": inverse(memory[program]) for program in memory}
    finish("implementations", result, compared, given.check, ("transformers", "accelerate"))


if __name__ == "__main__":
    main()
