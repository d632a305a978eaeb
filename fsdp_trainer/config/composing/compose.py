"""Composition and check of a verb's configuration.

Hydra only composes and never runs the program, so that no rank writes Hydra's files or logs.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.base.recorded import Place, marked, recorded
from fsdp_trainer.config.check import Report, as_text, build, flatten
from fsdp_trainer.config.composing.interpolations import require_few_interpolations
from fsdp_trainer.config.composing.overrides import (
    OVERLAYS,
    contents,
    owner_of,
    read_overrides,
    why_forbidden,
    why_unknown,
)
from fsdp_trainer.config.composing.recipe_files import (
    OWN,
    YamlFile,
    chain,
    label,
    not_yaml,
    read_yaml,
    take_files,
    wrong_defaults,
)
from fsdp_trainer.config.input_checks import check_inputs
from fsdp_trainer.config.rules.rules import check_rules
from fsdp_trainer.config.rules.rules_code import code_of_sweep
from fsdp_trainer.config.schema import GROUPS, SELECTORS, TrainConfig
from fsdp_trainer.config.verbs import PRIMARY
from fsdp_trainer.config.yaml_text import dump_yaml
from fsdp_trainer.errors import Problem, UserError

PACKAGE = Path(__file__).parents[2]
CONF = (
    PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"
)  # in an installed wheel, else in a checkout

NOT_COMPOSED = (
    HydraException,
    OmegaConfBaseException,
    yaml.YAMLError,
    TypeError,
    ValueError,
    AttributeError,
    AssertionError,
    ImportError,
    RecursionError,
)
"""Errors that Hydra and OmegaConf raise for a wrong configuration."""


def compose(
    verb: str, overrides: list[str], config_dir: str | None = None, *, inputs: bool = True
) -> Any:
    """Return the checked configuration of `verb`, an instance of its dataclass in verbs.PRIMARY.

    config_dir: folder with more groups and recipes. inputs: False if input files need not exist.
    Raises UserError with all problems.
    """
    return compose_with_report(verb, overrides, config_dir, inputs=inputs)[0]


def compose_with_report(
    verb: str, overrides: list[str], config_dir: str | None = None, *, inputs: bool = True
) -> tuple[Any, Report]:
    """Return the configuration of `compose`, and the report, which has each value's origin."""
    keys = flatten(PRIMARY[verb])
    words = take_files(overrides, config_dir)
    line = read_overrides(words, keys, options(verb, config_dir))
    report = Report(line.typed, line.problems, line.settled - line.typed.keys())
    tree = _compose_files(verb, line.hydra, config_dir, report)
    cfg = build(PRIMARY[verb], tree | line.prose, report)
    if isinstance(cfg, TrainConfig) and cfg.run.name is None:
        cfg.run.name = label(str(line.recipes[-1])) if line.recipes else "run"
    check_rules(cfg, report)
    if inputs:
        check_inputs(cfg, report, line.complete)
    report.close()
    return cfg, report


def options(verb: str, config_dir: str | None = None) -> dict[str, list[str]]:
    """Return the names of the options of each group of `verb`, including `recipe` and `sweep`.

    It is empty for verbs without training's groups. Raises UserError for a name that exists twice.
    """
    folders = _folders(config_dir)
    if not issubclass(PRIMARY[verb], TrainConfig):
        return {}
    names = {
        group: sorted(name for folder in folders for name in _names_in(folder / group))
        for group in (*GROUPS, "recipe", "sweep")
    }
    names["recipe"] += (name for name, file in OWN.items() if file.is_file())
    return names


def _names_in(folder: Path) -> Iterable[str]:
    """Return the names of a group's options in a folder, which is looked into once if packaged."""
    return _packaged_names(folder) if CONF in folder.parents else _find_names(folder)


def _find_names(folder: Path) -> tuple[str, ...]:
    files = folder.rglob("*.yaml")
    return tuple(file.relative_to(folder).with_suffix("").as_posix() for file in files)


def _read(file: Path) -> YamlFile:
    return _read_packaged(file) if CONF in file.parents else read_yaml(file)


_packaged_names = cache(_find_names)
_read_packaged = cache(read_yaml)


def find_file(path: str, config_dir: str | None = None) -> Path | None:
    """Return the file of a group's option or a recipe, e.g. `recipe/quickstart`.

    Returns None for an option of Hydra itself.
    """
    own = OWN.get(path.removeprefix("recipe/"))
    return own or next(
        (f for folder in _folders(config_dir) if (f := folder / f"{path}.yaml").is_file()), None
    )


def composable(verb: str, overrides: list[str], config_dir: str | None = None) -> list[str]:
    """Return the overrides in the form in which they are passed to Hydra.

    Raises UserError for problems that are visible without composing.
    """
    words = take_files(overrides, config_dir)
    line = read_overrides(words, flatten(PRIMARY[verb]), options(verb, config_dir))
    store_own_verb(verb)
    Report(line.typed, line.problems, set()).close()
    return line.hydra


def as_yaml(cfg: Any) -> str:
    """Return a configuration as YAML, with all keys in the schema's order."""
    return dump_yaml(recorded(cfg), width=140)


@contextmanager
def hydra(overrides: list[str], config_dir: str | None) -> Iterator[list[str]]:
    """Set up Hydra with conf/ and `config_dir`. Yields the overrides to pass to it.

    Raises UserError for files that cannot be composed.
    """
    own = [f'"own://{folder.resolve()}"' for folder in _folders(config_dir)[1:]]
    if own:
        overrides = [f"hydra.searchpath=[{','.join(own)}]", *overrides]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(
            str(CONF.resolve()), version_base="1.3", job_name="fsdp_trainer"
        ):
            yield overrides
    except yaml.MarkedYAMLError as error:
        raise UserError("a problem in the configuration", [not_yaml(error)]) from None
    except NOT_COMPOSED as error:
        raise UserError(
            "a problem in the configuration", "composing", hydra_message(error)
        ) from None


def config_flag(config_dir: str | None) -> list[str]:
    return ["--config-dir", config_dir] if config_dir else []


def _compose_files(verb: str, overrides: list[str], config_dir: str | None, report: Report) -> Json:
    store_own_verb(verb)
    try:
        if not check_own_recipes(verb, overrides, config_dir, report):
            raise UserError("problems in recipes")
        with hydra(overrides, config_dir) as given:
            check_files(verb, given, config_dir, report)
            composed = hydra_compose(verb, given)
            require_few_interpolations(composed)
            tree: Any = OmegaConf.to_container(composed, resolve=True)
            tree = marked(tree, from_environment(composed))
    except UserError as error:
        report.problems += error.problems
        report.close()
        raise
    return tree


def store_own_verb(verb: str) -> None:
    """Give Hydra the defaults of a verb of the user's own, which has no file in conf/."""
    if (CONF / f"{verb}.yaml").is_file():
        return
    cls: Any = PRIMARY[verb]
    node = asdict(cls())
    if issubclass(cls, TrainConfig):
        inherited = TrainConfig.__dataclass_fields__
        own = {name: value for name, value in node.items() if name not in inherited}
        node = {"defaults": ["train", "_self_"], **own}
    ConfigStore.instance().store(verb, node)


def from_environment(composed: Any) -> dict[Place, str]:
    """Return, by place, the written form of each value that an environment variable gives."""
    if "oc.env" not in str(composed):
        return {}
    used: list[str] = []

    def read(name: str, *default: Any) -> Any:
        used.append(name)
        return oc.env(name, *default)

    def values(node: Any, place: Place) -> Iterator[tuple[Place, str]]:
        names: Any = node if isinstance(node, DictConfig) else range(len(node))
        for name in names:
            used.clear()
            value = node[name]
            if isinstance(value, DictConfig | ListConfig):
                yield from values(value, (*place, name))
            elif used:
                yield (*place, name), str(node._get_node(name)._value())

    OmegaConf.register_new_resolver("oc.env", read, replace=True)
    try:
        return dict(values(composed, ()))
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def hydra_message(error: Exception) -> str:
    message = (
        re.sub(r"\n\t", " ", str(error).split("\nConfig search path")[0].strip())
        or str(error.__cause__ or "")
        or type(error).__name__
    )
    return re.sub(r"\n\s*\n", "\n", message)


def check_files(verb: str, given: list[str], config_dir: str | None, report: Report) -> None:
    """Check all files of a composition. Called within `hydra`, with the overrides it yields."""
    keys, groups = flatten(PRIMARY[verb]), options(verb, config_dir)
    for default in (
        GlobalHydra.instance()
        .config_loader()
        .compute_defaults_list(verb, given, RunMode.RUN)
        .defaults
    ):
        path = default.config_path or ""
        if file := find_file(path, config_dir):
            _check_file(file, path.split("/")[0], default.package or "", keys, groups, report)


def check_own_recipes(
    verb: str, overrides: list[str], config_dir: str | None, report: Report
) -> bool:
    """Check the defaults of the user's own recipes before Hydra, which stops at the first mistake.

    Returns False if there are mistakes. They are added to `report`, with all others in these files.
    """
    chosen = [name for word in overrides if word.startswith("+recipe=") for name in _names(word)]
    files = [find_file(f"recipe/{name}", config_dir) for name in chosen]
    own = [path for file in files if file and CONF not in file.parents for path in chain(file)]
    names = options(verb, config_dir)
    problems = [problem for file in own for problem in wrong_defaults(file, names)]
    if problems:
        report.problems += problems
        for file in own:
            _check_file(file, "recipe", "", flatten(PRIMARY[verb]), names, report)
    return not problems


def _names(word: str) -> list[str]:
    value = OverridesParser.create().parse_override(word).value()
    return [str(name) for name in value] if isinstance(value, list) else [str(value)]


def _check_file(
    file: Path,
    kind: str,
    package: str,
    keys: Json,
    groups: dict[str, list[str]],
    report: Report,
) -> None:
    tree, lines = _read(file)
    if not isinstance(tree, dict):
        report.problems.append(Problem(str(file), "is not a mapping of keys to values"))
        return
    if kind in OVERLAYS and package:
        report.problems.append(
            Problem(
                str(file),
                f"lies in  {package}.* : the first line of a {kind} is  # @package _global_",
            )
        )
        return
    settings = {**tree}
    refused = _refused_defaults(settings.pop("defaults", None) or [])
    for key, value in _leaves(settings, f"{package}." if package else "", keys):
        line = lines.get(key.removeprefix(f"{package}."))
        report.origins[key] = f"{file}:{line}" if line else str(file)
        if kind == "recipe":
            report.in_recipes.add(key)
        reason = _why_refused(key, value, kind, keys, groups)
        if reason:
            refused[key] = reason
    report.problems += [
        Problem(report.origins.get(key, str(file)), f"{key}  {reason}")
        for key, reason in refused.items()
    ]
    report.settled |= refused.keys()


def _refused_defaults(defaults: list[Any]) -> dict[str, str]:
    """Return the reason for each group in a file's defaults that a file may not choose."""
    names = [name for entry in defaults if isinstance(entry, dict) for name in entry]
    reasons = {name: why_forbidden(str(name).split()[-1].lstrip("/"), None) for name in names}
    return {name: reason for name, reason in reasons.items() if reason}


def _why_refused(
    key: str, value: Any, kind: str, keys: Json, groups: dict[str, list[str]]
) -> str | None:
    group, _, name = key.partition(".")
    forbidden = why_forbidden(key, value)
    if forbidden:
        return forbidden
    if group == "hydra":
        return code_of_sweep(key, value)
    if kind == "sweep":
        return (
            f"a sweep only says what varies: write it under  hydra.sweeper.params , as  {key}:"
            f" {as_text(value)}"
        )
    if key not in keys and any(k.startswith(f"{key}.") for k in keys):
        return (
            "is a group of keys: set some of them, or choose it under defaults:  - override"
            f" /{key}: NAME\n{contents(key, keys)}"
        )
    if owner_of(key, keys) is None:
        return why_unknown(key, None, keys, groups)
    if kind == "recipe" and SELECTORS.get(group) == name:
        return (
            f"would undo  {group}=…  on the command line. A recipe chooses it under defaults:  -"
            f" override /{group}: NAME"
        )
    return None


def _leaves(tree: Json, prefix: str, keys: Json) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value and f"{prefix}{name}" not in keys:
            yield from _leaves(value, f"{prefix}{name}.", keys)
        else:
            yield f"{prefix}{name}", value


def _folders(config_dir: str | None) -> list[Path]:
    recipe_folders = [file.parent.parent for file in OWN.values() if file.parent.name == "recipe"]
    with_groups = [d for d in recipe_folders if any((d / group).is_dir() for group in GROUPS)]
    given = [Path(config_dir)] if config_dir else []
    own_folders = {folder.resolve(): folder for folder in [*given, *with_groups]}
    return [CONF, *(_checked(folder, config_dir) for folder in own_folders.values())]


def _checked(own: Path, config_dir: str | None) -> Path:
    """Return a folder with the user's groups and recipes. Raises UserError if it cannot be used."""
    if not own.is_dir():
        raise UserError(
            "a problem in the configuration",
            f"--config-dir {config_dir}",
            "there is no such folder",
        )
    groups = [folder for folder in CONF.iterdir() if folder.is_dir()]
    packaged = {f"{group.name}/{name}.yaml" for group in groups for name in _names_in(group)}
    packaged |= {file.name for file in CONF.glob("*.yaml")}
    twins = [own / name for name in sorted(packaged) if (own / name).exists()]
    if twins:
        reason = "exists twice, and Hydra would silently take the packaged one: rename yours."
        raise UserError(
            "a name exists twice",
            [Problem(str(f), f"{reason}\nThe other is {CONF / f.relative_to(own)}") for f in twins],
        )
    return own
