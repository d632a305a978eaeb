"""All environments by name, and construction of the one in a configuration. Imports no torch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_trainer.base.own_code import place_of
from fsdp_trainer.base.recorded import FromEnvironment
from fsdp_trainer.config.check import as_text
from fsdp_trainer.config.entries import values_for, wrong_part
from fsdp_trainer.config.names import nearest
from fsdp_trainer.config.parts.own_parts import built_in, own_names, own_part, why_no_part
from fsdp_trainer.errors import UserError
from fsdp_trainer.rl.environments.environment import Environment

KEY, PART = "objective.environment", "environment"
ENVIRONMENTS: dict[str, type[Environment]] = built_in(PART)
METHODS = ("reset", "step")
"""What a user's environment must have; `reward` and `close` are optional."""
Entry = str | dict[str, Any]


@dataclass(frozen=True)
class EnvironmentSpec:
    """The environment of a run.

    make: returns a new one, for one rollout. rewards: True if it rewards rollouts itself.
    """

    title: str
    make: Callable[[], Any]
    rewards: bool = False
    file: Path | None = None

    @property
    def about(self) -> str:
        runs = f", which runs the code in {self.file}" if self.file else ""
        return f"answers over several turns with the environment {self.title}{runs}"


def find_environment(entry: Entry) -> EnvironmentSpec:
    problems = list(environment_problems(entry))
    if problems:
        raise _bad(entry, "\n".join(problems))
    options = dict(entry) if isinstance(entry, dict) else {"name": entry}
    name = str(options.pop("name"))
    if name in ENVIRONMENTS:
        kind = ENVIRONMENTS[name]
        values = values_for(kind, options)
        code = None
        if kind.code:
            program = str(values[kind.code])
            code = Path(program.rpartition(":")[0])
            values["program"] = _own(entry, program)
        return EnvironmentSpec(name, partial(kind, **values), kind.rewards, code)
    make = partial(_own(entry, name), **options)
    path, _, title = name.rpartition(":")
    environment = _made(entry, make, title)
    file = Path(path) if path else None
    return EnvironmentSpec(title, make, callable(getattr(environment, "reward", None)), file)


def environment_problems(entry: Entry) -> Iterator[str]:
    """Yield an error message for each problem of objective.environment. Runs no code of a user."""
    options = dict(entry) if isinstance(entry, dict) else {"name": entry}
    name = options.pop("name", None)
    if not isinstance(name, str):
        yield f"{as_text(entry)}  lacks a name, as in  {{name: search, folder: documents}}"
    elif name in ENVIRONMENTS:
        yield from _problems_of(name, options)
    elif ".py:" not in name and name not in own_names(PART):
        known = [*ENVIRONMENTS, *own_names(PART)]
        close = nearest(name, known)
        meant = f" Did you mean  {close} ?" if close else ""
        there = f"{' '.join(known)}, or your own as FILE.py:NAME"
        yield f"there is no such environment.{meant}\nThere are: {there}"
    elif ".py:" in name:
        yield from _missing_file(name)


def code_of(entry: Entry) -> list[str]:
    """Return the parts of an entry that decide which code runs, such as FILE.py:NAME.

    A part from an environment variable is as it was written.
    """
    options = entry if isinstance(entry, dict) else {"name": entry}
    name = options.get("name")
    parts = [name]
    if name in ENVIRONMENTS:
        parts = [options.get(part) for part in ENVIRONMENTS[name].names_code]
        parts = [part for part in parts if part not in (None, "null")]
    return [part.written if isinstance(part, FromEnvironment) else str(part) for part in parts]


def _problems_of(name: str, options: dict[str, Any]) -> Iterator[str]:
    kind = ENVIRONMENTS[name]
    known = {each.name: each for each in fields(kind) if each.metadata}
    what = f"option of {name}"
    wrong = [
        reason
        for part, value in options.items()
        if (reason := wrong_part(part, value, known, what))
    ]
    yield from wrong
    if not wrong:
        values = values_for(kind, options)
        problem = kind(**values).wrong_settings() or _code_problem(kind, values)
        if problem:
            yield f"{name}: {problem}"


def _code_problem(kind: type[Environment], values: dict[str, Any]) -> str | None:
    """Return an error message if the user's function is in no file, else None."""
    if not kind.code:
        return None
    program = str(values[kind.code])
    if ".py:" not in program:
        return f"{kind.code}: {program}  is no FILE.py:FUNCTION"
    return next(_missing_file(program), None)


def _missing_file(name: str) -> Iterator[str]:
    file = name.rpartition(":")[0]
    if not Path(file).is_file():
        yield f"{file} is no file"


def _own(entry: Entry, name: str) -> Any:
    """Return a user's environment or program. Raises UserError if there is none of this name."""
    if reason := why_no_part(PART, name):
        raise _bad(entry, reason)
    try:
        return own_part(PART, name)
    except Exception as error:
        raise _bad(entry, f"{type(error).__name__}: {error}{place_of(error)}") from error


def _made(entry: Entry, make: Callable[[], Any], name: str) -> Any:
    """Return a user's environment. Raises UserError if it cannot be made, or lacks a method."""
    try:
        environment = make()
    except Exception as error:
        raise _bad(entry, f"{name} cannot be made: {type(error).__name__}: {error}") from error
    missing = [method for method in METHODS if not callable(getattr(environment, method, None))]
    if missing:
        has = "reset(row), step(messages) and, if rewards do not score all, reward(messages)"
        raise _bad(entry, f"{name} has no {' and no '.join(missing)}. An environment has {has}")
    return environment


def _bad(entry: Entry, reason: str) -> UserError:
    return UserError("the environment cannot be used", f"{KEY}={as_text(entry)}", reason)
