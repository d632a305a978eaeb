"""The configuration as records show it: without passwords, signatures and the environment's values.

A value that `${oc.env:NAME}` gave stays as it was written. Numbers, switches and choices are values
of the schema, which records need, and no secrets.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.base.safe_text import without_secrets

Place = tuple[str | int, ...]
"""The keys and indices that lead to a value in a tree."""


class FromEnvironment(str):
    """A text from an environment variable. written: as the configuration has it."""

    def __new__(cls, text: str, written: str = "") -> "FromEnvironment":
        return super().__new__(cls, text)

    def __init__(self, text: str, written: str = ""):
        self.written = written


def marked(tree: Any, written: Mapping[Place, str], place: Place = ()) -> Any:
    if isinstance(tree, dict):
        return {name: marked(value, written, (*place, name)) for name, value in tree.items()}
    if isinstance(tree, list):
        return [marked(value, written, (*place, i)) for i, value in enumerate(tree)]
    if place not in written or not isinstance(tree, str):
        return tree
    return FromEnvironment(tree, written[place])


def marks_of(tree: Any, place: Place = ()) -> Iterator[tuple[Place, str]]:
    """Yield the place and the written form of each text from the environment: see `marked`."""
    if isinstance(tree, FromEnvironment):
        yield place, tree.written
    elif isinstance(tree, dict | list):
        for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from marks_of(value, (*place, name))


def flat(tree: Json, separator: str = ".") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            for below, leaf in flat(value, separator):
                yield f"{key}{separator}{below}", leaf
        else:
            yield str(key), value


def as_written(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: as_written(part) for name, part in value.items()}
    if isinstance(value, list):
        return [as_written(part) for part in value]
    if isinstance(value, FromEnvironment):
        return without_secrets(value.written)
    return without_secrets(value) if isinstance(value, str) else value


def as_recorded_earlier(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: as_recorded_earlier(part) for name, part in value.items()}
    if isinstance(value, list):
        return [as_recorded_earlier(part) for part in value]
    return without_secrets(str(value)) if isinstance(value, str) else value


def recorded(cfg: Any) -> Json:
    """Return a configuration as a tree that may be written to files and shown."""
    tree: Json = {}
    for field in fields(cfg):
        value = getattr(cfg, field.name)
        if is_dataclass(value):
            tree[field.name] = recorded(value)
        else:
            is_choice = isinstance(value, str) and field.metadata["choices"]
            tree[field.name] = str(value) if is_choice else as_written(value)
    return tree
