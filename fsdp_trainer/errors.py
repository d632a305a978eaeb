"""Errors that a user can mend. Each carries everything that is wrong, and what to type instead."""

from dataclasses import dataclass

WIDEST = 34  # what is longer has a line of its own


@dataclass
class Problem:
    """One thing that is wrong: what (key=value, a file and line, a tensor), why, and the way out (may span lines)."""

    what: str
    why: str


class UserError(Exception):
    """The configuration or the input is wrong: exit code 2, one message, no traceback."""

    exit_code = 2

    def __init__(self, title: str, problems: list[Problem] | None = None):
        self.title, self.problems = title, problems or []
        super().__init__(title, self.problems)  # both arguments, so that it pickles across ranks

    def __str__(self) -> str:
        lines = [f"fsdp-trainer: {self.title}"]
        width = max((len(p.what) for p in self.problems if len(p.what) <= WIDEST), default=0)
        for p in self.problems:
            first, *rest = p.why.splitlines() or [""]
            above = len(p.what) > WIDEST  # and what is said of it stands below
            lines += [
                "",
                *([f"  {p.what}", f"      {first}"] if above else [f"  {p.what:{width}}  {first}"]),
            ]
            lines += [f"  {'':{4 if above else width + 2}}{line}" for line in rest]
        return "\n".join(lines)


class RunFailed(Exception):
    """The run cannot go on through no fault of the input: exit code 1, one message, no traceback."""

    exit_code = 1

    def __str__(self) -> str:
        return f"fsdp-trainer: {super().__str__()}"


class Stopped(BaseException):
    """A signal or a limit of time ends what this rank is doing now: args[0] says which. No `except Exception` on the way is meant."""

    exit_code = 75
