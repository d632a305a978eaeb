"""A model without storage, of either implementation."""

import torch

from fsdp_trainer.models.balance import Balance
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder


def meta_decoder(config: ModelConfig, balance: Balance | None = None) -> Decoder:
    with torch.device("meta"):
        if config.encoder:
            from fsdp_trainer.models.hf.hf_encoder import TransformersEncoder

            return TransformersEncoder(config, balance)
        if config.by_transformers:
            # imports transformers
            from fsdp_trainer.models.hf.hf_decoder import TransformersDecoder

            return TransformersDecoder(config, balance)
        return Decoder(config, balance)
