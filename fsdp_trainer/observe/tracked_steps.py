"""A tracker's record of a run: its id, its last step and its name, which the run's folder keeps.

So each step is logged once, over stops, crashes and steps that are taken back.
"""

import json
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp_trainer.extensions import TrackedRun, Tracker
from fsdp_trainer.observe import records

CONTINUES = "continues"
"""Name under which the configuration of a tracker's run says which one it follows."""


class TrackedSteps:
    """An open tracker that gets each step once."""

    def __init__(self, tracker: Tracker, file: Path):
        self.tracker, self.newest, self._file = tracker, tracker.newest, file
        self._write()

    def log(self, values: dict[str, Any], step: int) -> None:
        """Log the numbers of a step, unless the tracker has it and cannot take it back."""
        if step > self.newest or self.tracker.takes_back:
            self.tracker.log(values, step)
            self.newest = step
            if self.tracker.is_durable:
                self._write()

    def close(self, exit_code: int) -> None:
        self.tracker.close(exit_code)
        self._write()

    def _write(self) -> None:
        if self.tracker.id_bytes:
            run = self.tracker.run
            known = {"id": self.tracker.id, "newest": self.newest, "name": run.name}
            records.replace(self._file, json.dumps({**known, CONTINUES: run.config.get(CONTINUES)}))


def tracked_run(base: TrackedRun, file: Path, kind: type[Tracker], after: int | None) -> TrackedRun:
    """Return the run that a tracker is opened for: the one before, or a new one.

    base: what does not depend on the tracker. file: what was written of its run, if there was one.
    after: the step to go on after, or None; a tracker that is ahead of it gets a new run.
    """
    text, name = file.read_text() if file.exists() else "", base.folder.name
    # an earlier version wrote the id alone; a full disk may have left nothing
    known: dict[str, Any] = {"id": text, "name": name}
    if text.startswith("{"):
        known = json.loads(text)
    newest = known.get("newest", base.step)
    is_ahead = after is not None and (
        newest > after or "newest" not in known or not kind.is_durable
    )
    if known["id"] and (kind.takes_back or not is_ahead):
        run = replace(base, name=known["name"], id=known["id"], is_new=False, newest=newest)
        return with_origin(run, known.get(CONTINUES))
    new = replace(base, name=name, id=secrets.token_hex(kind.id_bytes))
    if not known["id"] or after is None:
        return new
    new = replace(new, name=f"{name} from step {after + 1}")
    return with_origin(new, {"run": known["id"], "step": after})


def with_origin(run: TrackedRun, follows: dict[str, Any] | None) -> TrackedRun:
    return replace(run, config={**run.config, CONTINUES: follows}) if follows else run
