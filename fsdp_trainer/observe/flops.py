"""Floating-point operations of training by the two usual conventions. Neither counts padding."""

from fsdp_trainer.models.config import ModelConfig


def matmul_parameters(config: ModelConfig) -> int:
    """Count the weights that take part in a matrix product for every token.

    These are all but the input embedding; a tied embedding is the head's.
    """
    embedding = config.vocab_size * config.hidden_size
    return config.parameters() - embedding * (not config.tie_word_embeddings)


def palm_flops(config: ModelConfig, tokens: int, seq_len: int) -> float:
    """Return 6·N + 12·L·H·D·T for each token (PaLM, appendix B).

    Attention counts as if every token saw a whole row, or window.
    """
    spans = sum(min(seq_len, window or seq_len) for window in config.windows)
    attention = 12 * spans * config.num_attention_heads * config.head_dim
    return tokens * (6 * matmul_parameters(config) + attention)


def causal_flops(config: ModelConfig, tokens: int, attention_cost: int) -> float:
    """Return 6·N for each token, and half of 12·L·H·D·Σ length² over the documents."""
    heads = config.num_hidden_layers * config.num_attention_heads
    attention = 6 * heads * config.head_dim * attention_cost
    return tokens * 6 * matmul_parameters(config) + attention
