"""The front door: a verb, a composed configuration, and mistakes told as people want to read them. Imports no torch."""

import argparse
import importlib
import json
import os
import shlex
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from fsdp_trainer import __version__, phases
from fsdp_trainer.config.handover import take_over
from fsdp_trainer.config.verbs import PRIMARY
from fsdp_trainer.errors import Problem, RunFailed, UserError

VERBS = {
    "train": "fsdp_trainer.launch.start:train",
    "plan": "fsdp_trainer.plan.verb:plan",
    "preview": "fsdp_trainer.data.preview:preview",
    "prepare": "fsdp_trainer.data.ahead:prepare_ahead",
    "doctor": "fsdp_trainer.launch.doctor:doctor",
    "launch-files": "fsdp_trainer.launch.files:launch_files",
    "export": "fsdp_trainer.checkpoint.export:export",
    "verify": "fsdp_trainer.checkpoint.verify:verify",
    "generate": "fsdp_trainer.generate:generate",
    "quickstart": "fsdp_trainer.quickstart:quickstart",
    "report": "fsdp_trainer.report.verb:report",
    "recipes": "fsdp_trainer.config.document:recipes",
    "config": "fsdp_trainer.config.document:explain",
}
AS_RANKS = (
    "train",
    "doctor",
)  # start their ranks with the configuration that was composed, and what it was composed from


def main(argv: list[str] | None = None) -> int:
    """Run one command line. Returns the exit code: 0 done, 1 failed, 2 a mistake by the user, 3 the answer is no, 75 start it again."""
    try:
        code = _dispatch(sys.argv[1:] if argv is None else argv)
        try:
            sys.stdout.flush()
        except OSError:  # a log file on a full disk, or a reader that has gone, changes nothing about what was done
            write_no_more()
        return code
    except BrokenPipeError:  # whoever read this, such as head, has seen enough
        write_no_more()
        return 0
    except (UserError, RunFailed) as error:
        if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
            print(error, file=sys.stderr)
        elif os.environ.get("GROUP_RANK", "0") != "0" and (
            file := os.environ.get("TORCHELASTIC_ERROR_FILE")
        ):
            leave_a_word(error, file)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def leave_a_word(error: UserError | RunFailed, file: str) -> None:
    """One line for the table that this node's torchrun ends with: rank 0 speaks on another, and may know nothing of a file that is missing here."""
    line = " ".join(str(error).split())
    with suppress(OSError):  # what ends the run counts
        Path(file).write_text(
            json.dumps({"message": {"message": line, "extraInfo": {"timestamp": int(time.time())}}})
        )


def write_no_more() -> None:
    """What standard output still holds goes nowhere, so that the interpreter's end does not stumble over it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_verb(verb: str, overrides: list[str], config_dir: str | None = None) -> int:
    """Compose the configuration of `verb` and do it."""
    phases.begin()
    module, name = VERBS[verb].split(":")
    if verb in AS_RANKS and (handed := take_over(PRIMARY[verb])):
        return getattr(importlib.import_module(module), name)(handed, overrides)
    from fsdp_trainer.config.compose import (
        compose,
        config_flag,
    )  # Hydra, which a rank that is handed its configuration does without

    of_training = [
        w for w in overrides if verb == "config" and "=" in w and not w.startswith("key=")
    ]  # whose values are to be explained
    own = [w for w in overrides if w not in of_training]
    on_the_spot = verb not in (
        "plan",
        "doctor",
        "launch-files",
    )  # doctor says on which node something is missing; the others run elsewhere
    cfg = compose(verb, own, config_dir, inputs=on_the_spot)
    do = getattr(importlib.import_module(module), name)
    if verb in (*AS_RANKS, "launch-files"):
        return do(cfg, [*config_flag(config_dir), *overrides])
    if verb == "config":
        return do(cfg, of_training, config_dir)
    return do(cfg, config_dir) if verb == "recipes" else do(cfg)


def _dispatch(argv: list[str]) -> int:
    flags, words = _parser().parse_known_args(argv)
    if flags.version:
        print(f"fsdp-trainer {__version__}")
        return 0
    if flags.shell_completion:
        return _completion(words)
    verb, overrides = _verb(words)
    if flags.help:
        from fsdp_trainer.config.document import help_text

        print(help_text(verb if words[:1] == [verb] else None, flags.config_dir))
        return 0
    if flags.multirun and (flags.info or flags.cfg):
        raise UserError(
            "the command line cannot be read",
            [Problem("-m", "--cfg and --info show one run: leave one of them out")],
        )
    if flags.multirun:
        return _sweep(verb, overrides, flags.config_dir)
    if flags.info:
        return _hydra_info(flags.info, verb, overrides, flags.config_dir)
    if flags.cfg:
        from fsdp_trainer.config.compose import as_yaml, compose

        print(as_yaml(compose(verb, overrides, flags.config_dir, inputs=False)), end="")
        return 0
    return run_verb(verb, overrides, flags.config_dir)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(
            "the command line cannot be read",
            [
                Problem(
                    shlex.join(sys.argv[1:]), f"{message}\nfsdp-trainer --help  lists what there is"
                )
            ],
        )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fsdp-trainer", add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument(
        "--info",
        "-i",
        nargs="?",
        const="all",
        choices=["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"],
    )
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--shell-completion", "-sc", action="store_true")
    return parser


def _verb(words: list[str]) -> tuple[str, list[str]]:
    """The verb and its overrides. Raises UserError for a verb that is misspelt or not first."""
    first, rest = (words[0], words[1:]) if words and _bare(words[0]) else (None, words)
    misplaced = next((w for w in rest if w in VERBS), None)
    if first is not None and first not in VERBS:
        raise UserError("no such verb", [Problem(first, _why_no_verb(first))])
    if misplaced:
        line = shlex.join(["fsdp-trainer", misplaced, *(w for w in rest if w != misplaced)])
        why = (
            f"the verb comes first:  {line}"
            if first is None
            else f"one verb at a time; {first} came first.\nFor {misplaced}:  {line}"
        )
        raise UserError("the command line cannot be read", [Problem(misplaced, why)])
    return first or "train", rest


def _why_no_verb(word: str) -> str:
    from fsdp_trainer.config.check import flatten
    from fsdp_trainer.config.compose import options
    from fsdp_trainer.config.names import nearest
    from fsdp_trainer.config.overrides import listed, without_key

    meant = without_key(word, flatten(PRIMARY["train"]), options("train")) or nearest(word, VERBS)
    head = f"there is no such verb.{f' Did you mean  {meant} ?' if meant else ''}"
    return f"{head}\n{listed('There are:', VERBS)}\nSettings are  key=value"


def _bare(word: str) -> bool:
    return "=" not in word and word[:1] not in "+~-"


def _sweep(verb: str, words: list[str], config_dir: str | None) -> int:
    from fsdp_trainer.config.compose import config_flag
    from fsdp_trainer.launch.sweep import sweep

    if verb != "train":
        line = shlex.join(["fsdp-trainer", verb, *config_flag(config_dir), *words])
        raise UserError(
            "the sweep cannot be started",
            [Problem(f"-m {verb}", f"only training is swept. Without -m:  {line}")],
        )
    return sweep(words, config_dir)


def _hydra_info(what: str, verb: str, overrides: list[str], config_dir: str | None) -> int:
    from hydra.core.global_hydra import GlobalHydra

    from fsdp_trainer.config.compose import composable, hydra

    with hydra(composable(verb, overrides, config_dir), config_dir) as given:
        GlobalHydra.instance().hydra.show_info(what, verb, given)  # type: ignore[union-attr]
    return 0


def _completion(words: list[str]) -> int:
    """The completion scripts are Hydra's (`-sc install=bash`); what they ask for (`query`) is answered by the schema, without composing."""
    if words and words[0].startswith("query="):
        from fsdp_trainer.config.complete import completions

        line = os.environ.get("COMP_LINE", "fsdp-trainer ")
        print(*completions(line[: int(os.environ.get("COMP_POINT", len(line)))]), sep="\n")
        return 0
    from hydra.core.global_hydra import GlobalHydra

    from fsdp_trainer.config.compose import hydra

    with hydra([], None):
        try:
            GlobalHydra.instance().hydra.shell_completion("train", words)  # type: ignore[union-attr]
        except ValueError as error:
            raise UserError(
                "no such completion",
                [
                    Problem(
                        shlex.join(["-sc", *words]), f"{error}\nUse  -sc install=bash  (zsh, fish)"
                    )
                ],
            ) from None
    return 0
