"""What the models of one family have in common: a row of a table each, so that a new family is a row and not a class.

docs/add-a-model.md says what each column means for the computation.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Family:
    """One `model_type` of config.json."""

    architecture: str
    """Hugging Face's class, as config.json names it."""
    norms: Literal["before", "after", "around"] = "before"
    """Where a block normalises: what attention and feed-forward read, what they add to the stream, or both."""
    norm_offset: float = 0.0
    """Added to a norm's weight; the weight starts at 1 minus it."""
    norm_in_float32: bool = False
    """Whether a norm's weight multiplies before the result is rounded."""
    qk_norm: Literal["head", "whole"] | None = None
    """Queries and keys are normalised before rotation: each head by itself, or all heads together."""
    biased: tuple[str, ...] = ()
    """Projections of attention that always have a bias. attention_bias=true gives one to all four."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by √hidden_size."""
    rope_in_float32: bool = False
    """Whether queries and keys are rotated in float32."""
    windows: Literal["none", "all", "last", "pattern"] = "none"
    """Which blocks look back sliding_window tokens only: `last` those from max_window_layers on, `pattern` all but each window_pattern-th."""
    window_pattern: int = 0
    options: tuple[str, ...] = ()
    """Keys of config.json, beyond those of all families, that transformers reads for this one."""
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Projections that Hugging Face stores as one matrix, rows one after the other; split at import and fused at export."""
    spelling: dict[str, str] = field(default_factory=dict)
    """Keys of config.json whose name is not ours."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """What the family computes where neither config.json nor the configuration says otherwise."""
    omitted: dict[str, Any] = field(default_factory=dict)
    """What config.json's other keys mean where it lacks them."""

    def stored_name(self, name: str) -> str:
        """The matrix of a Hugging Face folder that holds a parameter: its own, or one that is fused of several."""
        for whole, parts in self.fused:
            module = whole.rpartition(".")[0]
            for part in parts:
                if name.endswith(f".{module}.{part}.weight"):
                    return f"{name.removesuffix(f'{module}.{part}.weight')}{whole}.weight"
        return name


GEMMA: dict[str, Any] = {
    "norms": "around", "norm_offset": 1.0, "norm_in_float32": True, "scaled_embedding": True, "windows": "pattern",
    "spelling": {"hidden_act": "hidden_activation", "rope_local_theta": "rope_local_base_freq"},
}  # fmt: skip
GEMMA_OMITTED: dict[str, Any] = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "tie_word_embeddings": True, "sliding_window": 4096,
}  # fmt: skip

FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        options=("attention_bias", "mlp_bias"),
        omitted={"max_position_embeddings": 2048},
    ),
    "mistral": Family(
        "MistralForCausalLM",
        windows="all",
        omitted={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "sliding_window": 4096,
        },
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        biased=("q_proj", "k_proj", "v_proj"),
        windows="last",
        omitted={
            "num_key_value_heads": 32,
            "max_position_embeddings": 32_768,
            "sliding_window": 4096,
        },
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        qk_norm="head",
        windows="last",
        options=("attention_bias",),
        omitted={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32_768,
            "sliding_window": 4096,
        },
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        **GEMMA,
        window_pattern=2,
        options=(
            "attention_bias",
            "query_pre_attn_scalar",
            "attn_logit_softcapping",
            "final_logit_softcapping",
        ),
        defaults={
            "hidden_act": "gelu_pytorch_tanh",
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        omitted=GEMMA_OMITTED | {"max_position_embeddings": 8192},
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        **GEMMA,
        qk_norm="head",
        window_pattern=6,
        options=(
            "attention_bias",
            "query_pre_attn_scalar",
            "final_logit_softcapping",
            "rope_local_theta",
        ),
        defaults={"hidden_act": "gelu_pytorch_tanh", "rope_theta": 1e6, "rope_local_theta": 1e4},
        omitted=GEMMA_OMITTED | {"vocab_size": 262_208, "max_position_embeddings": 131_072},
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        norms="after",
        norm_in_float32=True,
        qk_norm="whole",
        rope_in_float32=True,
        options=("attention_bias",),
        omitted={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        windows="all",
        options=("partial_rotary_factor",),
        fused=(
            ("self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj")),
            ("mlp.gate_up_proj", ("gate_proj", "up_proj")),
        ),
        omitted={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    ),
}
