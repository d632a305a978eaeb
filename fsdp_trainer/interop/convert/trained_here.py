"""The number of parameters that a recipe trains. Imports torch."""

import torch

from fsdp_trainer.config.schema import Adapter, Model
from fsdp_trainer.models.adapters.adapter_targets import resolve_adapters
from fsdp_trainer.models.adapters.adapters import add_adapters
from fsdp_trainer.models.from_config.resolve import resolve_model
from fsdp_trainer.models.hf.new_model import meta_decoder


def trained_here(model: Model, adapter: Adapter, scores: bool) -> int:
    """Return the number of trained parameters of a model in a folder. Raises UserError.

    scores: True for a model that scores texts.
    """
    config = resolve_model(model)
    if scores:
        config = config.with_labels()
    spec = resolve_adapters(adapter, config)
    if spec is None:
        return config.parameters()
    decoder = meta_decoder(config)
    add_adapters(decoder, spec, torch.float32)
    return sum(each.numel() for each in decoder.parameters() if each.requires_grad)
