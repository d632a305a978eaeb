"""The command line that starts another trainer, as settings: `accelerate launch sft.py --…`."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fsdp_trainer.config.yaml_text import load_yaml
from fsdp_trainer.interop.convert.trainers import SPELT, TABLES

METHODS = {*TABLES["signs"], *SPELT, "orpo", "simpo", "ppo", "bco", "gkd"}
"""Words of a script's name that say which trainer it is for."""
FLAG = re.compile(r"--?(?P<name>[A-Za-z][\w.-]*)(=(?P<value>.*))?", re.DOTALL)
PAIR = re.compile(r"\+?(?P<name>[A-Za-z][\w.]*)=(?P<value>.*)", re.DOTALL)
OF_RANKS = ("NPROC_PER_NODE=", "NNODES=")
"""Variables by which LLaMA-Factory is told how many ranks it starts."""
OF_EACH_NODE = ("nproc_per_node", "num_gpus")
OF_NODES = ("nnodes", "num_nodes")


@dataclass
class StartedTrainer:
    """The program that a command line starts.

    tool: whose program it is; None if its settings say. method: the trainer that its script is
    for. settings: its options and the launcher's, by name; files: configuration files that it
    names.
    """

    tool: str | None = None
    method: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)


def ranks_of(settings: dict[str, Any]) -> int:
    numbers = {name: value for name, value in settings.items() if isinstance(value, int)}
    total, each = numbers.get("num_processes"), [numbers.get(name, 1) for name in OF_EACH_NODE]
    return total or max(each) * max(numbers.get(name, 1) for name in OF_NODES)


def command_words(text: str) -> list[str]:
    """Return the words of the last command of a text that starts a trainer; [] if none does."""
    chosen: list[str] = []
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        variables = []
        while words and (PAIR.fullmatch(words[0]) or words[0] in ("exec", "env", "sudo", "time")):
            variables += [words[0]] if words[0].startswith(OF_RANKS) else []
            words = words[1:]
        is_script = words and words[0].endswith(".py")
        if words and (Path(words[0]).name in TABLES["launchers"] or is_script):
            chosen = [*words, *map(str.lower, variables)]
    return chosen


def read_command_line(text: str) -> StartedTrainer:
    words = command_words(text)
    at = program(words)
    is_module = words[at - 2 : at - 1] == ["-m"]
    script, rest = words[at - 1] if is_module else Path(words[at - 1]).name, words[at:]
    tool = TABLES["programs"].get(script)
    if tool:  # its command: `trl sft`, `llamafactory-cli train`, `axolotl train`
        script = rest[0] if rest and re.fullmatch(r"\w+", rest[0]) else ""
        rest = rest[1:] if script else rest
    method = next((word for word in re.split(r"[\W_]+", script.lower()) if word in METHODS), None)
    files: list[str] = []
    settings = dict(options(words[1 : at - 1 - is_module], files)) | dict(options(rest, files))
    return StartedTrainer(tool, SPELT.get(method or "", method), settings, files)


def program(words: list[str]) -> int:
    """Return the place after a script, a module or a program of a trainer's own."""
    for at, word in enumerate(words):
        before = words[at - 1] if at else ""
        is_program = word.endswith(".py") or before == "-m" or Path(word).name in TABLES["programs"]
        if is_program and not word.startswith(("torch.distributed", "accelerate.")):
            return at + 1
    return len(words)


def options(words: list[str], files: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield names and values; words that are YAML or JSON files without a name go to `files`."""
    name, values = "", []
    for word in [*words, "--end"]:
        match = begun(word, bool(name))
        if match is None:
            values.append(word)
            continue
        yield from finished(name, values, files)
        name, values = match["name"].replace("-", "_"), []
        if match["value"] is not None:
            yield name, value_of([match["value"]])
            name = ""


def begun(word: str, is_value: bool) -> re.Match[str] | None:
    """Return the name of an option, or NAME=VALUE where no value is expected."""
    flag = None if is_number(word) else FLAG.fullmatch(word)
    return flag or (None if is_value else PAIR.fullmatch(word))


def finished(name: str, values: list[str], files: list[str]) -> Iterator[tuple[str, Any]]:
    if not name or (name in ("config", "config_file") and values):
        files += [one for one in values if name or one.endswith((".yaml", ".yml", ".json"))]
    elif name.startswith("no_") and not values:
        yield name.removeprefix("no_"), False
    else:
        yield name, value_of(values)


def is_number(word: str) -> bool:
    return bool(re.fullmatch(r"-?[\d.]+(e-?\d+)?", word))


def value_of(words: list[str]) -> Any:
    """Return the value of an option: of none it is switched on, of several a list."""
    read = [scalar(word) for word in words]
    return True if not read else read[0] if len(read) == 1 else read


def scalar(word: str) -> Any:
    try:
        value = load_yaml(word)
    except yaml.YAMLError:
        return word
    return word if value is None else value
