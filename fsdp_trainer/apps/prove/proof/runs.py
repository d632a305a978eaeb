"""The runs of a proof: the program's own ranks, with a recorder, and their output in a file."""

import json
import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor

from fsdp_trainer.apps.prove.proof.forked_ranks import starter
from fsdp_trainer.apps.prove.proof.recordings import FOLDER, GRADIENTS, NUDGE, whole_tensors
from fsdp_trainer.config.paths import checkpoint_folders, run_folder
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.errors import RunFailed, UserError
from fsdp_trainer.extensions import IMPORTS
from fsdp_trainer.launch.start import start_ranks

LAST_LINES = 30
RECORDER = "fsdp_trainer.apps.prove.proof.recorder"
"""The module that ranks import."""


@dataclass
class ProofRun:
    """A run of a proof: where it lies, and once it is `recorded` what its ranks wrote.

    scratch: the folder of all runs' records.
    """

    cfg: TrainConfig
    scratch: Path

    @property
    def folder(self) -> Path:
        return self.scratch / "records" / str(self.cfg.run.name)

    def named(self, name: str) -> "ProofRun":
        return ProofRun(replace(self.cfg, run=replace(self.cfg.run, name=name)), self.scratch)

    def recorded(self, nudged: float = 0.0) -> "ProofRun":
        """Train, and return itself. Raises UserError and RunFailed as the run does.

        nudged: see `recordings.NUDGE`.
        """
        self.folder.mkdir(parents=True)
        output = self.folder / "output.log"
        imports = ",".join(filter(None, [os.environ.get(IMPORTS), RECORDER]))
        own = {IMPORTS: imports, FOLDER: str(self.folder)}
        if nudged:
            own[NUDGE] = str(nudged)
        with ExitStack() as stack:
            stack.enter_context(patch.dict(os.environ, own))
            file = stack.enter_context(output.open("w"))
            code = start_ranks(
                self.cfg, [], start=starter(self.cfg.launch.env), stdout=file, stderr=file
            )
        if code or not (self.folder / "end.rank0.pt").exists():
            raise failure(str(self.cfg.run.name), code, output.read_text())
        return self

    def resumed_from(self, begun: "ProofRun") -> "ProofRun":
        own, first = run_folder(self.cfg), begun.checkpoints[0]
        shutil.copytree(first, own / "checkpoints" / first.name, symlinks=True)
        for name in ("metrics.jsonl", "events.jsonl"):
            shutil.copyfile(run_folder(begun.cfg) / name, own / name)
        return self.recorded()

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        lines = (run_folder(self.cfg) / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    @property
    def checkpoints(self) -> list[Path]:
        return checkpoint_folders(run_folder(self.cfg))

    @cached_property
    def start(self) -> dict[str, Tensor]:
        """All weights at the start, by name, frozen ones and buffers too."""
        return whole_tensors(self.folder, "start")[0]

    @cached_property
    def end(self) -> dict[str, Tensor]:
        return whole_tensors(self.folder, "end")[0]

    @cached_property
    def trained(self) -> dict[str, bool]:
        return whole_tensors(self.folder, "start")[1]

    def gradients(self, step: int) -> dict[str, Tensor]:
        """Return the gradient of each trained weight in a step of `GRADIENTS`."""
        return whole_tensors(self.folder, f"gradients-{step}")[0]

    @property
    def unequal_copies(self) -> list[str]:
        """Sentences about numbers that ranks hold alike, and that differ."""
        names = ["start", *(f"gradients-{step}" for step in GRADIENTS), "end"]
        return [text for one in names for text in whole_tensors(self.folder, one)[2]]


def failure(name: str, code: int, output: str) -> UserError | RunFailed:
    own = output[output.rfind("fsdp-trainer: ") :] if "fsdp-trainer: " in output else output
    text = "\n".join(own.strip().splitlines()[-LAST_LINES:]).removeprefix("fsdp-trainer: ")
    if code == UserError.exit_code:
        return UserError(f"the {name} run is refused", "as `train` says", text)
    return RunFailed(f"the {name} run of the proof ended with code {code}:\n{text}")
