"""Models that mix tokens by recurrences or convolutions, as llama.cpp knows them.

transformers' classes compute them here. llama.cpp keeps some of their tensors in another form.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGUFWriter
from torch import Tensor

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.interop.weights.foreign_tensors import in_pairs
from fsdp_trainer.interop.weights.gguf_models import GgufModel, add_sizes_of_experts
from fsdp_trainer.models.config import FULL, ModelConfig

Change = Callable[[Tensor], Tensor]
Rules = dict[str, list[tuple[str, Change]]]
"""By the end of a name in a folder: the ends that take its place, and how the numbers change.

An end that begins with `blk.` is the whole name in a file, without the number of the block.
"""
KINDS = "kinds of blocks"
ATTENTION = (FULL, "attention")
"""Names of blocks with attention."""
ASSUMED = {
    "hidden_act": "silu", "mamba_hidden_act": "silu", "mlp_hidden_act": "relu2",
    "use_conv_bias": True, "mamba_conv_bias": True, "use_bias": False, "conv_bias": False,
    "attention_bias": False, "mlp_bias": False, "mamba_proj_bias": False, "projectors_bias": False,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "use_expert_bias": True, "n_group": 1,
}  # fmt: skip
"""What llama.cpp computes, by the name of the setting of a model that has it."""
LONGEST = 2**20
"""Context of a model whose config.json names none, as llama.cpp's converter writes it."""


@dataclass(frozen=True)
class Hybrid(GgufModel):
    """A type of models whose tensors are changed.

    rules: returns what is changed. sizes: returns fields of ModelConfig that a file says otherwise.
    Both get the settings of the text model, with transformers' defaults.
    """

    rules: Callable[[Json], Rules] = lambda source: {}
    sizes: Callable[[Json], Json] = lambda source: {}


def described(config: ModelConfig, folder: Path) -> ModelConfig:
    """Return a hybrid's architecture with all that its file says of it.

    `source` has the settings of the text model, with transformers' defaults, and the kinds of its
    blocks.
    """
    # imports transformers
    from fsdp_trainer.models.hf.hf_config import config_object

    whole = config_object(config.source, str(folder))
    text = whole.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    source = text.to_dict() | {KINDS: kinds}
    rope = source.get("rope_parameters") or {}
    epsilons = (source.get(name) for name in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"))
    own: Any = {
        "rms_norm_eps": next(each for each in epsilons if each is not None),
        "rope_theta": rope.get("rope_theta", config.rope_theta),
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0),
        "max_position_embeddings": min(config.max_position_embeddings, LONGEST),
    }
    return replace(config, source=source, **(own | HYBRIDS[config.family].sizes(source)))


def changed_names(config: ModelConfig, name: str) -> list[tuple[str, Change]]:
    rules = HYBRIDS[config.family].rules(config.source)
    end = max((end for end in rules if name.endswith(end)), key=len, default="")
    start = name.removesuffix(end)
    block = next((part for part in name.split(".") if part.isdigit()), "")
    return [
        (f"blk.{block}.{new[4:]}" if new.startswith("blk.") else start + new, change)
        for new, change in rules.get(end, [("", same)])
    ]


def hybrid_differences(config: ModelConfig) -> Iterator[str]:
    """Yield the settings in which llama.cpp assumes one value."""
    source = config.source
    rope = source.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        yield f"rope_type={rope['rope_type']}"
    for name, value in ASSUMED.items():
        if source.get(name, value) != value:
            yield f"{name}={str(source[name]).lower()}"
    low, high = source.get("time_step_limit") or (0.0, float("inf"))
    if low > 0 or (isinstance(high, float) and high < float("inf")):
        yield f"time_step_limit={[low, high]}"


# --- changes


def same(tensor: Tensor) -> Tensor:
    return tensor


def negative_exp(tensor: Tensor) -> Tensor:
    return -tensor.exp()


def as_column(tensor: Tensor) -> Tensor:
    return tensor[:, None]


def without_channel(tensor: Tensor) -> Tensor:
    """Return the matrix of a convolution of each channel by itself, [channels, 1, width]."""
    return tensor.squeeze(1)


def scaled(factor: float) -> Change:
    return lambda tensor: tensor * factor


def half(number: int) -> Change:
    return lambda tensor: tensor.chunk(2, -2)[number]


# --- Qwen3-Next, Qwen3.5

DELTA: Rules = {
    ".A_log": [(".A_log", negative_exp)],
    ".dt_bias": [(".dt_proj.bias", same)],
    ".conv1d.weight": [(".conv1d.weight", without_channel)],
    "norm.weight": [("norm.weight", lambda weight: weight + 1)],
    "linear_attn.norm.weight": [("linear_attn.norm.weight", same)],
}
"""Of a gated delta net, and norms whose weights are stored as differences from 1."""


def of_next(source: Json) -> Rules:
    """Return the rules of Qwen3-Next, whose projections lie together for each key head."""
    heads, values = source["linear_num_key_heads"], source["linear_num_value_heads"]
    key = source["linear_key_head_dim"]
    value = values // heads * source["linear_value_head_dim"]

    def part(*numbers: int) -> Change:
        def change(tensor: Tensor) -> Tensor:
            of_heads = tensor.view(heads, -1, tensor.shape[1])
            parts = of_heads.split([key, key, value, value], 1)
            return torch.cat([parts[i].reshape(-1, tensor.shape[1]) for i in numbers])

        return change

    together = [(".in_proj_qkv.weight", part(0, 1, 2)), (".in_proj_z.weight", part(3))]
    return DELTA | {".in_proj_qkvz.weight": together}


def of_qwen_3_5(source: Json) -> Rules:
    """Return the rules of Qwen3.5, whose value heads llama.cpp has in another order.

    A folder has the value heads of each key head together; a file begins with the first of each.
    """
    heads, size = source["linear_num_key_heads"], source["linear_value_head_dim"]
    others = 2 * heads * source["linear_key_head_dim"]

    def ordered(tensor: Tensor, size: int = 1) -> Tensor:
        grouped = tensor.reshape(heads, -1, size, *tensor.shape[1:])
        return grouped.transpose(0, 1).reshape(tensor.shape)

    def in_heads(tensor: Tensor) -> Tensor:
        return ordered(tensor, size)

    def after_keys(tensor: Tensor) -> Tensor:
        return torch.cat([tensor[:others], in_heads(tensor[others:])])

    changes: dict[str, Change] = {
        ".in_proj_qkv.weight": after_keys,
        ".in_proj_z.weight": in_heads,
        ".in_proj_a.weight": ordered,
        ".in_proj_b.weight": ordered,
        ".linear_attn.out_proj.weight": lambda tensor: in_heads(tensor.T).T,
        ".conv1d.weight": lambda tensor: after_keys(without_channel(tensor)),
        ".A_log": lambda tensor: negative_exp(ordered(tensor)),
    }
    own: Rules = {end: [(end, change)] for end, change in changes.items()}
    return DELTA | own | {".dt_bias": [(".dt_proj.bias", ordered)]}


def add_delta(writer: GGUFWriter, config: ModelConfig) -> None:
    source = config.source
    writer.add_ssm_conv_kernel(source["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(source["linear_key_head_dim"])
    writer.add_ssm_group_count(source["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(source["linear_num_value_heads"])
    writer.add_ssm_inner_size(source["linear_num_value_heads"] * source["linear_value_head_dim"])
    writer.add_full_attention_interval(interval_of(source))
    if config.family != "qwen3_next":
        sections = source["rope_parameters"].get("mrope_section", [11, 11, 10])
        writer.add_rope_dimension_sections([*sections, 0])
    if config.num_experts:
        add_hybrid_experts(writer, config)


def add_hybrid_experts(writer: GGUFWriter, config: ModelConfig) -> None:
    source = config.source
    shared = (
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "moe_shared_expert_intermediate_size",
    )
    of_shared = next(filter(None, map(source.get, shared)), None)
    add_sizes_of_experts(writer, config, source.get("moe_intermediate_size"), of_shared)


def interval_of(source: Json) -> int:
    """Return the place of the first block with full attention, counted from 1."""
    kinds = source[KINDS]
    return kinds.index(FULL) + 1 if FULL in kinds else len(kinds) + 1


def delta_differences(config: ModelConfig) -> Iterator[str]:
    yield from hybrid_differences(config)
    source = config.source
    interval = interval_of(source)
    if any((kind == FULL) != (i % interval == 0) for i, kind in enumerate(source[KINDS], 1)):
        yield f"layer_types={source[KINDS]}"
    if source.get("mlp_only_layers"):
        yield "dense feed-forwards in some blocks"


# --- LFM2


def lfm2_sizes(source: Json) -> Json:
    """Return the heads of each block, and the width of feed-forwards that transformers computes."""
    width = source["intermediate_size"]
    if source.get("block_auto_adjust_ff_dim"):
        width = int((source["block_ffn_dim_multiplier"] or 1) * int(2 * width / 3))
        width = -(-width // source["block_multiple_of"]) * source["block_multiple_of"]
    return {"intermediate_size": width, **heads_of_blocks(source)}


def heads_of_blocks(source: Json) -> Json:
    """Return the number of key heads of each block, 0 without attention."""
    heads = source["num_key_value_heads"]
    return {"num_key_value_heads": [heads * (kind in ATTENTION) for kind in source[KINDS]]}


def add_lfm2(writer: GGUFWriter, config: ModelConfig) -> None:
    source = config.source
    writer.add_shortconv_l_cache(source["conv_L_cache"])
    if config.num_experts:
        add_hybrid_experts(writer, config)
        writer.add_leading_dense_block_count(source["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def lfm2_rules(source: Json) -> Rules:
    return {
        ".conv.conv.weight": [(".conv.conv.weight", without_channel)],
        ".expert_bias": [(".expert_bias.bias", same)],
    }


def lfm2_differences(config: ModelConfig) -> Iterator[str]:
    yield from hybrid_differences(config)
    if config.source.get("routed_scaling_factor", 1.0) != 1.0:
        yield f"routed_scaling_factor={config.source['routed_scaling_factor']}"


# --- Mamba, and blocks that have it beside attention

NO_ATTENTION = {"num_attention_heads": 0, "num_key_value_heads": 0, "intermediate_size": 0}


def mamba_rules(source: Json) -> Rules:
    return {
        ".A_log": [(".A_log", negative_exp)],
        ".conv1d.weight": [(".conv1d.weight", without_channel)],
    }


MAMBA = {
    "conv_kernel": "mamba_d_conv", "state_size": "mamba_d_state", "time_step_rank": "mamba_dt_rank",
    "num_heads": "mamba_n_heads", "head_dim": "mamba_d_head", "n_groups": "mamba_n_groups",
}  # fmt: skip
"""Names of sizes in models of Mamba alone, and in those that have attention beside it."""
OF_NEMOTRON = {
    "state_size": "ssm_state_size", "num_heads": "mamba_num_heads", "head_dim": "mamba_head_dim",
}  # fmt: skip


def mamba_size(source: Json, name: str) -> int:
    names = (MAMBA[name], OF_NEMOTRON.get(name, ""), name)
    return next(source[each] for each in names if each in source)


def add_mamba(writer: GGUFWriter, config: ModelConfig) -> None:
    source = config.source
    expand = source["mamba_expand"] if "mamba_expand" in source else source["expand"]
    writer.add_ssm_conv_kernel(mamba_size(source, "conv_kernel"))
    writer.add_ssm_inner_size(expand * config.hidden_size)
    writer.add_ssm_state_size(mamba_size(source, "state_size"))
    writer.add_ssm_time_step_rank(mamba_size(source, "time_step_rank"))
    writer.add_ssm_dt_b_c_rms(config.family == "falcon_mamba")
    if config.num_experts:
        add_hybrid_experts(writer, config)


def mamba_2_rules(source: Json) -> Rules:
    groups = mamba_size(source, "n_groups")

    def in_groups(tensor: Tensor) -> Tensor:
        return tensor.view(groups, -1)

    norms: Rules = {
        f"{name}.norm.weight": [(f"{name}.norm.weight", in_groups)] for name in ("mixer", "mamba")
    }
    return {
        **mamba_rules(source),
        **norms,
        ".A_log": [(".A_log", lambda tensor: as_column(negative_exp(tensor)))],
        ".D": [(".D", as_column)],
        ".dt_bias": [(".dt_proj.bias", same)],
    }


def add_mamba_2(writer: GGUFWriter, config: ModelConfig) -> None:
    source = config.source
    writer.add_ssm_conv_kernel(mamba_size(source, "conv_kernel"))
    writer.add_ssm_state_size(mamba_size(source, "state_size"))
    writer.add_ssm_group_count(mamba_size(source, "n_groups"))
    writer.add_ssm_time_step_rank(mamba_size(source, "num_heads"))
    writer.add_ssm_inner_size(mamba_size(source, "num_heads") * mamba_size(source, "head_dim"))


def falcon_rules(source: Json) -> Rules:
    """Return the rules of Falcon-H1, whose factors a file has in its matrices."""
    gate, down = source["mlp_multipliers"]
    before = source["attention_in_multiplier"]
    groups = mamba_size(source, "n_groups") * mamba_size(source, "state_size")
    inner, heads = source["mamba_d_ssm"], mamba_size(source, "num_heads")
    parts = torch.tensor(source["ssm_multipliers"]) * source["ssm_in_multiplier"]
    counts = torch.tensor([inner, inner, groups, groups, heads])
    rows = parts.repeat_interleave(counts)[:, None]
    factors = {
        ".down_proj.weight": down,
        ".gate_proj.weight": gate,
        ".q_proj.weight": before,
        ".k_proj.weight": before * source["key_multiplier"],
        ".v_proj.weight": before,
        ".o_proj.weight": source["attention_out_multiplier"],
        ".mamba.out_proj.weight": source["ssm_out_multiplier"],
        "lm_head.weight": source["lm_head_multiplier"],
    }
    own: Rules = {end: [(end, scaled(factor))] for end, factor in factors.items()}
    embedding = "embed_tokens.weight"
    own[embedding] = [(embedding, scaled(source["embedding_multiplier"]))]
    own[".mamba.in_proj.weight"] = [
        (".mamba.in_proj.weight", lambda tensor: tensor * rows.to(tensor.device))
    ]
    return mamba_2_rules(source) | own


def falcon_differences(config: ModelConfig) -> Iterator[str]:
    yield from hybrid_differences(config)
    source = config.source
    if (
        config.tie_word_embeddings
        and source["lm_head_multiplier"] != source["embedding_multiplier"]
    ):
        yield "tie_word_embeddings=true with two factors"
    if source["mamba_rms_norm"] and source["mamba_norm_before_gate"]:
        yield "mamba_norm_before_gate=true"


def granite_sizes(source: Json) -> Json:
    shared = {"intermediate_size": source["shared_intermediate_size"]}
    return heads_of_blocks(source) | ({} if source["num_local_experts"] else shared)


def granite_rules(source: Json) -> Rules:
    end = "_shexp.weight" if source["num_local_experts"] else ".weight"
    rules: Rules = {
        ".block_sparse_moe.input_linear.weight": [
            ("blk.ffn_gate_exps.weight", half(0)),
            ("blk.ffn_up_exps.weight", half(1)),
        ],
        ".shared_mlp.input_linear.weight": [
            (f"blk.ffn_gate{end}", half(0)),
            (f"blk.ffn_up{end}", half(1)),
        ],
        ".shared_mlp.output_linear.weight": [(f"blk.ffn_down{end}", same)],
    }
    if source["position_embedding_type"] == "rope":
        for name, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
            own = f".{name}_proj.weight"
            rules[own] = [(own, partial(in_pairs, heads=source[heads]))]
    return mamba_2_rules(source) | rules


def add_granite(writer: GGUFWriter, config: ModelConfig) -> None:
    """Add the recurrence, the experts, the factors, and whether positions are rotated."""
    source = config.source
    add_mamba_2(writer, config)
    if config.num_experts:
        add_hybrid_experts(writer, config)
    writer.add_attention_scale(source["attention_multiplier"])
    writer.add_embedding_scale(source["embedding_multiplier"])
    writer.add_residual_scale(source["residual_multiplier"])
    writer.add_logit_scale(source["logits_scaling"])
    writer.add_rope_scaling_finetuned(source["position_embedding_type"] == "rope")


def nemotron_sizes(source: Json) -> Json:
    """Return the heads of each block, and the width of its feed-forward."""
    widths = {"mlp": source["intermediate_size"], "moe": source["moe_intermediate_size"]}
    return heads_of_blocks(source) | {
        "intermediate_size": [widths.get(kind, 0) for kind in source[KINDS]]
    }


def nemotron_rules(source: Json) -> Rules:
    return mamba_2_rules(source) | {
        ".gate.e_score_correction_bias": [("blk.exp_probs_b.bias", same)],
    }


def add_nemotron(writer: GGUFWriter, config: ModelConfig) -> None:
    source = config.source
    add_mamba_2(writer, config)
    writer.add_layer_norm_eps(config.rms_norm_eps)
    if "moe" in source[KINDS]:
        add_hybrid_experts(writer, config)
        writer.add_expert_shared_count(source["n_shared_experts"])
        writer.add_expert_weights_norm(True)
        writer.add_expert_weights_scale(source["routed_scaling_factor"])
        writer.add_expert_group_count(source["n_group"])


def nemotron_differences(config: ModelConfig) -> Iterator[str]:
    yield from hybrid_differences(config)
    if {"mlp", "moe"} <= {*config.source[KINDS]}:
        yield "dense feed-forwards beside experts"
    if config.source["moe_latent_size"]:
        yield f"moe_latent_size={config.source['moe_latent_size']}"


ARCH = gguf.MODEL_ARCH
NEXT = Hybrid(ARCH.QWEN3NEXT, add_delta, delta_differences, rules=of_next)
QWEN_3_5 = Hybrid(ARCH.QWEN35, add_delta, delta_differences, rules=of_qwen_3_5)
QWEN_3_5_MOE = replace(QWEN_3_5, architecture=ARCH.QWEN35MOE)
LFM2 = Hybrid(ARCH.LFM2, add_lfm2, lfm2_differences, rules=lfm2_rules, sizes=lfm2_sizes)
MAMBA_1 = Hybrid(
    ARCH.MAMBA, add_mamba, hybrid_differences, rules=mamba_rules, sizes=lambda source: NO_ATTENTION
)
GRANITE = Hybrid(
    ARCH.GRANITE_HYBRID, add_granite, hybrid_differences, rules=granite_rules, sizes=granite_sizes
)
NEMOTRON = Hybrid(
    ARCH.NEMOTRON_H, add_nemotron, nemotron_differences, rules=nemotron_rules, sizes=nemotron_sizes
)
HYBRIDS = {
    "qwen3_next": NEXT,
    "qwen3_5": QWEN_3_5,
    "qwen3_5_text": QWEN_3_5,
    "qwen3_5_moe": QWEN_3_5_MOE,
    "qwen3_5_moe_text": QWEN_3_5_MOE,
    "lfm2": LFM2,
    "lfm2_moe": replace(LFM2, architecture=ARCH.LFM2MOE),
    "mamba": MAMBA_1,
    "falcon_mamba": MAMBA_1,
    "jamba": replace(MAMBA_1, architecture=ARCH.JAMBA, sizes=heads_of_blocks),
    "mamba2": replace(MAMBA_1, architecture=ARCH.MAMBA2, add=add_mamba_2, rules=mamba_2_rules),
    "falcon_h1": Hybrid(ARCH.FALCON_H1, add_mamba_2, falcon_differences, rules=falcon_rules),
    "granitemoehybrid": GRANITE,
    "nemotron_h": NEMOTRON,
}
"""By model_type."""


def architecture_of(config: ModelConfig) -> gguf.MODEL_ARCH:
    if config.family == "nemotron_h" and "moe" in config.source[KINDS]:
        return ARCH.NEMOTRON_H_MOE
    return HYBRIDS[config.family].architecture
