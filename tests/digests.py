"""Digests of the results of six small runs, to check that a change leaves all numbers unchanged.

    python tests/digests.py --save FILE       # before the change
    python tests/digests.py --against FILE    # after it; exit code 1 and names if any differ

Digests are valid on one machine with one version of torch. They cover every weight, every optimizer
state, and the figures in metrics.jsonl that do not depend on time.
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from stored import bytes_of, newest, stored
from world import Run, World, write_chats

MIXED = ["batch.rows=7", "batch.micro_rows=2", "train.validate_every=4", "data.validation=0.1"]
RUNS = {
    "fsdp": (2, [*MIXED, "loss.label_smoothing=0.1", "loss.z_loss=1e-3", "train.on_spike=skip"]),
    "hsdp": (4, [*MIXED, "sharding=hsdp", "sharding.replicas=2", "precision.param_dtype=bfloat16"]),
    "ddp": (
        2,
        [*MIXED, "sharding=ddp", "activation_checkpoint=full", "model.tie_word_embeddings=false"],
    ),
    "adamw_8bit": (
        2,
        [
            *MIXED,
            "optim=adamw_8bit",
            "model.hidden_size=64",
            "precision.master_dtype=bfloat16",
            "precision.param_dtype=bfloat16",
        ],
    ),
    "streaming": (
        2,
        ["batch.rows=4", "batch.micro_rows=1", "data.streaming=true", "data.workers=1"],
    ),
    "gemma3": (
        2,
        [
            *MIXED,
            "model.family=gemma3_text",
            "model.sliding_window=16",
            "model.num_hidden_layers=7",
        ],
    ),
}
TIMED = {"time", "phases", "tokens_per_second", "step_seconds", "memory_gib"}
NEWER = {"validation_bits_per_byte"}
"""Figures that earlier versions, which a digest may come from, did not write."""


def digest(run: Run) -> dict[str, str]:
    """Return digests of the weights, of the optimizer states, and of the figures of all steps."""
    tensors = stored(newest(run))
    sums = {"weights": hashlib.sha256(), "optimizer": hashlib.sha256()}
    for name, tensor in sorted(tensors.items()):
        described = f"{name} {tensor.dtype} {list(tensor.shape)}"
        sums[name.partition("/")[0]].update(described.encode() + bytes_of(tensor).numpy().tobytes())
    lines = [
        {key: value for key, value in line.items() if key not in TIMED | NEWER}
        for line in run.metrics
    ]
    metrics = hashlib.sha256(json.dumps(lines, sort_keys=True).encode())
    return {name: sum_.hexdigest()[:16] for name, sum_ in (sums | {"metrics": metrics}).items()}


def all_digests() -> dict[str, dict[str, str]]:
    """Train the six runs in a temporary folder and return their digests."""
    world = World()
    with tempfile.TemporaryDirectory() as folder:
        chats = write_chats(Path(folder) / "chats.jsonl", 100)
        inputs = [f"data.path={chats}", "tokenizer.path=demo:bytes", f"data.cache={folder}/cache"]
        how = [*inputs, "train.steps=12", "checkpoint.every=5"]
        try:
            return {
                name: digest(world.train(Path(folder) / name, *how, *own, ranks=ranks))
                for name, (ranks, own) in RUNS.items()
            }
        finally:
            world.close()


def main() -> int:
    """Save the digests, or compare them with saved ones."""
    mode, file = sys.argv[1], Path(sys.argv[2])
    now = all_digests()
    if mode == "--save":
        file.write_text(json.dumps(now, indent=1) + "\n")
        return 0
    before = json.loads(file.read_text())
    differs = [
        f"{run}: {part}"
        for run, parts in before.items()
        for part, value in parts.items()
        if now[run][part] != value
    ]
    print("\n".join(differs) if differs else f"all {len(before)} runs are bitwise the same")
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
