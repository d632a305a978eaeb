"""Names of tensors in other tools' files, and Hugging Face's names of the same ones."""

import re
from dataclasses import dataclass, replace

HF_BLOCK = "model.layers"
QUERY_KEY_VALUE = ("attention.wq", "attention.wk", "attention.wv")


@dataclass(frozen=True)
class TensorNames:
    """A tool's names of the tensors of a decoder.

    block: what is before the number of a block. outside, inside: its names of the modules outside
    and inside of blocks, and Hugging Face's. pairs: model types whose queries and keys it rotates
    in pairs of neighbours; in all others, the two halves of a head are rotated together.
    """

    block: str
    outside: dict[str, str]
    inside: dict[str, str]
    pairs: tuple[str, ...] = ("llama", "mistral", "mixtral")

    def to_huggingface(self, name: str) -> str | None:
        """Return Hugging Face's name; None for a name that is not known."""
        return _translated(name, self.block, HF_BLOCK, self.outside, self.inside)

    def from_huggingface(self, name: str) -> str | None:
        """Return the tool's name of a tensor of Hugging Face's; None if it has none."""
        outside, inside = (
            {theirs: own for own, theirs in table.items()} for table in (self.outside, self.inside)
        )
        return _translated(name, HF_BLOCK, self.block, outside, inside)


def is_norm(name: str) -> bool:
    return name.endswith("norm.weight")


def _translated(
    name: str, block: str, new_block: str, outside: dict[str, str], inside: dict[str, str]
) -> str | None:
    module, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    if module in outside:
        return f"{outside[module]}.{kind}"
    match = re.fullmatch(rf"{re.escape(block)}\.(\d+)\.(.+)", module)
    if not match or match[2] not in inside:
        return None
    return f"{new_block}.{match[1]}.{inside[match[2]]}.{kind}"


META = TensorNames(
    "layers",
    {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"},
    {
        "attention_norm": "input_layernorm",
        "attention.wq": "self_attn.q_proj",
        "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.o_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj",
    },
)
"""Names of Meta's Llama, and of torchtitan's models up to release 0.2."""
TORCHTITAN = TensorNames(
    META.block,
    {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head"},
    {
        name.replace(".w", ".qkv_linear.w") if name in QUERY_KEY_VALUE else name: theirs
        for name, theirs in META.inside.items()
    },
)
"""Names of torchtitan's models from release 0.3 on."""
GGUF = TensorNames(
    "blk",
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"},
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_down": "mlp.down_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    },
)
AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
AROUND = AFTER | {"ffn_norm": "pre_feedforward_layernorm"}
FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
GGUF_BY_FAMILY = {
    family: replace(GGUF, inside=GGUF.inside | names)
    for family, names in {
        "gemma2": AROUND,
        "gemma3_text": AROUND,
        "olmo2": AFTER,
        "phi3": FUSED,
    }.items()
}
"""Model types of which some of llama.cpp's names are of other modules; GGUF for all others."""
MEGATRON = TensorNames(
    "decoder.layers",
    {
        "embedding.word_embeddings": "model.embed_tokens",
        "decoder.final_layernorm": "model.norm",
        "output_layer": "lm_head",
    },
    {
        "input_layernorm": "input_layernorm",
        "self_attention.q": "self_attn.q_proj",
        "self_attention.k": "self_attn.k_proj",
        "self_attention.v": "self_attn.v_proj",
        "self_attention.linear_proj": "self_attn.o_proj",
        "self_attention.q_layernorm": "self_attn.q_norm",
        "self_attention.k_layernorm": "self_attn.k_norm",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.linear_fc2": "mlp.down_proj",
    },
    pairs=(),
)
"""Names of megatron-core's GPT, after what it joins has been separated (megatron_tensors.py)."""
