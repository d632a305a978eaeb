"""The facts in the comments at the head of recipes."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

from fsdp_trainer.config.composing.compose import CONF, find_file, options


class RecipeHead(NamedTuple):
    """The facts in the head of a recipe's file; None if it lacks the line. memory: of one GPU."""

    does: str
    hardware: str
    memory: str | None
    step: str | None
    speed: str | None
    start: str


def recipe_heads(config_dir: str | None = None) -> dict[str, RecipeHead]:
    """Return the head of each recipe's file, by name: the smallest model first, adapters last."""
    heads, sizes = {}, {}
    for name in options("train", config_dir)["recipe"]:
        text = (find_file(f"recipe/{name}", config_dir) or Path()).read_text()
        lines = first_comments(f"recipe/{name}", config_dir)

        def find(pattern: str, text: str = text) -> str | None:
            match = re.search(f"(?m){pattern}", text)
            return match[1].strip() if match else None

        size = float((find(r"^# Disk +([\d.,]+) GiB a checkpoint") or "0").replace(",", ""))
        sizes[name] = "override /adapter" in text, size
        command = find(r"^#   ((?:.*\\\n)*.*)")
        heads[name] = RecipeHead(
            does=lines[0],
            hardware=find("^# hardware:(.*)") or "not said",
            memory=find(r"^# Memory +([^;\n]+)"),
            step=find("= ([0-9,]+ (?:tokens|answers)) a step"),
            speed=find("^# Speed +([^;:\n]+)"),
            start=_start(name, command, config_dir),
        )
    return {name: heads[name] for name in sorted(heads, key=lambda name: sizes[name])}


def _start(name: str, command: str | None, config_dir: str | None) -> str:
    if find_file(f"recipe/{name}", config_dir) != CONF / f"recipe/{name}.yaml":
        return f"fsdp-trainer --config-dir {shlex.quote(str(config_dir))} +recipe={name}"
    if not command:
        return f"fsdp-trainer +recipe={name}"
    return re.sub(r"\s*\\\n#\s*", " ", command)


def first_comments(path: str, config_dir: str | None) -> list[str]:
    """Return the comment lines of a recipe or sweep; the first one states its purpose."""
    text = (find_file(path, config_dir) or Path()).read_text()
    return [
        line.lstrip("# ")
        for line in text.splitlines()
        if line.startswith("#") and "@package" not in line
    ] or ["not said"]
