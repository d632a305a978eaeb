"""Properties common to all models of a family. A new family is a table entry, not a class.

docs/add-a-model.md describes the effect of each field on the computation.
"""

import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal

ACTIVATIONS = {
    "silu": "torch.nn.functional:silu",
    "gelu_pytorch_tanh": "fsdp_trainer.models.feed_forward:gelu_tanh",
    "gelu": "torch.nn.functional:gelu",
}
"""Functions of a feed-forward, as MODULE:NAME, by `hidden_act` in config.json."""
FULL = "full_attention"
SLIDING = "sliding_attention"
LATENT = "latent_attention"
"""Mixer whose keys and values are projected from a latent vector of each token."""
BIASED = "sigmoid"
"""Router that adds a bias to the scores of experts."""
EXPERTS = ".mlp.experts."
"""Part of a stacked parameter's name between the block's name and the matrix's name."""


def layer_pattern(layers: int, period: int) -> list[str]:
    """Return the type of each block: every period-th is FULL, none if the period is 0."""
    return [FULL if period and (i + 1) % period == 0 else SLIDING for i in range(layers)]


@dataclass(frozen=True)
class Family:
    """One `model_type` of config.json."""

    architecture: str
    """Hugging Face's class name, as in config.json."""
    mixer: str = "attention"
    """Token mixer of a block: a key of `decoder.MIXERS`."""
    feed_forward: str = "gated"
    """Feed-forward of a block: a key of `decoder.FEED_FORWARDS`."""
    norms: Literal["before", "after", "around"] = "before"
    """Norms are before attention and feed-forward, after them, or both."""
    norm_offset: float = 0.0
    """Added to a norm's weight; the weight starts at 1 minus this."""
    norm_in_float32: bool = False
    """True: a norm multiplies by its weight in float32, before rounding."""
    qk_norm: Literal["head", "whole"] | None = None
    """Queries and keys are normalised before rotation: per head, or over all heads together."""
    biased: tuple[str, ...] = ()
    """Attention projections that always have a bias; attention_bias=true adds one to all."""
    scaled_embedding: bool = False
    rope_in_float32: bool = False
    windows: Literal["none", "all", "last", "pattern"] = "none"
    """Blocks that attend to the last sliding_window tokens only: `last` is those from
    max_window_layers on, `pattern` all except every window_pattern-th."""
    window_pattern: int = 0
    options: tuple[str, ...] = ()
    """Keys of config.json that transformers reads for this family, beyond the common ones."""
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Projections that Hugging Face stores as one matrix with concatenated rows; split at import
    and fused at export."""
    key_aliases: dict[str, str] = field(default_factory=dict)
    """Name of a key in config.json by our name, if the two differ."""
    rope_type_aliases: dict[str, str] = field(default_factory=dict)
    """Our rope_type by other names for it in published folders."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Values of keys that are set neither in config.json nor in the configuration."""
    hf_defaults: dict[str, Any] = field(default_factory=dict)
    """Values of further keys that are absent from config.json."""
    refused_unless: dict[str, tuple] = field(default_factory=dict)
    """Further keys for `config.REFUSED_UNLESS`: keys that the decoder does not implement, with the
    values that leave the computation unchanged."""
    further_blocks: str = ""
    """Key of config.json for the number of multi-token prediction blocks after the last block.
    A config.json of this program says 0, unless an export has these blocks."""
    other_names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Alternative names in config.json by our name, read if the first name is absent."""
    feed_forward_name: str = "mlp"
    """Name of a block's feed-forward in a Hugging Face folder."""
    expert_matrices: dict[str, str] = field(default_factory=dict)
    """Names of an expert's matrices in a Hugging Face folder by our names, if they differ."""
    router_name: str = "gate"
    """Name of the router within the feed-forward in a Hugging Face folder."""
    router_bias: bool = False
    """True: the router adds a bias to its logits."""
    clamped_experts: bool = False
    """True: experts are `moe.ClampedExperts`, and a folder has one tensor for all of a block's."""
    sinks: bool = False
    """True: each attention head has a trained extra score in the softmax's denominator."""
    normalizes_experts: bool = False
    """True: the weights of a token's experts are always divided by their sum."""
    router: str = "softmax"
    """Router that chooses the experts: a key of `moe.ROUTERS`."""
    shared_expert: str = ""
    """Name of the dense feed-forward that every token passes through; "": there is none."""
    gates_shared_expert: bool = False
    """True: the shared expert's output is multiplied by a gate value of each token."""

    def stored_name(self, name: str) -> str:
        """Return the name of the (possibly fused) matrix of a folder that holds a parameter."""
        name = name.replace(".mlp.gate.", f".mlp.{self.router_name}.")
        name = name.replace(".mlp.", f".{self.feed_forward_name}.")
        for whole, parts in self.fused:
            module = whole.rpartition(".")[0]
            for part in parts:
                if name.endswith(f".{module}.{part}.weight"):
                    return f"{name.removesuffix(f'{module}.{part}.weight')}{whole}.weight"
        return name

    def stored_expert(self, name: str, expert: int) -> str:
        """Return the name of one expert's matrix in a folder. name: of the stacked parameter."""
        block, projection = name.split(EXPERTS)
        matrix = self.expert_matrices.get(projection, projection)
        return f"{block}.{self.feed_forward_name}.experts.{expert}.{matrix}.weight"


def is_stacked(name: str) -> bool:
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
        normalizes_experts=True,  # equal to a softmax over the chosen logits only
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
        rope_type_aliases={"su": "longrope", "yarn": "longrope"},  # in the first Phi-3 folders
        fused=(
            ("self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj")),
            ("mlp.gate_up_proj", ("gate_proj", "up_proj")),
        ),
        hf_defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
    ),
}

OTHER = Family("", windows="pattern")
"""Stands for the family of a model that transformers' own class computes."""


def nearest_family(raw: dict[str, Any]) -> str:
    """Return the family that is most like a model of another one, by the keys of its config.json.

    raw: the content of config.json. A name that begins alike counts if both have experts or neither
    has: `gemma` is like gemma2, `qwen3_next` like qwen3_moe.
    """
    if raw.get("kv_lora_rank"):
        return next(name for name, spec in FAMILIES.items() if spec.mixer == LATENT)
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    has_experts = any(raw.get(name) for name in counts)
    named = str(raw.get("model_type"))
    word = re.split(r"[\d_]", named)[0]
    alike = [
        name
        for name, spec in FAMILIES.items()
        if word and name.startswith(word) and (spec.feed_forward == "experts") == has_experts
    ]
    near = get_close_matches(named, alike, 1, 0)
    return near[0] if near else "mixtral" if has_experts else "llama"
