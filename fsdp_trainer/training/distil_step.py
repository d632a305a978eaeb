"""Forward and backward of micro-batches that a teacher reads before its student."""

from dataclasses import dataclass

from fsdp_trainer.models.decoder import DecoderOutput, MicroBatch
from fsdp_trainer.models.head import Objective
from fsdp_trainer.training.step import ForwardBackward
from fsdp_trainer.training.teacher import Teacher


@dataclass(kw_only=True)
class DistilForwardBackward(ForwardBackward):
    """Runs micro-batches with a teacher. The reported loss is that of the data's own tokens."""

    teacher: Teacher

    def forward(self, batch: MicroBatch, objective: Objective | None = None) -> DecoderOutput:
        """Run the teacher, then the student, whose head compares both. See ForwardBackward."""
        with self.teacher.reading(batch) as with_soft_targets:
            return self.model(with_soft_targets, objective)
