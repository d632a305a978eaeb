"""Accuracy of the plan's memory, compared with `memory_gib` in the metrics of real trainings.

    python -m benchmarks.plan_accuracy [--device cpu|cuda] [--check]

On a CPU with 2 and 4 ranks: the process's peak memory is compared with the plan's total, which
--check compares; and its excess over that of a minimal training with the total without the
allowance, though buffers of oneDNN and gloo grow too. On a GPU with one rank: the peak that torch
allocated is compared with the total without the allowance.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import arguments, finish, torchrun
from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.models.from_config.resolve import resolve_model
from fsdp_trainer.planning.plan.memory import Moment, memory
from fsdp_trainer.planning.plan.planned_run import PlannedRun

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**20),
}
"""Settings with which glibc returns free memory at once: otherwise its arenas would be measured."""
STEPS = 2  # the first step creates the optimizer's moments
HEADS = ["model.head_dim=64", "model.max_position_embeddings=8192"]
SMALL = [
    "model=tiny", *HEADS, "model.hidden_size=768", "model.intermediate_size=2048", "model.num_attention_heads=12", "model.num_key_value_heads=4",
    "model.num_hidden_layers=6", "model.vocab_size=16384", "model.tie_word_embeddings=false", "precision=fp32", "batch.seq_len=256", "batch.rows=4",
]  # fmt: skip
LARGE = [
    "model=tiny", *HEADS, "model.hidden_size=2048", "model.intermediate_size=5632", "model.num_attention_heads=32", "model.num_key_value_heads=8",
    "model.num_hidden_layers=16", "model.vocab_size=128256", "model.tie_word_embeddings=false", "batch.seq_len=4096", "batch.rows=2",
]  # fmt: skip
GEMMA = [
    "model.family=gemma3_text",
    "model.tie_word_embeddings=true",
    "model.vocab_size=65536",
    "model.hidden_size=512",
]
NOTHING = [
    "model=tiny",
    "model.vocab_size=300",
    "precision=fp32",
    "batch.seq_len=64",
    "batch.rows=4",
]
FULL, SELECTIVE = "activation_checkpoint=full", "activation_checkpoint=selective"
CPU: dict[str, tuple[int, list[str]]] = {
    "2 ranks": (2, ["batch.rows=2"]),
    "2 ranks, ddp, 2 micro-batches": (2, ["sharding=ddp", SELECTIVE]),
    "2 ranks, gemma 3, 4 rows, 2 blocks a unit": (
        2,
        [*GEMMA, "sharding.blocks_per_unit=2", "batch.micro_rows=4", "batch.rows=8"],
    ),
    "4 ranks, full": (4, [FULL]),
    "4 ranks, hsdp, 2 blocks a unit": (
        4,
        ["sharding=hsdp", "sharding.replicas=2", "sharding.blocks_per_unit=2", SELECTIVE],
    ),
}
GPU: dict[str, tuple[int, list[str]]] = {
    "none": (1, []),
    "selective": (1, [SELECTIVE]),
    "full, 4 rows": (1, [FULL, "batch.micro_rows=4", "batch.rows=4"]),
    "full, 2 micro-batches": (1, [FULL]),
    "pure bf16": (1, [FULL, "precision=pure_bf16"]),
    "8-bit AdamW": (1, [FULL, "optim=adamw_8bit"]),
    "tied": (1, [FULL, "model.tie_word_embeddings=true"]),
    "offloaded": (1, [FULL, "sharding.cpu_offload=true"]),
}


def main() -> None:
    """Train, predict, print and store the result."""
    given = arguments(__doc__, repeat=1, device="cpu")
    base, cases = (LARGE, GPU) if given.device == "cuda" else (SMALL, CPU)
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "texts.jsonl").write_text(
            "".join(json.dumps({"text": "plan " * 2000}) + "\n" for _ in range(64))
        )
        nothing = (
            {n: measured(folder, n, NOTHING, "cpu") for n in (2, 4)}
            if given.device == "cpu"
            else {}
        )
        for case, (ranks, more) in cases.items():
            plan, peak = (
                predicted([*base, *more], ranks, given.device),
                measured(folder, ranks, [*base, *more], given.device),
            )
            tensors = plan.total - plan.bytes["allowance"]
            rows[case] = {
                "when": plan.when,
                "predicted_mib": mib(plan.total),
                "measured_mib": mib(peak),
                "tensors_predicted_mib": mib(tensors),
            }
            rows[case]["tensors_measured_mib"] = mib(peak - nothing.get(ranks, 0.0))
            rows[case]["tensors_off"] = round(tensors / (peak - nothing.get(ranks, 0.0)) - 1, 3)
            if given.device == "cpu":
                rows[case]["off"] = round(plan.total / peak - 1, 3)
            print(f"{case:32} {rows[case]}", file=sys.stderr)
    worst = max(
        abs(row["off" if given.device == "cpu" else "tensors_off"]) for row in rows.values()
    )
    result = {
        "what": f"peak of {STEPS} steps",
        "nothing_mib": {n: mib(size) for n, size in nothing.items()},
        "cases": rows,
    }
    finish(
        f"plan_accuracy_{given.device}",
        result,
        {"the worst case, predicted by measured": round(1 - worst, 3)},
        given.check,
    )


def mib(size: float) -> float:
    """Return bytes as MiB, rounded for the result."""
    return round(size / 2**20, 1)


def predicted(overrides: list[str], ranks: int, device: str) -> Moment:
    """Return the moment of the plan's peak memory."""
    cfg = compose(
        "train", [*overrides, "data.path=texts.jsonl", "tokenizer.path=demo:bytes"], inputs=False
    )
    return memory(PlannedRun.of(cfg, resolve_model(cfg.model), ranks), device).peak


def measured(folder: Path, ranks: int, overrides: list[str], device: str) -> float:
    """Train and return the peak memory in bytes of the rank with the most."""
    run = [
        f"run.root={folder}",
        "run.name=run",
        "run.overwrite=true",
        "checkpoint.resume=never",
        "checkpoint.every=null",
        "logging.every=1",
    ]
    run += [
        f"data.path={folder}/texts.jsonl",
        "data.too_long=split",
        "tokenizer.path=demo:bytes",
        f"launch.device={device}",
        f"train.steps={STEPS}",
    ]
    command = [*torchrun(ranks), "-m", "fsdp_trainer", "train"]
    done = subprocess.run(
        [*command, *overrides, *run],
        capture_output=True,
        text=True,
        env={**os.environ, **ENVIRONMENT},
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(overrides)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return json.loads(lines[-1])["memory_gib"] * 2**30


if __name__ == "__main__":
    main()
