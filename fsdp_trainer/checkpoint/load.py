"""A whole model in one process, for inference and comparison."""

from pathlib import Path

import torch

from fsdp_trainer.checkpoint.base import (
    load_weights,
    read_base,
    require_unchanged,
    weights_on_disk,
)
from fsdp_trainer.checkpoint.files import require_undamaged
from fsdp_trainer.checkpoint.huggingface import read_parameters
from fsdp_trainer.config.paths import find_checkpoint, is_adapter, model_folder
from fsdp_trainer.errors import RunFailed
from fsdp_trainer.hub import fetch
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder, meta_decoder


def load_model(
    path: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Decoder:
    """Return a decoder from a Hugging Face folder, a checkpoint or a run, ready for `logits`.

    Of a run with an adapter, or a PEFT folder, the adapter is merged into its base model.
    Raises UserError and RunFailed.
    """
    path = Path(path).expanduser()
    checkpoint = find_checkpoint(path)
    if checkpoint:
        require_undamaged(checkpoint)
    if is_adapter(path):
        fetch(str(path))  # of a base model that is on the hub
    model = meta_decoder(ModelConfig.from_hf(model_folder(path))).to(dtype)
    model.to_empty(device=device)
    model.tie_weights()
    try:
        if checkpoint and not read_base(checkpoint).adapters:
            load_weights(model, checkpoint, {}, alone=True)
        else:
            if checkpoint:
                require_unchanged(model.config, checkpoint)
            read_parameters(model, weights_on_disk(model.config, checkpoint or path))
    except OSError as error:
        raise RunFailed(f"cannot read the weights: {error}") from None
    return model.eval().requires_grad_(False)
