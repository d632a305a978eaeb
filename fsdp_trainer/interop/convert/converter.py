"""Settings of another trainer to a recipe, with an answer to each of them."""

import math
import re
import tempfile
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.base.safe_text import visible
from fsdp_trainer.config.check import flatten
from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.config.names import SURE, known_elsewhere, nearest, table
from fsdp_trainer.config.schema import GROUPS, TrainConfig
from fsdp_trainer.config.yaml_text import load_yaml
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.interop.convert import trl
from fsdp_trainer.interop.convert.counted_samples import counted
from fsdp_trainer.interop.convert.data_sets import answers_to_lists
from fsdp_trainer.interop.convert.defaults import AROUND, with_defaults
from fsdp_trainer.interop.convert.foreign_file import ForeignFile
from fsdp_trainer.interop.convert.meanings import RULES, SECTIONS, clipping, rows
from fsdp_trainer.interop.convert.named_data import answers_to_names, entries_of_index
from fsdp_trainer.interop.convert.same_training import comparison, shown_name, trained_parameters
from fsdp_trainer.interop.convert.trainers import TRAINER
from fsdp_trainer.interop.convert.translation import (
    IMPOSSIBLE,
    NOTHING,
    TRANSLATED,
    UNSET,
    Answer,
    Rule,
    as_number,
    impossible,
    is_off,
    is_on,
    nothing,
    option,
    sets,
)
from fsdp_trainer.training.setup.run_length import RunLength

NO_FILE = ForeignFile(Path(), "", {})
UNKNOWN = "no setting with this meaning is known here; docs/configuration.md lists all"
MOST_ROUNDS = 30
"""Attempts to compose the recipe, each without the settings that the last one was refused for."""
SOME_REWARD = "objective.rewards=[number]"
"""What files of GRPO have as code: with any other reward the run is as long."""
SHOWN = 70
FILLED_IN = re.compile(r"\$\{")
"""What begins a part of a text that stands for another value."""


@dataclass
class Conversion:
    """The answers to a file's settings, by name in its order."""

    file: ForeignFile
    answers: dict[str, Answer] = field(default_factory=dict)
    open: list[Problem] = field(default_factory=list)
    """What the recipe is still refused for."""
    cfg: TrainConfig | None = None
    """The recipe's configuration, if it is not refused for more than its rewards."""

    def values(self) -> dict[str, tuple[Any, list[str]]]:
        decided: dict[str, tuple[Any, list[str]]] = {}
        for name, answer in self.answers.items():
            for key, value in answer.sets.items():
                _, by = decided.get(key, (None, []))
                stays = key in decided and (key, value) not in STRONGER
                decided[key] = decided[key][0] if stays else value, [*by, name]
        return decided

    def length(self) -> RunLength | None:
        """Return the length of the recipe's run; None if the recipe is refused."""
        cfg, file = self.cfg, self.file
        if cfg is None:
            return None
        is_counted = cfg.data.packing == "none" or cfg.objective.method.samples
        rows = (file.samples or 0) if is_counted and cfg.data.validation is None else 0
        return RunLength(cfg.train, cfg.batch, cfg.optim, cfg.schedule, rows)

    def comparison(self) -> list[tuple[str, str, str]]:
        """Return the table of what is trained there and here; [] if the recipe is refused."""
        cfg, file, length = self.cfg, self.file, self.length()
        if cfg is None or length is None:
            return []
        trained = trained_parameters(cfg.model, cfg.adapter, file.method)
        template = cfg.data.template or "the tokenizer's template"
        around = [("text around a prompt", "none", template)] if AROUND in file.implied else []
        return comparison(length, trained, file) + around

    def of_kind(self, kind: str) -> dict[str, Answer]:
        return {name: answer for name, answer in self.answers.items() if answer.kind == kind}


STRONGER = [("adapter", "qlora"), ("adapter", "dora"), ("precision", "bf16"), ("objective", "ipo"),
            ("sharding", "hsdp"), ("sharding", "ddp"), ("optim.offload", "disk")]  # fmt: skip
"""Values that replace those of earlier settings: qlora lora, HYBRID_SHARD FSDP."""


def convert(file: ForeignFile, ranks: int) -> Conversion:
    result = first_answers(file, ranks)
    for _ in range(MOST_ROUNDS):
        done = composed(result)
        if isinstance(done, TrainConfig):
            return replace(result, cfg=done)
        if not any(_take_back(result, problem) for problem in done):
            settled = composed(result, SOME_REWARD)
            cfg = settled if isinstance(settled, TrainConfig) else None
            return replace(result, open=done, cfg=cfg)
    return result


def first_answers(file: ForeignFile, ranks: int) -> Conversion:
    """Return an answer to each setting, whatever the recipe is refused for."""
    of_index = dict(entries_of_index(file.path, file.settings))
    settings, ranks = file.settings | of_index, max(ranks, file.ranks)
    file = with_defaults(replace(file, settings=settings, ranks=ranks))
    result = Conversion(file, answers_to(file))
    if data := result.values().get("data.path"):
        file = counted(file, data[0])
        result = Conversion(file, answers_to(file))
    _settle_conflicts(result)
    return result


def answers_to(file: ForeignFile) -> dict[str, Answer]:
    of_data = answers_to_lists(file) | answers_to_names(file)
    return {name: of_data.get(name) or answer(name, value, file)
            for name, value in file.settings.items()}  # fmt: skip


def _settle_conflicts(result: Conversion) -> None:
    """Say of settings that contradict an earlier one that they are not kept."""
    decided: dict[str, tuple[str, Any]] = {}
    for name, each in result.answers.items():
        for key, value in each.sets.items():
            first, before = decided.get(key, (name, value))
            is_stronger = (key, value) in STRONGER or (key, before) in STRONGER
            if before != value and not is_stronger and name in result.file.implied:
                result.answers[name] = nothing(f"{named(first)}  says it")
                break
            if before != value and not is_stronger:
                said = f"{key}={as_yaml(before)}  of  {named(first)}  is kept"
                result.answers[name] = impossible(said)
                break
        else:
            decided = {key: (name, value) for key, value in each.sets.items()} | decided


def answer(name: str, value: Any, file: ForeignFile) -> Answer:
    leaf = name.rpartition(".")[2]
    has_null = RULES.get(leaf) is clipping or (
        leaf == "max_completion_length" and file.method == "grpo"
    )
    if value in UNSET and not has_null:
        return nothing("not set")
    if value == "auto" and file.tool in ("DeepSpeed", "accelerate"):
        return nothing("the trainer that starts DeepSpeed decides it")
    try:
        return answer_by_rule(name, as_number(value), file) or by_name(name, value)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, OSError,
            RecursionError):  # fmt: skip
        return impossible(f"{shown(value)} is not a value that is understood; set it by hand")


def answer_by_rule(name: str, value: Any, file: ForeignFile) -> Answer | None:
    if name == "batch_size" and file.tool == "torchtune":
        return rows(value, file)
    rule = trl.rule_of(name, file) or rule_of(name)
    return rule(value, file) if rule else None


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
        return nothing("off") if is_off(value) else impossible(f"{UNKNOWN}{meant_instead(name)}")
    if known.sentence:
        if is_off(value):
            return nothing("off")
        said = " ".join(known.sentence.split())
        return impossible(said) if known.missing or known.by_hand else nothing(said)
    key, _, stated = known.meant.partition("=")
    if not stated:
        return _kept(key, value)
    if not is_off(value) and not is_on(value):
        return impossible(f"it is said by  {known.meant}")
    return option(known.meant)(value, NO_FILE)


def meant_instead(name: str) -> str:
    """Return a question for a setting that is close to a known one; "" if none is."""
    leaf = name.rpartition(".")[2]
    every = {*RULES, *table().exact, *(key.rpartition(".")[2] for key in keys())}
    close = nearest(leaf, (one for one in every if "." not in one), SURE)
    return f". Is  {close}  meant?" if close else ""


def _kept(key: str, value: Any) -> Answer:
    if value == "auto":
        return nothing(f"`auto`:  {key}  has a default")
    if isinstance(value, bool) and not takes_switch(key):
        return impossible(f"it is said by  {key}") if value else nothing("off")
    return sets(**{key: as_number(value)})


@cache
def keys() -> Json:
    return flatten(TrainConfig)


def own_key(name: str) -> str | None:
    """Return our key of the same name, if it is the only one, or that of an optimizer's part."""
    section, _, leaf = name.rpartition(".")
    if name in keys():
        return name
    matches = [key for key in keys() if key.rpartition(".")[2] == leaf
             and not key.startswith("objective.")]  # fmt: skip
    if section.startswith("optimizer"):
        return f"optim.{leaf}" if f"optim.{leaf}" in matches else None
    return matches[0] if len(matches) == 1 and not section else None


def takes_switch(key: str) -> bool:
    return key in keys() and "bool" in str(keys()[key].type)


def composed(result: Conversion, *words: str) -> TrainConfig | list[Problem]:
    """Return the recipe's configuration, or what `train` refuses it for, on any machine."""
    for key, (value, _) in result.values().items():
        if FILLED_IN.search(as_yaml(value)):
            reason = "holds  ${…} , in whose place something else would be read"
            return [Problem(key, reason)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(settings_text(result), encoding="utf-8")
        try:
            return compose("train", [f"+recipe={file}", *words], inputs=False)
        except UserError as error:
            return error.problems


def _take_back(result: Conversion, problem: Problem) -> bool:
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
        note = one_line(result.answers[name].note)
        whole = f"{named(name)}: {shown(result.file.settings[name])}"
        whole += " by default" if name in result.file.implied and name[0] != "(" else ""
        said.append(named(name) if name in told else whole + (f" ({note})" if note else ""))
    told.update(names)
    return f"{front}{as_yaml(value)}  # {'; '.join(said)}"


class _OneLine(yaml.SafeDumper):
    """Writes texts with line breaks and control characters as JSON does, escaped in quotes."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True: what is repeated is written again."""
        return True


def _represented(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_OneLine.add_representer(str, _represented)


def as_yaml(value: Any) -> str:
    text = yaml.dump(value, Dumper=_OneLine, default_flow_style=True, width=math.inf,
                     allow_unicode=True)  # fmt: skip
    return visible(text.removesuffix("\n").removesuffix("\n...").strip())


def one_line(text: str) -> str:
    return visible(" ".join(text.split()))


def named(name: str) -> str:
    """Return the name of a setting: as YAML if it has characters that end a line or are hidden."""
    return name if name.isprintable() else as_yaml(name)


def shown(value: Any) -> str:
    text = as_yaml(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def recipe_text(result: Conversion) -> str:
    """Return the recipe, with a line for each setting that sets nothing, and the comparison.

    Raises UserError if it would be read as anything else than what it sets.
    """
    settings = settings_text(result)
    lines = [*head(result), settings]
    lines += [*not_set(result, NOTHING, "Nothing to set:"),
              *not_set(result, IMPOSSIBLE, "Not possible as it is:")]  # fmt: skip
    for problem in result.open:
        settled = one_line(f"{problem.what}  {problem.reason}")
        lines.append(f"# To be settled before it trains: {settled}")
    table = result.comparison()
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines += ["#"] * bool(result.open) + ["# The same training?", "#"] if table else []
    lines += ["#   " + "   ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    text = "\n".join(lines).rstrip("#\n ") + "\n"
    read = read_back(text)
    if read is None or as_yaml(read) != as_yaml(read_back(settings)):
        raise UserError(
            "nothing is converted", str(result.file.path), "has settings that a recipe cannot hold"
        )
    return text


def head(result: Conversion) -> list[str]:
    """Return the first lines of a recipe: what it was made of, and how it is used."""
    file = result.file
    own = [each for name, each in result.answers.items() if name not in {*file.implied, TRAINER}]
    counts = {kind: sum(each.kind == kind for each in own)
              for kind in (TRANSLATED, NOTHING, IMPOSSIBLE)}  # fmt: skip
    path = "" if "data.path" in result.values() else " data.path=…"
    return [
        "# @package _global_",
        f"# Converted from {named(file.path.name)} ({shown_name(file)}): {len(own)} settings,"
        f" {counts[TRANSLATED]} translated, {counts[NOTHING]} without a meaning here,"
        f" {counts[IMPOSSIBLE]} not possible; {len(file.implied)} defaults.",
        "#",
        f"#   fsdp-trainer prove THIS_FILE.yaml{path}     # a small copy of it, on any machine",
        f"#   fsdp-trainer train THIS_FILE.yaml{path}",
        "",
    ]


def not_set(result: Conversion, kind: str, title: str) -> list[str]:
    """Return lines about the settings with one kind of answer; defaults without a meaning aside."""
    file, lines = result.file, []
    by_note: dict[str, list[str]] = {}
    for name, each in result.of_kind(kind).items():
        if kind == IMPOSSIBLE or name not in file.implied:
            by_note.setdefault(each.note, []).append(name)
    for note, names in by_note.items():
        lines += [f"#   {named(name)}: {shown(file.settings[name])}"
                  f"{' by default' if name in file.implied else ''}" for name in names]  # fmt: skip
        lines.append(f"#       {one_line(note)}")
    return [f"# {title}", "#", *lines, "#"] if lines else []


def read_back(text: str) -> Any:
    try:
        return load_yaml(text) or {}
    except yaml.YAMLError:
        return None
