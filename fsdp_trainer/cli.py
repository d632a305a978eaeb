"""The command line: find the verb, compose its configuration, report mistakes. Imports no torch."""

import argparse
import errno
import os
import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

from fsdp_trainer.base import phases
from fsdp_trainer.base.remote_code import allow_remote_code
from fsdp_trainer.base.safe_text import visible, without_secrets
from fsdp_trainer.config.composing.handover import inherited_configuration
from fsdp_trainer.config.composing.source_words import (
    as_source,
    is_convertible,
    is_path,
    require_quotes,
)
from fsdp_trainer.config.parts.own_parts import code_at, why_no_part
from fsdp_trainer.config.verbs import PRIMARY, VERBS, add_verb, forget_added_verbs
from fsdp_trainer.config.yaml_text import YAML_FILE
from fsdp_trainer.errors import RunFailed, UserError, report
from fsdp_trainer.extensions import import_modules
from fsdp_trainer.version import __version__

INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
NO_OVERRIDE = re.compile(r"[^=+~-][^=]*")
WORD_OF_STAGE = re.compile(r"(all|tokenizer|pretrain|mid|sft)\.")
"""Beginning of a setting for one stage of `chain`."""


def main(argv: list[str] | None = None) -> int:
    """Run one command line, by default this process's, and return the exit code.

    0: done; 1: failed; 2: a mistake by the user; 3: the answer is no; 75: stopped early, start it
    again to resume.
    """
    argv = sys.argv[1:] if argv is None else argv
    sys.argv[1:] = map(without_secrets, sys.argv[1:])  # trackers record it
    try:
        return _dispatch(argv)
    except BrokenPipeError:  # the reader of our output, such as `head`, has closed the pipe
        return 0
    except (UserError, RunFailed) as error:
        report(error)
        return error.exit_code
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        reason = "is too long for a file or a folder here. Use a shorter name"
        report(UserError("a name is too long", str(error.filename), reason))
        return UserError.exit_code
    except KeyboardInterrupt:
        return 130
    finally:
        forget_added_verbs()


def run_verb(name: str, overrides: list[str], config_dir: str | None = None) -> int:
    phases.begin()
    verb = VERBS[name]
    overrides = with_bare_words(name, overrides)
    if verb.starts_ranks and (cfg := inherited_configuration(PRIMARY[name])):
        allow_remote_code(cfg)
        return code_at(verb.function)(cfg, overrides)
    # imports Hydra, which a rank that received its configuration does not need
    from fsdp_trainer.config.composing.compose import compose, config_flag

    explained: list[str] = []
    if "explained" in verb.needs:  # overrides of training, whose values `config` explains
        explained = [word for word in overrides if re.match("(?!(key|schema)=).*=", word)]
    of_stages: list[str] = []
    if "words of stages" in verb.needs:
        of_stages = [word for word in overrides if WORD_OF_STAGE.match(word)]
    own = [word for word in overrides if word not in (*explained, *of_stages)]
    words = [*config_flag(config_dir), *overrides]
    further = {
        "words": words,
        "config_dir": config_dir,
        "explained": explained,
        "words of stages": of_stages,
    }
    cfg = compose(name, own, config_dir, inputs=verb.inputs)
    allow_remote_code(cfg)
    if "://" in str(getattr(cfg, "source", "")):
        cfg = code_at("fsdp_trainer.run.mirrored_source:with_local_source")(cfg)
    return code_at(verb.function)(cfg, *(further[need] for need in verb.needs))


def _dispatch(argv: list[str] | None) -> int:
    flags, words = _parser().parse_known_args(argv)
    if flags.version:
        print(f"fsdp-trainer {__version__}")
        return 0
    if flags.shell_completion:
        return _complete(words)
    import_modules(flags.imported or [])
    topic = flags.help
    if topic and not words:
        words, topic = [topic], ""  # it is the verb
    typed, overrides = _split_verb(words)
    overrides = [*_recipe_flags(flags), *overrides]
    if topic is not None:
        from fsdp_trainer.config.composing.help import help_text

        print(visible(help_text(typed, topic.partition("=")[0], flags.config_dir)))
        return 0
    return _run_or_show(typed or "train", overrides, flags)


def _run_or_show(verb: str, overrides: list[str], flags: argparse.Namespace) -> int:
    """Run the verb, once or as a sweep, or print what --cfg or --info request."""
    overrides = with_bare_words(verb, overrides)
    if flags.multirun and (flags.info or flags.cfg):
        raise _unreadable("-m", "--cfg and --info show one run: leave one of them out")
    if flags.multirun:
        return _sweep(verb, overrides, flags.config_dir)
    if flags.info:
        return _hydra_info(flags.info, verb, overrides, flags.config_dir)
    if flags.cfg:
        from fsdp_trainer.config.composing.compose import as_yaml, compose

        print(as_yaml(compose(verb, overrides, flags.config_dir, inputs=False)), end="")
        return 0
    return run_verb(verb, overrides, flags.config_dir)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        reason = f"{message}\nfsdp-trainer --help  lists what there is"
        raise _unreadable(shlex.join(sys.argv[1:]), reason)


def _unreadable(what: str, reason: str) -> UserError:
    return UserError("the command line cannot be read", what, reason)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fsdp-trainer", add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", nargs="?", const="")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--shell-completion", "-sc", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--import", dest="imported", action="append")
    # flags with which other programs name a configuration file
    parser.add_argument("--config", "--config-file", "--config_file", dest="recipe_file")
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--config-path", "-cp", dest="config_dir")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--info", "-i", nargs="?", const="all", choices=INFO)
    return parser


def _split_verb(words: list[str]) -> tuple[str | None, list[str]]:
    """Return the verb, if one is given, and its overrides.

    Raises UserError for a verb that is misspelt or not first.
    """
    first = None
    rest = words
    if words and NO_OVERRIDE.fullmatch(words[0]):
        first, *rest = words
        if YAML_FILE.fullmatch(first):
            first, rest = None, words
        elif first not in VERBS:
            own = add_verb(first)
            if own is None:
                raise UserError("no such verb", first, _why_no_verb(first))
            first = own
    for misplaced in VERBS.keys() & rest:
        others = [word for word in rest if word != misplaced]
        line = shlex.join(["fsdp-trainer", misplaced, *others])
        reason = f"one verb at a time; {first} came first.\nFor {misplaced}:  {line}"
        raise _unreadable(misplaced, reason if first else f"the verb comes first:  {line}")
    return first, rest


def with_bare_words(verb: str, words: list[str]) -> list[str]:
    """Return the words with those written out that stand for a setting.

    The name of a YAML file stands for `+recipe=FILE`, a path that exists for `source=PATH`.
    """
    words = _with_recipe_files(verb, words)
    if all(field.name != "source" for field in fields(PRIMARY[verb])):
        return words
    if verb == "convert":
        require_quotes(words)
    is_source = is_convertible if verb == "convert" else is_path
    paths = [word for word in words if is_source(word)]
    if not paths:
        return words
    return [*(word for word in words if word not in paths), as_source(verb, paths, words)]


def _with_recipe_files(verb: str, words: list[str]) -> list[str]:
    if verb != "config" and not issubclass(PRIMARY[verb], PRIMARY["train"]):
        return words
    files = [word for word in words if YAML_FILE.fullmatch(word)]
    if not files:
        return words
    from fsdp_trainer.config.composing.recipe_files import as_override

    return [as_override(word) for word in words]


def _recipe_flags(flags: argparse.Namespace) -> list[str]:
    """Return the recipe given by --config FILE or --config-name NAME, as a list of 0 or 1 words."""
    if flags.recipe_file:
        return [flags.recipe_file]
    if not flags.config_name:
        return []
    name = re.sub(r"\.ya?ml$", "", flags.config_name)
    folder = Path(flags.config_dir or ".")
    for file in (folder / "recipe" / f"{name}.yaml", folder / f"{name}.yaml"):
        if file.is_file():
            return [str(file)]
    return [f"+recipe={name}"]


def _why_no_verb(word: str) -> str:
    from fsdp_trainer.config.check import flatten
    from fsdp_trainer.config.composing.compose import options
    from fsdp_trainer.config.composing.overrides import filled, listed, without_key
    from fsdp_trainer.config.names import known_elsewhere, nearest

    if ".py:" in word:
        return str(why_no_part("verb", word))
    elsewhere = known_elsewhere(word)
    if elsewhere and elsewhere.sentence:
        return filled(f"there is no such verb: {elsewhere.sentence}")
    meant = without_key(word, flatten(PRIMARY["train"]), options("train")) or nearest(word, VERBS)
    guess = f" Did you mean  {meant} ?" if meant else ""
    verbs = listed("There are:", VERBS)
    return f"there is no such verb.{guess}\n{verbs}\nSettings are  key=value"


def _sweep(verb: str, overrides: list[str], config_dir: str | None) -> int:
    from fsdp_trainer.apps.sweep.sweep import sweep
    from fsdp_trainer.config.composing.compose import config_flag

    if verb != "train":
        line = shlex.join(["fsdp-trainer", verb, *config_flag(config_dir), *overrides])
        raise UserError(
            "the sweep cannot be started",
            f"-m {verb}",
            f"only training is swept. Without -m:  {line}",
        )
    return sweep(overrides, config_dir)


def _hydra_info(what: str, verb: str, overrides: list[str], config_dir: str | None) -> int:
    from hydra.core.global_hydra import GlobalHydra

    from fsdp_trainer.config.composing.compose import composable, hydra

    with hydra(composable(verb, overrides, config_dir), config_dir) as given:
        hydra_main = GlobalHydra.instance().hydra
        assert hydra_main
        hydra_main.show_info(what, verb, given)
    return 0


def _complete(words: list[str]) -> int:
    """Print completions of a word, or install the shell's completion script.

    The scripts are Hydra's (`-sc install=bash`). Their queries (`-sc query=bash`) are answered from
    the schema, without composing.
    """
    if words and words[0].startswith("query="):
        from fsdp_trainer.config.composing.complete import completions

        line = os.environ.get("COMP_LINE", "fsdp-trainer ")
        print(*completions(line[: int(os.environ.get("COMP_POINT", len(line)))]), sep="\n")
        return 0
    from hydra.core.global_hydra import GlobalHydra

    from fsdp_trainer.config.composing.compose import hydra

    with hydra([], None):
        try:
            hydra_main = GlobalHydra.instance().hydra
            assert hydra_main
            hydra_main.shell_completion("train", words)
        except ValueError as error:
            reason = f"{error}\nUse  -sc install=bash  (zsh, fish)"
            raise UserError("no such completion", shlex.join(["-sc", *words]), reason) from None
    return 0
