"""Import and export of a Hugging Face folder compared with plain reading and writing of its bytes.

    python -m benchmarks.hf_io [--repeat 3] [--gib 1.1] [--check]

First writes a random bfloat16 Llama of the requested size to a temporary folder.

import: seconds of import_weights alone, on the slowest rank. Memory for the float32 shards, twice
the bytes of the files, is allocated before, but the kernel clears its pages only when they are
first written, which is counted. "import again" is a second import into the same memory, without
that. Compared with one process that reads the same files once, in pieces of 16 MiB. All start with
an empty page cache. Expected memory of a rank: its shard + the largest tensor's slice + a constant,
which is the memory that the same process needs for a tiny model.

export: export_checkpoint of a float32 checkpoint that 1 or 2 ranks wrote, in one process as at the
end of a run, fsync included. Compared with writing the same number of bytes once, in pieces of
16 MiB, and fsync. The checkpoint is in the page cache, as after training.
"""

import gc
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.harness import arguments, finish, in_turn, inverse, ratio, run_ranks, spread
from fsdp_trainer.checkpoint.exports.hf_folder import export_checkpoint
from fsdp_trainer.checkpoint.huggingface import import_weights
from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.launch.world import connect, join
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.materialize import allocate
from fsdp_trainer.parallel.parallelize import Computation, parallelize

GIB, MIB = 2**30, 2**20
RANKS = (1, 2)
BUFFER = memoryview(bytearray(16 * MIB))
DTYPES = ("bfloat16", "float32")


def write_folder(folder: Path, gib: float) -> ModelConfig:
    """Write a bfloat16 Llama of about `gib` GiB in several files; return its configuration."""
    size = {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
    }
    one = ModelConfig(**size, vocab_size=32_000, num_hidden_layers=1, tie_word_embeddings=False)
    none = ModelConfig(**size, vocab_size=32_000, num_hidden_layers=0, tie_word_embeddings=False)
    layers = max(
        1, round((gib * GIB / 2 - none.parameters()) / (one.parameters() - none.parameters()))
    )
    config = ModelConfig(**{**asdict(one), "num_hidden_layers": layers})
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Decoder(config).named_parameters()}
    names, weight_map = list(shapes), {}
    folder.mkdir()
    for i in range(0, len(names), 32):
        file = f"model-{i:05d}.safetensors"
        save_file(
            {
                name: torch.randn(shapes[name]).to(torch.bfloat16) * 0.02
                for name in names[i : i + 32]
            },
            folder / file,
        )
        weight_map |= dict.fromkeys(names[i : i + 32], file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    (folder / "config.json").write_text(json.dumps(config.to_hf("bfloat16")))
    return config


def peak() -> int:
    """Return this process's peak resident memory in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def import_rank(folder: Path) -> None:
    """Build, shard and import a model as one rank; print seconds and memory as JSON.

    `sum` in the output is the sum of all numbers that this rank imported.
    """
    cfg = compose("train", ["precision=fp32"], inputs=False)
    world = join(os.environ, "cpu", 60)
    connect(world, 60)
    gc.freeze()  # as a run does after its imports: 0.17 s for each search of all that they created
    with torch.device("meta"):
        model = Decoder(ModelConfig.from_hf(folder))
    dims = Dims(Layout(cfg.sharding, world.size, cfg.batch), "cpu", timeout=60)
    parallelize(model, dims, Computation.of(cfg))
    allocate(model, world.device)
    torch.distributed.barrier()
    seconds = []
    for _ in range(2):
        if world.main:
            drop_cache(sorted(folder.glob("*.safetensors")))
        torch.distributed.barrier()
        started = time.perf_counter()
        import_weights(model, folder)
        seconds.append(time.perf_counter() - started)
        torch.distributed.barrier()
    figures = {"seconds": seconds[0], "again": seconds[1], "peak": peak()}
    local = [p.to_local() for p in model.parameters()]
    figures |= {
        "shard": sum(p.nbytes for p in local),
        "sum": sum(p.sum(dtype=torch.float64).item() for p in local),
    }
    print(json.dumps(figures))
    torch.distributed.destroy_process_group()


def drop_cache(files: list[Path]) -> None:
    """Remove files from the page cache, so that the next read waits for the disk."""
    for file in files:
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_once(files: list[Path]) -> float:
    """Return the seconds of reading files."""
    started = time.perf_counter()
    for file in files:
        with file.open("rb", 0) as handle:
            while handle.readinto(BUFFER):
                pass
    return time.perf_counter() - started


def write_once(file: Path, size: int) -> float:
    """Return the seconds of writing a file and of its fsync. size: bytes."""
    started = time.perf_counter()
    with file.open("wb", 0) as handle:
        remaining = size
        while remaining:
            remaining -= handle.write(BUFFER[: min(remaining, len(BUFFER))])
        os.fsync(handle.fileno())
    seconds = time.perf_counter() - started
    file.unlink()
    return seconds


def after_dropping(files: list[Path], way: Callable[[], float]) -> float:
    """Return the seconds of `way` after removing `files` from the page cache."""
    drop_cache(files)
    return way()


def export(checkpoint: Path, out: Path, dtype: str) -> float:
    """Return the seconds of an export."""
    shutil.rmtree(out, ignore_errors=True)
    started = time.perf_counter()
    export_checkpoint(checkpoint, out, dtype)
    return time.perf_counter() - started


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a Hugging Face folder, by name."""
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def make_checkpoint(folder: Path, ranks: int) -> Path:
    """Import a folder on `ranks` ranks and return the checkpoint that they write."""
    data = [
        "data.path=demo:backwards",
        "data.too_long=truncate",
        "tokenizer.path=demo:bytes",
        "batch.seq_len=64",
        f"batch.rows={ranks}",
    ]
    how = [
        "precision=fp32",
        "train.steps=0",
        f"launch.nproc_per_node={ranks}",
        f"run.root={folder.parent}",
        f"run.name=run{ranks}",
    ]
    command = [
        sys.executable,
        "-m",
        "fsdp_trainer",
        "model=auto",
        f"model.init_from={folder}",
        *data,
        *how,
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder.parent / f"run{ranks}" / "checkpoints" / "step-00000000"


def measure_import(
    place: Path, config: ModelConfig, repeat: int
) -> tuple[dict[str, Any], dict[str, float]]:
    """Measure the import on 1 and 2 ranks; return the results and the compared runs."""
    small, large = place / "small", place / "large"
    files = sorted(large.glob("*.safetensors"))
    write_folder(small, 0.0)
    whole = sum(t.sum(dtype=torch.float64).item() for t in tensors(large).values())
    result, compared = {}, {}
    for ranks in RANKS:
        runs: list[list[dict]] = []

        def imported(ranks: int = ranks, runs: list[list[dict]] = runs) -> float:
            runs.append(run_ranks("benchmarks.hf_io", ranks, "--import-of", str(large)))
            assert abs(sum(r["sum"] for r in runs[-1]) - whole) < 1e-6 * abs(whole), (
                "the weights are not those of the folder"
            )
            return max(r["seconds"] for r in runs[-1])

        ways = {"read once": partial(read_once, files), "import": imported}
        seconds = in_turn(
            {name: partial(after_dropping, files, way) for name, way in ways.items()}, repeat
        )
        seconds["import again"] = [max(r["again"] for r in run) for run in runs]
        constant = max(
            r["peak"] - r["shard"]
            for r in run_ranks("benchmarks.hf_io", ranks, "--import-of", str(small))
        )
        times, again = (
            ratio(seconds[way], seconds["read once"]) for way in ("import", "import again")
        )
        result[f"import on {ranks} rank{'s' * (ranks > 1)}"] = {
            "seconds": {name: spread(values) for name, values in seconds.items()},
            "import/read once": times,
            "import again/read once": again,
            "memory_mib": {
                "shard": round(max(r["shard"] for r in runs[-1]) / MIB),
                "constant": round(constant / MIB),
                "beyond": round(
                    max(r["peak"] - r["shard"] - constant for run in runs for r in run) / MIB
                ),
                "largest_slice": round(4 * config.vocab_size * config.hidden_size / ranks / MIB),
            },
        }
        compared[f"read once/import on {ranks}"] = inverse(times)
        compared[f"read once/import again on {ranks}"] = inverse(again)
    return result, compared


def measure_export(place: Path, repeat: int) -> tuple[dict[str, Any], dict[str, float]]:
    """Measure the export of checkpoints of 1 and 2 ranks; return results and compared figures."""
    out, once = place / "out", place / "once"
    stored = tensors(place / "large")
    result, compared = {}, {}
    for ranks in RANKS:
        checkpoint = make_checkpoint(place / "large", ranks)
        for dtype in DTYPES:
            read_once(sorted(checkpoint.glob("*.distcp")))
            export(checkpoint, out, dtype)
            exported = tensors(out)
            assert exported.keys() == stored.keys()
            assert all(
                torch.equal(stored[name].to(tensor.dtype), tensor)
                for name, tensor in exported.items()
            )
            size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
            ways = {
                "write once": partial(write_once, once, size),
                "export": partial(export, checkpoint, out, dtype),
            }
            seconds = in_turn(ways, repeat)
            times = ratio(seconds["export"], seconds["write once"])
            (memory,) = run_ranks(
                "benchmarks.hf_io", 1, "--export-of", str(checkpoint), "--dtype", dtype
            )
            result[f"export of a checkpoint by {ranks} as {dtype}"] = {
                "gib": round(size / GIB, 2),
                "seconds": {name: spread(values) for name, values in seconds.items()},
                "export/write once": times,
                "memory_mib": memory,
            }
            compared[f"write once/export of {ranks} as {dtype}"] = inverse(times)
        shutil.rmtree(checkpoint)
    return result, compared


def main() -> None:
    """Measure import and export, check that the numbers are unchanged, and store the result."""
    given = arguments(__doc__, repeat=3, gib=1.1, import_of="", export_of="", dtype="bfloat16")
    if given.import_of:
        import_rank(Path(given.import_of))
        return
    if given.export_of:
        before = peak()
        export(Path(given.export_of), Path(given.export_of).parent / "export", given.dtype)
        print(json.dumps({"before": round(before / MIB), "peak": round(peak() / MIB)}))
        return
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        config = write_folder(place / "large", given.gib)
        stored = sum(file.stat().st_size for file in (place / "large").glob("*.safetensors"))
        what = f"{config.parameters():,} parameters, {stored / GIB:.2f} GiB of bfloat16"
        imports, compared_imports = measure_import(place, config, given.repeat)
        exports, compared_exports = measure_export(place, given.repeat)
    result = {"what": what, "rounds": given.repeat, **imports, **exports}
    finish("hf_io", result, compared_imports | compared_exports, given.check)


if __name__ == "__main__":
    main()
