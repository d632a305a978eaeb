"""Tasks on which the model is evaluated during training."""

from collections.abc import Callable
from typing import Any

import torch

from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.evaluation.scoring import Metrics, Scorer, sharded_shares
from fsdp_trainer.evaluation.tasks import Tasks
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.observe.console import without_errors
from fsdp_trainer.parallel.compile import without_compiling
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.parallelize import stay_gathered
from fsdp_trainer.training.run_inputs import RunInputs


class TrainingTasks:
    """The tasks of evaluation.tasks, run on the training ranks without effect on training."""

    def __init__(self, cfg: TrainConfig, inputs: RunInputs, dims: Dims, device: torch.device):
        """Load the tasks. Raises UserError for a task that does not exist."""
        self.names = cfg.evaluation.tasks
        self.rows = cfg.evaluation.rows
        self.cfg = cfg
        self.device = device
        self.shares = sharded_shares(dims, device)
        self.tasks = Tasks(cfg.evaluation, inputs.tokenizer, inputs.template)

    def run(self, model: Decoder, check: Callable[[], None], decoder: Any) -> Metrics:
        """Return {task: {metric: value}}; it may be empty except on each node's first rank.

        check: called before each batch; may raise, on all ranks together. decoder: the object that
        computes the logits. Collective.
        """
        scorer = Scorer(decoder, self.rows, self.device, self.shares, check)
        gathered = stay_gathered(model, self.cfg, self.device)
        with without_compiling(self.cfg.compile.enabled), gathered:
            return self.tasks.run(scorer)


def flat_metrics(metrics: Metrics) -> dict[str, float]:
    """Return the metrics as {`task/name`: value}, without standard errors."""
    return {
        f"{task}/{name}": value
        for task, values in metrics.items()
        for name, value in without_errors(values).items()
    }
