"""Floating-point operations of training, by the two conventions in use. Padding counts in neither."""

from fsdp_trainer.models.config import ModelConfig

# dense bf16 FLOP/s by a part of the device's name, from the vendors' data sheets; the first match counts
PEAKS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "B100": 1750e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "MI300X": 1307e12,
}


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a device; None where it is not known, rather than a guess."""
    return next((peak for part, peak in PEAKS.items() if part in device_name), None)


def matmul_parameters(config: ModelConfig) -> int:
    """Weights that take part in a matrix product for every token: all but the input embedding (a tied one is the head's)."""
    return config.parameters() - (0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size)


def palm_flops(config: ModelConfig, tokens: int, seq_len: int) -> float:
    """6·N + 12·L·H·D·T a token (PaLM, appendix B): attention as if every token saw a whole row, or window."""
    spans = sum(min(seq_len, window or seq_len) for window in config.windows)
    attention = 12 * spans * config.num_attention_heads * config.head_dim
    return tokens * (6 * matmul_parameters(config) + attention)


def causal_flops(config: ModelConfig, tokens: int, squares: int) -> float:
    """6·N a token, and attention as it is computed: half of 12·L·H·D·Σ length² over the documents."""
    attention = 6 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * squares
    return tokens * 6 * matmul_parameters(config) + attention
