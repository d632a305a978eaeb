"""The translation of a setting of another trainer. settings.yaml has those of a fixed answer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_trainer.config.yaml_text import load_yaml
from fsdp_trainer.interop.convert.foreign_file import ForeignFile

TRANSLATED, NOTHING, IMPOSSIBLE = "translated", "nothing to set", "not possible"
OFF: tuple[Any, ...] = (False, 0, "false", "no", "none", "off", [], {})
UNSET = (None, "", "null")


@dataclass
class Answer:
    """An answer to one setting. sets: our keys and groups that it decides, with their values."""

    kind: str
    sets: dict[str, Any] = field(default_factory=dict)
    note: str = ""


Rule = Callable[[Any, ForeignFile], Answer]
"""Returns what becomes of a value; the whole file says what it means."""


def sets(note: str = "", **values: Any) -> Answer:
    return Answer(
        TRANSLATED, {key.replace("__", "."): value for key, value in values.items()}, note
    )


def nothing(why: str) -> Answer:
    return Answer(NOTHING, note=why)


def impossible(instead: str) -> Answer:
    """Return that a setting cannot be kept, and what can be done instead."""
    return Answer(IMPOSSIBLE, note=instead)


def is_off(value: Any) -> bool:
    return (value.lower() if isinstance(value, str) else value) in OFF


def is_on(value: Any) -> bool:
    return (value.lower() if isinstance(value, str) else value) in (True, "true", "yes", "on")


def as_number(value: Any) -> Any:
    """Return a number or switch that is written as text, as 2e-4 in YAML; others unchanged."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            pass
    return value


def fixed(why: str) -> Rule:
    return lambda value, file: nothing(why)


def lacking(instead: str) -> Rule:
    """Return a rule for a setting that cannot be kept unless it is off."""
    return lambda value, file: nothing("off") if is_off(value) else impossible(instead)


def keeps(key: str, note: str = "", kind: Callable[[Any], Any] = as_number) -> Rule:
    return lambda value, file: sets(note, **{key: kind(value)})


def option(setting: str) -> Rule:
    key, _, value = setting.partition("=")
    return lambda on, file: nothing("off") if is_off(on) else sets(**{key: load_yaml(value)})


SETTINGS = load_yaml((Path(__file__).parent / "settings.yaml").read_text(encoding="utf-8"))


def rules_of(part: str) -> dict[str, Rule]:
    """Return the rules of a part of settings.yaml, by the name of the setting."""
    kinds = {"fixed": fixed, "lacking": lacking, "option": option}
    return {
        name: kinds[kind](text)
        for kind, answers in SETTINGS[part].items()
        for text, names in answers.items()
        for name in names
    }
