"""Is every value what its key takes. Problems are collected, so that all of them can be told at once."""

import math
import re
import textwrap
from dataclasses import Field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from fsdp_trainer.config.names import absent, choice_meant
from fsdp_trainer.config.schema import default_of
from fsdp_trainer.errors import Problem, UserError

KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    NoneType: "null",
    dict: "a mapping such as {a: b}",
}


class Report:
    """Everything that is wrong, each problem shown as the user wrote it: from the command line, else with the file that set it.

    typed: key → the argument that set it. settled: keys with a problem already; what follows from it is not told.
    """

    def __init__(self, typed: dict[str, str], problems: list[Problem], settled: set[str]):
        self.typed, self.problems, self.settled = typed, problems, settled
        self.origins: dict[str, str] = {}  # key → the file that set it

    def add(self, key: str, value: Any, why: str) -> None:
        """`key` has a `value` that cannot stay."""
        if key not in self.settled:
            where = (
                ""
                if key in self.typed or key not in self.origins
                else f"\n(set in {self.origins[key]})"
            )
            self.problems.append(Problem(self.typed.get(key, f"{key}={show(value)}"), why + where))
            self.settled.add(key)

    def close(self) -> None:
        """Raise a UserError with everything that is wrong, if anything is."""
        if self.problems:
            count = "a problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
            raise UserError(f"{count} in the configuration", self.problems)


def value_of(cfg: Any, key: str) -> Any:
    """Return the value of a dotted key; None where the configuration has no such key."""
    for name in key.split("."):
        cfg = getattr(cfg, name, None)
    return cfg


def show(value: Any) -> str:
    """A value as it is written in an override."""
    if isinstance(value, list):
        return f"[{','.join(map(show, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {show(item)}" for name, item in value.items()) + "}"
    if value is None:
        return "null"
    if isinstance(value, float) and 0 < abs(value) < 1e-3:
        return re.sub(r"e-0", "e-", f"{value:g}")
    return str(value).lower() if isinstance(value, bool) else str(value)


def describe(kind: Any) -> str:
    """A field's type in words."""
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
    """Whether a field's type has room for any text."""
    return str in (kind, *get_args(kind))


def limits(f: Field) -> str:
    """A field's choices or bounds in words; empty if there are none."""
    if f.metadata["choices"]:
        return ", ".join(map(show, f.metadata["choices"]))
    words = {"minimum": "at least", "above": "above", "maximum": "at most"}
    return ", ".join(
        f"{word} {f.metadata[name]:g}"
        for name, word in words.items()
        if f.metadata[name] is not None
    )


def convert(value: Any, kind: Any) -> Any:
    """`value` as the type `kind`. A number may come as text (from YAML, from the environment). Raises ValueError."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        for member in inside:
            try:
                return convert(value, member)
            except ValueError:
                continue
    elif kind is NoneType and value is None:
        return None
    elif origin is Literal and value in inside:
        return value
    elif origin is list and isinstance(value, list):
        return [convert(item, inside[0]) for item in value]
    elif origin is dict and isinstance(value, dict):
        return {
            str(name): item if inside[1] is Any else convert(item, inside[1])
            for name, item in value.items()
        }
    elif kind is bool and str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    elif (
        kind in (int, float)
        and isinstance(value, int | float | str)
        and not isinstance(value, bool)
    ):
        number = value if isinstance(value, int) else float(value)
        if kind is int and number == int(number):
            return int(number)
        if kind is float and math.isfinite(number):
            return float(number)
    elif (
        kind is str
        and isinstance(value, str | int | float)
        and not isinstance(value, bool)
        and str(value)
    ):
        return str(value)
    raise ValueError


def wrong_with(value: Any, f: Field) -> str | None:
    """Why a converted value is outside its field's choices or bounds."""
    choices, low, above, high = (
        f.metadata[name] for name in ("choices", "minimum", "above", "maximum")
    )
    if value is None:
        return None
    if choices and any(
        item not in choices for item in (value if isinstance(value, list) else [value])
    ):
        return f"is not one of: {limits(f)}"
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, bool | str):
            continue
        if (
            (low is not None and number < low)
            or (above is not None and number <= above)
            or (high is not None and number > high)
        ):
            return f"must be {limits(f)}" + (", or null" if NoneType in get_args(f.type) else "")
    return None


def build(cls: Any, tree: dict[str, Any], report: Report, prefix: str = "") -> Any:
    """The dataclass `cls` from a composed tree; what the tree does not say is the schema's default."""
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
            note = (
                "\n(YAML reads a bare on, off, yes or no as true or false: put it in quotes)"
                if in_file
                else ""
            )
            report.add(key, raw, wrong_type(key, raw, f, note))
            continue
        if why := wrong_with(values[f.name], f):
            report.add(key, raw, f"{why}{_meant(key, raw, f)}\n{f.metadata['text']}")
    return cls(**values)


def wrong_type(key: str, value: Any, f: Field, note: str = "") -> str:
    """Why a value cannot be converted. note: what is told beside it."""
    if f.metadata["choices"]:
        why = f"is not one of: {limits(f)}"
    else:
        why = f"must be {describe(f.type)}" + (f", {limits(f)}" if limits(f) else "")
    if value == "":
        why = "is empty: leave it out, or write null where that is allowed"
    why += _meant(key, value, f) + note
    if value is None:
        default = default_of(f)
        why += f"\nleave it out, or write  {key}={show(default)}"
    return f"{why}\n{f.metadata['text']}"


def _meant(key: str, value: Any, f: Field) -> str:
    if f.metadata["choices"] and absent(str(value)):
        return f"\n{textwrap.fill(absent(str(value)), 90, break_on_hyphens=False)}"
    meant = (
        choice_meant(value, f.metadata["choices"])
        if f.metadata["choices"] and not isinstance(value, list)
        else None
    )
    return f"\nDid you mean  {key}={show(meant)} ?" if meant is not None else ""


def flatten(cls: Any, prefix: str = "") -> dict[str, Field]:
    """Every key of a primary configuration, dotted, in the order of the schema."""
    found: dict[str, Field] = {}
    for f in fields(cls):
        found |= (
            flatten(f.type, f"{prefix}{f.name}.") if is_dataclass(f.type) else {prefix + f.name: f}
        )
    return found
