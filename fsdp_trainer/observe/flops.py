"""Floating-point operations of training, by the two conventions in use. Padding counts in neither."""

from fsdp_trainer.models.config import ModelConfig


def matmul_parameters(config: ModelConfig) -> int:
    """Weights that take part in a matrix product for every token: all but the input embedding (a tied one is the head's)."""
    return config.parameters() - (
        0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    )


def palm_flops(config: ModelConfig, tokens: int, seq_len: int) -> float:
    """6·N + 12·L·H·D·T a token (PaLM, appendix B): attention as if every token saw a whole row, or window."""
    spans = sum(min(seq_len, window or seq_len) for window in config.windows)
    attention = 12 * spans * config.num_attention_heads * config.head_dim
    return tokens * (6 * matmul_parameters(config) + attention)


def causal_flops(config: ModelConfig, tokens: int, squares: int) -> float:
    """6·N a token, and attention as it is computed: half of 12·L·H·D·Σ length² over the documents."""
    attention = (
        6 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * squares
    )
    return tokens * 6 * matmul_parameters(config) + attention
