"""The inputs of a run, prepared on this machine."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fsdp_trainer.data.prepared import Prepared
from fsdp_trainer.data.templates.chat_template import Template
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer
from fsdp_trainer.launch.world import World
from fsdp_trainer.observe.console import Console, throttled

BEAT_SECONDS = 1.0
"""Seconds between heartbeats of a rank that prepares data while others wait for it."""


@dataclass
class RunInputs:
    """Tokenizer, template, data and the folders of models.

    init_from: local folder of model.init_from; None: random weights.
    second_folder: local folder of the second model; None: there is none, or it is the model that
    the run begins with.
    teacher_files: digest of the files in second_folder, if it is of a teacher whose lists are
    stored; else None.
    """

    tokenizer: TextTokenizer
    template: Template
    data: Prepared
    init_from: Path | None
    second_folder: Path | None = None
    teacher_files: str | None = None


def progress_with_heartbeat(console: Console, world: World) -> Callable[[str], None]:
    """Return a function that prints progress and sends heartbeats to the ranks that wait."""
    progress = console.paced()
    beat = throttled(lambda _: world.heartbeat(), BEAT_SECONDS)

    def report(line: str) -> None:
        progress(line)
        beat(line)

    return report
