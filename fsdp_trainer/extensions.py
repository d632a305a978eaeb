"""The user's own code in a run: callbacks, metrics, objectives, rewards and trackers.

Code is named on the command line (`--import my_module`, FILE.py:NAME), registered from Python or
offered by an installed package, never named by a configuration file. Imports no torch.
"""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_trainer.config.methods import METHODS, ObjectiveChoice
from fsdp_trainer.config.parts import own_parts
from fsdp_trainer.config.parts.own_parts import KINDS
from fsdp_trainer.errors import UserError

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

    def rollouts(self, run: RunInfo, step: int, rollouts: Sequence[Any]) -> None:
        """Handle the answers of the model that a step trains on, with their rewards."""

    def gradients(self, run: RunInfo, step: int) -> None:
        """Handle the gradients of a step before they are clipped.

        `run.model.parameters()` have this rank's parts of them in `grad`.
        """

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


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker is opened for.

    folder: the run's folder. name, id: those of its run in the tracker, the same at each restart.
    is_new: False at a restart. newest: the last step that the tracker has, as far as this program
    knows; -1 for none. step: the last step that the run has done. config: the resolved
    configuration, by group. mode: the value of the tracker's key, such as `offline`.
    """

    folder: Path
    name: str = ""
    id: str = ""
    is_new: bool = True
    newest: int = -1
    step: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    project: str = ""
    mode: Any = None


class Tracker:
    """A receiver of a run's metrics; a subclass overrides `log`, and opens it in `__init__`.

    Only rank 0 has trackers, each in a thread of its own. An exception is reported once and ends
    the tracker, never the run.
    """

    takes_back = False
    """True if a step that is logged again replaces the earlier values, and later steps.

    Otherwise each step is logged once, and a run that goes back to an earlier step continues in
    another run of the tracker, a new object that gets all steps before.
    """
    is_durable = True
    """False if a killed process may lose what was logged since the start: it is logged again."""
    id_bytes = 4
    """Bytes of a new id, which has two digits for each; 0: a restart need not know of this one."""

    def __init__(self, run: TrackedRun):
        """Open the tracker. A subclass may set `id`, and `newest`, the last step that it has."""
        newest = min(run.newest, run.step) if self.takes_back else run.newest
        self.run, self.id, self.newest = run, run.id, newest

    def log(self, values: dict[str, Any], step: int) -> None:
        """Log the numbers of a step, by the names that docs/trackers.md has."""

    def text(self, name: str, text: str, step: int) -> None:
        """Log a text, such as an answer to one of train.sample_prompts."""

    def line(self, line: dict[str, Any]) -> None:
        """Handle a line of metrics.jsonl or events.jsonl, unchanged."""

    def close(self, exit_code: int) -> None:
        """Send what is not sent yet. exit_code: 0, too, for a run that will be resumed."""


CALLBACKS: dict[str, Callback] = KINDS["callback"]
METRICS: dict[str, Callable[[], Any]] = KINDS["metric"]
OBJECTIVES: dict[str, Callable[..., Any]] = KINDS["objective"]
REWARDS: dict[str, Callable[..., list[float]]] = KINDS["reward"]
BUILT_IN = own_parts.BUILT_IN | {
    "objective": METHODS,
    "metric": ("loss", "objective", "loss_by_source", "method"),
}
"""Names of the program's own extensions, which a user's cannot have."""


def register(kind: str, name: str, what: Any = None) -> Any:
    """Register an extension for all runs of this process; without `what`, return a decorator.

    The kinds, and what each expects:
    callback: a `Callback` or its class. metric: a class like those of training/metrics.py, with
    `name` as its own name. objective: a function of (scores, weights) that returns a scalar tensor,
    chosen with  objective.name=NAME. reward: a function of a list of attempts (see
    rl/rewards/reward.py) that returns a number for each, used as an entry of objective.rewards; its
    further parameters are keys of that entry. tracker: a subclass of `Tracker`, chosen with
    logging.trackers=[NAME]. optimizer, schedule, format, form: see docs/extending.md.
    Raises UserError for another kind, and for a name that is in use.
    """
    if kind not in KINDS:
        raise UserError(
            "nothing of this kind can be registered",
            f"register({kind!r}, …)",
            f"there are {', '.join(KINDS)}",
        )
    if what is None:
        return lambda decorated: register(kind, name, decorated)
    if name in KINDS[kind] or name in BUILT_IN.get(kind, ()):
        raise UserError(
            "the name is already in use",
            f"register({kind!r}, {name!r})",
            "is registered already: use another name",
        )
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
            raise UserError("a module cannot be imported", f"--import {name}", text) from error


def registered_by_user(choice: ObjectiveChoice) -> Callable[..., Any] | None:
    """Return the user's own objective; None if the chosen one is built in."""
    return OBJECTIVES.get(choice.name)


def objective_names() -> list[str]:
    return [*METHODS, *OBJECTIVES]
