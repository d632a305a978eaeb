"""Fine-tuning compared with transformers under accelerate's FSDP2: useful tokens/s and memory.

    python -m benchmarks.train_step [--repeat 3] [--ranks 2] [--check]

Samples have the lengths of gsm8k's: 195 tokens in the mean, of which two thirds are the answer,
which is supervised. The vocabulary has 32,000 tokens. Everything is float32, without recomputation
or compilation.

- padded: the same rows on both sides, padded to the same length. Losses must agree at every step.
- full rows: one rank and one thread beside a plain loop, see benchmarks/full_rows.py.
- natural: ours fills rows of 1,024 tokens with complete samples; the other program pads a batch to
  its longest sample. Both see the same samples at a learning rate of 0, so the mean losses over all
  of them must agree.

A useful token is one of a sample, not of padding. Memory is a rank's peak, including imports.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import full_rows
from benchmarks.harness import (
    arguments,
    finish,
    in_turn,
    inverse,
    print_result,
    rank_memory,
    ratio,
    run_ranks,
    spread,
)

VOCABULARY = 32_000
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
STEPS, WARM = 4, 2  # optimizer steps in all, and untimed ones at the start
ROWS = {"padded": 8, "natural": 8}  # rows of a step, over all ranks
SEQ_LEN = {"padded": 576, "natural": 1024}
LR = {"padded": 1e-3, "natural": 0.0}
IGNORED = -100


def main() -> None:
    """Measure, print and store the result, or run one rank's task."""
    given = arguments(__doc__, repeat=3, ranks=2, peer="")
    if given.peer:
        return print_result(train_with_accelerate(json.loads(Path(given.peer).read_text())))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        ways = {
            (program, way): (
                lambda program=program, way=way: PROGRAMS[program](folder, way, given.ranks)
            )
            for way in ROWS
            for program in PROGRAMS
        }
        measured = in_turn(ways, given.repeat)
        full_rows.prepare(folder)
        full = in_turn(
            {
                "fsdp_trainer": lambda: full_rows.ours(folder),
                "plain": lambda: full_rows.plain(folder),
            },
            given.repeat,
        )
    result: dict[str, Any] = {
        "what": f"{given.ranks} ranks over gloo, {given.repeat} rounds, {STEPS - WARM} timed steps each"
    }
    for way in ROWS:
        mine, theirs = measured["fsdp_trainer", way], measured["accelerate", way]
        result[way] = {
            "largest_difference_of_losses": check_losses(mine[0]["losses"], theirs[0]["losses"]),
            **{
                what: {
                    program: spread([run[what] for run in measured[program, way]])
                    for program in PROGRAMS
                }
                for what in ("tokens_per_second", "memory_mib")
            },
            "speed_ratio": ratio(
                [run["tokens_per_second"] for run in mine],
                [run["tokens_per_second"] for run in theirs],
            ),
            "memory_ratio": ratio(
                [run["memory_mib"] for run in mine], [run["memory_mib"] for run in theirs]
            ),
        }
    result["full rows"] = of_full_rows(full)
    compared = {f"{way}: speed": result[way]["speed_ratio"] for way in ROWS}
    compared |= {f"{way}: memory saved": inverse(result[way]["memory_ratio"]) for way in ROWS}
    compared["full rows: speed"] = result["full rows"]["speed_ratio"]
    finish("train_step", result, compared, given.check, ("transformers", "accelerate"))


def of_full_rows(measured: dict[str, list[dict]]) -> dict[str, Any]:
    """Return the result of full rows: processor time, page faults and memory, with their spread."""
    mine, theirs = measured["fsdp_trainer"], measured["plain"]
    figures = ("processor_ms", "page_faults", "memory_mib")
    return {
        "largest_difference_of_losses": check_losses(mine[0]["losses"], theirs[0]["losses"]),
        **{
            what: {name: spread([run[what] for run in runs]) for name, runs in measured.items()}
            for what in figures
        },
        "speed_ratio": ratio(
            [run["processor_ms"] for run in theirs], [run["processor_ms"] for run in mine]
        ),
    }


def check_losses(mine: list[float], theirs: list[float]) -> float:
    """Return the largest difference. Raises AssertionError if it is not rounding."""
    assert len(mine) == len(theirs)
    difference = max(abs(a - b) for a, b in zip(mine, theirs, strict=True))
    assert difference < 1e-4, f"losses differ by {difference}: {mine} {theirs}"
    return difference


def prepare(folder: Path) -> None:
    """Write a tokenizer of 32,000 words, samples of gsm8k's lengths, and a random Llama."""
    import torch
    import transformers

    full_rows.write_tokenizer(folder / "tokenizer.json", VOCABULARY)
    random = np.random.default_rng(0)
    # means, deviations and correlation of the logarithms of the lengths of gsm8k's questions and
    # answers under a 32,000-token SentencePiece
    draws = random.normal(size=(2048, 2)) @ np.array([[1, 0.546], [0, 0.838]])
    lengths = np.exp(draws * [0.352, 0.424] + [4.12, 4.77]).astype(int)

    def text(count: int) -> str:
        return " ".join(f"w{i}" for i in random.zipf(1.2, count) % 30_000)

    rows = [{"prompt": text(prompt), "completion": text(answer)} for prompt, answer in lengths]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, **SIZES, max_position_embeddings=1024, tie_word_embeddings=False
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "hf")


def command(folder: Path, way: str) -> list[str]:
    """Return the overrides that training and its preview share."""
    data = [
        f"data.path={folder}/rows.jsonl",
        f"tokenizer.path={folder}/tokenizer.json",
        "data.template=plain",
    ]
    packing = "none" if way == "padded" else "best_fit"
    return [
        *data,
        f"model.init_from={folder}/hf",
        f"data.packing={packing}",
        f"batch.seq_len={SEQ_LEN[way]}",
        f"batch.rows={ROWS[way]}",
    ]


def ours(folder: Path, way: str, ranks: int, *own: str) -> dict[str, Any]:
    """Train with this trainer and return the figures, read from the run's records.

    own: further overrides.
    """
    run = folder / "runs" / f"{way}-{time.monotonic_ns()}"
    shape = [
        f"launch.nproc_per_node={ranks}",
        f"batch.micro_rows={ROWS[way] // ranks}",
        f"train.steps={STEPS}",
        "precision=fp32",
    ]
    how = [
        f"optim.lr={LR[way]}",
        "schedule=constant",
        "checkpoint.every=null",
        f"run.root={run.parent}",
        f"run.name={run.name}",
    ]
    start([sys.executable, "-m", "fsdp_trainer", *command(folder, way), *shape, *how, *own], ranks)
    return our_figures(run, way)


def our_figures(run: Path, way: str) -> dict[str, Any]:
    """Return speed, memory and losses of a run, read from its records."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = sum(line["step_seconds"] for line in lines[WARM:])
    losses = [line["loss"] for line in lines]
    if way == "natural":
        supervised = np.diff([0, *(line["supervised_tokens"] for line in lines)])
        losses = [float(np.average(losses, weights=supervised))]
    return {
        "tokens_per_second": (lines[-1]["tokens"] - lines[WARM - 1]["tokens"]) / seconds,
        "memory_mib": lines[-1]["memory_gib"] * 1024,
        "losses": losses,
    }


def start(line: list[str], ranks: int) -> str:
    """Run a command and return its output. ranks: processes that share the machine's cores."""
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
    env = {**os.environ, **threads}
    done = subprocess.run(line, check=False, capture_output=True, text=True, env=env)
    if done.returncode:
        raise RuntimeError(f"{' '.join(line)} failed:\n{done.stderr[-4000:]}")
    return done.stdout


def accelerated(
    folder: Path, way: str, ranks: int, program: str = "benchmarks.train_step"
) -> dict[str, Any]:
    """Train with accelerate and transformers on the same samples and return the figures.

    program: whose --peer a rank is.
    """
    task = peers_task(folder, way)
    (folder / "task.json").write_text(json.dumps(task))
    results = run_ranks(program, ranks, "--peer", str(folder / "task.json"))
    return peers_figures(task, way, results)


def peers_task(folder: Path, way: str) -> dict[str, Any]:
    """Return the task of the other program: the samples of our steps, and settings."""
    options = ["preview.format=json", f"preview.rows={STEPS * ROWS[way]}"]
    shown = start(
        [sys.executable, "-m", "fsdp_trainer", "preview", *command(folder, way), *options], 1
    )
    samples = [sample for line in shown.splitlines() for sample in documents(json.loads(line))]
    if way == "natural":
        samples = [samples[i] for i in np.random.default_rng(1).permutation(len(samples))]
    steps = np.array_split(np.arange(len(samples)), STEPS)
    return {
        "folder": str(folder / "hf"),
        "lr": LR[way],
        "length": SEQ_LEN[way] if way == "padded" else None,
        "steps": [[samples[i] for i in step] for step in steps],
    }


def peers_figures(task: dict[str, Any], way: str, results: list[dict]) -> dict[str, Any]:
    """Return speed, memory and losses from the results that the ranks printed."""
    losses = [loss for loss, _ in results[0]["losses"]]
    if way == "natural":
        weights = [weight for _, weight in results[0]["losses"]]
        losses = [float(np.average(losses, weights=weights))]
    seconds = max(rank["seconds"] for rank in results)
    tokens = sum(len(sample["tokens"]) for step in task["steps"][WARM:] for sample in step)
    return {
        "tokens_per_second": tokens / seconds,
        "memory_mib": max(rank["memory_mib"] for rank in results),
        "losses": losses,
    }


def documents(row: dict[str, Any]) -> list[dict[str, list[int]]]:
    """Return the samples of a packed row.

    A label has the position of its own token, because transformers shifts labels itself.
    """
    samples, begin = [], 0
    for length in row["documents"]:
        labels = [IGNORED, *row["labels"][begin : begin + length - 1]]
        samples.append({"tokens": row["tokens"][begin : begin + length], "labels": labels})
        begin += length
    return samples


def train_with_accelerate(task: dict[str, Any], block: str = "LlamaDecoderLayer") -> dict[str, Any]:
    """Train as one rank; return its figures. A rank's part of a step is one forward.

    block: the class of the blocks, which are sharded one by one.
    """
    import torch
    import transformers

    accelerator = accelerator_with_fsdp2(block)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        task["folder"], dtype=torch.float32
    ).train()
    losses, seconds = timed_steps(accelerator, model, task)
    return {"seconds": seconds, "memory_mib": rank_memory(), "losses": losses}


def accelerator_with_fsdp2(block: str = "LlamaDecoderLayer") -> Any:
    """Return accelerate's Accelerator for a model whose blocks, of this class, are sharded."""
    import accelerate
    import torch

    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[block],
    )
    accelerator = accelerate.Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin)
    # On CPUs accelerate always chooses plain data parallelism. With these attributes set to FSDP it
    # shards there as on GPUs.
    accelerate.PartialState().distributed_type = accelerator.state.distributed_type = (
        accelerate.DistributedType.FSDP
    )
    accelerator.state.fsdp_plugin = plugin
    return accelerator


def timed_steps(
    accelerator: Any,
    model: Any,
    task: dict[str, Any],
    finished: Callable[[Any, Any], None] = lambda model, optimizer: None,
) -> tuple[list[tuple[float, float]], float]:
    """Train; return each step's loss and number of supervised tokens, and the timed steps' seconds.

    finished: called at the end with the sharded model and its optimizer.
    """
    import torch

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=task["lr"], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    assert accelerator.is_fsdp2
    losses, started = [], 0.0
    for i, step in enumerate(task["steps"]):
        if i == WARM:
            started = time.perf_counter()
        batch = padded(step[accelerator.process_index :: accelerator.num_processes], task["length"])
        supervised = accelerator.reduce((batch["labels"][:, 1:] != IGNORED).sum(), "sum")
        loss = model(**batch, num_items_in_batch=supervised).loss
        accelerator.backward(
            loss * accelerator.num_processes
        )  # gradients are averaged over the ranks
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((accelerator.reduce(loss.detach(), "sum").item(), supervised.item()))
    seconds = time.perf_counter() - started
    finished(model, optimizer)
    return losses, seconds


def padded(samples: list[dict], length: int | None) -> dict[str, Any]:
    """Return a batch padded as by transformers' collators, to `length` or to the longest sample."""
    import torch

    length = length or max(len(sample["tokens"]) for sample in samples)

    def fill(name: str, value: int) -> torch.Tensor:
        return torch.tensor(
            [sample[name] + [value] * (length - len(sample[name])) for sample in samples]
        )

    for sample in samples:
        sample["mask"] = [1] * len(sample["tokens"])
    return {
        "input_ids": fill("tokens", 0),
        "attention_mask": fill("mask", 0),
        "labels": fill("labels", IGNORED),
    }


PROGRAMS = {"fsdp_trainer": ours, "accelerate": accelerated}

if __name__ == "__main__":
    main()
