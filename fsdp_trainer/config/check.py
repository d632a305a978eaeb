"""The check that every value has its key's type and is within its choices or bounds.

Problems are collected, so that all of them can be reported at once.
"""

import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from fsdp_trainer.base.recorded import FromEnvironment
from fsdp_trainer.config.keys import default_of
from fsdp_trainer.config.names import absent, choice_meant
from fsdp_trainer.config.parts.own_parts import FAMILY, own_names, why_no_part
from fsdp_trainer.errors import Problem, UserError

KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    NoneType: "null",
    dict: "a mapping such as {a: b}",
}


YAML_BOOL = "\n(YAML reads a bare on, off, yes or no as true or false: put it in quotes)"


Violations = Iterator[tuple[str, str]]
"""Keys that break a rule, each with the reason and what to type instead."""


class Report:
    """The problems found so far. Each names the argument that caused it, else the file.

    typed: by key, the argument that set it. settled: keys with a reported problem; further
    problems with them may be consequences and are not reported.
    """

    def __init__(self, typed: dict[str, str], problems: list[Problem], settled: set[str]):
        self.typed, self.problems, self.settled = typed, problems, settled
        self.origins: dict[str, str] = {}  # by key, the file that set it
        self.in_recipes: set[str] = set()  # keys that recipes set

    def add(self, key: str, value: Any, reason: str) -> None:
        """Report a problem with the `value` of a key, unless the key has one already."""
        if key in self.settled:
            return
        if key not in self.typed and key in self.origins:
            reason += f"\n(set in {self.origins[key]})"
        self.problems.append(Problem(self.typed.get(key, f"{key}={as_text(value)}"), reason))
        self.settled.add(key)

    def close(self) -> None:
        if self.problems:
            count = "a problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
            raise UserError(f"{count} in the configuration", self.problems)


def value_of(cfg: Any, key: str) -> Any:
    for name in key.split("."):
        cfg = getattr(cfg, name, None)
    return cfg


def as_text(value: Any) -> str:
    """Return a value as it is shown to the user, in the form of an override but without quotes."""
    if isinstance(value, list):
        return f"[{','.join(map(as_text, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {as_text(item)}" for name, item in value.items()) + "}"
    if isinstance(value, FromEnvironment):
        return value.written
    if value is None:
        return "null"
    if isinstance(value, float) and 0 < abs(value) < 1e-3:
        return re.sub(r"e-0", "e-", f"{value:g}")
    return str(value).lower() if isinstance(value, bool) else str(value)


def as_value(value: Any) -> str:
    """Return a value in a form that Hydra's override grammar reads, quoted where needed."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{as_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(as_value, value))}]"
    text = value.written if isinstance(value, FromEnvironment) else str(value)
    if isinstance(value, int | float) or re.fullmatch(r"[\w./+-]+", text):
        return text
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def describe(kind: Any) -> str:
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(map(describe, inside))
    if origin is list:
        return {
            float: "a list of numbers such as [0.9,0.95]",
            int: "a list of whole numbers such as [8,16]",
        }.get(inside[0], "a list of texts such as [a,b]")
    if origin is dict and inside[1] in (int, float):
        return f"a mapping to {KINDS[inside[1]].removeprefix('a ')}s such as {{a: 8}}"
    return inside[0] if origin is Literal else KINDS[origin or kind]


def takes_text(kind: Any) -> bool:
    return str in (kind, *get_args(kind))


def limits(f: Field) -> str:
    if f.metadata["choices"]:
        own = [] if f.metadata["part"] in (None, FAMILY) else ["FILE.py:NAME"]
        return ", ".join([*map(as_text, f.metadata["choices"]), *own])
    words = {"minimum": "at least", "above": "above", "maximum": "at most"}
    return ", ".join(
        f"{word} {f.metadata[name]:g}"
        for name, word in words.items()
        if f.metadata[name] is not None
    )


def convert(value: Any, kind: Any) -> Any:
    """Convert `value` to type `kind`; a number may be text. Raises ValueError, OverflowError."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _convert_to_any(value, inside)
    if origin is list and isinstance(value, list):
        return [convert(item, inside[0]) for item in value]
    if origin is dict and isinstance(value, dict):
        if inside[1] is Any:
            return {str(name): item for name, item in value.items()}
        return {str(name): _in_mapping(item, inside[1]) for name, item in value.items()}
    if origin is Literal and value in inside:
        return value
    if kind in SCALARS:
        return SCALARS[kind](value)
    raise ValueError


def _in_mapping(item: Any, kind: Any) -> Any:
    """Convert a value of a mapping, in which a text may be empty. Raises ValueError."""
    return "" if item == "" and kind is str else convert(item, kind)


def _convert_to_any(value: Any, kinds: tuple[Any, ...]) -> Any:
    """Convert `value` to the first of the types that accepts it. Raises ValueError.

    A number stays a number where text is accepted as well.
    """
    if type(value) in (int, float) and type(value) in kinds:
        return value
    for kind in kinds:
        try:
            return convert(value, kind)
        except ValueError:
            continue
    raise ValueError


def _null(value: Any) -> None:
    if value is not None:
        raise ValueError


def _bool(value: Any) -> bool:
    if str(value).lower() not in ("true", "false"):
        raise ValueError
    return str(value).lower() == "true"


def _number(value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    return value if isinstance(value, int) else float(value)


def _int(value: Any) -> int:
    number = _number(value)
    if number != int(number):
        raise ValueError
    return int(number)


def _float(value: Any) -> float:
    number = _number(value)
    if not math.isfinite(number):
        raise ValueError
    return float(number)


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value):
        raise ValueError
    return value if isinstance(value, str) else str(value)


SCALARS: dict[Any, Callable[[Any], Any]] = {
    NoneType: _null,
    bool: _bool,
    int: _int,
    float: _float,
    str: _text,
}


def wrong_with(value: Any, f: Field) -> str | None:
    """Return the reason why a converted value is not among its choices or in bounds, or None."""
    if value is None:
        return None
    items = value if isinstance(value, list) else [value]
    choices, kind = f.metadata["choices"], f.metadata["part"]
    others = [item for item in items if choices and item not in choices]
    if kind and others:
        return why_no_choice(kind, str(others[0]), f)
    if others:
        return f"is not one of: {limits(f)}"
    if any(_is_out_of_bounds(item, f) for item in items if not isinstance(item, bool | str)):
        return f"must be {limits(f)}" + (", or null" if NoneType in get_args(f.type) else "")
    return None


def why_no_choice(kind: str, name: str, f: Field) -> str | None:
    """Return the reason why a value is neither a choice nor a part of the user's own, or None."""
    reason = why_no_part(kind, name)
    if reason is None or ":" in name:
        return reason
    return f"is not one of: {', '.join([limits(f), *own_names(kind)])}"


def _is_out_of_bounds(number: Any, f: Field) -> bool:
    low, above, high = (f.metadata[name] for name in ("minimum", "above", "maximum"))
    if low is not None and number < low:
        return True
    if above is not None and number <= above:
        return True
    return high is not None and number > high


def build(cls: Any, tree: dict[str, Any], report: Report, prefix: str = "") -> Any:
    """Build the dataclass `cls` from a composed tree, with defaults for keys that are not in it.

    Adds a problem to the report for each wrong value.
    """
    values = {}
    for f in fields(cls):
        key = prefix + f.name
        if is_dataclass(f.type):
            values[f.name] = build(f.type, tree.get(f.name) or {}, report, key + ".")
            continue
        values[f.name] = default_of(f)
        raw = tree.get(f.name, values[f.name])
        try:
            values[f.name] = convert(raw, f.type)
        except (ValueError, OverflowError):
            in_file = isinstance(raw, bool) and takes_text(f.type) and key not in report.typed
            report.add(key, raw, wrong_type(key, raw, f, YAML_BOOL if in_file else ""))
            continue
        problem = wrong_with(values[f.name], f)
        if problem:
            report.add(key, raw, f"{problem}{_meant(key, raw, f)}\n{f.metadata['text']}")
            if f.metadata["part"]:  # rules ask the part that is chosen
                values[f.name] = default_of(f)
    return cls(**values)


def wrong_type(key: str, value: Any, f: Field, note: str = "") -> str:
    """Return the reason why a value cannot be converted, followed by `note`."""
    if f.metadata["choices"]:
        reason = f"is not one of: {limits(f)}"
    else:
        reason = f"must be {describe(f.type)}" + (f", {limits(f)}" if limits(f) else "")
    if value == "":
        reason = "is empty: leave it out, or write null where that is allowed"
    reason += _meant(key, value, f) + note
    if value is None:
        default = default_of(f)
        reason += f"\nleave it out, or write  {key}={as_text(default)}"
    return f"{reason}\n{f.metadata['text']}"


def other_unit(key: str, value: Any) -> str:
    """Return the override for a share that was written as steps, or steps as a share; else ""."""
    try:
        number = _float(value)
    except (ValueError, OverflowError):
        return ""
    if key == "schedule.warmup_steps" and 0 < number < 1:
        return f"schedule.warmup={number:g}"
    if key == "schedule.warmup" and number > 1 and number.is_integer():
        return f"schedule.warmup_steps={number:.0f}"
    return ""


def _meant(key: str, value: Any, f: Field) -> str:
    if other := other_unit(key, value):
        return f"\nDid you mean  {other} ?"
    if f.metadata["choices"] and absent(str(value)):
        return f"\n{textwrap.fill(absent(str(value)), 90, break_on_hyphens=False)}"
    if not f.metadata["choices"] or isinstance(value, list):
        return ""
    meant = choice_meant(value, f.metadata["choices"])
    return f"\nDid you mean  {key}={as_text(meant)} ?" if meant is not None else ""


def flatten(cls: Any, prefix: str = "") -> dict[str, Field]:
    """Return the fields of a primary configuration by dotted key, in the order of the schema."""
    keys: dict[str, Field] = {}
    for f in fields(cls):
        if is_dataclass(f.type):
            keys |= flatten(f.type, f"{prefix}{f.name}.")
        else:
            keys[prefix + f.name] = f
    return keys
