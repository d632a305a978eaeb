"""Documentation from schema and recipes: YAML comments, docs/, the verbs `config` and `recipes`.

`python -m fsdp_trainer.config.document` rewrites conf/ and docs/configuration.md after a change.
"""

import json
import re
import textwrap
from dataclasses import Field, fields
from inspect import getdoc
from operator import attrgetter
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fsdp_trainer.base.safe_text import visible
from fsdp_trainer.config.check import describe, flatten
from fsdp_trainer.config.composing.compose import CONF, compose_with_report, find_file, options
from fsdp_trainer.config.composing.overrides import why_unknown
from fsdp_trainer.config.composing.recipe_heads import recipe_heads
from fsdp_trainer.config.composing.recipe_schema import recipe_schema
from fsdp_trainer.config.key_texts import (
    OWN_NODES,
    SMALL,
    comment,
    every_key,
    keys_of_small_verbs,
    on_lines,
    written,
)
from fsdp_trainer.config.keys import default_of
from fsdp_trainer.config.names import KnownName, known_elsewhere, synonyms_of
from fsdp_trainer.config.schema import GROUPS, SELECTORS, TrainConfig
from fsdp_trainer.config.verbs import (
    PRIMARY,
    ConfigConfig,
    RecipesConfig,
)
from fsdp_trainer.errors import UserError

WIDTH = 140


def yaml_block(cls: Any) -> str:
    """Return YAML with every key of a group, its default and an aligned comment."""
    settings = [f"{f.name}: {written(default_of(f))}" for f in fields(cls)]
    column = max(map(len, settings), default=0) + 2
    lines = []
    for setting, f in zip(settings, fields(cls), strict=True):
        first, *rest = textwrap.wrap(
            comment(f), WIDTH - column - 2, break_long_words=False, break_on_hyphens=False
        )
        lines += [f"{setting:{column}}# {first}", *(f"{'':{column}}# {line}" for line in rest)]
    return "".join(f"{line}\n" for line in lines)


def node_of(verb: str, name: str) -> Field:
    cls: Any = PRIMARY[verb]
    return next(f for f in fields(cls) if f.name == name)


def main_options(conf: Path) -> dict[str, str]:
    """Return the option of each group that train.yaml chooses.

    The file of such an option is complete, with a comment on every key.
    """
    train: Any = OmegaConf.to_container(OmegaConf.load(conf / "train.yaml"))
    defaults = train["defaults"]
    return {
        group: option
        for default in defaults
        if isinstance(default, dict)
        for group, option in default.items()
    }


def documented_files(conf: Path) -> dict[Path, str]:
    """Return the text of every file in conf/ that is generated from the schema."""
    groups: dict[str, Any] = {f.name: f.type for f in fields(TrainConfig)}
    classes = {
        conf / group / f"{option}.yaml": groups[group]
        for group, option in main_options(conf).items()
    }
    classes |= {conf / f"{verb}.yaml": cls for verb, cls in SMALL.items()}
    heads = {path: path.read_text().split("\n\n")[0].rstrip() for path in classes}
    texts = {path: f"{heads[path]}\n\n{yaml_block(cls)}" for path, cls in classes.items()}
    plain = {"train": ("run", "batch", "train", "loss", "evaluation", "profile")} | {
        verb: (verb,) for verb in OWN_NODES
    }
    for verb, nodes in plain.items():
        text = (conf / f"{verb}.yaml").read_text()
        for node in nodes:
            body = textwrap.indent(yaml_block(node_of(verb, node).type), "  ")
            head, _, tail = text.partition(f"\n{node}:\n")
            below = re.sub(r"^( .*\n)*", "", tail)
            text = f"{head}\n{node}:\n{body}{below}"
        texts[conf / f"{verb}.yaml"] = text
    return texts


def markdown(options: dict[str, list[str]]) -> str:
    """Return the text of docs/configuration.md. options: names of the options of each group."""
    parts = [
        "# Configuration\n\n"
        "This page lists every key with its default and its meaning.\n\n"
        "Set a key with `key=value`, choose an option of a group with `group=option`, apply a\n"
        "recipe with `+recipe=NAME`. `fsdp-trainer --cfg job …` prints the composed configuration\n"
        "([the command line](command-line.md)). This page is generated from\n"
        "`fsdp_trainer/config/schema.py` and `verbs.py` by\n"
        "`python -m fsdp_trainer.config.document`.\n"
    ]
    for f in [*fields(TrainConfig), *(node_of(verb, verb) for verb in OWN_NODES)]:
        chosen = (
            f"\nOptions: {', '.join(f'`{f.name}={name}`' for name in options[f.name])}\n"
            if f.name in GROUPS
            else ""
        )
        parts.append(_section(f.name, f.type, f"{f.name}.", chosen))
    for verb, cls in SMALL.items():
        if fields(cls):
            parts.append(_section(f"The verb {verb}", cls, "", ""))
    return "\n".join(parts)


def _section(title: str, cls: Any, prefix: str, chosen: str) -> str:
    rows = [
        f"| `{prefix}{f.name}` | `{written(default_of(f))}` | {comment(f)} |" for f in fields(cls)
    ]
    return "\n".join(
        [
            f"## {title}\n\n{getdoc(cls)}\n{chosen}\n| key | default | meaning |\n|---|---|---|",
            *rows,
            "",
        ]
    )


def explain(cfg: ConfigConfig, overrides: list[str], config_dir: str | None = None) -> int:
    """Run the verb `config`: print one key, a group's keys, or all. Returns the exit code.

    overrides: overrides of training; if given, the values of that configuration are printed too.
    With `schema`, print the JSON Schema of recipes.
    """
    if cfg.schema:
        return _print_schema(cfg, overrides, config_dir)
    keys = every_key()
    wanted = keys_meant(cfg.key, keys)
    values, report = {key: default_of(f) for key, f in keys.items()}, None
    if overrides:
        node = wanted[0].split(".")[0]
        composed, report = compose_with_report(
            node if node in OWN_NODES else "train", overrides, config_dir, inputs=False
        )
        values |= {key: attrgetter(key)(composed) for key in flatten(type(composed))}
    if len(wanted) > 1:
        _print_keys(cfg.key, {key: (keys[key], values[key]) for key in wanted})
        return 0
    key, f = wanted[0], keys[wanted[0]]
    group, _, name = key.partition(".")
    print(
        f"{key}\n{on_lines('  ', comment(f))}\n\n  type     {describe(f.type)}\n  default"
        f"  {written(default_of(f))}"
    )
    if report:
        origin = report.origins.get(key, "the schema")
        print(
            f"  here     {written(values[key])}, set by"
            f"  {report.typed.get(key) or origin.removeprefix(f'{CONF}/')}"
        )
    if SELECTORS.get(group) == name:
        print(
            on_lines(
                f"  choose   {group}=",
                "OPTION, which sets the keys that belong together:"
                f" {' '.join(options('train')[group])}",
            )
        )
    if synonyms := synonyms_of(key):
        print(on_lines("  known as ", ", ".join(synonyms)))
    if key in keys_of_small_verbs():
        print(f"  goes to  fsdp-trainer {group} {name}=…")
    return 0


def _print_keys(group: str | None, keys: dict[str, tuple[Field, Any]]) -> None:
    """Print one line for each key, and how to choose those of a group together."""
    for key, (f, value) in keys.items():
        print(on_lines(f"{key:38} {written(value):14} ", comment(f)))
    if group in GROUPS:
        head = f"\n{group}=OPTION sets those that belong together:  "
        print(on_lines(head, " ".join(options("train")[group])))


def _print_schema(cfg: ConfigConfig, overrides: list[str], config_dir: str | None) -> int:
    others = ([f"key={cfg.key}"] if cfg.key else []) + overrides
    if others:
        reason = "does not go with schema=true, which describes all keys: leave it out"
        raise UserError("a problem in the configuration", others[0], reason)
    print(json.dumps(recipe_schema(options("train", config_dir)), indent=1))
    return 0


def keys_meant(name: str | None, keys: dict[str, Field]) -> list[str]:
    """Return the keys that `config key=NAME` explains. Raises UserError if there are none.

    name: a key, a group, the last part of some keys, or another program's name for a key.
    """
    wanted = [key for key in keys if name in (None, key) or key.startswith(f"{name}.")]
    wanted = wanted or [key for key in keys if key.split(".")[-1] == name]
    answer = KnownName() if wanted else known_elsewhere(str(name)) or KnownName()
    meant = answer.meant.split("=")[0]
    wanted = wanted or [key for key in keys if key == meant or key.startswith(f"{meant}.")]
    if not wanted:
        raise UserError(
            "no such key", f"key={name}", why_unknown(str(name), None, keys, dict.fromkeys(GROUPS))
        )
    return wanted


def recipes(cfg: RecipesConfig, config_dir: str | None = None) -> int:
    """Run the verb `recipes`: print purpose, hardware and command of each, the smallest first."""
    for name, head in recipe_heads(config_dir).items():
        file = find_file(f"recipe/{name}", config_dir)
        own = "" if file == CONF / f"recipe/{name}.yaml" else f"  (your own: {file})"
        print(visible(f"{name}{own}"))
        said = {
            f"{part:10}": text
            for part, text in head._asdict().items()
            if text and part not in ("does", "start")
        }
        parts = {"": head.does, **said}.items()
        print(visible("\n".join(on_lines(f"  {part}", text) for part, text in parts)))
        print(visible(f"  start     {head.start}\n"))
    return 0


def write() -> None:
    """Update conf/ and docs/configuration.md from the schema."""
    for path, text in documented_files(CONF).items():
        path.write_text(text)
    page = CONF.parent / "docs" / "configuration.md"
    page.write_text(markdown(options("train")))
