"""DPO compared with trl's DPOTrainer on the same pairs with the same losses: speed and memory.

    python -m benchmarks.preferences [--repeat 2] [--check]
    python -m benchmarks.preferences --small 1        # tiny models, which only shows that it runs; needs no trl

Pairs have realistic lengths: the logarithms of prompt and answer lengths have the means, deviations
and correlations of 300 English pairs under a 32,000-token SentencePiece, and no answer with its
prompt has more than 512 tokens. The model is that of benchmarks.train_step, in float32, with all
weights trained; the reference is another model of that shape. Every way reads all pairs once, 8 a
step on each rank. The learning rate is 0, so the mean losses over all pairs must agree.

- fsdp_trainer: rows of 1,024 tokens filled with complete pairs, one row at a time; the reference's
  log-probabilities are computed once, before the first step.
- trl: DPOTrainer with its defaults except float32: 8 pairs padded to the longest answer, activation
  checkpointing, the reference model in memory.
- trl, tuned: settings with the least computation: one pair at a time, so that little is padded, no
  activation checkpointing, the reference computed before the first step.

accelerate shards only on GPUs, so with 2 ranks each has all of trl's weights. Seconds are those of
all steps and of the reference. Memory is a rank's peak up to its last step, and its excess over the
process before a model is made, with all imports. Processor seconds are a rank's from that moment.
"""

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import train_step
from benchmarks.harness import arguments, finish, inverse, rank_memory, spread
from benchmarks.trl_common import (
    OURS,
    PACKAGES,
    USED,
    Usage,
    answer_task,
    compare,
    in_rounds,
    our_lines,
    run_task,
    shrink_model,
    step_clock,
    timed_method,
    trl_options,
    ways_to_measure,
)

PAIRS, STEP = 16, 8
"""Number of pairs in all, and in a step on each rank."""
ROWS = 5
"""Number of rows of our step on each rank: the 16 pairs fill 10 rows in all."""
LONGEST, ROW = 512, 1024
"""Largest number of tokens of an answer with its prompt, and tokens of one of our rows."""
BETA = 0.1
CHUNK = "loss.chunk_mib=96"
"""Chunk size with which the logits of all answers of a row are computed at once."""
TUNED = {
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": STEP,
    "gradient_checkpointing": False,
    "precompute_ref_log_probs": True,
}
WAYS: dict[str, dict[str, Any]] = {
    OURS: {},
    "trl": {"per_device_train_batch_size": STEP},
    "trl, tuned": TUNED,
}
"""Options of DPOConfig that are specific to each way."""
FIGURES = ("pairs_per_second", *USED)


def main() -> None:
    """Measure, print and store the result, or run one rank's task."""
    given = arguments(__doc__, repeat=2, ranks="1,2", small=0, task="")
    if given.task:
        answer_task(given.task, PROGRAMS)
    ways = ways_to_measure(tuple(WAYS), bool(given.small))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, bool(given.small))
        measured = in_rounds(partial(measure, folder), ways, given.ranks, given.repeat)
    result: dict[str, Any] = {"what": f"{PAIRS} pairs once, float32, CPU, {given.repeat} rounds"}
    compared = {}
    for ranks, runs in measured.items():
        figures = compare(runs, FIGURES)
        result[f"{ranks} ranks"] = {
            "largest_difference_of_losses": difference_of_losses(runs),
            **figures,
            "seconds_of_reference": {
                way: spread([run["seconds_of_reference"] for run in each])
                for way, each in runs.items()
            },
        }
        for way in ways[1:]:
            faster = figures["pairs_per_second"]["ratio"][way]
            less = figures["memory_mib"]["ratio"][way]
            compared[f"{ranks} ranks, {way}: speed"] = faster
            compared[f"{ranks} ranks, {way}: memory saved"] = inverse(less)
    if given.small:
        return print(json.dumps(result, indent=1))
    finish("preferences", result, compared, given.check, PACKAGES)


def difference_of_losses(runs: dict[str, list[dict[str, Any]]]) -> float:
    """Return the largest difference of mean losses from ours.

    Raises AssertionError if it is not rounding.
    """
    losses = {way: each[0]["loss"] for way, each in runs.items()}
    difference = max(abs(loss - losses[OURS]) for loss in losses.values())
    assert difference < 1e-4, losses
    return difference


# --- inputs


def prepare(folder: Path, small: bool) -> None:
    """Write a tokenizer, pairs, a model and its reference, both with random weights."""
    import torch
    import transformers

    if small:
        shrink_model()
    train_step.prepare(folder)
    torch.manual_seed(1)
    config = transformers.LlamaConfig.from_pretrained(folder / "hf")
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "reference")
    words, ends = f"{folder}/tokenizer.json", {"eos_token": "</s>", "pad_token": "</s>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=words, **ends)
    tokenizer.save_pretrained(folder / "tokenizer")
    pairs = draw_pairs()
    write_rows(folder / "pairs.jsonl", pairs)
    prompts = [f"User: {pair['prompt']} Assistant: " for pair in pairs]  # as data.template=plain
    rendered = [pair | {"prompt": text} for pair, text in zip(pairs, prompts, strict=True)]
    write_rows(folder / "pairs_for_trl.jsonl", rendered)


def write_rows(file: Path, rows: list[dict[str, str]]) -> None:
    """Write one JSON object a line."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def draw_pairs() -> list[dict[str, str]]:
    """Return prompts with two answers, of words that are one token each."""
    random = np.random.default_rng(0)
    means = np.array([5.27, 5.39, 5.59])
    factors = np.array([[1.48, 0, 0], [0.167, 1.267, 0], [0.246, 0.466, 0.944]])

    def text(count: int) -> str:
        return " ".join(f"w{i}" for i in random.zipf(1.2, count) % 30_000)

    pairs: list[dict[str, str]] = []
    while len(pairs) < PAIRS:
        prompt, *answers = np.exp(factors @ random.normal(size=3) + means).astype(int) + 1
        if prompt + max(answers) + 3 <= LONGEST:  # the template adds 3 tokens
            chosen, rejected = map(text, answers)
            pairs.append({"prompt": text(prompt), "chosen": chosen, "rejected": rejected})
    return pairs


def measure(folder: Path, way: str, ranks: int) -> dict[str, Any]:
    """Train once and return the figures. way: a key of WAYS."""
    task = {"way": way, "ranks": ranks, "options": WAYS[way]}
    results = run_task("benchmarks.preferences", folder, ranks, task)
    seconds = max(rank["seconds"] + rank["seconds_of_reference"] for rank in results)
    highest = {
        name: max(rank[name] for rank in results) for name in ("seconds_of_reference", *USED)
    }
    return {"pairs_per_second": PAIRS / seconds, "loss": results[0]["loss"], **highest}


# --- on a rank


def train_ours(task: dict[str, Any]) -> dict[str, Any]:
    """Train as one rank of this trainer; return its figures."""
    import fsdp_trainer.run.run  # noqa: F401  imported before memory is read
    from fsdp_trainer.methods.stored_columns import ReferenceColumn

    usage, folder = Usage(), task["folder"]
    data = [f"data.path={folder}/pairs.jsonl", f"tokenizer.path={folder}/tokenizer"]
    models = [f"model.init_from={folder}/hf", f"objective.reference={folder}/reference"]
    rows = [f"batch.rows={ROWS * task['ranks']}", "batch.micro_rows=1", f"batch.seq_len={ROW}"]
    how = ["objective=dpo", f"objective.beta={BETA}", "optim.lr=0", "train.epochs=1", CHUNK]
    with timed_method(ReferenceColumn, "compute") as reference:
        lines = our_lines(task, [*data, "data.template=plain", *models, *rows, *how])
    supervised = np.diff([0, *(line["supervised_tokens"] for line in lines)])
    answers = [line["answer_tokens_chosen"] + line["answer_tokens_rejected"] for line in lines]
    pairs = supervised / answers
    assert round(pairs.sum()) == PAIRS, pairs
    return {
        "seconds": sum(line["step_seconds"] for line in lines),
        "seconds_of_reference": sum(reference),
        "loss": float(np.average([line["loss"] for line in lines], weights=pairs)),
        **usage.figures(lines[-1]["memory_gib"] * 1024),
    }


def train_with_trl(task: dict[str, Any]) -> dict[str, Any]:
    """Train as one rank of trl's DPOTrainer; return its figures."""
    from datasets import Dataset
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer

    usage, folder, load = Usage(), task["folder"], LlamaForCausalLM.from_pretrained
    # read from a file: ranks share computed columns of a data set only if it has a file
    pairs = Dataset.from_json(f"{folder}/pairs_for_trl.jsonl", cache_dir=task["out"])
    how = {"beta": BETA, "max_length": LONGEST, "learning_rate": 0.0, "num_train_epochs": 1}
    options = DPOConfig(**how, **trl_options(task))
    clock = step_clock()
    with timed_method(DPOTrainer, "_precompute_ref_logps") as reference:
        trainer = DPOTrainer(
            model=load(f"{folder}/hf"),
            ref_model=load(f"{folder}/reference"),
            args=options,
            train_dataset=pairs,
            processing_class=PreTrainedTokenizerFast.from_pretrained(f"{folder}/tokenizer"),
            callbacks=[clock],
        )
    if options.precompute_ref_log_probs:
        trainer.ref_model = None
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return {
        "seconds": sum(clock.seconds),
        "seconds_of_reference": sum(reference),
        "loss": float(np.mean(losses)),
        **usage.figures(rank_memory()),
    }


PROGRAMS = {OURS: train_ours, "trl": train_with_trl, "trl, tuned": train_with_trl}

if __name__ == "__main__":
    main()
