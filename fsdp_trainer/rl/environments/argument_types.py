"""Types of a tool call's arguments that the model wrote as texts. Imports no torch."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from fsdp_trainer.base.json_files import Json


class Texts(dict[str, str]):
    """Arguments of a call as texts, whose types the tool's description says."""


def refuse_constant(name: str) -> Any:
    """Raise ValueError: NaN and Infinity are not JSON."""
    raise ValueError(name)


def typed_arguments(texts: Texts, schema: Any) -> Json:
    """Return arguments with the types that a tool's `parameters` give them; others stay texts."""
    known = mapping(schema)
    properties = mapping(known.get("properties"))
    others = known.get("additionalProperties")
    types = {name: [*types_of(properties.get(name, others), known)] for name in texts}
    return {name: typed(text, types[name]) for name, text in texts.items()}


def types_of(schema: Any, root: Json, depth: int = 0) -> Iterator[str]:
    """Yield the types that a JSON Schema allows. root: where its $ref are found."""
    if not isinstance(schema, dict) or depth > DEEPEST:
        return
    own = schema.get("type")
    yield from own if isinstance(own, list) else [own] if own else types_of_values(schema)
    for choice in choices_of(schema, root):
        yield from types_of(choice, root, depth + 1)
    if schema.get("nullable"):
        yield "null"


def choices_of(schema: Json, root: Json) -> Iterator[Any]:
    for name in ("anyOf", "oneOf", "allOf"):
        yield from listed(schema.get(name))
    if isinstance(reference := schema.get("$ref"), str):
        definitions = root.get("$defs") or root.get("definitions")
        yield mapping(definitions).get(reference.rpartition("/")[2])


def types_of_values(schema: Json) -> Iterator[str]:
    values = [*listed(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    yield from (TYPE_NAMES[type(value)] for value in values if type(value) in TYPE_NAMES)


def mapping(value: Any) -> Json:
    """Return a mapping of a schema, an empty one for what should be one and is none."""
    return value if isinstance(value, dict) else {}


def listed(value: Any) -> list[Any]:
    """Return a list of a schema, an empty one for what should be one and is none."""
    return value if isinstance(value, list) else []


DEEPEST = 8
TYPE_NAMES = {
    str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null",
    dict: "object", list: "array",
}  # fmt: skip


def typed(text: str, types: Sequence[str]) -> Any:
    """Return a text as the first of these types that it fits, else the text."""
    for name in types:
        if name in CONVERTERS:
            with suppress(ValueError, OverflowError, RecursionError):
                return CONVERTERS[name](text)
    return text


def as_integer(text: str) -> int:
    number = as_number(text)
    if number != int(number):
        raise ValueError(text)
    return int(number)


def as_number(text: str) -> int | float:
    """Return a number that JSON has: not NaN."""
    with suppress(ValueError):
        return int(text)
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return int(number) if number.is_integer() and "." not in text else number


def as_type(kind: type, text: str) -> Any:
    value = json.loads(text, parse_constant=refuse_constant)
    if not isinstance(value, kind):
        raise ValueError(text)
    return value


def as_choice(choices: Json, text: str) -> Any:
    word = text.strip().lower()
    if word not in choices:
        raise ValueError(text)
    return choices[word]


CONVERTERS: dict[str, Callable[[str], Any]] = {
    "integer": as_integer,
    "number": as_number,
    "boolean": partial(as_choice, {"true": True, "1": True, "false": False, "0": False}),
    "null": partial(as_choice, {"null": None, "none": None}),
    "object": partial(as_type, dict),
    "array": partial(as_type, list),
}
CONVERTERS |= {
    alias: CONVERTERS[name]
    for alias, name in {
        "int": "integer", "float": "number", "bool": "boolean", "dict": "object", "list": "array",
    }.items()
}  # fmt: skip
"""By the names of JSON Schema's types, and of Python's, which many tools have."""
