"""The number of parameters that a recipe trains. Imports torch."""

from pathlib import Path

import torch

from fsdp_trainer.checkpoint.formats.headers import read_header
from fsdp_trainer.config.schema import Adapter, Model
from fsdp_trainer.models.adapters.adapter_targets import resolve_adapters
from fsdp_trainer.models.adapters.adapters import add_adapters
from fsdp_trainer.models.from_config.resolve import resolve_model
from fsdp_trainer.models.hf.new_model import meta_decoder


def trained_here(model: Model, adapter: Adapter, scores: bool) -> tuple[int, dict[str, list[int]]]:
    """Return the number of trained parameters of a model in a folder, and the tensors' shapes.

    scores: True for a model that scores texts. Raises UserError, SafetensorError and OSError.
    """
    shapes = {
        name: list(tensor.shape)
        for file in Path(str(model.init_from)).glob("*.safetensors")
        for name, tensor in read_header(file, all_parts=True).items()
    }
    config = resolve_model(model)
    if scores:
        config = config.with_labels()
    spec = resolve_adapters(adapter, config)
    if spec is None:
        return config.parameters(), shapes
    decoder = meta_decoder(config)
    add_adapters(decoder, spec, torch.float32)
    return sum(each.numel() for each in decoder.parameters() if each.requires_grad), shapes
