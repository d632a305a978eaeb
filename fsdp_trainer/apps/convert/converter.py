"""Settings of another trainer to a recipe, with an answer to each of them."""

import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from fsdp_trainer.apps.convert.foreign_file import ForeignFile
from fsdp_trainer.apps.convert.meanings import BATCH, RULES, SECTIONS, Rule, option, rows
from fsdp_trainer.apps.convert.translation import (
    IMPOSSIBLE,
    NOTHING,
    TRANSLATED,
    UNSET,
    Answer,
    as_number,
    impossible,
    is_off,
    nothing,
    sets,
)
from fsdp_trainer.config.check import flatten
from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.config.names import known_elsewhere
from fsdp_trainer.config.schema import GROUPS, TrainConfig
from fsdp_trainer.errors import Problem, UserError

NO_FILE = ForeignFile(Path(), "", {})
UNKNOWN = "no setting with this meaning is known here; docs/configuration.md lists all"
MOST_ROUNDS = 30
"""Attempts to compose the recipe, each without the settings that the last one was refused for."""
SHOWN = 70


@dataclass
class Conversion:
    """The answers to a file's settings, by name in its order."""

    file: ForeignFile
    answers: dict[str, Answer] = field(default_factory=dict)
    open: list[Problem] = field(default_factory=list)
    """What the recipe is still refused for."""

    def values(self) -> dict[str, tuple[Any, list[str]]]:
        """Return our keys and groups with their values, and the settings that decided each."""
        decided: dict[str, tuple[Any, list[str]]] = {}
        for name, answer in self.answers.items():
            for key, value in answer.sets.items():
                _, by = decided.get(key, (None, []))
                kept = decided[key][0] if key in decided and not _is_stronger(key, value) else value
                decided[key] = kept, [*by, name]
        return decided

    def of_kind(self, kind: str) -> dict[str, Answer]:
        """Return the answers of one kind."""
        return {name: answer for name, answer in self.answers.items() if answer.kind == kind}


def _is_stronger(key: str, value: Any) -> bool:
    """Return True if a later setting replaces an earlier one: qlora lora, fp16 nothing."""
    return (key, value) in [("adapter", "qlora"), ("adapter", "dora"), ("precision", "bf16")]


def convert(file: ForeignFile, ranks: int) -> Conversion:
    """Return an answer to each setting, with which the recipe can be composed."""
    result = Conversion(file, {name: answer(name, value, file, ranks)
                               for name, value in file.settings.items()})  # fmt: skip
    for _ in range(MOST_ROUNDS):
        refused = problems_of(result)
        if not any(_take_back(result, problem) for problem in refused):
            result.open = refused
            break
    return result


def answer(name: str, value: Any, file: ForeignFile, ranks: int) -> Answer:
    """Return what becomes of a setting."""
    if value in UNSET:
        return nothing("not set")
    if value == "auto" and file.tool in ("DeepSpeed", "accelerate"):
        return nothing("the trainer that starts DeepSpeed decides it")
    if name in BATCH or (name == "batch_size" and file.tool == "torchtune"):
        return rows(value, file, ranks)
    if name.rpartition(".")[2] in ("gradient_accumulation_steps", "gradient_accumulation"):
        return nothing("in  batch.rows")
    rule = rule_of(name)
    if rule:
        try:
            return rule(as_number(value), file)
        except (ValueError, TypeError, KeyError, AttributeError, OSError):
            return impossible(f"{value!r} is not a value that is understood; set it by hand")
    return by_name(name, value)


def rule_of(name: str) -> Rule | None:
    """Return the rule for a setting: of its name, of its last part, or of its section."""
    of_section = (rule for section, rule in SECTIONS.items() if name.startswith(section))
    return RULES.get(name) or next(of_section, None) or RULES.get(name.rpartition(".")[2])


def by_name(name: str, value: Any) -> Answer:
    """Return the meaning of a setting that keeps its value, by its name or names.yaml."""
    if own := own_key(name):
        return sets(**{own: as_number(value)})
    known = known_elsewhere(name)
    if known is None:
        return nothing("off") if is_off(value) else impossible(UNKNOWN)
    if known.sentence:
        if is_off(value):
            return nothing("off")
        said = " ".join(known.sentence.split())
        return impossible(said) if known.missing else nothing(said)
    key, _, stated = known.meant.partition("=")
    if stated:
        return option({key: yaml.safe_load(stated)})(value, NO_FILE)
    return _kept(key, value)


def _kept(key: str, value: Any) -> Answer:
    """Return that our key has the same value."""
    if value == "auto":
        return nothing(f"`auto`:  {key}  has a default")
    if isinstance(value, bool) and not takes_switch(key):
        return impossible(f"it is said by  {key}") if value else nothing("off")
    return sets(**{key: as_number(value)})


@cache
def keys() -> dict[str, Any]:
    """Return our keys with their descriptions."""
    return flatten(TrainConfig)


def own_key(name: str) -> str | None:
    """Return our key of the same name, if it is the only one, or that of an optimizer's part."""
    section, _, leaf = name.rpartition(".")
    if name in keys():
        return name
    found = [key for key in keys() if key.rpartition(".")[2] == leaf]
    if section.startswith("optimizer"):
        return f"optim.{leaf}" if f"optim.{leaf}" in found else None
    return found[0] if len(found) == 1 and not section else None


def takes_switch(key: str) -> bool:
    """Return True if a key or group may be true or false."""
    return key in keys() and "bool" in str(keys()[key].type)


def problems_of(result: Conversion) -> list[Problem]:
    """Return what the recipe is refused for, as `train` would refuse it on another machine."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(settings_text(result), encoding="utf-8")
        try:
            compose("train", [f"+recipe={file}"], inputs=False)
        except UserError as error:
            return error.problems
    return []


def _take_back(result: Conversion, problem: Problem) -> bool:
    """Answer that a setting is not possible, if the problem names what it sets."""
    for name, each in result.answers.items():
        for key in each.sets:
            named = problem.what.partition("=")[0]
            is_group = f"override /{key}:" in problem.what + problem.reason
            if key == named or is_group or problem.reason.startswith(f"{key} "):
                reason = problem.reason.split("\n(set in")[0].removeprefix(f"{key}  ")
                said = f"{key}={each.sets[key]}  {' '.join(reason.split())}"
                result.answers[name] = impossible(said)
                return True
    return False


def settings_text(result: Conversion) -> str:
    """Return the part of a recipe that sets something."""
    values = result.values()
    chosen = [key for key in values if key in GROUPS]
    lines = ["defaults:"] if chosen else []
    told: set[str] = set()
    for key in chosen:
        lines.append(_line(f"  - override /{key}: ", values[key], result, told))
    tree: dict[str, list[str]] = {}
    for key in values:
        if key not in GROUPS:
            tree.setdefault(key.rpartition(".")[0], []).append(key)
    for section, keys in tree.items():
        lines += ["", f"{section}:"] if section else [""]
        for key in keys:
            indent = "  " if section else ""
            leaf = key.rpartition(".")[2]
            lines.append(_line(f"{indent}{leaf}: ", values[key], result, told))
    return "\n".join(lines) + "\n"


def _line(front: str, decided: tuple[Any, list[str]], result: Conversion, told: set[str]) -> str:
    """told: settings that an earlier line has shown, which are only named again."""
    value, names = decided
    said = []
    for name in names:
        note = " ".join(result.answers[name].note.split())
        whole = f"{name}: {shown(result.file.settings[name])}" + (f" ({note})" if note else "")
        said.append(name if name in told else whole)
    told.update(names)
    return f"{front}{as_yaml(value)}  # {'; '.join(said)}"


def as_yaml(value: Any) -> str:
    """Return a value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...").strip()


def shown(value: Any) -> str:
    """Return a value on one line, cut if it is long."""
    text = as_yaml(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def recipe_text(result: Conversion) -> str:
    """Return the recipe, with a line for each setting that sets nothing."""
    counts = {kind: len(result.of_kind(kind)) for kind in (TRANSLATED, NOTHING, IMPOSSIBLE)}
    name = result.file.path.name
    lines = [
        "# @package _global_",
        f"# Converted from {result.file.tool}'s {name}: {len(result.answers)} settings,"
        f" {counts[TRANSLATED]} translated, {counts[NOTHING]} without a meaning here,"
        f" {counts[IMPOSSIBLE]} not possible.",
        "#",
        "#   fsdp-trainer train THIS_FILE.yaml data.path=…",
        "",
        settings_text(result),
    ]
    for kind, title in ((NOTHING, "Nothing to set:"), (IMPOSSIBLE, "Not possible as it is:")):
        answers = result.of_kind(kind)
        if answers:
            lines += [f"# {title}", "#"]
        by_note: dict[str, list[str]] = {}
        for setting, each in answers.items():
            by_note.setdefault(each.note, []).append(setting)
        for note, names in by_note.items():
            lines += [f"#   {name}: {shown(result.file.settings[name])}" for name in names]
            lines.append(f"#       {' '.join(note.split())}")
        lines += ["#"] if answers else []
    for problem in result.open:
        reason = " ".join(problem.reason.split())
        lines.append(f"# To be settled before it trains: {problem.what}  {reason}")
    return "\n".join(lines).rstrip("#\n ") + "\n"
