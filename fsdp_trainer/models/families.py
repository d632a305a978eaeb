"""Properties that all models of a family share. A new family is a row of a table, not a class.

docs/add-a-model.md says what each column means for the computation.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

FULL = "full_attention"
SLIDING = "sliding_attention"
LATENT = "latent_attention"
"""The mixer whose keys and values are made of a narrower vector of each token."""
BIASED = "sigmoid"
"""The router whose experts have a bias."""
EXPERTS = ".mlp.experts."
"""Between a block's name and that of a stacked parameter of its experts."""


def layer_pattern(layers: int, period: int) -> list[str]:
    """Return a type for each block: every period-th is FULL, none if the period is 0."""
    return [FULL if period and (i + 1) % period == 0 else SLIDING for i in range(layers)]


@dataclass(frozen=True)
class Family:
    """One `model_type` of config.json."""

    architecture: str
    """Hugging Face's class, as config.json names it."""
    mixer: str = "attention"
    """The part of a block that mixes tokens: a name of `decoder.MIXERS`."""
    feed_forward: str = "gated"
    """The part of a block that computes each token alone: a name of `decoder.FEED_FORWARDS`."""
    norms: Literal["before", "after", "around"] = "before"
    """A block normalises what attention and feed-forward read, what they add, or both."""
    norm_offset: float = 0.0
    """Added to a norm's weight; the weight starts at 1 minus it."""
    norm_in_float32: bool = False
    """A norm's weight multiplies before the result is rounded."""
    qk_norm: Literal["head", "whole"] | None = None
    """Queries and keys are normalised before rotation: each head alone, or all heads together."""
    biased: tuple[str, ...] = ()
    """Projections of attention that always have a bias; attention_bias=true gives one to all."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by √hidden_size."""
    rope_in_float32: bool = False
    """Queries and keys are rotated in float32."""
    windows: Literal["none", "all", "last", "pattern"] = "none"
    """Blocks that look back sliding_window tokens only: `last` are those from max_window_layers on,
    `pattern` all but every window_pattern-th."""
    window_pattern: int = 0
    options: tuple[str, ...] = ()
    """Keys of config.json, beyond those of all families, that transformers reads for this one."""
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Projections that Hugging Face stores as one matrix, rows one after the other; split at import
    and fused at export."""
    key_aliases: dict[str, str] = field(default_factory=dict)
    """Our names of config.json's keys that have another name there."""
    rope_type_aliases: dict[str, str] = field(default_factory=dict)
    """Other names for rope_type in published folders."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Values where neither config.json nor the configuration has the key."""
    hf_defaults: dict[str, Any] = field(default_factory=dict)
    """Values of config.json's other keys where it lacks them."""
    refused_unless: dict[str, tuple] = field(default_factory=dict)
    """Keys of config.json that change the computation in a way that the decoder does not know, and
    their values that do not; beside those of all families."""
    further_blocks: str = ""
    """Key of config.json: the number of blocks behind the last one that predict further tokens.
    They are passed over at import, and an export has none."""
    other_names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Further names of our keys in folders, read where the first is absent."""
    feed_forward_name: str = "mlp"
    """Name of the feed-forward in a block's part of a Hugging Face folder."""
    expert_matrices: dict[str, str] = field(default_factory=dict)
    """Other names of an expert's matrices there, by ours."""
    router_name: str = "gate"
    """Name of the router there, within the feed-forward."""
    router_bias: bool = False
    """The router adds a bias to its logits."""
    clamped_experts: bool = False
    """Experts are `moe.ClampedExperts`, and one tensor of a folder holds all of a block's."""
    sinks: bool = False
    """Attention has one more score for each head, learnt, in the softmax's denominator alone."""
    normalizes_experts: bool = False
    """The weights of a token's experts are divided by their sum, whatever config.json says."""
    router: str = "softmax"
    """The router, which chooses the experts: a name of `moe.ROUTERS`."""
    shared_expert: str = ""
    """Name of a dense feed-forward that every token meets besides its experts; "": there is none"""
    gates_shared_expert: bool = False
    """True if the shared expert's output is multiplied by a gate of each token."""

    def stored_name(self, name: str) -> str:
        """Return the matrix of a Hugging Face folder that holds a parameter, its own or a fused."""
        name = name.replace(".mlp.gate.", f".mlp.{self.router_name}.")
        name = name.replace(".mlp.", f".{self.feed_forward_name}.")
        for whole, parts in self.fused:
            module = whole.rpartition(".")[0]
            for part in parts:
                if name.endswith(f".{module}.{part}.weight"):
                    return f"{name.removesuffix(f'{module}.{part}.weight')}{whole}.weight"
        return name

    def stored_expert(self, name: str, expert: int) -> str:
        """Return the matrix of a Hugging Face folder that holds one expert's of a stacked one."""
        block, projection = name.split(EXPERTS)
        matrix = self.expert_matrices.get(projection, projection)
        return f"{block}.{self.feed_forward_name}.experts.{expert}.{matrix}.weight"


def is_stacked(name: str) -> bool:
    """Return True for the name of a parameter that holds the matrices of all experts."""
    return EXPERTS in name


GEMMA: dict[str, Any] = {
    "norms": "around",
    "norm_offset": 1.0,
    "norm_in_float32": True,
    "scaled_embedding": True,
    "windows": "pattern",
    "key_aliases": {
        "hidden_act": "hidden_activation",
        "rope_local_theta": "rope_local_base_freq",
    },
}
GEMMA_HF_DEFAULTS: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
}
EXPERT_OPTIONS = ("num_experts", "num_experts_per_tok", "norm_topk_prob")
SPARSE_OPTIONS = ("mlp_only_layers", "decoder_sparse_step")
EXPERT_NAMES: dict[str, tuple[str, ...]] = {"num_experts": ("num_local_experts",)}
LATENT_OPTIONS = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "rope_interleave",
)
GROUPED_OPTIONS = (
    "first_k_dense_replace",
    "n_shared_experts",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
)
TINY_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
}

FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        options=("attention_bias", "mlp_bias"),
        hf_defaults={"max_position_embeddings": 2048},
    ),
    "mistral": Family(
        "MistralForCausalLM",
        windows="all",
        hf_defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "sliding_window": 4096,
        },
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        biased=("q_proj", "k_proj", "v_proj"),
        windows="last",
        hf_defaults={
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
        hf_defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32_768,
            "sliding_window": 4096,
        },
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        feed_forward="experts",
        qk_norm="head",
        refused_unless={"use_sliding_window": (False, None)},
        options=("attention_bias", *EXPERT_OPTIONS, "moe_intermediate_size", *SPARSE_OPTIONS),
        other_names=EXPERT_NAMES,
        defaults=TINY_EXPERTS,
        hf_defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        feed_forward="experts",
        biased=("q_proj", "k_proj", "v_proj"),
        shared_expert="shared_expert",
        gates_shared_expert=True,
        refused_unless={"use_sliding_window": (False, None), "qkv_bias": (True, None)},
        options=(
            *EXPERT_OPTIONS,
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            *SPARSE_OPTIONS,
        ),
        other_names=EXPERT_NAMES,
        defaults=TINY_EXPERTS | {"shared_expert_intermediate_size": 192},
        hf_defaults={
            "num_key_value_heads": 16,
            "max_position_embeddings": 32_768,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        feed_forward="experts",
        feed_forward_name="block_sparse_moe",
        expert_matrices={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
        normalizes_experts=True,
        windows="all",
        refused_unless={"router_jitter_noise": (0, None)},
        options=("num_experts", "num_experts_per_tok"),
        key_aliases={"num_experts": "num_local_experts"},
        other_names={"num_experts": ("num_experts",)},
        defaults={"num_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6},
        hf_defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
        },
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        feed_forward="experts",
        qk_norm="whole",
        refused_unless={"clip_qkv": (None,)},
        options=("attention_bias", *EXPERT_OPTIONS),
        other_names=EXPERT_NAMES,
        defaults={"num_experts": 8, "num_experts_per_tok": 2},
        hf_defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        mixer=LATENT,
        feed_forward="experts",
        router=BIASED,
        shared_expert="shared_experts",
        refused_unless={
            "scoring_func": ("sigmoid", None),
            "topk_method": ("noaux_tc", None),
            "moe_layer_freq": (1, None),
        },
        options=(
            "attention_bias",
            *EXPERT_OPTIONS,
            "moe_intermediate_size",
            *LATENT_OPTIONS,
            *GROUPED_OPTIONS,
        ),
        further_blocks="num_nextn_predict_layers",
        key_aliases={"num_experts": "n_routed_experts"},
        other_names=EXPERT_NAMES,
        defaults=TINY_EXPERTS
        | {
            "norm_topk_prob": True,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
        },
        hf_defaults={
            "vocab_size": 129_280,
            "max_position_embeddings": 4096,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "first_k_dense_replace": 3,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
        },
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        feed_forward="experts",
        norm_in_float32=True,
        router_name="router",
        router_bias=True,
        clamped_experts=True,
        sinks=True,
        normalizes_experts=True,  # the softmax of the chosen logits alone is the same
        windows="pattern",
        window_pattern=2,
        refused_unless={"swiglu_alpha": (1.702, None), "swiglu_limit": (7.0, None)},
        options=("attention_bias", "num_experts", "num_experts_per_tok"),
        key_aliases={"num_experts": "num_local_experts"},
        other_names={"num_experts": ("num_experts",)},
        defaults={
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "rope_theta": 150_000.0,
        },
        hf_defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "num_experts": 128,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
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
        hf_defaults=GEMMA_HF_DEFAULTS | {"max_position_embeddings": 8192},
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
        hf_defaults=GEMMA_HF_DEFAULTS | {"vocab_size": 262_208, "max_position_embeddings": 131_072},
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        norms="after",
        norm_in_float32=True,
        qk_norm="whole",
        rope_in_float32=True,
        options=("attention_bias",),
        hf_defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        windows="all",
        options=("partial_rotary_factor",),
        rope_type_aliases={"su": "longrope", "yarn": "longrope"},  # of the first Phi-3 folders
        fused=(
            ("self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj")),
            ("mlp.gate_up_proj", ("gate_proj", "up_proj")),
        ),
        hf_defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    ),
}
