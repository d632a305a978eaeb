"""A run as a plan sees it: the model that is trained, and what its objective adds."""

from dataclasses import dataclass, field, replace

import torch

from fsdp_trainer.config.layout import Layout
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.config.verbs import PlanConfig
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.planning.plan.fsdp_units import KnownModels
from fsdp_trainer.planning.plan.group_exchange import GroupExchange
from fsdp_trainer.planning.plan.pipeline_stages import RankStages, distinct, stages_of_all
from fsdp_trainer.planning.plan.planned_model import PlannedModel
from fsdp_trainer.planning.plan.rollout_cost import rows_of_answers
from fsdp_trainer.planning.plan.scoring_models import ScoringModel, scoring_models
from fsdp_trainer.planning.plan.second_model import PlannedTeacher, named_teacher


@dataclass(frozen=True)
class PlannedRun:
    """The models of a run in its layout.

    teacher: its teacher or reference model, None without; further_forwards: additional forwards of
    a step's rows without gradients; scoring: its reward models.
    """

    model: PlannedModel
    teacher: PlannedTeacher | None
    further_forwards: int
    scoring: tuple[ScoringModel, ...] = ()
    exchange: GroupExchange = field(default_factory=GroupExchange)
    """With other groups of ranks; the rest of the plan is of one group."""
    training_ranks_score: bool = True
    """False if there are rollout ranks, which score what they generate."""
    averages: bool = False
    """True if groups of ranks average their weights: see parallel.memory_check."""

    @classmethod
    def of(
        cls, cfg: TrainConfig, config: ModelConfig, world: int, known: KnownModels | None = None
    ) -> "PlannedRun":
        """Return the run of a model on `world` ranks.

        With generated answers a step has as many rows as they fill, instead of batch.rows prompts.
        known: models of earlier plans. Raises UserError for adapters that do not fit the model, and
        for a teacher whose architecture is not known.
        """
        known = known or KnownModels()
        scoring = scoring_models(cfg, world, known)
        number = getattr(torch, cfg.precision.master_dtype).itemsize
        gbps = cfg.plan.groups_gbps if isinstance(cfg, PlanConfig) else None
        exchange = GroupExchange.of(cfg.replicas, cfg.launch.groups, number, gbps)
        cfg = rows_of_answers(cfg)
        cfg = replace(cfg, batch=exchange.batch_of_one(cfg.batch))
        model = PlannedModel.of(cfg, config, world, known)
        by_base = cfg.second_model is not None and cfg.second_model.mode == "base"
        further_forwards = by_base + cfg.objective.method.extra_forwards
        teacher = named_teacher(cfg, config, world, known)
        score = not cfg.launch.rollout_ranks
        averages = cfg.replicas.method == "diloco"
        return cls(model, teacher, further_forwards, scoring, exchange, score, averages)

    @property
    def layout(self) -> Layout:
        return self.model.layout

    @property
    def teacher_in_memory(self) -> PlannedTeacher | None:
        return None if self.teacher is None or self.teacher.is_stored else self.teacher

    @property
    def stages_by_rank(self) -> list[RankStages]:
        """The distinct stages of a pipeline's ranks; without a pipeline, the whole model."""
        return distinct(self.stages_of_all, self.model.whole.kind_of)

    @property
    def stages_of_all(self) -> list[RankStages]:
        return stages_of_all(self.model.whole, self.layout)
