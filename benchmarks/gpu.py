"""Speed of training steps on one GPU relative to its ceilings, and the gain of each technique.

    python -m benchmarks.gpu [--parts ceilings,mfu,generation,sft,ladder,formats,offload] [--small 1] [--check]

- ceilings: a bfloat16 matrix product, and attention at 8,192 tokens by each available kernel.
- mfu: eight blocks of Llama-3.1-8B's shape, one document per row of 8,192 tokens, with one row a
  step and with four at once, and a Hugging Face script on the same shape (benchmarks.plain_script).
- generation: answers of Qwen3-0.6B, 64 at a time, with and without CUDA graphs.
- formats: the model of mfu, not compiled, and in float8.
- sft: Qwen3-0.6B with one document per row of 8k, 16k or 64k tokens and full recomputation; four
  rows a step, but one of 64k.
  prime-rl publishes 26,005 and 25,486 tokens a second and `out of memory` for these on one H100.
- ladder: Llama-3.2-1B in rows of 8,192 tokens packed with documents of 1,000 tokens in the mean:
  from plain to all techniques, one at a time, and a Hugging Face Trainer on the same documents,
  padded to the longest of a batch. Both have a learning rate of 0: their mean losses must agree.
- offload: Llama-3.2-1B, four rows of 8,192 tokens a step, by the place of the optimizer's states.
- several: on all GPUs of this machine, the bytes per second of each collective, and eight blocks of
  Llama-3.1-8B's shape by layout: sharded, in tensor groups, and with context parallelism by each
  method. It is not among the default parts, and is reported as missing if there is one GPU.

Needs no network; the Trainer's line needs transformers and accelerate. --small 1: tiny models,
which only shows that the benchmark runs.
"""

import gzip
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import (
    arguments,
    finish,
    print_result,
    python_process,
    run_ranks,
    spread,
    wait_for_device,
)
from benchmarks.train_step import documents, padded
from fsdp_trainer.base.distributed import ALL_GATHER, REDUCE_SCATTER
from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.generation import continuations
from fsdp_trainer.generation.sampling import Sampling
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.from_config.resolve import resolve_model

STEPS, EVERY = 16, 4  # optimizer steps, of which the second half is timed; and between log writes
CUDA = torch.cuda.is_available()
LADDER = {
    "eager, block mask, all logits, full recomputation": [],
    "+ compile": ["compile=enabled"],
    "+ attention by documents": ["model.attention=auto"],
    "+ loss in chunks": ["loss.chunk_mib=null"],
    "- recomputation": ["activation_checkpoint=none"],
    "+ float8": ["precision=fp8"],
}
PLAIN = [
    "compile=disabled",
    "model.attention=mask",
    "loss.chunk_mib=100000",
    "activation_checkpoint=full",
    "precision=bf16",
]
SIZE = {
    "sft": "qwen3_0_6b",
    "ladder": "llama3_2_1b",
    "offload": "llama3_2_1b",
    "mfu": "llama3_8b",
    "formats": "llama3_8b",
    "generation": "qwen3_0_6b",
    "several": "llama3_8b",
}
VOCABULARY = dict.fromkeys(SIZE, 128_256) | dict.fromkeys(("sft", "generation"), 151_936)
DEFAULT_PARTS = ("ceilings", "mfu", "generation", "sft", "ladder", "formats", "offload")
DOCUMENTS_AT_ONCE = 8  # in a batch of the Trainer


def main() -> None:
    """Measure the requested parts, print and store the result."""
    given = arguments(__doc__, repeat=1, parts=",".join(DEFAULT_PARTS), small=0, task="", links=0)
    if given.links:
        return print_link_speeds(bool(given.small))
    if given.task:
        return print(json.dumps(train_with_trainer(json.loads(Path(given.task).read_text()))))
    if not CUDA and not given.small:
        sys.exit(
            "benchmarks.gpu needs a GPU; to see whether it runs at all:  python -m benchmarks.gpu --small 1"
        )
    result: dict[str, Any] = {
        "what": f"one GPU, {STEPS - STEPS // 2} timed steps"
        + (", tiny models" if given.small else "")
    }
    with tempfile.TemporaryDirectory() as name:
        for part in given.parts.split(","):
            result[part] = PARTS[part](Path(name), bool(given.small))
            print(part, json.dumps(result[part], indent=1), flush=True)
    compared = {
        f"{part}: {name}: mfu_palm": run["mfu_palm"]
        for part in SIZE
        for name, run in result.get(part, {}).items()
        if isinstance(run, dict) and run.get("mfu_palm")
    }
    if given.small:
        return
    name = "gpu" if given.parts == ",".join(DEFAULT_PARTS) else f"gpu-{given.parts}"
    finish(name, result, compared, given.check, ("transformers", "accelerate", "torchao", "triton"))


def ceilings(folder: Path, small: bool) -> dict[str, Any]:
    """Return the rates of a square matrix product, a copy, and attention forward and backward."""
    device = torch.device("cuda" if CUDA else "cpu")
    n = 256 if small else 8192
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    results: dict[str, Any] = {
        f"{n}³ matrix product": {"tflops": spread(rates(lambda: a @ b, 2 * n**3))}
    }
    one, other = (torch.zeros(n**2, device=device) for _ in range(2))
    copies = rates(lambda: other.copy_(one), 2 * one.nbytes * 1e3)
    results[f"copy of {one.nbytes >> 20} MiB"] = {"gigabytes_per_second": spread(copies)}
    heads, tokens, channels = (2, 256, 64) if small else (32, 8192, 128)
    q, k, v = (
        torch.randn(
            1, heads, tokens, channels, device=device, dtype=torch.bfloat16, requires_grad=True
        )
        for _ in range(3)
    )
    work = (
        3.5 * 4 * heads * tokens**2 * channels / 2
    )  # forward, and backward with 2.5 times as much; half of the scores are masked
    for kernel in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"):

        def both() -> None:
            F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

        try:
            with sdpa_kernel(getattr(SDPBackend, kernel)):
                results[f"attention, {kernel.lower()}"] = {"tflops": spread(rates(both, work))}
        except RuntimeError as error:
            results[f"attention, {kernel.lower()}"] = {"failed": str(error).splitlines()[0]}
    return results


def rates(call: Any, work: float) -> list[float]:
    """Return the TFLOP/s of ten calls, after three untimed ones. work: operations of a call."""
    results = []
    for _ in range(13):
        wait_for_device()
        started = time.perf_counter()
        call()
        wait_for_device()
        results.append(work / (time.perf_counter() - started) / 1e12)
    return results[3:]


def sft(folder: Path, small: bool) -> dict[str, Any]:
    """Return the figures of Qwen3-0.6B by row length."""
    lengths = [128] if small else [8192, 16384, 65536]
    how = ["activation_checkpoint=full", "precision=fp32" if small else "compile=enabled"]
    results = {}
    for n in lengths:
        rows = 4 if n <= 16384 else 1
        words = [*how, f"model.max_position_embeddings={n}", *at_once(rows)]
        results[f"{n} tokens"] = run(folder, "sft", small, n, [n] * 64, words)
    return results


def at_once(rows: int) -> list[str]:
    """Return the overrides for steps of so many rows in one micro-batch."""
    return [f"batch.rows={rows}", f"batch.micro_rows={rows}"]


def ladder(folder: Path, small: bool) -> dict[str, Any]:
    """Return the figures of Llama-3.2-1B with one more technique at a time, and of the Trainer."""
    row = 256 if small else 8192
    draws = np.random.default_rng(0).normal(np.log(row / 10), 0.7, 1024)
    lengths = np.clip(np.exp(draws), 16, row - 1).astype(int).tolist()
    chosen = PLAIN
    results = {}
    for name, more in LADDER.items():
        keys = [override.split("=")[0] for override in more]
        chosen = [override for override in chosen if override.split("=")[0] not in keys] + more
        results[name] = run(folder, "ladder", small, row, lengths, [*chosen, "optim.lr=0"])
    results["Hugging Face Trainer"] = trainer(folder, small, row, results["- recomputation"])
    return results


def mfu(folder: Path, small: bool) -> dict[str, Any]:
    """Return the figures of eight blocks of Llama-3.1-8B's shape, ours and a plain script's."""
    row, shape = blocks_of_8b(small)
    compiled = [*shape, *["compile=enabled"] * (not small)]
    profiled = [*compiled, *at_once(4), "profile.steps=4-5"]
    results = {
        "bfloat16": run(folder, "mfu", small, row, [row] * 64, compiled),
        "bfloat16, four rows": run(folder, "mfu", small, row, [row] * 64, profiled),
    }
    for trace in (folder / "run/profile").glob("*.json.gz"):
        results["bfloat16, four rows"]["milliseconds_of_two_steps"] = longest_kernels(trace)
    for name, rows in (("", 1), (", four rows", 4)):
        words = ["--rows", str(rows), "--small", str(int(small))]
        results[f"Hugging Face, Liger, compiled{name}"] = plain_script(folder, words)
    return results


def formats(folder: Path, small: bool) -> dict[str, Any]:
    """Return the figures of the same blocks in other ways, with four rows at once."""
    row, shape = blocks_of_8b(small)
    # blocks that are not compiled call attention once per document, by cuDNN
    ways = {"not compiled": [], "float8": ["compile=enabled", "precision=fp8"]}
    return {
        name: run(folder, "formats", small, row, [row] * 64, [*shape, *at_once(4), *how])
        for name, how in ways.items()
    }


def blocks_of_8b(small: bool) -> tuple[int, list[str]]:
    """Return the tokens of a row, and the overrides of eight blocks of Llama-3.1-8B."""
    row, layers = (256, 2) if small else (8192, 8)
    return row, [f"model.num_hidden_layers={layers}", "activation_checkpoint=none"]


def longest_kernels(trace: Path, count: int = 30) -> dict[str, float]:
    """Return the milliseconds of the kernels that took longest in a profile, by name."""
    seconds: Counter[str] = Counter()
    for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]:
        if event.get("cat") == "kernel":
            seconds[event["name"][:80]] += event["dur"] / 1e3
    return {name: round(each, 2) for name, each in seconds.most_common(count)}


def plain_script(folder: Path, words: list[str]) -> dict[str, Any]:
    """Return the figures of benchmarks.plain_script, or why it failed."""
    output = folder / "plain.txt"
    with python_process(["-m", "benchmarks.plain_script", *words], output) as process:
        code = process.wait()
    lines = output.read_text().strip().splitlines()
    if code:
        return {"failed": lines[-1]}
    return json.loads(next(line for line in lines if line.startswith("{")))


def generation(folder: Path, small: bool) -> dict[str, Any]:
    """Return milliseconds a token of Qwen3-0.6B with random weights, 64 answers at a time."""
    device = torch.device("cuda" if CUDA else "cpu")
    config = compose("train", model("generation", small), inputs=False).model
    with device:
        decoder = Decoder(resolve_model(config))
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    decoder.to(torch.bfloat16)
    rows, count = (2, 20) if small else (64, 128)
    prompts = np.random.default_rng(0).integers(0, 260, (rows, 64)).tolist()
    sampling = Sampling(count, 1.0, log_probabilities=True)
    results: dict[str, Any] = {}
    for name, records in (
        ("CUDA graphs", continuations.can_record),
        ("launched", lambda *_: False),
    ):
        with patch.object(continuations, "can_record", records):
            times = []
            for _ in range(2):  # the first one prepares
                wait_for_device()
                began = time.perf_counter()
                continuations.generate_tokens(decoder, prompts, (), sampling, rows=rows)
                times.append(time.perf_counter() - began)
        results[name] = {"milliseconds_a_token": times[1] / count * 1e3}
    return results


def offload(folder: Path, small: bool) -> dict[str, Any]:
    """Return the figures of Llama-3.2-1B with the optimizer's states in each place."""
    row = 256 if small else 8192
    common = ["activation_checkpoint=full", "batch.rows=4"]
    common += [] if small else ["compile=enabled"]
    # a disk is slow: fewer steps
    places = {
        "on the GPU": (STEPS, ["batch.micro_rows=4"]),
        "on the host": (STEPS, ["batch.micro_rows=4", "optim.offload=cpu"]),
        "on the host, four micro-batches": (STEPS, ["optim.offload=cpu"]),
        "on a disk": (4, ["batch.micro_rows=4", "optim.offload=disk"]),
    }
    return {
        name: run(folder, "offload", small, row, [row] * 64, [*common, *how], steps=steps)
        for name, (steps, how) in places.items()
    }


def several(folder: Path, small: bool) -> dict[str, Any]:
    """Return the figures of all GPUs of this machine together; with `small` of two CPU ranks."""
    ranks = 2 if small else torch.cuda.device_count()
    if ranks < 2:
        return {"missing": f"layouts need 2 GPUs or more, here is {ranks}"}
    shape = ["activation_checkpoint=full"]
    shape += [] if small else ["model.num_hidden_layers=8"]
    layouts = {"sharded": [], f"tensor {ranks}": [f"sharding.tensor={ranks}"]} | {
        f"context {ranks}, {method}": [
            f"sharding.context={ranks}",
            f"sharding.context_method={method}",
        ]
        for method in ("ulysses", "gathered", "ring")
    }
    row = 256 if small else 8192
    links = run_ranks("benchmarks.gpu", ranks, "--links", "1", "--small", str(int(small)))
    return {
        "ranks": ranks,
        "gigabytes_per_second": links[0],
        "layouts": {
            name: run(folder, "several", small, row, [row] * 64, [*shape, *how], ranks)
            for name, how in layouts.items()
        },
    }


def print_link_speeds(small: bool) -> None:
    """Print, on the first rank, GB/s that each rank sends in each collective."""
    dist.init_process_group("nccl" if CUDA else "gloo")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    device = torch.device("cuda", rank) if CUDA else torch.device("cpu")
    if CUDA:
        torch.cuda.set_device(device)
    size = 2**16 if small else 2**28
    part = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
    whole = torch.zeros(ranks * len(part), dtype=torch.bfloat16, device=device)
    same = torch.zeros_like(part)
    sent, came = [0] * ranks, [0] * ranks
    sent[(rank + 1) % ranks] = came[(rank - 1) % ranks] = len(part)
    calls = {
        "all-gather": (lambda: ALL_GATHER(whole, part), (ranks - 1) * part.nbytes),
        "reduce-scatter": (lambda: REDUCE_SCATTER(part, whole), (ranks - 1) * part.nbytes),
        "all-to-all": (
            lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
            (ranks - 1) * part.nbytes,
        ),
        "to the next rank": (
            lambda: dist.all_to_all_single(same, part, came, sent),
            part.nbytes,
        ),
    }
    rates_by_call = {
        name: spread([rate / 1e-3 for rate in rates(call, sent_bytes)])
        for name, (call, sent_bytes) in calls.items()
    }
    if rank == 0:
        print_result(rates_by_call)
    dist.barrier()
    dist.destroy_process_group()


def run(
    folder: Path,
    part: str,
    small: bool,
    row: int,
    lengths: list[int],
    how: list[str],
    ranks: int = 1,
    steps: int = STEPS,
) -> dict[str, Any]:
    """Train random weights on random letters; return the run's figures, or the error.

    part: a key of SIZE. row: tokens of a row. lengths: tokens of each document. how: overrides.
    """
    letters = np.random.default_rng(1).integers(97, 123, sum(lengths), np.uint8).tobytes().decode()
    texts = [
        letters[end - n + 1 : end]
        for n, end in zip(lengths, np.cumsum(lengths).tolist(), strict=True)
    ]  # one letter less: the end of text is a token
    (folder / f"{part}.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    named = {override.split("=")[0] for override in how}
    usual = [*data(folder, part, row, ranks), *model(part, small), "schedule=constant"]
    given = [override for override in usual if override.split("=")[0] not in named]
    given += [f"train.steps={steps}", *how]
    place = [
        f"run.root={folder}",
        "run.name=run",
        "run.overwrite=true",
        "checkpoint.resume=never",
        "checkpoint.every=null",
        f"logging.every={min(EVERY, steps // 2)}",
    ]
    place.append(f"launch.nproc_per_node={ranks}")
    failed = train_without_saving([*given, *place], folder, steps)
    results = {"failed": failed} if failed else figures_of(folder / "run", steps)
    print(part, *how, json.dumps(results), flush=True)
    return results


def figures_of(run: Path, steps: int) -> dict[str, Any]:
    """Return the figures of a run of so many steps, of which the second half is timed."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["step_seconds"] for line in lines[steps // 2 :]]
    tokens = np.diff([0, *(line["tokens"] for line in lines)])
    results = {
        "tokens_per_second": float(tokens[steps // 2 :].sum() / sum(seconds)),
        "memory_gib": lines[-1]["memory_gib"],
    }
    results["mean_loss"] = float(
        np.average(
            [line["loss"] for line in lines],
            weights=np.diff([0, *(line["supervised_tokens"] for line in lines)]),
        )
    )
    for figure in ("mfu_palm", "mfu_causal"):
        if figure in lines[-1]:
            results[figure] = float(
                np.average([line[figure] for line in lines[steps // 2 :]], weights=seconds)
            )
    return results


def train_without_saving(overrides: list[str], folder: Path, steps: int) -> str:
    """Train until the last step's metrics are written; return why it failed, or nothing.

    The run is killed then: writing its last checkpoint takes longer than the steps.
    """
    metrics, log = folder / "run/metrics.jsonl", folder / "log.txt"
    metrics.unlink(missing_ok=True)
    log.unlink(missing_ok=True)  # the run before may still write to its own
    with python_process(["-m", "fsdp_trainer", *overrides], log) as process:
        while process.poll() is None:
            if metrics.exists() and len(metrics.read_text().splitlines()) == steps:
                return ""
            time.sleep(0.1)
    if not process.returncode:
        return ""
    lines = log.read_text().strip().splitlines()
    return "\n".join([line for line in lines if "out of memory" in line] or lines[-5:])


def data(folder: Path, part: str, row: int, rows: int = 1) -> list[str]:
    """Return the overrides that training and its preview share."""
    return [
        f"data.path={folder}/{part}.jsonl",
        "tokenizer.path=demo:bytes",
        f"batch.seq_len={row}",
        f"batch.rows={rows}",
        "batch.micro_rows=1",
    ]


def model(part: str, small: bool) -> list[str]:
    """Return the overrides for a part's model."""
    return (
        ["model=tiny", "model.vocab_size=260"]
        if small
        else [f"model={SIZE[part]}", f"model.vocab_size={VOCABULARY[part]}"]
    )


def trainer(folder: Path, small: bool, row: int, ours: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of transformers' Trainer on the documents of the ladder's rows.

    It has its own attention, no compilation, and a batch of DOCUMENTS_AT_ONCE documents, about as
    many as a row of ours. ours: our figures.
    """
    try:
        import transformers  # noqa: F401
    except ImportError:
        return {"failed": "transformers is not installed"}
    command = [
        sys.executable,
        "-m",
        "fsdp_trainer",
        "preview",
        *data(folder, "ladder", row),
        "preview.format=json",
        f"preview.rows={STEPS}",
    ]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    samples = [sample for line in shown.splitlines() for sample in documents(json.loads(line))]
    config = resolve_model(compose("train", model("ladder", small), inputs=False).model)
    (folder / "task.json").write_text(
        json.dumps(
            {"config": config.to_hf("float32"), "samples": samples, "out": str(folder / "trainer")}
        )
    )
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--task", str(folder / "task.json")],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1]}
    results = json.loads(done.stdout.splitlines()[-1])
    if "tokens_per_second" in ours:
        # both sides have other random weights: the losses of random letters agree only in the mean
        assert abs(results["mean_loss"] - ours["mean_loss"]) < 0.02 * ours["mean_loss"], (
            results,
            ours,
        )
        results["ours_times_faster"] = ours["tokens_per_second"] / results["tokens_per_second"]
    return results


def train_with_trainer(task: dict[str, Any]) -> dict[str, Any]:
    """Train with transformers' Trainer in this process, as in a user's script; return figures."""
    import transformers

    samples = task["samples"]
    config = transformers.AutoConfig.for_model(**task["config"])
    weights = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    steps = len(samples) // DOCUMENTS_AT_ONCE
    seconds: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            wait_for_device()
            seconds.append(time.perf_counter())

    options = transformers.TrainingArguments(
        task["out"], per_device_train_batch_size=DOCUMENTS_AT_ONCE, max_steps=steps, learning_rate=0.0, bf16=CUDA, use_cpu=not CUDA,
        logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True, dataloader_drop_last=True, remove_unused_columns=False,
    )  # fmt: skip
    trainer = transformers.Trainer(
        weights,
        options,
        train_dataset=samples,
        data_collator=lambda batch: padded(batch, None),
        callbacks=[Clock()],
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    warm = steps // 2
    order = list(
        trainer.get_train_dataloader().sampler
    )  # in the order of training, because the sampler's seed is fixed
    tokens = sum(
        len(samples[i]["tokens"])
        for i in order[warm * DOCUMENTS_AT_ONCE : steps * DOCUMENTS_AT_ONCE]
    )
    memory = torch.cuda.max_memory_allocated() / 2**30 if CUDA else None
    return {
        "tokens_per_second": tokens / (seconds[-1] - seconds[warm - 1]),
        "memory_gib": memory,
        "mean_loss": float(np.mean(losses)),
    }


PARTS = {
    "ceilings": ceilings,
    "mfu": mfu,
    "generation": generation,
    "formats": formats,
    "sft": sft,
    "ladder": ladder,
    "offload": offload,
    "several": several,
}

if __name__ == "__main__":
    main()
