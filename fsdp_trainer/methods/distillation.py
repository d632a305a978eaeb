"""Training on data and on a teacher's probabilities (Hinton et al. 2015)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_trainer.methods.method import Method, StepParts
from fsdp_trainer.methods.stored_columns import RunRows
from fsdp_trainer.methods.stored_teacher import ListedTeacher, TeacherColumn
from fsdp_trainer.methods.teacher import (
    FrozenModel,
    Teacher,
    record_of_lists,
    shard_teacher,
    with_second_model,
)
from fsdp_trainer.models.decoder import Decoder, DecoderOutput, MicroBatch
from fsdp_trainer.models.head import Objective, Scores
from fsdp_trainer.observe.step_log import finite_or_none
from fsdp_trainer.training.batches import BatchOptions
from fsdp_trainer.training.metrics import MethodMetric, MicroBatchResult
from fsdp_trainer.training.setup.run_setup import RunSetup
from fsdp_trainer.training.step import ForwardBackward


@dataclass(frozen=True)
class Distillation:
    """Σ weight · ((1 - share) · cross-entropy + share · T² · divergence) over tokens.

    The head calls it. weights: [tokens] float32, already divided by the step's Σ weight.
    temperature: T, with which the divergence was computed; T² keeps its gradient as large as for
    T = 1.
    """

    weights: Tensor
    share: float
    temperature: float
    needs_mean = False
    needs_all_tokens = False

    def __call__(self, scores: Scores, tokens: slice) -> Tensor:
        assert scores.divergence is not None
        of_teacher = self.share * self.temperature**2 * scores.divergence
        losses = of_teacher - (1 - self.share) * scores.log_probability
        return (losses * self.weights[tokens]).sum()


@dataclass(kw_only=True)
class DistilForwardBackward(ForwardBackward):
    """Runs micro-batches with a teacher. The reported loss is the cross-entropy on the data."""

    teacher: Teacher | ListedTeacher

    def forward(self, batch: MicroBatch, objective: Objective | None = None) -> DecoderOutput:
        """Run the teacher, then the student, whose head compares the two. See ForwardBackward."""
        with self.teacher.reading(batch) as with_soft_targets:
            return self.model(with_soft_targets, objective)


class TeacherMetrics:
    """The divergence between teacher and student, and the teacher's loss on the same targets.

    Sums: Σ weight, Σ weight · divergence, Σ weight · the teacher's negative log-likelihood.
    """

    keys: tuple[str, ...] = ("kl", "teacher_loss")
    size = 3
    of_tokens = True

    def part(self, result: MicroBatchResult) -> Tensor:
        scores, weights = result.scores, result.batch.weights.double()
        assert scores.divergence is not None
        assert scores.teacher_log_probability is not None
        values = torch.stack(
            [torch.ones_like(weights), scores.divergence, -scores.teacher_log_probability]
        )
        return (values * weights).sum(1)

    def written(self, sums: list[float]) -> dict[str, Any]:
        weight, *totals = sums
        means = [total / weight for total in totals] if weight else []
        return {key: finite_or_none(mean) for key, mean in zip(self.keys, means, strict=False)}


class DistillationMethod(Method):
    """Training with a teacher, which is in memory or has stored lists of its likeliest tokens."""

    def __init__(self, setup: RunSetup, rows: RunRows, checkpoint: Path | None):
        files = setup.inputs.teacher_files  # none in a rehearsal
        if files:
            Teacher.require_same(setup.cfg.second_model, checkpoint, record_of_lists(files))
            rows = column_of_run(setup, rows).prepare(files)
        super().__init__(setup, rows, checkpoint)
        self.teacher = self._teacher()

    def _teacher(self) -> Teacher | ListedTeacher:
        """Return the teacher, which has no weights yet if it is in memory. Collective."""
        setup, source = self.setup, self.setup.inputs.second_folder
        assert source
        assert self.second
        models = with_second_model(setup.config, source, setup.cfg.sharding.tensor)
        if self.second.has_lists:
            return ListedTeacher(self.choice, min(config.vocab_size for config in models))
        parts = setup.config, setup.dims, setup.compiled
        return shard_teacher(setup.cfg, source, models[1], *parts)

    @property
    def frozen_models(self) -> list[FrozenModel]:
        return [self.teacher] if isinstance(self.teacher, Teacher) else []

    def load(self, model: Decoder, options: BatchOptions) -> tuple[RunRows, dict[str, str]]:
        if isinstance(self.teacher, Teacher):
            digest = self.load_frozen(self.teacher)
        else:
            digest = record_of_lists(str(self.setup.inputs.teacher_files))
        return self.rows, {"teacher": digest}

    @property
    def objective_differs(self) -> bool:
        """See Method. The reported loss is that of the data alone."""
        return True

    def objective(self) -> Callable[[Tensor], Objective]:
        return partial(Distillation, share=self.choice.share, temperature=self.choice.temperature)

    def metric(self) -> MethodMetric:
        return TeacherMetrics()

    def step(self, parts: StepParts) -> ForwardBackward:
        return DistilForwardBackward(*parts, teacher=self.teacher)


def column_of_run(setup: RunSetup, rows: RunRows) -> TeacherColumn:
    """Return the column of the rows with the teacher's top-k tokens."""
    assert setup.inputs.second_folder

    def leave_if_agreed() -> None:
        setup.signals.sync()
        setup.signals.raise_if_agreed()

    return TeacherColumn(
        cfg=setup.cfg,
        rows=rows,
        dims=setup.dims,
        say=setup.observer.say,
        source=setup.inputs.second_folder,
        student=setup.config,
        world=setup.world,
        progress=setup.observer.console.paced(),
        check=leave_if_agreed,
    )
