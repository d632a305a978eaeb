"""A tracker's record of a run: its id, its last step and its name, which the run's folder keeps.

So each step is logged once, over stops, crashes and steps that are taken back.
"""

import json
import secrets
from dataclasses import replace
from pathlib import Path

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.extensions import TrackedRun, Tracker
from fsdp_trainer.observe import records

CONTINUES = "continues"
"""Name under which the configuration of a tracker's run says which one it follows."""


class TrackedSteps:
    def __init__(self, tracker: Tracker, file: Path):
        self.tracker, self.newest, self._file = tracker, tracker.newest, file
        self._write()

    def log(self, values: Json, step: int) -> None:
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
    # nothing, or a part, if the disk was full; the id alone from before 1.0.0rc1
    known = records.parse(file.read_text() if file.exists() else "")
    new = replace(base, name=base.folder.name, id=secrets.token_hex(kind.id_bytes))
    if not known or CONTINUES not in known:
        return new
    newest, follows = known["newest"], known[CONTINUES]
    if kind.takes_back or after is None or (kind.is_durable and newest <= after):
        run = replace(base, name=known["name"], id=known["id"], is_new=False, newest=newest)
        return with_origin(run, follows)
    new = replace(new, name=f"{new.name} from step {after + 1}")
    return with_origin(new, {"run": known["id"], "step": after})


def with_origin(run: TrackedRun, follows: Json | None) -> TrackedRun:
    return replace(run, config={**run.config, CONTINUES: follows}) if follows else run
