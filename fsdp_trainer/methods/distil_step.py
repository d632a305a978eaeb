"""Forward and backward of micro-batches with soft targets from a teacher."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from fsdp_trainer.models.decoder import DecoderOutput, MicroBatch
from fsdp_trainer.models.head import Objective
from fsdp_trainer.training.step import ForwardBackward


class SoftTeacher(Protocol):
    """A provider of a teacher's probabilities: the teacher in memory, or its stored lists."""

    def reading(self, batch: MicroBatch) -> AbstractContextManager[MicroBatch]:
        """Return a context manager for the batch with soft targets, valid inside. Collective."""


@dataclass(kw_only=True)
class DistilForwardBackward(ForwardBackward):
    """Runs micro-batches with a teacher. The reported loss is the cross-entropy on the data."""

    teacher: SoftTeacher

    def forward(self, batch: MicroBatch, objective: Objective | None = None) -> DecoderOutput:
        """Run the teacher, then the student, whose head compares the two. See ForwardBackward."""
        with self.teacher.reading(batch) as with_soft_targets:
            return self.model(with_soft_targets, objective)
