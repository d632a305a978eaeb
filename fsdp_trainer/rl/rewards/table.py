"""All rewards by name, and construction of those in a configuration. Imports no torch."""

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import Field, fields
from typing import Any

from fsdp_trainer.config.check import as_text, convert
from fsdp_trainer.config.entries import wrong_part
from fsdp_trainer.config.names import nearest
from fsdp_trainer.errors import UserError
from fsdp_trainer.extensions import REWARDS as REGISTERED
from fsdp_trainer.rl.rewards.code import Code
from fsdp_trainer.rl.rewards.exact import Exact
from fsdp_trainer.rl.rewards.http import Http
from fsdp_trainer.rl.rewards.length import Length
from fsdp_trainer.rl.rewards.model import ModelReward
from fsdp_trainer.rl.rewards.number import Number
from fsdp_trainer.rl.rewards.regex import Regex
from fsdp_trainer.rl.rewards.reward import FunctionReward, Reward

REWARDS: dict[str, type[Reward]] = {
    kind.name: kind for kind in (Exact, Number, Regex, Length, Code, Http, ModelReward)
}
SYNONYMS = {
    "exact_match": "exact", "equal": "exact", "match": "exact", "accuracy": "exact",
    "math": "number", "numeric": "number", "gsm8k": "number", "boxed": "number",
    "regexp": "regex", "pattern": "regex", "format": "regex",
    "python": "code", "unit_test": "code", "unit_tests": "code", "tests": "code",
    "url": "http", "https": "http", "server": "http", "remote": "http",
    "reward_model": "model", "rm": "model", "classifier": "model",
    "overlong": "length", "soft_overlong": "length", "len": "length",
}  # fmt: skip
"""Names that users may type instead, for the hint in the error message."""
LABEL = re.compile(r"[\w.-]+")


def make_rewards(entries: Sequence[str | dict[str, Any]]) -> list[Reward]:
    problems = list(entry_problems(entries))
    if problems:
        reason = "\n".join(problems)
        raise UserError(
            "the rewards cannot be used", f"objective.rewards={as_text(list(entries))}", reason
        )
    return [_make(entry) for entry in entries]


def entry_problems(entries: Sequence[str | dict[str, Any]]) -> Iterator[str]:
    titles: set[str] = set()
    for entry in entries:
        problems = list(_problems_of(entry))
        yield from problems
        if problems:
            continue
        title = _make(entry).title
        if title in titles:
            yield f"{title} is listed twice: give one a label, as in  {{name: {title}, label: b}}"
        titles.add(title)


def names() -> list[str]:
    return [*REWARDS, *REGISTERED]


def _problems_of(entry: str | dict[str, Any]) -> Iterator[str]:
    parts = _parts_of(entry)
    name = parts.pop("name", None)
    if name is None:
        yield f"{as_text(entry)}  lacks a name, as in  {{name: number, weight: 0.5}}"
        return
    if name not in names():
        close = SYNONYMS.get(str(name).lower()) or nearest(str(name), names())
        meant = f" Did you mean  {close} ?" if close else ""
        yield f"{name}: there is no such reward.{meant}\nThere are: {' '.join(names())}"
        return
    wrong = [reason for part in parts if (reason := _wrong_part(name, part, parts[part]))]
    yield from wrong
    if not wrong:
        problem = _make(entry).wrong_parts()
        if problem:
            yield f"{name}: {problem}"


def _wrong_part(name: str, part: str, value: Any) -> str | None:
    """Return the error message for one key of an entry; None if it is valid."""
    if part == "label" and value is not None and not LABEL.fullmatch(str(value)):
        return f"label: {as_text(value)}  has letters, digits and  _ . -  only"
    return wrong_part(part, value, _known_parts(name), f"part of the reward {name}")


def _known_parts(name: str) -> dict[str, Field | None]:
    """Return the keys of a reward with their fields; None for a function's untyped parameter."""
    if name in REWARDS:
        return {field.name: field for field in fields(REWARDS[name]) if field.metadata}
    own: dict[str, Field | None] = {field.name: field for field in fields(Reward)}
    parameters = list(inspect.signature(REGISTERED[name]).parameters.values())[1:]
    return own | {parameter.name: None for parameter in parameters}


def _parts_of(entry: str | dict[str, Any]) -> dict[str, Any]:
    return dict(entry) if isinstance(entry, dict) else {"name": entry}


def _make(entry: str | dict[str, Any]) -> Reward:
    parts = _parts_of(entry)
    name = parts.pop("name")
    known = _known_parts(name)
    for part, about in known.items():
        if part in parts and about is not None:
            parts[part] = convert(parts[part], about.type)
    if name in REWARDS:
        return REWARDS[name](**parts)
    common = {part: parts.pop(part) for part in ("weight", "label") if part in parts}
    options = tuple(parts.items())
    return FunctionReward(**common, function=REGISTERED[name], registered_as=name, options=options)
