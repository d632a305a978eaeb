"""Peak host memory of each rank while it imports a Hugging Face folder, and while the folder is exported again.

    python -m benchmarks.import_memory [--gib 1.0] [--ranks 2]

Writes a random Llama of the asked size to a temporary folder first. Expected per rank: its float32 shard + the largest slice + a constant,
where the constant is what the same process needs for a model of a few kilobytes.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file

from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder

GIB = 2**30


def write_folder(folder: Path, gib: float) -> ModelConfig:
    """A bfloat16 Llama of about `gib` in several files."""
    size = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
    one = ModelConfig(**size, vocab_size=32_000, num_hidden_layers=1, tie_word_embeddings=False)
    none = ModelConfig(**size, vocab_size=32_000, num_hidden_layers=0, tie_word_embeddings=False)
    layers = max(1, round((gib * GIB / 2 - none.parameters()) / (one.parameters() - none.parameters())))
    config = ModelConfig(**{**asdict(one), "num_hidden_layers": layers})
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Decoder(config).named_parameters()}
    names, weight_map = list(shapes), {}
    for i in range(0, len(names), 32):
        file = f"model-{i:05d}.safetensors"
        save_file({name: torch.randn(shapes[name]).to(torch.bfloat16) * 0.02 for name in names[i : i + 32]}, folder / file)
        weight_map |= dict.fromkeys(names[i : i + 32], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config.to_hf("bfloat16")))
    return config


def rank(folder: Path) -> None:
    """One rank: build, shard, import; prints its peak as JSON."""
    from fsdp_trainer.checkpoint.huggingface import import_weights
    from fsdp_trainer.config.compose import compose
    from fsdp_trainer.launch.world import connect, join
    from fsdp_trainer.parallel.materialize import allocate
    from fsdp_trainer.parallel.mesh import build_mesh
    from fsdp_trainer.parallel.parallelize import parallelize

    cfg = compose("train", ["precision=fp32"], inputs=False)
    world = join(os.environ, "cpu", 60)
    connect(world, 60)
    with torch.device("meta"):
        model = Decoder(ModelConfig.from_hf(folder))
    parallelize(model, build_mesh(cfg.sharding, "cpu"), cfg)
    allocate(model, world.device)
    started = time.perf_counter()
    import_weights(model, folder)
    seconds = time.perf_counter() - started
    shard = sum(p.to_local().nbytes for p in model.parameters())
    print(
        json.dumps(
            {"rank": world.rank, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "shard": shard, "seconds": seconds}
        )
    )
    torch.distributed.destroy_process_group()


def measure(folder: Path, ranks: int) -> list[dict]:
    """Each rank's figures."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "benchmarks.import_memory"]
    out = subprocess.run([*command, "--rank-of", str(folder)], check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def main() -> None:
    """Measure a small and a large folder, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank-of", type=Path)
    arguments = parser.parse_args()
    if arguments.rank_of:
        rank(arguments.rank_of)
        return
    with tempfile.TemporaryDirectory() as small, tempfile.TemporaryDirectory() as large:
        write_folder(Path(small), 0.0)
        config = write_folder(Path(large), arguments.gib)
        constant = max(r["peak"] - r["shard"] for r in measure(Path(small), arguments.ranks))
        largest = 4 * config.vocab_size * config.hidden_size
        stored = sum(f.stat().st_size for f in Path(large).glob("*.safetensors"))
        print(
            f"folder {stored / GIB:.2f} GiB bfloat16, {config.parameters():,} parameters, {arguments.ranks} ranks, torch {torch.__version__}"
        )
        for r in measure(Path(large), arguments.ranks):
            beyond = r["peak"] - r["shard"] - constant
            print(
                f"rank {r['rank']}: peak {r['peak'] / GIB:.2f} GiB = shard {r['shard'] / GIB:.2f} + constant {constant / GIB:.2f} + {beyond / GIB:.2f}"
                f" (largest tensor {largest / GIB:.2f}), {r['seconds']:.1f} s"
            )


if __name__ == "__main__":
    main()
