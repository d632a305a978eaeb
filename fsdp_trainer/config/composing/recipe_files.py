"""The user's own recipe files, and checks of their defaults.

Hydra looks for recipes in folders, and applies one to the whole configuration only if it has a line
`# @package _global_`. A file that is named by its path, or has no such line, is registered in
Hydra's ConfigStore as a recipe `NAME.own`, so that neither is needed.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from fsdp_trainer.config.check import as_text
from fsdp_trainer.config.composing.overrides import listed, quoted
from fsdp_trainer.config.names import absent, nearest, table
from fsdp_trainer.config.schema import GROUPS
from fsdp_trainer.config.yaml_text import YAML_FILE, Loader
from fsdp_trainer.errors import Problem, UserError

SUFFIX = ".own"
HEADER = re.compile(r"(?m)^#\s*@package\s+_global_\s*$")

OWN: dict[str, Path] = {}
"""Recipe files of this command line outside of Hydra's folders, by name in the ConfigStore."""


class YamlFile(NamedTuple):
    """The content of a YAML file, and the line of each dotted key.

    The key of an entry of a list ends in its index.
    """

    tree: Any
    lines: dict[str, int]


def read_yaml(path: Path) -> YamlFile:
    """Read a YAML file. Raises UserError with file and line if it is not YAML."""
    try:
        loader = Loader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        tree = loader.construct_document(node) if node else None
    except yaml.MarkedYAMLError as error:
        raise UserError("a problem in the configuration", [not_yaml(error, path)]) from None
    except (OSError, ValueError, yaml.YAMLError) as error:  # no text, or control characters
        raise UserError(
            "a problem in the configuration", str(path), f"is not YAML: {error}"
        ) from None
    lines: dict[str, int] = {}
    if node:
        _collect_lines(node, "", lines)
    return YamlFile(tree or {}, lines)


def not_yaml(error: yaml.MarkedYAMLError, path: Path | None = None) -> Problem:
    mark = error.problem_mark or error.context_mark
    if not mark:
        return Problem(str(path or "YAML"), f"is not YAML: {error.problem}")
    file = path or Path(mark.name)
    line = file.read_text().splitlines()[mark.line : mark.line + 1] if file.is_file() else []
    tab = "\nYAML is indented with spaces, and this line has a tab" if "\t" in "".join(line) else ""
    return Problem(f"{file}:{mark.line + 1}", f"is not YAML: {error.problem}{tab}")


def _collect_lines(node: yaml.Node, prefix: str, lines: dict[str, int]) -> None:
    if isinstance(node, yaml.MappingNode):
        entries = [(str(key.value), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        entries = [(str(i), value, value) for i, value in enumerate(node.value)]
    else:
        return
    for name, key, value in entries:
        lines[f"{prefix}{name}"] = key.start_mark.line + 1
        _collect_lines(value, f"{prefix}{name}.", lines)


def as_override(word: str) -> str:
    if not YAML_FILE.fullmatch(word):
        return word
    return f"+recipe={word}" if re.fullmatch(r"[\w./-]+", word) else f"+recipe={quoted(word)}"


def take_files(words: list[str], config_dir: str | None) -> list[str]:
    """Register recipe files among `words`; return the words with their names in the ConfigStore.

    Files of an earlier command line in this process are removed.
    """
    OWN.clear()
    ConfigStore.instance().repo.pop("recipe", None)
    return [_take(as_override(word), config_dir) for word in words]


def label(recipe: str) -> str:
    """Return the default run name for a recipe; for a path, the file's name without suffix."""
    return re.sub(rf"(\.ya?ml|{re.escape(SUFFIX)}\d*)$", "", Path(recipe).name)


def _take(word: str, config_dir: str | None) -> str:
    if not word.startswith("+recipe="):
        return word
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException:
        return word
    if override.is_sweep_override():
        return word
    chosen = override.value()
    names = chosen if isinstance(chosen, list) else [chosen]
    for_hydra = [_name_of(str(name), config_dir) for name in names]
    return word if for_hydra == names else f"+recipe=[{','.join(map(quoted, for_hydra))}]"


def _name_of(name: str, config_dir: str | None) -> str:
    if re.search(r"\.ya?ml$", name) and Path(name).expanduser().is_file():
        return _register(Path(name).expanduser())
    file = Path(config_dir or ".") / "recipe" / f"{name}.yaml"
    if config_dir and file.is_file() and not all(HEADER.search(f.read_text()) for f in chain(file)):
        return _register(file)
    return name


def chain(file: Path) -> list[Path]:
    """Return a recipe's file and all files of the user's own that it is based on."""
    files = [file]
    for path in files:
        tree = read_yaml(path).tree
        defaults = tree.get("defaults") if isinstance(tree, dict) else None
        for entry in defaults if isinstance(defaults, list) else []:
            base = _base(path, entry)
            if base and base not in files:
                files.append(base)
    return files


def _base(path: Path, entry: Any) -> Path | None:
    if not isinstance(entry, str):
        return None
    file = path.parent / (entry if re.search(r"\.ya?ml$", entry) else f"{entry}.yaml")
    return file if file.is_file() else None


def _register(path: Path) -> str:
    same_stem = [name for name in OWN if label(name) == path.stem]
    for name in same_stem:
        if OWN[name].samefile(path):
            return name
    name = f"{path.stem}{SUFFIX}{len(same_stem) or ''}"
    OWN[name] = path
    tree = read_yaml(path).tree
    if isinstance(tree, dict):
        defaults = tree.get("defaults")
        if isinstance(defaults, list):
            bases = [_base(path, entry) for entry in defaults]
            tree["defaults"] = [
                _register(base) if base else entry
                for base, entry in zip(bases, defaults, strict=True)
            ]
        try:
            ConfigStore.instance().store(name, tree, group="recipe", package="_global_")
        except (OmegaConfBaseException, RecursionError) as error:
            line = str(error).partition("\n")[0]
            raise UserError(
                "a problem in the configuration", str(path), f"cannot be read: {line}"
            ) from None
    return name


def wrong_defaults(file: Path, options: Mapping[str, list[str]]) -> list[Problem]:
    """Return all mistakes in a recipe's defaults, with lines. Hydra would stop at the first."""
    tree, lines = read_yaml(file)
    if not isinstance(tree, dict) or not tree.get("defaults"):
        return []
    if not isinstance(tree["defaults"], list):
        reason = "defaults  is a list, as\ndefaults:\n  - override /precision: fp32"
        return [Problem(f"{file}:{lines['defaults']}", reason)]
    problems = []
    for i, entry in enumerate(tree["defaults"]):
        reason = _why_wrong(file, entry, options)
        if reason:
            problems.append(Problem(f"{file}:{lines[f'defaults.{i}']}", reason))
    return problems


def _why_wrong(file: Path, entry: Any, options: Mapping[str, list[str]]) -> str:
    if isinstance(entry, str):
        return _why_no_base(file, entry, options)
    if not isinstance(entry, dict) or len(entry) != 1:
        return (
            f"{as_text(entry)}  chooses nothing. A recipe chooses by  - override /precision: fp32"
        )
    (name, option), *_ = entry.items()
    group = str(name).split()[-1].lstrip("/")
    typed = f"- {name}: {as_text(option)}"
    if group.startswith("hydra"):
        return ""  # checked together with the keys of hydra.*
    if group == "recipe":
        return f"{typed}  another recipe is built on by its name alone:  - {as_text(option)}"
    if group not in GROUPS:
        close = nearest(group, GROUPS)
        meant = f" Did you mean  - override /{close}: {as_text(option)} ?" if close else ""
        return f"{typed}  there is no such group.{meant}\n{listed('groups:', GROUPS)}"
    if option not in options[group]:
        return f"{typed}  {_why_no_option(group, option, options[group])}"
    if str(name) != f"override /{group}":
        return (
            f"{typed}  a recipe chooses an option with override and a slash:\n- override"
            f" /{group}: {option}"
        )
    return ""


def _why_no_option(group: str, option: Any, names: list[str]) -> str:
    text = as_text(option)
    synonym = table().options.get(group, {}).get(text.lower())
    sentence = "" if synonym else absent(text)
    close = synonym or nearest(text, names)
    meant = f" Did you mean  - override /{group}: {close} ?" if close and not sentence else ""
    reason = f"{group} has no option {text}{': ' + sentence if sentence else '.'}{meant}"
    return f"{reason}\n{listed(f'{group} has:', names)}"


def _why_no_base(file: Path, name: str, options: Mapping[str, list[str]]) -> str:
    if name == "_self_" or name in options["recipe"] or _base(file, name):
        return ""
    groups = [group for group in GROUPS if name in options[group]]
    if groups:
        return f"- {name}  is an option of a group:\n- override /{groups[0]}: {name}"
    siblings = sorted(f.stem for f in file.parent.glob("*.yaml") if f != file)
    close = nearest(name, [*options["recipe"], *siblings])
    meant = f" Did you mean  - {close} ?" if close else ""
    packaged = [recipe for recipe in options["recipe"] if recipe not in OWN]
    return f"- {name}  there is no such recipe to build on.{meant}\n{listed('recipes:', packaged)}"
