"""Paths on the command line that stand for `source=`, as in `fsdp-trainer report runs/a runs/b`."""

import re
import shlex
from pathlib import Path

from fsdp_trainer.config.verbs import PRIMARY, ReportConfig
from fsdp_trainer.errors import UserError


def is_path(word: str) -> bool:
    """Return True for a word that is no setting and names something that exists, or an address.

    Folders of a sweep have `=` in their names: `runs/sweep/optim.lr=0.001` is a path.
    """
    if re.match(r"[^=\s]+://\S+$", word):
        return True
    return ("=" not in word or "/" in word.split("=")[0]) and Path(word).exists()


STARTERS = ("accelerate", "torchrun", "deepspeed", "python", "trl", "llamafactory-cli", "axolotl")


def require_quotes(words: list[str]) -> None:
    """Raise UserError for a command line of another trainer whose words stand alone."""
    if words and words[0] in STARTERS and not Path(words[0]).exists():
        line = shlex.join(["fsdp-trainer", "convert", shlex.join(words)])
        reason = f"a command line to convert is one word, in quotes:  {line}"
        raise UserError("the command line cannot be read", shlex.join(words), reason)


def is_convertible(word: str) -> bool:
    return is_path(word) or bool(re.match(r"-$|[^\s=]+(\s|\.(ya?ml|json|sh)$)", word))


def as_source(verb: str, paths: list[str], words: list[str]) -> str:
    """Return `source=` with these paths, quoted where Hydra's grammar needs it.

    words: the whole command line. Raises UserError if it names more than the verb reads.
    """
    named = [word for word in words if word.startswith("source=")]
    several = issubclass(PRIMARY[verb], ReportConfig)
    if named or (len(paths) > 1 and not several):
        others = [word for word in words if word not in (*paths, *named)]
        line = shlex.join(["fsdp-trainer", verb, paths[0], *others])
        reason = "`source` is given twice" if named else f"{verb} reads one at a time"
        raise UserError(
            "the command line cannot be read", " ".join([*paths, *named]), f"{reason}:  {line}"
        )
    if several:
        return f"source=[{','.join(map(_quoted, paths))}]"
    return f"source={_quoted(paths[0])}"


def _quoted(path: str) -> str:
    if re.fullmatch(r"[\w./-]+", path):
        return path
    from fsdp_trainer.config.composing.overrides import quoted

    return quoted(path)
