"""A whole model in one process, for inference and comparison."""

from pathlib import Path

import torch

from fsdp_trainer.checkpoint.base import load_weights
from fsdp_trainer.checkpoint.huggingface import import_weights
from fsdp_trainer.config.paths import find_checkpoint, model_folder
from fsdp_trainer.errors import RunFailed
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder, meta_decoder


def load_model(
    path: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Decoder:
    """Return a decoder from a Hugging Face folder, a checkpoint or a run, ready for `logits`.

    Raises UserError and RunFailed.
    """
    model = meta_decoder(ModelConfig.from_hf(model_folder(path))).to(dtype)
    model.to_empty(device=device)
    model.tie_weights()
    if checkpoint := find_checkpoint(path):
        load_weights(model, checkpoint, {}, alone=True)
    else:
        try:
            import_weights(model, Path(path).expanduser())
        except OSError as error:
            raise RunFailed(f"cannot read the weights: {error}") from None
    return model.eval().requires_grad_(False)
