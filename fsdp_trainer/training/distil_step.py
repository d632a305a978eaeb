"""Forward and backward of micro-batches that a teacher reads before its student."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from fsdp_trainer.models.decoder import DecoderOutput, MicroBatch
from fsdp_trainer.models.head import Objective
from fsdp_trainer.training.step import ForwardBackward


class SoftTeacher(Protocol):
    """Gives micro-batches a teacher's probabilities: one in memory, or what was stored of it."""

    def reading(self, batch: MicroBatch) -> AbstractContextManager[MicroBatch]:
        """Return the batch with soft targets, for as long as it is entered. Collective."""


@dataclass(kw_only=True)
class DistilForwardBackward(ForwardBackward):
    """Runs micro-batches with a teacher. The reported loss is that of the data's own tokens."""

    teacher: SoftTeacher

    def forward(self, batch: MicroBatch, objective: Objective | None = None) -> DecoderOutput:
        """Run the teacher, then the student, whose head compares both. See ForwardBackward."""
        with self.teacher.reading(batch) as with_soft_targets:
            return self.model(with_soft_targets, objective)
