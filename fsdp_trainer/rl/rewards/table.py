"""All rewards by name, and construction of those in a configuration. Imports no torch."""

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import Field, fields
from typing import Any

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.config.check import as_text, convert
from fsdp_trainer.config.entries import wrong_part
from fsdp_trainer.config.names import nearest
from fsdp_trainer.config.parts.own_parts import built_in, own_names, usable_part, why_no_part
from fsdp_trainer.errors import UserError
from fsdp_trainer.rl.rewards.reward import FunctionReward, Reward

KEY, PART = "objective.rewards", "reward"
REWARDS: dict[str, type[Reward]] = built_in(PART)
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


def make_rewards(entries: Sequence[str | Json]) -> list[Reward]:
    problems = list(entry_problems(entries, runs_files=True))
    if problems:
        reason = "\n".join(problems)
        raise UserError("the rewards cannot be used", f"{KEY}={as_text(list(entries))}", reason)
    return [_make(entry) for entry in entries]


def entry_problems(entries: Sequence[str | Json], runs_files: bool = False) -> Iterator[str]:
    """Yield an error message for each problem of objective.rewards.

    runs_files: whether settings of rewards in files of the user's are checked, which runs these.
    """
    titles: set[str] = set()
    for entry in entries:
        problems = list(_problems_of(entry, runs_files))
        yield from problems
        if problems:
            continue
        parts = _parts_of(entry)
        title = parts.get("label") or parts["name"].rpartition(":")[2]
        if title in titles:
            yield f"{title} is listed twice: give one a label, as in  {{name: {title}, label: b}}"
        titles.add(title)


def names_of_code(entries: Sequence[str | Json]) -> list[str]:
    names = [str(_parts_of(entry).get("name")) for entry in entries]
    return [name for name in names if ".py:" in name]


def _problems_of(entry: str | Json, runs_files: bool) -> Iterator[str]:
    parts = _parts_of(entry)
    name = parts.pop("name", None)
    if name is None:
        yield f"{as_text(entry)}  lacks a name, as in  {{name: number, weight: 0.5}}"
        return
    if reason := _why_no_reward(str(name)):
        yield reason
        return
    if ".py:" in name and not runs_files:
        return
    wrong = [reason for part in parts if (reason := _wrong_part(name, part, parts[part]))]
    yield from wrong
    if not wrong:
        problem = _make(entry).wrong_parts()
        if problem:
            yield f"{name}: {problem}"


def _why_no_reward(name: str) -> str | None:
    known = [*REWARDS, *own_names(PART)]
    if ".py:" in name:
        return why_no_part(PART, name)
    if name in known:
        return None
    close = SYNONYMS.get(name.lower()) or nearest(name, known)
    meant = f" Did you mean  {close} ?" if close else ""
    return f"{name}: there is no such reward.{meant}\nThere are: {' '.join(known)}"


def _wrong_part(name: str, part: str, value: Any) -> str | None:
    if part == "label" and value is not None and not LABEL.fullmatch(str(value)):
        return f"label: {as_text(value)}  has letters, digits and  _ . -  only"
    return wrong_part(part, value, _known_parts(name), f"part of the reward {name}")


def _known_parts(name: str) -> dict[str, Field | None]:
    """Return the keys of a reward with their fields; None for a function's untyped parameter."""
    kind = _code_of(name)
    of_class = kind if isinstance(kind, type) else Reward
    known: dict[str, Field | None] = {f.name: f for f in fields(of_class) if f.metadata}
    if of_class is kind:
        return known
    parameters = list(inspect.signature(kind).parameters.values())[1:]
    return known | {parameter.name: None for parameter in parameters}


def _code_of(name: str) -> Any:
    return REWARDS.get(name) or usable_part(PART, name)


def _parts_of(entry: str | Json) -> Json:
    return dict(entry) if isinstance(entry, dict) else {"name": entry}


def _make(entry: str | Json) -> Reward:
    parts = _parts_of(entry)
    name = parts.pop("name")
    known = _known_parts(name)
    for part, about in known.items():
        if part in parts and about is not None:
            parts[part] = convert(parts[part], about.type)
    kind = _code_of(name)
    if isinstance(kind, type):
        return kind(**parts)
    common = {part: parts.pop(part) for part in ("weight", "label") if part in parts}
    title, options = name.rpartition(":")[2], tuple(parts.items())
    return FunctionReward(**common, function=kind, registered_as=title, options=options)
