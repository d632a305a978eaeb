"""The text of `--help`: of the program, of a verb, and of a group of keys."""

import re
import textwrap
from dataclasses import Field, fields, is_dataclass
from typing import Any

from fsdp_trainer.config.check import flatten
from fsdp_trainer.config.composing.compose import CONF, options
from fsdp_trainer.config.composing.recipe_heads import first_comments, recipe_heads
from fsdp_trainer.config.key_texts import comment, on_lines, written
from fsdp_trainer.config.keys import default_of
from fsdp_trainer.config.parts.own_parts import own_names
from fsdp_trainer.config.schema import GROUPS, TrainConfig
from fsdp_trainer.config.verbs import PRIMARY
from fsdp_trainer.errors import UserError

USED_MOST = (
    *("data.path", "model.init_from", "tokenizer.path", "data.validation", "batch.seq_len"),
    *("batch.rows", "batch.micro_rows", "train.steps", "train.epochs", "train.validate_every"),
    *("optim.lr", "optim.weight_decay", "checkpoint.every", "checkpoint.export_hf", "run.name"),
    *("run.seed", "launch.nproc_per_node"),
)
"""Keys that the help of a verb with training's keys, and none of its own, begins with."""

HELP = """\
fsdp-trainer [VERB] [+recipe=NAME] [group=option] [key=value] …
fsdp-trainer -m [+recipe=NAME] [+sweep=NAME] [key=value,value] …     one training per combination
torchrun … -m fsdp_trainer [+recipe=NAME] …

verbs (train, if none is given)
{verbs}

options
  --help, VERB --help [GROUP]    this page; what a verb takes; a group of keys
  --cfg job                      print the composed configuration instead of running
  --info defaults                where it comes from (also: searchpath, defaults-tree, config)
  FILE.yaml                      a recipe of your own for +recipe=NAME (also --config FILE.yaml)
  --config-dir DIR               a folder with more groups and recipes (DIR/recipe/NAME.yaml)
  -sc install=bash               shell completion:  eval "$(fsdp-trainer -sc install=bash)"
  --version

groups
{groups}

recipes
{recipes}

sweeps
{sweeps}

fsdp-trainer config key=optim.lr  explains a key; docs/configuration.md has them all."""


def help_text(verb: str | None, group: str, config_dir: str | None) -> str:
    """Return the text of `--help`, of `VERB --help`, or of `VERB --help GROUP`. group: or ""."""
    if verb is None:
        return _of_program(config_dir)
    cls: Any = PRIMARY[verb]
    if group:
        return _of_group(cls, verb, group, config_dir)
    lines = [first_line(cls), "", *(f"  {line}" for line in examples(verb))]
    if own := own_keys(cls):
        lines += ["", f"keys of {verb}", *map(_line, own.items())]
    if not issubclass(cls, TrainConfig):
        return "\n".join(lines)
    keys = flatten(cls)
    if not own:
        lines += ["", "keys used most", *(_line((key, keys[key])) for key in USED_MOST)]
    groups = [f.name for f in fields(TrainConfig) if is_dataclass(f.type)]
    return "\n".join(
        [
            *lines,
            "",
            f"other keys, by group:  fsdp-trainer {verb} --help GROUP",
            textwrap.indent(textwrap.fill(" ".join(groups), 96), "  "),
            "",
            "recipes:  fsdp-trainer recipes      options of groups:  fsdp-trainer --help",
        ]
    )


def _of_program(config_dir: str | None) -> str:
    names = options("train", config_dir)
    recipes = (f"  {name:22} {head.does}" for name, head in recipe_heads(config_dir).items())
    sweeps = (
        f"  {name:22} {first_comments(f'sweep/{name}', config_dir)[0]}" for name in names["sweep"]
    )
    verbs = [f"  {name:13}{first_line(cls)}" for name, cls in PRIMARY.items()]
    verbs += [f"  {name:13}(yours)" for name in own_names("verb") if name not in PRIMARY]
    return HELP.format(
        verbs="\n".join(verbs),
        groups="\n".join(f"  {group:22} {' '.join(names[group])}" for group in GROUPS),
        recipes="\n".join(recipes),
        sweeps="\n".join(sweeps),
    )


def _of_group(cls: Any, verb: str, group: str, config_dir: str | None) -> str:
    """Return the lines of a group's keys, or of one. Raises UserError if the verb has none such."""
    keys = {key: f for key, f in flatten(cls).items() if f"{key}.".startswith(f"{group}.")}
    if not keys:
        names = " ".join(dict.fromkeys(key.split(".")[0] for key in flatten(cls) if "." in key))
        reason = f"{verb} has no such group of keys" + (f". It has: {names}" if names else "")
        raise UserError("there is no help on that", group, reason)
    lines = [f"keys of {group}", *map(_line, keys.items())]
    if group in GROUPS:
        names = " ".join(options("train", config_dir)[group])
        lines += ["", f"{group}=OPTION sets those that belong together:  {names}"]
    return "\n".join(lines)


def own_keys(cls: Any) -> dict[str, Field]:
    of_training = flatten(TrainConfig) if issubclass(cls, TrainConfig) else {}
    return {key: f for key, f in flatten(cls).items() if key not in of_training}


def examples(verb: str) -> list[str]:
    """Return the command lines at the head of a verb's file in conf/."""
    file = CONF / f"{verb}.yaml"
    if not file.is_file():  # one of the user's own
        return []
    head = file.read_text(encoding="utf-8").split("\n\n")[0]
    return re.findall(r"(?m)^# (fsdp-trainer .*)$", head)


def _line(item: tuple[str, Field]) -> str:
    key, f = item
    own = own_names(f.metadata["part"]) if f.metadata["part"] else []
    text = f"{comment(f)} Yours: {' '.join(own)}" if own else comment(f)
    return on_lines(f"  {key}={written(default_of(f))}  ", text)


def first_line(cls: type) -> str:
    return (cls.__doc__ or "").splitlines()[0]
