"""The translation of a setting of another trainer. settings.yaml has those of a fixed answer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.config.yaml_text import load_yaml, table_beside
from fsdp_trainer.interop.convert.foreign_file import ForeignFile

TRANSLATED, NOTHING, IMPOSSIBLE = "translated", "nothing to set", "not possible"
OFF: tuple[Any, ...] = (False, 0, "false", "no", "none", "off", [], {})
UNSET = (None, "", "null")


@dataclass
class Answer:
    """An answer to one setting. sets: our keys and groups that it decides, with their values."""

    kind: str
    sets: Json = field(default_factory=dict)
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
    return lambda value, file: nothing("off") if is_off(value) else impossible(instead)


def keeps(said: str, kind: Callable[[Any], Any] = as_number) -> Rule:
    """Return a rule for a setting that keeps its value. said: our key, and a note after a space."""
    key, _, note = said.partition(" ")
    return lambda value, file: sets(note, **{key: kind(value)})


def never(instead: str) -> Rule:
    return lambda value, file: impossible(instead)


def same(instead: str, neutral: Any) -> Rule:
    """Return a rule for a setting of which only one value, or a few, are what is done here."""
    values = neutral if isinstance(neutral, list) else [neutral]
    return lambda value, file: nothing("as here") if value in values else impossible(instead)


def counts_with(instead: str, needed: Json) -> Rule:
    """Return a rule for a setting that only counts if another one has a value. needed: by name."""
    ((name, values),) = needed.items()

    def rule(value: Any, file: ForeignFile) -> Answer:
        if file.own(name) in values:
            return impossible(instead)
        return nothing(f"only counts with  {name}: {values[0]}")

    return rule


def of_server(instead: str) -> Rule:
    """Return a rule for a setting of answers that vLLM makes."""
    return lambda value, file: nothing(instead if uses_server(file) else SERVER)


SERVER = "only counts with  use_vllm: true"


def uses_server(file: ForeignFile) -> bool:
    """Return True if vLLM makes the answers."""
    return not is_off(file.own("use_vllm") or False)


def one_of(instead: str, known: dict[str, Json]) -> Rule:
    def rule(value: Any, file: ForeignFile) -> Answer:
        chosen = known.get(str(value).lower())
        return sets(**chosen) if chosen else impossible(instead)

    return rule


def option(setting: str) -> Rule:
    key, _, value = setting.partition("=")
    return lambda on, file: nothing("off") if is_off(on) else sets(**{key: load_yaml(value)})


SETTINGS = table_beside(__file__, "settings.yaml")
KINDS: dict[str, Callable[..., Rule]] = {
    "fixed": fixed,
    "lacking": lacking,
    "never": never,
    "option": option,
    "of a server": of_server,
    "keeps": keeps,
    **{f"keeps {kind.__name__}": partial(keeps, kind=kind) for kind in (int, str, bool)},
}
"""Kinds of rules, by their names in settings.yaml, each made of a sentence or a setting."""
WITH_MORE: dict[str, Callable[[str, Any], Rule]] = {
    "same": same,
    "counts with": counts_with,
    "one of": one_of,
}
"""Those of which each setting is made of something more."""


def rules_of(part: str, functions: Mapping[str, Any]) -> dict[str, Rule]:
    """Return the rules of a part of settings.yaml, by the name of the setting.

    functions: by the names that the part has: rules, or what makes one of a text.
    """
    rules: dict[str, Rule] = {}
    for kind, answers in SETTINGS[part].items():
        for text, names in answers.items():
            if kind in WITH_MORE:
                rules |= {name: WITH_MORE[kind](text, more) for name, more in names.items()}
            elif kind == "rule":
                name, *words = text.split()
                rule = functions[name](*words) if words else functions[name]
                rules |= dict.fromkeys(names, rule)
            else:
                rules |= dict.fromkeys(names, KINDS[kind](text))
    return rules
