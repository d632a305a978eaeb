"""CORE, the centred accuracy of base models over 22 tasks (Li et al. 2024, arXiv 2406.11794, §3.5).

The data are a folder in the format of nanochat's eval bundle, https://github.com/karpathy/nanochat:
core.yaml (`icl_tasks`), eval_data/ (JSON lines) and eval_meta_data.csv (accuracy of random guesses,
in percent). Examples, the choice of items and the scores are computed as in its core_eval.py.
"""

import csv
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fsdp_trainer.base.text_files import text_lines
from fsdp_trainer.config.schema import CORE_FILES
from fsdp_trainer.config.yaml_text import load_yaml
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer
from fsdp_trainer.errors import UserError
from fsdp_trainer.evaluation.scoring import Ending, Likelihood, Metrics, Scorer

CORE = "core"
"""The name of these tasks in tasks=[…]."""
ORDER_SEED, EXAMPLE_SEED = 1337, 1234  # nanochat's
Item = dict[str, Any]


class TaskKind(NamedTuple):
    """A kind of tasks.

    texts: returns an item's texts, without examples. answer: returns the index of the right one.
    """

    texts: Callable[[Item, str], list[str]]
    answer: Callable[[Item], int]


KINDS = {
    "multiple_choice": TaskKind(
        lambda item, between: [f"{item['query']}{between}{choice}" for choice in item["choices"]],
        lambda item: item["gold"],
    ),
    "schema": TaskKind(
        lambda item, between: [
            f"{each}{between}{item['continuation']}" for each in item["context_options"]
        ],
        lambda item: item["gold"],
    ),
    "language_modeling": TaskKind(
        lambda item, between: [
            f"{item['context'].strip()}{between}{end}" for end in ("", item["continuation"])
        ],
        lambda item: 1,
    ),
}
"""Kinds of tasks by icl_task_type."""


@dataclass(frozen=True)
class CoreTask:
    """A task of the bundle.

    shots: number of examples before a question. baseline: accuracy of random guesses, 0 to 1.
    """

    label: str
    kind: str
    shots: int
    delimiter: str
    baseline: float
    items: list[Item]

    def texts(self, number: int) -> list[str]:
        """Return an item's texts, after examples that depend only on the item's number."""
        kind, item = KINDS[self.kind], self.items[number]
        others = range(len(self.items) - 1)
        shots = min(self.shots, len(others))  # with evaluation.limit there may be fewer
        drawn = random.Random(EXAMPLE_SEED + number).sample(others, shots)
        chosen = [i + (i >= number) for i in drawn]  # without the item itself
        before = ""
        for example in (self.items[i] for i in chosen):
            before += kind.texts(example, self.delimiter)[kind.answer(example)] + "\n\n"
        texts = [before + text for text in kind.texts(item, self.delimiter)]
        if self.kind == "language_modeling":
            texts[0] = texts[0].rstrip()  # a space at the end would belong to the next token
        return texts

    def endings(self, tokens: list[list[int]], context: int) -> list[Ending]:
        """Return the endings whose likelihoods answer an item.

        tokens: of each of its texts. context: length of the model's context.
        """
        if self.kind == "schema":
            same = common_prefix([text[::-1] for text in tokens])
            counts = [same] * len(tokens)
        else:
            same = common_prefix(tokens)
            counts = [len(text) - same for text in tokens]
        if self.kind == "language_modeling":
            tokens, counts = tokens[1:], counts[1:]
        texts = [tuple(text[-context:]) for text in tokens]
        return [
            Ending(text, min(max(count, 1), len(text) - 1))
            for text, count in zip(texts, counts, strict=True)
        ]

    def is_right(self, number: int, endings: list[Ending], scores: list[Likelihood]) -> bool:
        if self.kind == "language_modeling":
            return scores[0].is_greedy
        pairs = zip(scores, endings, strict=True)
        losses = [-score.total / ending.length for score, ending in pairs]
        return losses.index(min(losses)) == self.items[number]["gold"]


class Core:
    def __init__(self, folder: str, limit: int | None, tokenizer: TextTokenizer):
        """limit: items of each task; None: all. Raises UserError for an incomplete bundle."""
        try:
            self.tasks = read_tasks(Path(folder), limit)
        except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
            reason = f"cannot be read: {type(error).__name__}: {error}"
            raise UserError(
                "the data of CORE is incomplete", f"core_data={folder}", reason
            ) from None
        self.tokenizer = tokenizer

    def run(self, scorer: Scorer) -> Metrics:
        metrics = {f"{CORE}/{task.label}": self.run_task(task, scorer) for task in self.tasks}
        centered = [values["centered"] for values in metrics.values()]
        return {CORE: {"centered": sum(centered) / len(centered)}, **metrics}

    def run_task(self, task: CoreTask, scorer: Scorer) -> dict[str, float]:
        """Return a task's accuracy, its standard error, and the centred accuracy. Collective."""
        questions = [
            task.endings([self.encode(text) for text in task.texts(number)], scorer.context)
            for number in range(len(task.items))
        ]
        scores = iter(scorer.likelihoods([ending for endings in questions for ending in endings]))
        right = [
            task.is_right(number, endings, [next(scores) for _ in endings])
            for number, endings in enumerate(questions)
        ]
        accuracy = sum(right) / len(right)
        spread = math.sqrt(accuracy * (1 - accuracy) / max(1, len(right) - 1))
        centered = (accuracy - task.baseline) / (1 - task.baseline)
        return {"acc": accuracy, "acc_stderr": spread, "centered": centered}

    def encode(self, text: str) -> list[int]:
        tokenizer = self.tokenizer
        first = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        return [first or 0, *tokenizer.encode(text)]


def read_tasks(folder: Path, limit: int | None) -> list[CoreTask]:
    """Return the tasks of a bundle. Raises OSError, ValueError, KeyError, TypeError, YAMLError."""
    tasks, data, table = (folder / name for name in CORE_FILES)
    with table.open(encoding="utf-8") as file:
        baselines = {
            row["Eval Task"]: float(row["Random baseline"]) for row in csv.DictReader(file)
        }
    return [
        CoreTask(
            task["label"],
            task["icl_task_type"],
            task["num_fewshot"][0],
            task.get("continuation_delimiter", " "),
            baselines[task["label"]] / 100,
            read_items(data / task["dataset_uri"], limit),
        )
        for task in load_yaml(tasks.read_text(encoding="utf-8"))["icl_tasks"]
    ]


def read_items(file: Path, limit: int | None) -> list[Item]:
    """Return the items of a file, shuffled: many files are sorted. limit: None: all items."""
    items = [json.loads(line) for line in text_lines(file)]
    random.Random(ORDER_SEED).shuffle(items)
    return items[:limit]


def common_prefix(texts: list[list[int]]) -> int:
    return sum(1 for _ in takewhile(lambda each: len(set(each)) == 1, zip(*texts, strict=False)))
