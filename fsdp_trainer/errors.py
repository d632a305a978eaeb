"""Errors that are reported without a traceback, with the command or override that fixes them."""

import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fsdp_trainer.base.safe_text import safe

WIDEST = 34  # characters; a longer `what` is printed on its own line


WHAT_GOES_TOGETHER = "docs/reference/support.md shows what goes together"
"""The end of the reason why two settings are refused that no rule of arithmetic forbids."""
LONGEST = 4_000  # characters of a quoted text


def shortened(text: str) -> str:
    is_long = len(text) > LONGEST
    return f"{text[:LONGEST]} … ({len(text):,} characters)" if is_long else text


@dataclass(unsafe_hash=True)
class Problem:
    """One mistake.

    what: key=value, a file and line, or a tensor. reason: why it is wrong, and the fix, in one or
    more lines.
    """

    what: str
    reason: str

    def __post_init__(self) -> None:
        # both may quote strangers' files, and addresses with passwords
        self.what, self.reason = shortened(safe(self.what)), shortened(safe(self.reason))


class UserError(Exception):
    """The configuration or the input is wrong: exit code 2, one message, no traceback."""

    exit_code = 2
    reported = False

    def __init__(self, title: str, problems: list[Problem] | str = "", reason: str = ""):
        """problems: all mistakes; of a single one its `what`, and its `reason`."""
        self.title = safe(title)
        if isinstance(problems, str):
            problems = [Problem(problems, reason)] if problems or reason else []
        self.problems = problems
        super().__init__(self.title, self.problems)  # both arguments, so that it can be unpickled

    def __str__(self) -> str:
        short = [len(p.what) for p in self.problems if len(p.what) <= WIDEST]
        width = max(short, default=0)
        text = f"fsdp-trainer: {self.title}"
        for p in self.problems:
            is_short = len(p.what) <= WIDEST
            head = f"  {p.what:{width}}  " if is_short else f"  {p.what}\n      "
            indent = width + 4 if is_short else 6
            text += f"\n\n{head}" + f"\n{'':{indent}}".join(p.reason.splitlines())
        return text


class RunFailed(Exception):
    """The run cannot continue, although the input is right: exit code 1, no traceback."""

    exit_code = 1
    reported = False

    def __str__(self) -> str:
        return safe(f"fsdp-trainer: {super().__str__()}")


class Stopped(BaseException):
    """A signal or time limit that interrupts a wait of the main thread; args[0] names it.

    A BaseException, so that `except Exception` does not swallow it.
    """

    exit_code = 75


def report(error: UserError | RunFailed) -> None:
    """Print an error that all ranks may have raised, on rank 0 alone and only the first time.

    On other nodes it is written to torchrun's error file instead, which torchrun shows in the table
    of failed ranks that it ends with.
    """
    if error.reported:
        return
    error.reported = True
    env = os.environ
    if env.get("RANK", env.get("SLURM_PROCID", "0")) == "0":
        print(error, file=sys.stderr, flush=True)
    elif env.get("GROUP_RANK", "0") != "0" and "TORCHELASTIC_ERROR_FILE" in env:
        line = " ".join(str(error).split())
        now = int(time.time())
        record = {"message": {"message": line, "extraInfo": {"timestamp": now}}}
        with suppress(OSError):  # the exit code must be right even without the file
            Path(env["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(record))
