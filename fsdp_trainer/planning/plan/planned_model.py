"""A model in a layout, from which a plan computes memory, time and messages."""

from dataclasses import dataclass
from functools import cached_property

import torch

from fsdp_trainer.config.layout import Layout
from fsdp_trainer.config.schema import (
    ActivationCheckpoint,
    Adapter,
    Model,
    Optim,
    Precision,
    TrainConfig,
)
from fsdp_trainer.config.verbs import PlanConfig
from fsdp_trainer.data.records.labelled_texts import QUERIES, RANKED
from fsdp_trainer.models.config import ModelConfig, RankConfig
from fsdp_trainer.parallel.memory_check import stays_gathered
from fsdp_trainer.planning.plan.fsdp_units import KnownModels, ModelParts, Sizes
from fsdp_trainer.planning.plan.planned_tower import PlannedTower

IMAGE_SHARE = 0.5
"""Share of a row's tokens that are of images, if nothing is known."""
IN_GROUPS = dict.fromkeys(("pairs", "unpaired", QUERIES, RANKED), 2)
"""Documents that belong together in full rows, by what a method reads: answers, a query and its
document, or two documents of a query."""


@dataclass(frozen=True)
class PlannedModel:
    """A model in a layout, and the settings that its memory, time and messages depend on.

    config: the complete model; part: what one rank of a tensor group computes; whole, own: the
    parameters of both; options: the settings of its attention; compiled:
    True if blocks are; chunk_mib: limit of the head's logits; documents: of a full row, which are
    equally long; image_share: of a row's tokens, those of images if the model reads any.
    """

    layout: Layout
    config: ModelConfig
    part: RankConfig
    whole: ModelParts
    own: ModelParts
    precision: Precision
    optim: Optim
    sizes: Sizes
    checkpointing: ActivationCheckpoint
    adapter: Adapter
    options: Model
    compiled: bool
    chunk_mib: int | None
    documents: int
    image_share: float

    @classmethod
    def of(
        cls, cfg: TrainConfig, config: ModelConfig, world: int, known: KnownModels
    ) -> "PlannedModel":
        """Return the model of a run on `world` ranks.

        Raises UserError if the adapters do not fit the model.
        """
        ranks, frozen = cfg.sharding.tensor, cfg.train.freeze
        share = cfg.plan.image_share if isinstance(cfg, PlanConfig) else None
        return cls(
            layout=Layout(cfg.sharding, world, cfg.batch),
            config=config,
            part=config.on_tensor_rank(ranks),
            whole=known.parts(config, cfg.adapter, frozen),
            own=known.parts(config, cfg.adapter, frozen, ranks),
            precision=cfg.precision,
            optim=cfg.optim,
            sizes=Sizes.of(cfg.precision, cfg.adapter),
            checkpointing=cfg.activation_checkpoint,
            adapter=cfg.adapter,
            options=cfg.model,
            compiled=cfg.compile.enabled,
            chunk_mib=cfg.loss.chunk_mib,
            documents=IN_GROUPS.get(cfg.objective.method.reads, 1),
            image_share=IMAGE_SHARE if share is None else share,
        )

    @cached_property
    def tower(self) -> PlannedTower | None:
        dtype = self.precision.param_dtype
        return PlannedTower.of(self.own, self.image_share, self.layout, dtype, self.checkpointing)

    @property
    def keeps_gathered(self) -> bool:
        """True if units stay gathered from forward to backward."""
        return stays_gathered(self.layout, self.config, self.precision)

    @property
    def number(self) -> int:
        return self.sizes.compute

    @property
    def reduced_number(self) -> int:
        return getattr(torch, self.precision.reduce_dtype).itemsize

    @property
    def stored_number(self) -> int:
        return self.sizes.master
