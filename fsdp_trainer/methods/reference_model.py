"""A reference model in memory, for a model that is trained on its own answers.

For preference pairs, whose rows are known before training, see stored_columns.py.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.methods.teacher import FrozenModel, shard_frozen, with_second_model
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import MicroBatch
from fsdp_trainer.models.from_config.setup import ModelSetup, WeightSource
from fsdp_trainer.models.hf.new_model import meta_decoder
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.memory_check import stays_gathered
from fsdp_trainer.parallel.parallelize import Computation, reshard

REFERENCE_ARCHITECTURE = "reference_architecture"
"""Key of the digest of a reference's architecture in a checkpoint."""


def architecture_digest(config: ModelConfig) -> str:
    text = json.dumps(config.decisive, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=10).hexdigest()


@dataclass
class ReferenceModel(FrozenModel):
    """A second model with the run's initial weights, or another one with the same vocabulary."""

    name = "reference"
    advice = "Give  model.init_from  and  objective.reference  as they were"

    @torch.no_grad()
    def __call__(self, batch: MicroBatch) -> Tensor:
        try:
            scores = self.model(replace(batch, token_share=None)).scores
        finally:
            if not self.stays_gathered:
                reshard(self.model)
        return scores.log_probability


def build_reference(
    cfg: TrainConfig,
    folder: Path | None,
    trained: ModelSetup,
    dims: Dims,
    compiled: bool,
) -> ReferenceModel:
    """Return a reference without weights, on the meta device. Collective.

    folder: folder of the reference; None: the weights that the run begins with, with their
    adapters. trained: the model in training. Must be called before `parallelize` of that model,
    whose budget for activations must stay in force.
    """
    setup = trained
    if folder is not None:
        _, config = with_second_model(trained.config, folder, cfg.sharding.tensor)
        setup = ModelSetup(config, source=WeightSource(cfg.run.seed, folder))
    model = meta_decoder(setup.config)
    model.lm_head.chunk_mib = cfg.loss.chunk_mib
    model.lm_head.temperature = cfg.objective.temperature
    model = shard_frozen(model, Computation.of(cfg, compiled), dims, setup.adapters)
    stays = stays_gathered(dims.layout, setup.config, cfg.precision)
    return ReferenceModel(model, setup.source, stays)
