"""GRPO over several turns with a tool, compared with trl's GRPOTrainer and its environments.

    python -m benchmarks.tool_rollouts [--repeat 3] [--check]
    python -m benchmarks.tool_rollouts --small 1     # few steps, which only show that it runs

The task is that of `quickstart task=tools`: a tiny model that mostly gives up on sums learns to call
a calculator. A step makes 8 rollouts of at most 3 turns for each of 8 prompts, in float32, and
trains on them once. Both learn: each way's mean reward of the last step is in the result.

- fsdp_trainer: objective.environment=calculator.
- trl: environment_factory with the same calculator; 64 rollouts at a time, no activation
  checkpointing; its parser of Qwen 3's tool calls.

The first of 8 steps is not timed. One process. Memory and processor seconds as in
benchmarks.rollouts.
"""

import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

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
    step_clock,
    trl_options,
    ways_to_measure,
)

PROMPTS, SAMPLES, TURNS, NEW = 8, 8, 3, 16
"""Number of prompts in a step, of rollouts of each, of turns, and of tokens in a turn."""
STEPS, WARM = 8, 1
LR = 3e-4
FIGURES = ("steps_per_second", *USED)
WAYS: dict[str, dict[str, Any]] = {OURS: {}, "trl": {"gradient_checkpointing": False}}


def main() -> None:
    """Measure, print and store the result, or run one task."""
    given = arguments(__doc__, repeat=3, ranks="1", small=0, task="")
    if given.task:
        answer_task(given.task, PROGRAMS)
    ways = ways_to_measure(tuple(WAYS), bool(given.small))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, steps=2 if given.small else 500)
        measured = in_rounds(partial(measure, folder), ways, given.ranks, given.repeat)
    runs = measured[1]
    figures = compare(runs, FIGURES)
    rewards = {way: [run["reward"] for run in each] for way, each in runs.items()}
    what = f"{PROMPTS} × {SAMPLES} rollouts of at most {TURNS} turns a step, float32, CPU"
    result = {"what": f"{what}, {given.repeat} rounds", "reward_of_the_last_step": rewards}
    result |= figures
    if given.small:
        return print(json.dumps(result, indent=1))
    compared = {}
    for way in ways[1:]:
        compared[f"{way}: speed"] = figures["steps_per_second"]["ratio"][way]
        compared[f"{way}: memory saved"] = inverse(figures["memory_mib"]["ratio"][way])
    finish("tool_rollouts", result, compared, given.check, PACKAGES)


def prepare(folder: Path, steps: int) -> None:
    """Write the questions, and train the model that mostly gives up."""
    from fsdp_trainer.apps.quickstart import quickstart_tools

    quickstart_tools.write_data(folder)
    keys = [*quickstart_tools.MODEL, *quickstart_tools.TAUGHT, f"train.steps={steps}"]
    keys += [f"run.root={folder}", f"data.cache={folder}/cache", f"data.path={folder}/chats.jsonl"]
    keys += [f"data.template={folder}/template.jinja", "checkpoint.export_hf=true"]
    subprocess.run([sys.executable, "-m", "fsdp_trainer", "train", *keys], check=True)


def measure(folder: Path, way: str, ranks: int) -> dict[str, Any]:
    """Train once and return the figures. way: a key of WAYS."""
    task = {"way": way, "ranks": ranks, "options": WAYS[way]}
    [result] = run_task("benchmarks.tool_rollouts", folder, ranks, task)
    return {"steps_per_second": (STEPS - WARM) / result["seconds"], **result}


# --- on a rank


def train_ours(task: dict[str, Any]) -> dict[str, Any]:
    """Train with this trainer; return the figures."""
    import fsdp_trainer.run.run  # noqa: F401  imported before memory is read

    usage, folder = Usage(), task["folder"]
    data = [f"data.path={folder}/questions.jsonl", f"data.template={folder}/template.jinja"]
    rows = [f"batch.rows={PROMPTS}", "batch.micro_rows=4", "batch.seq_len=512"]
    rollouts = [f"objective.samples={SAMPLES}", f"objective.turns={TURNS}"]
    rollouts += [f"objective.max_new_tokens={NEW}", "objective.environment=calculator"]
    how = ["objective=grpo", "objective.rewards=[exact]", f"optim.lr={LR}", f"train.steps={STEPS}"]
    model = [f"model.init_from={folder}/tools-taught/hf", "data.shuffle=false"]
    lines = our_lines(task, [*data, *model, *rows, *rollouts, *how])
    return {
        "seconds": sum(line["step_seconds"] for line in lines[WARM:]),
        "reward": lines[-1]["reward"],
        **usage.figures(lines[-1]["memory_gib"] * 1024),
    }


def train_with_trl(task: dict[str, Any]) -> dict[str, Any]:
    """Train with trl's GRPOTrainer; return the figures."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    usage, folder = Usage(), task["folder"]
    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/tools-taught/hf")
    tokenizer.response_template = qwen3_template
    lines = Path(folder, "questions.jsonl").read_text().splitlines()[: PROMPTS * STEPS]
    rows = [
        {"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]}
        for row in map(json.loads, lines)
    ]
    batch = {"per_device_train_batch_size": PROMPTS * SAMPLES, "num_generations": SAMPLES}
    rollouts = {"max_completion_length": TURNS * NEW, "max_tool_calling_iterations": TURNS - 1}
    how = {"learning_rate": LR, "max_steps": STEPS, "shuffle_dataset": False}
    clock = step_clock()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(f"{folder}/tools-taught/hf"),
        reward_funcs=[is_right],
        args=GRPOConfig(**batch, **rollouts, **how, **trl_options(task)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        environment_factory=CalculatorOfTrl,
        callbacks=[clock],
    )
    trainer.train()
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    assert len(rewards) == STEPS, rewards
    return {
        "seconds": sum(clock.seconds[WARM:]),
        "reward": rewards[-1],
        **usage.figures(rank_memory()),
    }


class CalculatorOfTrl:
    """The calculator as an environment of trl's."""

    def reset(self, **columns: Any) -> None:
        """Begin a rollout."""

    def calculator(self, expression: str) -> str:
        """Compute the value of an arithmetic expression.

        Args:
            expression: The expression.

        Returns:
            The value.
        """
        from fsdp_trainer.rl.environments.calculator import Calculator

        return Calculator().call(expression=expression)


def is_right(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """Return the rewards of rollouts, with the signature that trl expects."""
    pairs = zip(completions, answer, strict=True)
    return [float(turns[-1]["content"].strip() == right) for turns, right in pairs]


PROGRAMS = {OURS: train_ours, "trl": train_with_trl}

if __name__ == "__main__":
    main()
