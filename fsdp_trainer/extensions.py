"""The user's own code in a run: callbacks, metrics, objectives and rewards. Imports no torch.

Code is named on the command line (`--import my_module`) or registered from Python, never by a
configuration file.
"""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_trainer.config.methods import METHODS, ObjectiveChoice
from fsdp_trainer.errors import Problem, UserError

IMPORTS = "FSDP_TRAINER_IMPORT"
"""Environment variable with the modules of --import, separated by commas. Ranks and jobs that this
program starts import them too."""


@dataclass(frozen=True)
class RunInfo:
    """The run that calls a callback.

    folder: the run's folder. cfg: the configuration, a `TrainConfig`. model: this rank's part of
    the decoder, whose parameters are DTensors.
    """

    folder: Path
    rank: int
    world_size: int
    cfg: Any
    model: Any


class Callback:
    """Methods that a run calls; a subclass overrides those that it needs.

    Every rank calls them, except `checkpoint`. An exception in one of them ends the run.
    """

    def start(self, run: RunInfo) -> None:
        """Handle the start or resumption of the run, before its first step."""

    def step(self, run: RunInfo, step: int) -> None:
        """Handle the end of a step. Its metrics may still be on the device: see `metrics`."""

    def metrics(self, run: RunInfo, line: dict[str, Any]) -> None:
        """Handle a line written to metrics.jsonl.

        A logging step writes the lines of all steps since the last logging step.
        """

    def validation(self, run: RunInfo, step: int, loss: float | None) -> None:
        """Handle the end of a validation.

        step: 0 before the first step. loss: None if it is not finite.
        """

    def checkpoint(self, run: RunInfo, step: int, path: Path) -> None:
        """Handle a committed checkpoint, on rank 0 alone, in the thread that wrote it."""

    def end(self, run: RunInfo, reason: str, exit_code: int) -> None:
        """Handle the orderly end of the run, finished or stopped."""


CALLBACKS: dict[str, Callback] = {}
METRICS: dict[str, Callable[[], Any]] = {}
OBJECTIVES: dict[str, Callable[..., Any]] = {}
REWARDS: dict[str, Callable[..., list[float]]] = {}
BUILT_IN = {
    "objective": tuple(METHODS),
    "metric": ("loss", "objective", "loss_by_source", "method"),
    "reward": ("exact", "number", "regex", "length", "code", "http", "model"),
}
"""Names of the program's own extensions, which a user's cannot have."""
KINDS: dict[str, dict[str, Any]] = {
    "callback": CALLBACKS,
    "metric": METRICS,
    "objective": OBJECTIVES,
    "reward": REWARDS,
}


def register(kind: str, name: str, what: Any = None) -> Any:
    """Register an extension for all runs of this process; without `what`, return a decorator.

    The kinds, and what each expects:
    callback: a `Callback` or its class. metric: a class like those of training/metrics.py, with
    `name` as its own name. objective: a function of (scores, weights) that returns a scalar tensor,
    chosen with  objective.name=NAME. reward: a function of a list of attempts (see
    rewards/reward.py) that returns a number for each, used as an entry of objective.rewards; its
    further parameters are keys of that entry.
    Raises UserError for another kind, and for a name that is in use.
    """
    if kind not in KINDS:
        problem = Problem(f"register({kind!r}, …)", f"there are {', '.join(KINDS)}")
        raise UserError("nothing of this kind can be registered", [problem])
    if what is None:
        return lambda decorated: register(kind, name, decorated)
    if name in KINDS[kind] or name in BUILT_IN.get(kind, ()):
        problem = Problem(
            f"register({kind!r}, {name!r})", "is registered already: use another name"
        )
        raise UserError("the name is already in use", [problem])
    is_class = isinstance(what, type)
    KINDS[kind][name] = what() if kind == "callback" and is_class else what
    return what


def import_modules(names: Sequence[str]) -> None:
    """Import the modules of --import, and those of the parent process.

    Raises UserError for a module that cannot be imported.
    """
    inherited = os.environ.get(IMPORTS, "").split(",")
    modules = list(dict.fromkeys(name for name in [*inherited, *names] if name))
    if not modules:
        return
    os.environ[IMPORTS] = ",".join(modules)
    if os.getcwd() not in sys.path and "" not in sys.path:  # as `python -m` does
        sys.path.insert(0, os.getcwd())
    for name in modules:
        try:
            importlib.import_module(name)
        except UserError:
            raise
        except Exception as error:
            text = (
                f"{type(error).__name__}: {error}\nA module is named as in `import`, without .py, "
                "and must be in this folder or on PYTHONPATH"
            )
            problem = Problem(f"--import {name}", text)
            raise UserError("a module cannot be imported", [problem]) from error


def registered_by_user(choice: ObjectiveChoice) -> Callable[..., Any] | None:
    """Return the user's own objective; None if the chosen one is built in."""
    return OBJECTIVES.get(choice.name)


def objective_names() -> list[str]:
    """Return the possible values of objective.name."""
    return [*BUILT_IN["objective"], *OBJECTIVES]
