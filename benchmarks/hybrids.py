"""A hybrid packed and with one document in a row, and accelerate: useful tokens/s and memory.

    python -m benchmarks.hybrids [--repeat 2] [--ranks 2] [--check]

A small Qwen3.5, three of four blocks with linear attention, and the samples of
`benchmarks.train_step`, of gsm8k's lengths, float32. Each step has about the same samples. All
programs train at a learning rate of 0; the mean losses of packed rows and of accelerate must agree.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import arguments, finish, in_turn, inverse, print_result, ratio, spread
from benchmarks.train_step import (
    ROWS,
    STEPS,
    VOCABULARY,
    WARM,
    accelerated,
    check_losses,
    ours,
    prepare,
    train_with_accelerate,
)

WAY = "natural"
PACKED, ALONE, ACCELERATE = "packed", "one document a row", "accelerate"
SIZES = {
    "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
DOCUMENTS = 5
"""Samples in a full row, in the mean."""


def main() -> None:
    """Measure, print and store the result, or run one rank's task."""
    given = arguments(__doc__, repeat=2, ranks=2, peer="")
    if given.peer:
        task = json.loads(Path(given.peer).read_text())
        return print_result(train_with_accelerate(task, "Qwen3_5DecoderLayer"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        write_hybrid(folder / "hf")
        rows = DOCUMENTS * ROWS[WAY]
        alone = ["data.packing=none", f"batch.rows={rows}"]
        ways = {
            PACKED: lambda: ours(folder, WAY, given.ranks),
            ALONE: lambda: ours(folder, WAY, given.ranks, *alone),
            ACCELERATE: lambda: accelerated(folder, WAY, given.ranks, "benchmarks.hybrids"),
        }
        measured = in_turn(ways, given.repeat)
    first = {program: runs[0]["losses"] for program, runs in measured.items()}
    result: dict[str, Any] = {
        "what": f"{given.ranks} ranks over gloo, {given.repeat} rounds, {STEPS - WARM} timed steps",
        "difference_of_losses": check_losses(first[PACKED], first[ACCELERATE]),
    }
    for what in ("tokens_per_second", "memory_mib"):
        figures = {program: [run[what] for run in runs] for program, runs in measured.items()}
        result[what] = {program: spread(values) for program, values in figures.items()}
        result[f"{what}_ratio"] = {
            program: ratio(figures[PACKED], figures[program]) for program in (ALONE, ACCELERATE)
        }
    speed, memory = result["tokens_per_second_ratio"], result["memory_mib_ratio"]
    compared = {f"{program}: speed": speed[program] for program in speed}
    compared |= {f"{program}: memory saved": inverse(memory[program]) for program in memory}
    finish("hybrids", result, compared, given.check, ("transformers", "accelerate"))


def write_hybrid(folder: Path) -> None:
    """Write a random Qwen3.5 in place of another model."""
    import torch
    import transformers

    shutil.rmtree(folder)
    heads = SIZES["num_attention_heads"]
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        **SIZES,
        head_dim=SIZES["hidden_size"] // heads,
        linear_num_key_heads=heads // 2,
        linear_num_value_heads=heads,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    transformers.Qwen3_5ForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    main()
