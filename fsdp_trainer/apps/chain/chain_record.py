"""The record of a chain: which stages are finished, with which settings, and how long they took."""

import json
import time
from pathlib import Path
from typing import Any

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.base.recorded import as_written, recorded
from fsdp_trainer.config.check import as_text
from fsdp_trainer.config.schema import COMPARED_GROUPS

FILE = "chain.jsonl"
LENGTH = ("train.steps", "train.epochs", "train.freeze")
FREE = (
    "data.cache", "data.max_lost", "data.workers", "data.prefetch", "data.pad_to_multiple",
    "model.attention", "model.attention_kernel", "optim.implementation", "loss.chunk_mib",
    # the chain's own folders, which may be moved
    "model.init_from", "tokenizer.path", "out",
    # what the verb tokenizer prints
    "format", "compare",
)  # fmt: skip
"""Keys that may change between starts of a chain because they do not affect a stage's result."""


class ChainRecord:
    """The lines of chain.jsonl: one each time a stage ended or its result was deleted."""

    def __init__(self, folder: Path):
        self.file = folder / FILE

    def lines(self) -> list[Json]:
        """Return all lines except those that a crash left incomplete."""
        lines = []
        for text in self.file.read_text().splitlines() if self.file.exists() else []:
            try:
                lines.append(json.loads(text))
            except ValueError:
                continue
        return lines

    def add(self, stage: str, event: str, **details: Any) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with open(self.file, "a") as file:
            file.write(json.dumps({"time": time.time(), "stage": stage, "event": event, **details}))
            file.write("\n")

    def finished(self, stage: str) -> Json | None:
        done = None
        for line in self.lines():
            if line["stage"] != stage:
                continue
            if line["event"] == "forgotten":
                done = None
            elif line["event"] == "end" and line["exit_code"] == 0:
                done = line
        return done

    def seconds(self, stage: str) -> float:
        """Return the total seconds of all attempts at a stage, successful or not."""
        total = 0.0
        for line in self.lines():
            if line["stage"] == stage:
                total = 0.0 if line["event"] == "forgotten" else total + line.get("seconds", 0.0)
        return total


def settings_of(cfg: Any) -> Json:
    """Return the settings of a stage's configuration that affect its result."""
    settings: Json = {}
    for group, values in recorded(cfg).items():
        if isinstance(values, dict) and group in (*COMPARED_GROUPS, "train", "run"):
            settings |= {f"{group}.{name}": value for name, value in values.items()}
        elif not isinstance(values, dict):
            settings[group] = values
    return {key: value for key, value in settings.items() if decides(key)}


def decides(key: str) -> bool:
    group = key.partition(".")[0]
    if group in ("train", "run"):
        return key in (*LENGTH, "run.seed")
    return key not in FREE


def changes(then: Json, now: Json) -> list[str]:
    # `then` was read from JSON, which has no tuples
    then, now = as_written(then), json.loads(json.dumps(now))
    keys = [key for key in now if key in then and then[key] != now[key]]
    return [f"{key} was {as_text(then[key])}, is {as_text(now[key])}" for key in keys]
