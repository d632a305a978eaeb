"""A training method at run time: plain fine-tuning, and what other methods override.

What a method needs of a configuration is in config/methods.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_trainer.checkpoint.frozen_weights import Base
from fsdp_trainer.extensions import registered_by_user
from fsdp_trainer.methods.stored_columns import RunRows
from fsdp_trainer.methods.teacher import FrozenModel
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.head import Objective
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.pipeline import Pipeline
from fsdp_trainer.training.batches import BatchOptions
from fsdp_trainer.training.data_source import DataSource, SourceContext
from fsdp_trainer.training.gradients import GradientSync
from fsdp_trainer.training.guard import EmbeddingGradProbe
from fsdp_trainer.training.loss_scale import LossScale
from fsdp_trainer.training.metrics import MethodMetric, Metrics, MetricWatch
from fsdp_trainer.training.objective import token_objective
from fsdp_trainer.training.pipeline_step import PipelineForwardBackward
from fsdp_trainer.training.setup.run_setup import RunSetup
from fsdp_trainer.training.step import ForwardBackward


class StepParts(NamedTuple):
    """The parts of a ForwardBackward, in the order of its fields."""

    model: Decoder
    objective: Callable[[Tensor], Objective]
    metrics: Metrics
    dims: Dims
    probe: EmbeddingGradProbe
    gradient_sync: GradientSync | None
    loss_scale: LossScale | None


class Method:
    """Plain fine-tuning: the mean loss of supervised tokens.

    A run calls, in this order: the constructor, before the model in training is built; `load`, when
    that model has memory and no weights yet; and `source` and `step`, when it has its weights.
    """

    start_formats: dict[str, str] | None = None
    """Number formats of the run's first weights if `load` has left them in the model, see `fill`;
    None if it has not."""

    def __init__(self, setup: RunSetup, rows: RunRows, checkpoint: Path | None):
        """Build what the method needs besides the model in training. Collective.

        checkpoint: the one that the run resumes from; None for a new run. Raises UserError.
        """
        self.setup, self.rows, self.checkpoint = setup, rows, checkpoint
        self.choice, self.second = setup.cfg.objective, setup.cfg.second_model

    @property
    def head_temperature(self) -> float:
        """The temperature that divides the logits in training."""
        return 1.0

    @property
    def frozen_models(self) -> list[FrozenModel]:
        return []

    @property
    def architectures(self) -> list[ModelConfig]:
        return [self.setup.config, *(frozen.model.config for frozen in self.frozen_models)]

    @property
    def objective_differs(self) -> bool:
        """True if the objective is another number than the reported loss."""
        loss, choice = self.setup.cfg.loss, self.choice
        added = choice.mtp or loss.label_smoothing or loss.z_loss
        return bool(registered_by_user(choice) or added)

    def about(self) -> list[str]:
        """Return printed lines on what the method makes of the data."""
        return []

    def load(self, model: Decoder, options: BatchOptions) -> tuple[RunRows, dict[str, str]]:
        """Read or store what a second model says. Collective.

        Returns the rows with its columns, and its digest by role, which is part of checkpoints.
        model: in training, whose weights are read afterwards. Raises UserError if the run resumes
        from a checkpoint that was trained with another second model.
        """
        return self.rows, {}

    def load_frozen(self, frozen_model: FrozenModel) -> str:
        """Read the weights of a second model in memory, and return their digest. Collective."""
        setup = self.setup
        dtype = setup.cfg.precision.param_dtype
        digest = frozen_model.load(setup.frozen_model_device, setup.device, dtype)
        frozen_model.require_same(self.second, self.checkpoint, digest)
        return digest

    def source(
        self,
        rows: DataSource,
        context: SourceContext,
        model: Decoder,
        base: Base | None,
        dtypes: dict[str, str],
    ) -> DataSource:
        """Return the source of a step's micro-batches. rows: the source of the data's own rows.

        base, dtypes: origin of the frozen weights, and number formats of all, as in checkpoints.
        """
        return rows

    def objective(self) -> Callable[[Tensor], Objective]:
        return token_objective(self.choice, self.setup.cfg.loss)

    def metric(self) -> MethodMetric | None:
        """Return the method's own metrics; None: it has none."""
        return None

    def watch(self) -> MetricWatch | None:
        """Return what reviews the method's metrics; None: nothing does."""
        return None

    def step(self, parts: StepParts) -> ForwardBackward:
        """Return the object that runs a step's micro-batches. Collective."""
        setup, cfg = self.setup, self.setup.cfg
        if cfg.sharding.pipeline == 1:
            return ForwardBackward(*parts)
        dtype = getattr(torch, cfg.precision.param_dtype)
        pipeline = Pipeline(parts.model, setup.dims, dtype, setup.device)
        return PipelineForwardBackward(*parts, pipeline=pipeline)
