"""GRPO compared with trl's GRPOTrainer and transformers' generate: sampling, learning and memory.

    python -m benchmarks.rollouts [--repeat 2] [--check]
    python -m benchmarks.rollouts --small 1        # a tiny model, which only shows that it runs; needs no trl

A step samples 8 answers of exactly 64 tokens to each of 2 prompts, and trains on the answers once.
Model and prompts are those of benchmarks.train_step, in float32: all weights are trained, prompts
are as long as gsm8k's questions. An answer is rewarded if a regular expression is found in it. The
sampled answers differ; the mean entropy of a token must agree.

- fsdp_trainer: each prompt is computed once for all its answers; answers are packed into rows of
  1,024 tokens, one row at a time.
- trl: GRPOTrainer with its defaults except float32: 8 answers at a time, activation checkpointing.
- trl, tuned: no activation checkpointing.

The first of 3 steps is not timed. accelerate shards only on GPUs, so with 2 ranks each has all of
trl's weights, while ours are sharded. Memory is a rank's peak, and its excess over the process
before a model is made, with all imports. Processor seconds are a rank's from that moment.
"""

import json
import re
import tempfile
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks import train_step
from benchmarks.harness import arguments, finish, inverse, rank_memory
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

PROMPTS, SAMPLES, NEW = 2, 8, 64
"""Number of prompts in a step, of answers to each, and of tokens in an answer."""
STEPS, WARM = 3, 1
LR = 1e-6
PATTERN = "w5[0-4]"
"""Regular expression of rewarded answers; two in three have a word that matches."""
WAYS: dict[str, dict[str, Any]] = {
    OURS: {},
    "trl": {},
    "trl, tuned": {"gradient_checkpointing": False},
}
"""Options of GRPOConfig that are specific to each way."""
SECONDS = ("seconds_of_sampling", "seconds_of_learning")
FIGURES = ("steps_per_second", *SECONDS, *USED)


def main() -> None:
    """Measure, print and store the result, or run one rank's task."""
    given = arguments(__doc__, repeat=2, ranks="1,2", small=0, task="")
    if given.task:
        answer_task(given.task, PROGRAMS)
    ways = ways_to_measure(tuple(WAYS), bool(given.small))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.small:
            shrink_model()
        prepare(folder)
        measured = in_rounds(partial(measure, folder), ways, given.ranks, given.repeat)
    what = f"{PROMPTS} × {SAMPLES} answers of {NEW} tokens a step, float32, CPU"
    result: dict[str, Any] = {"what": f"{what}, {given.repeat} rounds"}
    compared = {}
    for ranks, runs in measured.items():
        figures = compare(runs, FIGURES)
        result[f"{ranks} ranks"] = {
            "largest_difference_of_entropies": difference_of_entropies(runs),
            **figures,
        }
        for way in ways[1:]:
            name = f"{ranks} ranks, {way}"
            compared[f"{name}: speed"] = figures["steps_per_second"]["ratio"][way]
            for part in SECONDS:
                compared[f"{name}: {part} saved"] = inverse(figures[part]["ratio"][way])
            compared[f"{name}: memory saved"] = inverse(figures["memory_mib"]["ratio"][way])
    if given.small:
        return print(json.dumps(result, indent=1))
    finish("rollouts", result, compared, given.check, PACKAGES)


def difference_of_entropies(runs: dict[str, list[dict[str, Any]]]) -> float:
    """Return the largest difference of entropies from ours.

    Raises AssertionError if it is larger than sampling explains.
    """
    entropies = {way: each[0]["entropy"] for way, each in runs.items()}
    difference = max(abs(entropy - entropies[OURS]) for entropy in entropies.values())
    assert difference < 0.1, entropies
    return difference


def prepare(folder: Path) -> None:
    """Write a tokenizer, the prompts of all steps, and a model with random weights."""
    train_step.prepare(folder)
    with open(folder / "rows.jsonl") as rows:
        (folder / "prompts.jsonl").write_text("".join(islice(rows, PROMPTS * STEPS)))


def measure(folder: Path, way: str, ranks: int) -> dict[str, Any]:
    """Train once and return the figures. way: a key of WAYS."""
    task = {"way": way, "ranks": ranks, "options": WAYS[way]}
    results = run_task("benchmarks.rollouts", folder, ranks, task)
    steps = STEPS - WARM
    sampling = max(rank["seconds_of_sampling"] for rank in results) / steps
    seconds = max(rank["seconds"] for rank in results) / steps
    return {
        "steps_per_second": 1 / seconds,
        "seconds_of_sampling": sampling,
        "seconds_of_learning": seconds - sampling,
        "entropy": results[0]["entropy"],
        **{name: max(rank[name] for rank in results) for name in USED},
    }


# --- on a rank


def train_ours(task: dict[str, Any]) -> dict[str, Any]:
    """Train as one rank of this trainer; return its figures."""
    import fsdp_trainer.run.run  # noqa: F401  imported before memory is read

    usage, folder = Usage(), task["folder"]
    data = [f"data.path={folder}/prompts.jsonl", f"tokenizer.path={folder}/tokenizer.json"]
    rows = [f"batch.rows={PROMPTS}", "batch.micro_rows=1", "batch.seq_len=1024"]
    answers = [f"objective.samples={SAMPLES}", f"objective.max_new_tokens={NEW}"]
    reward = f"objective.rewards=[{{name: regex, pattern: '{PATTERN}'}}]"
    how = ["objective=grpo", reward, f"optim.lr={LR}", f"train.steps={STEPS}"]
    model = [f"model.init_from={folder}/hf", "data.template=plain", "data.shuffle=false"]
    lines = our_lines(task, [*data, *model, *rows, *answers, *how])
    assert all(line["answer_tokens"] == NEW for line in lines), lines
    timed = lines[WARM:]
    names = ("rollouts", "rewards")
    sampling = sum(line["phases"].get(name, 0) for line in timed for name in names)
    return {
        "seconds": sum(line["step_seconds"] for line in timed),
        "seconds_of_sampling": sampling,
        "entropy": lines[0]["entropy"],
        **usage.figures(lines[-1]["memory_gib"] * 1024),
    }


def train_with_trl(task: dict[str, Any]) -> dict[str, Any]:
    """Train as one rank of trl's GRPOTrainer; return its figures."""
    from datasets import Dataset
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    usage, folder = Usage(), task["folder"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=f"{folder}/tokenizer.json", eos_token="</s>", pad_token="</s>"
    )
    rows = [json.loads(line) for line in Path(folder, "prompts.jsonl").read_text().splitlines()]
    # the tokens of data.template=plain
    prompts = [{"prompt": f"User: {row['prompt']} Assistant: "} for row in rows]
    together = PROMPTS * SAMPLES // task["ranks"]
    batch = {"per_device_train_batch_size": SAMPLES}
    batch["gradient_accumulation_steps"] = together // SAMPLES
    answers = {"num_generations": SAMPLES, "max_completion_length": NEW, "shuffle_dataset": False}
    how = {"generation_kwargs": {"min_new_tokens": NEW}, "learning_rate": LR, "max_steps": STEPS}
    options = GRPOConfig(**batch, **answers, **how, **trl_options(task))
    clock = step_clock()
    with timed_method(GRPOTrainer, "_generate_and_score_completions") as sampling:
        trainer = GRPOTrainer(
            model=LlamaForCausalLM.from_pretrained(f"{folder}/hf"),
            reward_funcs=[has_pattern],
            args=options,
            train_dataset=Dataset.from_list(prompts),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    lines = [line for line in trainer.state.log_history if "entropy" in line]
    assert len(sampling) == len(lines) == STEPS, (sampling, lines)
    assert all(line["completions/mean_length"] == NEW for line in lines), lines
    return {
        "seconds": sum(clock.seconds[WARM:]),
        "seconds_of_sampling": sum(sampling[WARM:]),
        "entropy": lines[0]["entropy"],
        **usage.figures(rank_memory()),
    }


def has_pattern(completions: list[str], **columns: Any) -> list[float]:
    """Return the rewards of answers, with the signature that trl expects."""
    return [float(bool(re.search(PATTERN, text))) for text in completions]


PROGRAMS = {OURS: train_ours, "trl": train_with_trl, "trl, tuned": train_with_trl}

if __name__ == "__main__":
    main()
