"""Where this rank is: in which step, and at what. Whoever watches over ranks, or breaks them on purpose, looks here."""

import threading
import time
from dataclasses import dataclass

PHASES = (
    "start",
    "data",
    "forward",
    "backward",
    "clip",
    "update",
    "validation",
    "samples",
    "log",
    "staging",
    "shards",
    "manifest",
    "rename",
    "prune",
    "agree",
    "export",
    "end",
)
"""In a step's order. `staging` to `prune` are a checkpoint's, `agree` is the ranks' decision whether to stop."""


@dataclass
class Place:
    """since: time.monotonic() when the phase began; entered: how many have begun."""

    step: int = 0
    phase: str = "start"
    since: float = 0.0
    entered: int = 0


main, background = Place(), Place()
"""Of the thread that trains, and of the one that writes checkpoints."""


def enter(phase: str, step: int | None = None) -> None:
    """This thread begins a phase; of `step`, if that is another than before."""
    place = main if threading.current_thread() is threading.main_thread() else background
    place.phase, place.since = phase, time.monotonic()
    place.step = place.step if step is None else step
    place.entered += 1
