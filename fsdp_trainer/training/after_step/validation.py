"""Validation during training."""

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch.distributed as dist
from torch import Tensor

from fsdp_trainer.observe.step_log import finite_or_none
from fsdp_trainer.training.after_step.stoppable import StoppableWork
from fsdp_trainer.training.batches import StepPlan
from fsdp_trainer.training.compilations import CompilationLog
from fsdp_trainer.training.data_source import StoredRows
from fsdp_trainer.training.metrics import Metrics, MicroBatchResult, validation_metrics
from fsdp_trainer.training.progress import VALIDATE, Progress


class ValidationSums(NamedTuple):
    """The sums of this rank's metrics over the validation set, and the plan of its only step."""

    metrics: Metrics
    sums: Tensor
    plan: StepPlan


@dataclass
class Validation(StoppableWork[ValidationSums]):
    """Computes the mean loss over exactly the validation set.

    The result is the same for any number of ranks.
    """

    name: ClassVar[str] = VALIDATE
    phase: ClassVar[str] = "validation"
    rows: StoredRows
    token_bytes: Tensor
    """[vocabulary] int64: number of bytes of each token."""
    is_first: bool
    """True if the model is also validated before its first step, as a baseline."""
    min_decrease: float
    """train.early_stop_delta: a loss counts as lower for train.early_stop if it is by more."""
    compilations: CompilationLog

    def due(self, progress: Progress) -> bool:
        return super().due(progress) or (progress.at_start and self.is_first)

    def run(self, progress: Progress) -> None:
        super().run(progress)
        self.compilations.report(progress.step, "validation")

    def compute(self, check: Callable[[], None]) -> ValidationSums:
        of_method = self.forward_backward.metrics.of_method
        metrics = validation_metrics(self.rows.source_names, self.token_bytes, of_method)
        sums = metrics.zeros()
        with closing(self.rows.open_all()) as feed:
            step = feed.next_step(1)
            for batch, scores in self.forward_backward.scores(step, check):
                loss = self.forward_backward.loss(batch, scores)
                metrics.add(sums, MicroBatchResult(batch, scores, loss, loss))
        return ValidationSums(metrics, sums, step.plan)

    def record(
        self, computed: ValidationSums, progress: Progress, seconds: Callable[[], float]
    ) -> None:
        metrics, sums, plan = computed
        self.forward_backward.dims.sum_over_tokens(sums)
        dist.broadcast(sums, 0)  # decisions depend on it: it must be bitwise equal on all ranks
        weight = self.forward_backward.weight(plan)
        loss = sums[metrics.position("loss")].item() / (weight or math.nan)
        progress.validated(loss, self.min_decrease)
        written = metrics.written(sums.tolist())
        by_source, bits = written.get("loss_by_source") or {}, written["bits_per_byte"]
        lowest, value = (progress.best_step, progress.best_loss), finite_or_none(loss)
        self.log.observer.validated(progress.step, value, bits, lowest, by_source, seconds())
        line: dict[str, Any] = {"validation_loss": value, "validation_bits_per_byte": bits}
        if by_source:
            line["validation_loss_by_source"] = by_source
        of_method = self.forward_backward.metrics.of_method
        names = of_method.keys if of_method is not None else ()
        if events_of := getattr(of_method, "events", None):
            events = events_of(metrics.of("method", sums).tolist())
            for name, event in events.items():
                self.log.observer.event(name, step=progress.step, **event)
        line |= {f"validation_{name}": written[name] for name in names if name in written}
        self.log.add_to_line(line, progress)
