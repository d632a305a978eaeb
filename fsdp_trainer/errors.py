"""Errors reported without a traceback, and with what to type instead."""

import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

WIDEST = 34  # a longer `what` gets a line of its own


@dataclass(unsafe_hash=True)
class Problem:
    """One mistake.

    what: key=value, a file and line, or a tensor; why: and how to mend it, in one line or several.
    """

    what: str
    why: str


class UserError(Exception):
    """The configuration or the input is wrong: exit code 2, one message, no traceback."""

    exit_code = 2
    reported = False

    def __init__(self, title: str, problems: list[Problem] | None = None):
        self.title = title
        self.problems = problems or []
        super().__init__(title, self.problems)  # both arguments, so that it pickles across ranks

    def __str__(self) -> str:
        short = [len(p.what) for p in self.problems if len(p.what) <= WIDEST]
        width = max(short, default=0)
        text = f"fsdp-trainer: {self.title}"
        for p in self.problems:
            is_short = len(p.what) <= WIDEST
            head = f"  {p.what:{width}}  " if is_short else f"  {p.what}\n      "
            indent = width + 4 if is_short else 6
            text += f"\n\n{head}" + f"\n{'':{indent}}".join(p.why.splitlines())
        return text


class RunFailed(Exception):
    """The run cannot go on, and the input is not at fault: exit code 1, no traceback."""

    exit_code = 1
    reported = False

    def __str__(self) -> str:
        return f"fsdp-trainer: {super().__str__()}"


class Stopped(BaseException):
    """Raised in the main thread when a signal or time limit interrupts a wait; args[0] says which.

    A BaseException, so that `except Exception` does not swallow it.
    """

    exit_code = 75


def report(error: UserError | RunFailed) -> None:
    """Print an error that all ranks may have, on rank 0 alone, and only the first time.

    The torchrun of another node ends with a table of its own ranks: its line is written for that.
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
        with suppress(OSError):  # the exit code matters more
            Path(env["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(record))
