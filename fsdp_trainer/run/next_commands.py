"""The last lines of a run: the model's folder, and what can be typed next."""

import os
import shlex
from pathlib import Path

from fsdp_trainer.base.process import OWN_ENDING
from fsdp_trainer.checkpoint.origin import read_origin
from fsdp_trainer.config.methods import ObjectiveChoice
from fsdp_trainer.config.schema import Data
from fsdp_trainer.data.records.labelled_texts import LABELLED, QUERIES, RANKED

EXPORTS = {
    "hf": "a Hugging Face folder",
    "adapter": "an adapter as PEFT stores it",
}
"""The folders that a run exports to."""


def next_commands(run: Path, objective: ObjectiveChoice, data: Data, adapted: bool) -> list[str]:
    """Return lines on a finished run's exports, and commands that can be copied.

    Empty where another program of this package starts the run and says it. adapted: the run trains
    an adapter.
    """
    if OWN_ENDING in os.environ:
        return []
    there = []
    for name, what in EXPORTS.items():
        step = read_origin(run / name).get("step")
        if step is not None:  # it may be of a step before the last
            there.append(f"       {run / name} is {what}, of step {step:,}")
    source, commands = shlex.quote(str(run)), []
    if not objective.method.scores:
        text = data.format == "text"
        commands.append(f"generate {source} prompt=Hello{' raw=true' if text else ''}")
        commands += [] if text else [f"chat {source}"]
    if objective.method.reads in (LABELLED, QUERIES, RANKED):
        commands.append(f"chat {source}")
    commands.append(f"report {source}")
    if not there:
        name, form = ("adapter", " form=adapter") if adapted else ("hf", "")
        commands.append(f"export {source} out={shlex.quote(str(run / name))}{form}")
    return [*there, "next:", *(f"  fsdp-trainer {command}" for command in commands)]
