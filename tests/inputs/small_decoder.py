"""A small model of ours with random weights, in this process."""

from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.from_config.initialize import initialize_weights

SIZES = {
    "vocab_size": 200, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2,
}  # fmt: skip


def small_decoder(seed, **options):
    """options: sizes other than SIZES, and more of the model's configuration."""
    model = Decoder(ModelConfig(**SIZES | options))
    initialize_weights(model, seed)
    return model
