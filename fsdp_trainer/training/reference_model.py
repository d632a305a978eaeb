"""A reference in memory: the frozen model that one which learns from its own answers stays near to.

Those of preference pairs read rows that are known beforehand: see stored_reference.py.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fsdp_trainer.config.rules_objective import loads_reference
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.models.adapter_spec import AdapterSpec
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import MicroBatch, meta_decoder
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.memory_check import keeps_gathered
from fsdp_trainer.parallel.parallelize import reshard
from fsdp_trainer.training.teacher import FrozenModel, frozen, share_frozen, with_teacher


@dataclass
class ReferenceModel(FrozenModel):
    """The weights that a run began with, or those of another model with the same vocabulary."""

    name = "reference"
    advice = "Give  model.init_from  and  objective.reference  as they were"

    @torch.no_grad()
    def __call__(self, batch: MicroBatch) -> Tensor:
        """Return the log-probability of each target, [supervised]. Collective."""
        try:
            scores = self.model(replace(batch, token_share=None)).scores
        finally:
            if not self.stays_gathered:
                reshard(self.model)
        return scores.log_probability


def build_reference(
    cfg: TrainConfig,
    source: Path | None,
    init_from: Path | None,
    trained: ModelConfig,
    adapters: AdapterSpec | None,
    dims: Dims,
    compiled: bool,
) -> ReferenceModel | None:
    """Return a reference without weights, on the meta device; None: the run loads none.

    source: its folder; None: the weights that the run begins with, those of init_from with their
    adapters. trained: the architecture of the model in training. Before that one's `parallelize`,
    whose budget for activations holds. Collective.
    """
    if not loads_reference(cfg):
        return None
    if source is None:
        own, config, source = frozen(cfg, cfg.adapter), trained, init_from
    else:
        own, adapters = frozen(cfg), None
        _, config = with_teacher(trained, source, cfg.sharding.tensor)
    model = meta_decoder(config)
    model.lm_head.chunk_mib = cfg.loss.chunk_mib
    model.lm_head.temperature = cfg.objective.temperature
    model = share_frozen(model, own, dims, compiled, adapters)
    return ReferenceModel(model, source, own, keeps_gathered(cfg.sharding))
