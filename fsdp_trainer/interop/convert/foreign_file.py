"""A configuration file of another trainer: which one's it is, and its settings by dotted name."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from fsdp_trainer.base.json_files import DEEPEST, Json, is_deeper
from fsdp_trainer.config.yaml_text import load_yaml
from fsdp_trainer.errors import UserError
from fsdp_trainer.interop.convert.command_line import (
    StartedTrainer,
    command_words,
    ranks_of,
    read_command_line,
)
from fsdp_trainer.interop.convert.trainers import EXPLICIT, OWN_TOOL, TABLES, TRAINER, method_of

OF_TRAINERS = ("axolotl", "LLaMA-Factory", OWN_TOOL)
WHAT_IS_READ = "a file of `key: value` is needed, or a command line that starts a trainer"
WHOLE = ("rope_scaling", "chat_template_kwargs", "special_tokens", "plugins", "commands", "tpu_env")
"""Settings whose value is one thing, although it has parts."""


@dataclass(frozen=True)
class ForeignFile:
    """The settings of a file in its order, by dotted names."""

    path: Path
    tool: str
    settings: Json
    method: str | None = None
    """The training method that the settings are for; None if they do not say."""
    implied: frozenset[str] = frozenset()
    """Settings that the file does not have: what its trainer then does."""
    ranks: int = 1
    samples: int | None = None
    """The number of samples of the data, if its files are here."""
    columns: frozenset[str] = frozenset()
    """The columns of its first sample."""

    def value(self, *names: str) -> Any:
        values = (self.settings.get(name) for name in names)
        return next((value for value in values if value not in (None, "", "auto")), None)

    def own(self, *names: str) -> Any:
        """Return the value of the first of TRL's settings, also in axolotl's section for them."""
        return self.value(*names, *(f"trl.{name}" for name in names))


def read_source(source: str) -> ForeignFile:
    """Return the settings of a file, of `-` (standard input) or of a command line.

    Raises UserError.
    """
    path = Path(source).expanduser()
    if source == "-":
        return of_text(Path("standard input"), sys.stdin.read())
    if command_words(source) and not path.exists():
        return of_text(Path("the command line"), source)
    if not path.exists():
        raise UserError(
            "there is nothing to convert", f"source={source}", "there is no such file or folder"
        )
    return read_foreign_file(path)


def read_foreign_file(path: Path) -> ForeignFile:
    try:
        return of_text(path, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        raise unreadable(path, str(error)) from None


def of_text(path: Path, text: str) -> ForeignFile:
    tree, started = tree_of(path, text), StartedTrainer()
    if not isinstance(tree, dict) and command_words(text):
        started = read_command_line(text)
        tree, path = with_files(started, path)
    if not isinstance(tree, dict) or not tree:
        raise UserError(
            "there is nothing to convert", str(path), f"holds no settings: {WHAT_IS_READ}"
        )
    settings = dict(flat(tree))
    tool = started.tool or tool_of(settings, bool(started.settings))
    if tool is None and started.method is None:
        known = "\n".join(
            f"{tool}: {' or '.join(signs)}" for tool, signs in TABLES["tools"].items()
        )
        reason = f"has none of the settings by which a trainer's file is known:\n{known}"
        raise UserError("there is nothing to convert", str(path), reason)
    file = with_trainer(path, tool or OWN_TOOL, settings, started.method)
    return replace(file, ranks=ranks_of(started.settings))


def with_files(started: StartedTrainer, path: Path) -> tuple[Json, Path]:
    """Return the settings of a command line over those of the files that it names.

    Also returns the path of the trainer's file, beside which others are; without one `path`.
    Raises UserError.
    """
    named = [read_foreign_file(found_near(path, each)) for each in started.files]
    tree = {name: value for each in named for name, value in each.settings.items()}
    tree = {name: value for name, value in tree.items() if name != TRAINER} | started.settings
    return tree, next((each.path for each in named if each.tool in OF_TRAINERS), path)


def tool_of(settings: Json, is_started: bool) -> str | None:
    """Return the tool that settings are for; is_started: not those of accelerate alone."""
    return next((tool for tool, signs in TABLES["tools"].items() if settings.keys() & set(signs)
                 and not (is_started and tool == "accelerate")), None)  # fmt: skip


def tree_of(path: Path, text: str) -> Any:
    """Return what a file holds; of a script of commands its text. Raises UserError."""
    try:
        is_json = path.suffix == ".json" or (not path.suffix and text.lstrip().startswith("{"))
        load = json.loads if is_json else load_yaml
        tree = text if path.suffix in (".sh", ".bash") else load(text)
        if is_deeper(tree, DEEPEST):
            raise RecursionError
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        if command_words(text):
            return text
        reason = str(error).splitlines()[0] if str(error) else f"is nested over {DEEPEST} deep"
        raise unreadable(path, reason) from None
    return tree


def found_near(path: Path, name: str) -> Path:
    return next((each for each in (Path(name), path.parent / name) if each.exists()), Path(name))


def unreadable(path: Path, reason: str) -> UserError:
    return UserError(
        "there is nothing to convert", str(path), f"cannot be read: {reason.splitlines()[0]}"
    )


def with_trainer(path: Path, tool: str, settings: Json, method: str | None) -> ForeignFile:
    """Return a file with the trainer that its settings are for, as a setting if none names it.

    method: that of the script which reads them, if its name says it.
    """
    method = method if method and tool == OWN_TOOL else method_of(settings, tool)
    if method and tool == OWN_TOOL and not settings.keys() & set(EXPLICIT):
        settings = {TRAINER: method} | settings
    return ForeignFile(path, tool, settings, method)


def flat(tree: Json, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value); of a list of mappings each is LIST[0], LIST[1] …"""
    for key, value in tree.items():
        name = f"{above}{key}"
        if isinstance(value, dict) and value and key not in WHOLE:
            yield from flat(value, f"{name}.")
        elif isinstance(value, list) and any(isinstance(each, dict) and each for each in value):
            for place, each in enumerate(value):
                if isinstance(each, dict) and each:
                    yield from flat(each, f"{name}[{place}].")
                else:
                    yield f"{name}[{place}]", each
        else:
            yield name, value
