"""Completions of a command line's last word: verbs, groups' options, keys and their values."""

from collections.abc import Mapping
from dataclasses import Field
from glob import escape, glob
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import get_args

from fsdp_trainer.config.check import as_text, flatten
from fsdp_trainer.config.composing.compose import options
from fsdp_trainer.config.composing.overrides import OVERLAYS
from fsdp_trainer.config.devices import DEVICES
from fsdp_trainer.config.input_checks import DEMOS
from fsdp_trainer.config.key_texts import every_key
from fsdp_trainer.config.keys import default_of
from fsdp_trainer.config.rules.rules import PATHS
from fsdp_trainer.config.verbs import PRIMARY
from fsdp_trainer.errors import UserError

CONFIG_DIR = ("--config-dir", "-cd")
FLAGS = {
    "--cfg": ("job",), "-c": ("job",),
    "--info": ("defaults", "defaults-tree", "searchpath", "config"), "-i": ("defaults",),
    "-sc": ("install=bash", "install=zsh", "install=fish"),
    "--help": (), "--version": (), "--multirun": (), "-m": (),
}  # fmt: skip
"""By flag, the words that may follow it."""


def completions(line: str) -> list[str]:
    """Return the possible completions of a command line's last word.

    line: the text up to the cursor, including the program's name. The result is empty where a file
    is expected: the shell itself completes files.
    """
    _, *before, word = [*line.split(), ""] if line[-1:].isspace() else line.split()
    if before and before[-1] in CONFIG_DIR:
        return []
    if before and FLAGS.get(before[-1]):
        words = [*FLAGS[before[-1]]]
    elif word.startswith("-"):
        words = [*FLAGS, *CONFIG_DIR]
    else:
        words = _settings(word, before)
    return sorted({w for w in words if w.startswith(word) and " " not in w})


def _settings(word: str, before: list[str]) -> list[str]:
    """Return verbs, settings and recipe files for a word. before: the words before it."""
    verb = next((w for w in before if w in PRIMARY), None)
    keys, groups = flatten(PRIMARY[verb or "train"]), _options(verb or "train", before)
    words = _values(word, keys, groups) if "=" in word else _names(word, keys, groups)
    if not verb and not any("=" in w for w in before):
        words += PRIMARY
    if word:
        words += [*glob(f"{escape(word)}*.yaml"), *glob(f"{escape(word)}*/")]
    return words


def _options(verb: str, before: list[str]) -> dict[str, list[str]]:
    own = next((folder for flag, folder in pairwise(before) if flag in CONFIG_DIR), None)
    try:
        return options(verb, own)
    except UserError:  # a problem with that folder, which the command itself will report
        return options(verb)


def _names(word: str, keys: Mapping[str, Field], groups: Mapping[str, list[str]]) -> list[str]:
    """Return groups and keys, keys one part at a time: `optim.` and then `optim.lr=`.

    Recipes and sweeps have their plus: `+recipe=`.
    """
    chosen = [f"+{group}=" if group in OVERLAYS else f"{group}=" for group in groups]
    parts = [(key, word.count(".") + 1) for key in keys]
    return chosen + [
        f"{key}=" if key.count(".") < n else ".".join(key.split(".")[:n]) + "." for key, n in parts
    ]


def _values(word: str, keys: Mapping[str, Field], groups: Mapping[str, list[str]]) -> list[str]:
    head, _, typed = word.rpartition("=")
    name = head.lstrip("+")
    if name == "key" and "key" in keys:  # the verb `config`
        values = list(every_key())
    elif name in keys:
        values = _values_of_key(name, keys[name], typed)
    else:
        values = groups.get(name, [])
    return [f"{head}={value}" for value in values]


def _values_of_key(name: str, f: Field, typed: str) -> list[str]:
    values = [*map(as_text, f.metadata["choices"])]
    if bool in (f.type, *get_args(f.type)):
        values += ["true", "false"]
    if name == "plan.gpu":
        values += DEVICES
    default = default_of(f)
    if default not in (None, []):
        values.append(as_text(default))
    elif NoneType in get_args(f.type):
        values.append("null")
    if name in PATHS:
        files = glob(f"{escape(typed)}*")
        values += [f"{file}/" if Path(file).is_dir() else file for file in files]
        values += DEMOS.get(name, ())
    return values
