"""What the last word of a command line can become: verbs, options of groups, keys, and the values that a key takes."""

from collections.abc import Mapping
from dataclasses import Field
from glob import escape, glob
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import get_args

from fsdp_trainer.config.check import flatten, show
from fsdp_trainer.config.compose import options
from fsdp_trainer.config.document import every_key
from fsdp_trainer.config.inputs import DEMOS
from fsdp_trainer.config.overrides import LAID_OVER
from fsdp_trainer.config.rules import PATHS
from fsdp_trainer.config.schema import default_of
from fsdp_trainer.config.verbs import PRIMARY
from fsdp_trainer.devices import DEVICES
from fsdp_trainer.errors import UserError

CONFIG_DIR = ("--config-dir", "-cd")
FLAGS = {
    "--cfg": ("job",), "-c": ("job",), "--info": ("defaults", "defaults-tree", "searchpath", "config"), "-i": ("defaults",),
    "-sc": ("install=bash", "install=zsh", "install=fish"), "--help": (), "--version": (), "--multirun": (), "-m": (),
}  # fmt: skip
"""What may follow each."""


def completions(line: str) -> list[str]:
    """Of a command line up to the cursor, program and all. Nothing where files are wanted, which the shell itself offers."""
    _, *before, word = [*line.split(), ""] if line[-1:].isspace() else line.split()
    if before and before[-1] in CONFIG_DIR:
        return []
    if before and FLAGS.get(before[-1]):
        found = [*FLAGS[before[-1]]]
    elif word.startswith("-"):
        found = [*FLAGS, *CONFIG_DIR]
    else:
        verb = next((w for w in before if w in PRIMARY), None)
        keys, groups = flatten(PRIMARY[verb or "train"]), _options(verb or "train", before)
        found = _values(word, keys, groups) if "=" in word else _names(word, keys, groups)
        found += [] if verb or any("=" in w for w in before) else list(PRIMARY)
        found += [*glob(f"{escape(word)}*.yaml"), *glob(f"{escape(word)}*/")] if word else []
    return sorted({f for f in found if f.startswith(word) and " " not in f})


def _options(verb: str, before: list[str]) -> dict[str, list[str]]:
    own = next((folder for flag, folder in pairwise(before) if flag in CONFIG_DIR), None)
    try:
        return options(verb, own)
    except UserError:  # about that folder, told when the command is given
        return options(verb)


def _names(word: str, keys: Mapping[str, Field], groups: Mapping[str, list[str]]) -> list[str]:
    """Keys a part at a time, as `optim.` and then `optim.lr=`; what is laid over with its plus."""
    chosen = [f"+{group}=" if group in LAID_OVER else f"{group}=" for group in groups]
    parts = [(key, word.count(".") + 1) for key in keys]
    return chosen + [
        f"{key}=" if key.count(".") < n else ".".join(key.split(".")[:n]) + "." for key, n in parts
    ]


def _values(word: str, keys: Mapping[str, Field], groups: Mapping[str, list[str]]) -> list[str]:
    head, _, typed = word.rpartition("=")
    name = head.lstrip("+")
    if name == "key" and "key" in keys:  # of the verb `config`
        found = list(every_key())
    elif name not in keys:
        found = groups.get(name, [])
    else:
        f = keys[name]
        default = default_of(f)
        found = [
            *map(show, f.metadata["choices"]),
            *(["true", "false"] if bool in (f.type, *get_args(f.type)) else []),
        ]
        found += DEVICES if name == "plan.gpu" else []
        found += (
            [show(default)]
            if default not in (None, [])
            else ["null"]
            if NoneType in get_args(f.type)
            else []
        )
        if name in PATHS:
            found += [
                f"{file}/" if Path(file).is_dir() else file for file in glob(f"{escape(typed)}*")
            ] + [*DEMOS.get(name, ())]
    return [f"{head}={value}" for value in found]
