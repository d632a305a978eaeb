"""Evaluation of the model in training on evaluation.tasks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.data.media.media import MediaReader
from fsdp_trainer.evaluation.scoring import Metrics, Scorer, WorkSplit
from fsdp_trainer.evaluation.tasks import Tasks
from fsdp_trainer.observe.console import without_errors
from fsdp_trainer.parallel.compile import without_compiling
from fsdp_trainer.parallel.parallelize import stay_gathered
from fsdp_trainer.training.after_step.stoppable import StoppableWork
from fsdp_trainer.training.progress import EVALUATE, Progress


@dataclass
class TrainingTasks(StoppableWork[Metrics]):
    """Runs the tasks on the training ranks."""

    name: ClassVar[str] = EVALUATE
    phase: ClassVar[str] = "evaluation"
    cfg: TrainConfig
    tasks: Tasks
    split: WorkSplit
    device: torch.device
    media: MediaReader | None

    def compute(self, check: Callable[[], None]) -> Metrics:
        """Return {task: {metric: value}}; it may be empty except on each node's first rank."""
        model, cfg = self.forward_backward.model, self.cfg
        decoder, rows = self.forward_backward.decoder, cfg.evaluation.rows
        scorer = Scorer(decoder, rows, self.device, self.split, check, self.media)
        gathered = stay_gathered(model, cfg.sharding, cfg.precision, self.device)
        with without_compiling(self.cfg.compile.enabled), gathered:
            return self.tasks.run(scorer)

    def record(self, computed: Metrics, progress: Progress, seconds: Callable[[], float]) -> None:
        self.log.observer.evaluated(progress.step, computed, seconds())
        self.log.add_to_line({"tasks": flat_metrics(computed)}, progress)


def flat_metrics(metrics: Metrics) -> dict[str, float]:
    """Return the metrics as {`task/name`: value}, without standard errors."""
    return {
        f"{task}/{name}": value
        for task, values in metrics.items()
        for name, value in without_errors(values).items()
    }
