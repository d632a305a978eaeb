"""All trackers by the name of their key in `logging`, and those of the user's own."""

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

from fsdp_trainer.config.parts.own_parts import built_in, own_part
from fsdp_trainer.config.schema import Logging
from fsdp_trainer.extensions import TrackedRun, Tracker

TRACKERS: dict[str, type[Tracker]] = built_in("tracker")
OFF = (None, False, "disabled")


class ChosenTracker(NamedTuple):
    """A tracker of a run. find: returns its class; the user's own is imported only then."""

    find: Callable[[], type[Tracker]]
    mode: Any


def chosen_trackers(cfg: Logging) -> dict[str, ChosenTracker]:
    modes = {name: getattr(cfg, name) for name in TRACKERS}
    chosen = {
        name: ChosenTracker(partial(TRACKERS.__getitem__, name), mode)
        for name, mode in modes.items()
        if mode not in OFF
    }
    for entry in cfg.trackers:
        name = re.sub(r"\W+", "-", entry.rpartition(":")[2])
        chosen[name] = ChosenTracker(cache(partial(own_tracker, entry)), entry)
    return chosen


def own_tracker(entry: str) -> type[Tracker]:
    """Return the class of an entry of logging.trackers. Raises TypeError if it is no tracker."""
    kind = own_part("tracker", entry)
    if not (isinstance(kind, type) and issubclass(kind, Tracker)):
        raise TypeError("it is no class derived from fsdp_trainer.Tracker")
    return kind


def open_tracker(kind: type[Tracker], run: TrackedRun) -> Tracker:
    return kind(run)
