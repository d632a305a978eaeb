"""A small model of ours with random weights, in this process."""

from zoo import MODELS

from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.from_config.initialize import initialize_weights

SIZES = MODELS["small_decoder"]


def small_decoder(seed, **options):
    """options: sizes other than SIZES, and more of the model's configuration."""
    model = Decoder(ModelConfig(**SIZES | options))
    initialize_weights(model, seed)
    return model
