"""Training from Python: `fsdp_trainer.train`."""

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsdp_trainer.base import phases
from fsdp_trainer.base.counted import counted
from fsdp_trainer.base.remote_code import allow_remote_code
from fsdp_trainer.config.check import as_value
from fsdp_trainer.config.composing.compose import compose, config_flag
from fsdp_trainer.config.paths import run_folder
from fsdp_trainer.errors import UserError
from fsdp_trainer.extensions import CALLBACKS, Callback, import_modules
from fsdp_trainer.launch.start import starts_ranks
from fsdp_trainer.observe.records import whole_lines
from fsdp_trainer.run.verb import train as train_verb

Overrides = str | Sequence[str] | Mapping[str, Any]


class TrainResult(int):
    """The exit code of a training run, as an int, with the run's folder and last metrics."""

    folder: Path
    """The run's folder."""
    history: list[dict[str, Any]]
    """The lines of the run's metrics.jsonl: one entry a step, those before a resume included."""

    def __new__(cls, exit_code: int, *_: Any) -> "TrainResult":
        return super().__new__(cls, exit_code)  # a copy has no folder yet

    def __init__(self, exit_code: int, folder: Path):
        self.folder = folder
        self.history = list(whole_lines(folder / "metrics.jsonl"))

    @property
    def metrics(self) -> dict[str, Any]:
        """The last entry of `history`; empty if there is none."""
        return self.history[-1] if self.history else {}

    @property
    def exit_code(self) -> int:
        """0: finished; 1: failed; 75: stopped, and the same call resumes it."""
        return int(self)

    def __repr__(self) -> str:
        steps = counted(len(self.history), "step")
        return f"TrainResult(exit_code={int(self)}, folder={str(self.folder)!r}, {steps})"


def train(
    overrides: Overrides = (),
    config_dir: str | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    imports: Sequence[str] = (),
    **keys: Any,
) -> TrainResult:
    """Train as `fsdp-trainer train OVERRIDES` does.

    overrides: a list of words, `["+recipe=quickstart", "run.seed=1"]`, one string with all words,
    or a dictionary, `{"+recipe": "quickstart", "run.seed": 1}`. callbacks: called by this run,
    which must have a single rank or be started by torchrun. imports: modules that register
    extensions, imported here and in the ranks that this call starts. keys: further overrides, as
    `recipe="quickstart", adapter="lora", optim={"lr": 1e-4}`.
    Raises UserError for a mistake in the configuration or the input.
    """
    phases.begin()
    import_modules(imports)
    words = as_words(overrides) + as_words(
        {"+recipe" if name == "recipe" else name: value for name, value in keys.items()}
    )
    cfg = compose("train", words, config_dir)
    allow_remote_code(cfg)
    if callbacks and starts_ranks(cfg.launch, os.environ):
        text = (
            "ranks are processes of their own, and these objects are in this process.\n"
            "Register callbacks in a module:  train(…, imports=['my_module'])  or use  "
            "launch.nproc_per_node=1"
        )
        raise UserError("the callbacks would not be called", "callbacks", text)
    with called_by_this_run(callbacks), own_excepthook():
        exit_code = train_verb(cfg, [*config_flag(config_dir), *words])
    return TrainResult(exit_code, run_folder(cfg))


@contextmanager
def own_excepthook() -> Iterator[None]:
    """Keep torch from writing the rank before each line of this process's later tracebacks."""
    before = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = before


@contextmanager
def called_by_this_run(callbacks: Sequence[Callback]) -> Iterator[None]:
    """Register callbacks while the block runs. Raises UserError for an object that is none."""
    wrong = [callback for callback in callbacks if not isinstance(callback, Callback)]
    if wrong:
        text = "is no fsdp_trainer.Callback: derive its class from that, and pass an object of it"
        raise UserError("a callback cannot be called", repr(wrong[0]), text)
    names = {f"callback {i}": callback for i, callback in enumerate(callbacks)}
    CALLBACKS.update(names)
    try:
        yield
    finally:
        for name in names:
            del CALLBACKS[name]


def as_words(overrides: Overrides) -> list[str]:
    if isinstance(overrides, str):
        return shlex.split(overrides)
    if isinstance(overrides, Mapping):
        return [f"{key}={as_value(value)}" for key, value in flat(overrides)]
    return list(overrides)


def flat(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield dotted keys with their values: `{"train": {"steps": 1}}` gives `("train.steps", 1)`.

    Only one level is flattened. A dictionary under a key that has a dot already is a value.
    """
    for name, value in tree.items():
        if isinstance(value, Mapping) and "." not in name:
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())
        else:
            yield name, value
