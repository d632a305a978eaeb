"""Model types that llama.cpp knows: what their GGUF files say, and what it assumes of them.

What llama.cpp assumes is not in a file: a model that differs in it would compute something else.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import gguf
from gguf import GGUFWriter

from fsdp_trainer.config.parts.families import SLIDING, layer_pattern
from fsdp_trainer.interop.folders.gguf_description import GEMMA2_27B, GEMMA3_27B, gemma_query_scalar
from fsdp_trainer.models.config import EXPERTS, ModelConfig


@dataclass(frozen=True)
class GgufModel:
    """A type of models in llama.cpp.

    architecture: the package's name of it. add: adds facts besides those that all files have.
    differences: yields the keys, with values, in which a model differs from what llama.cpp assumes.
    space: True if a tokenizer of SentencePiece's puts a space in front of a text.
    """

    architecture: gguf.MODEL_ARCH
    add: Callable[[GGUFWriter, ModelConfig], None] = lambda writer, config: None
    differences: Callable[[ModelConfig], Iterable[str]] = lambda config: ()
    space: bool = True


# --- Gemma


def add_gemma(writer: GGUFWriter, config: ModelConfig) -> None:
    if config.attn_logit_softcapping:
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if config.rope_local_theta:
        writer.add_rope_freq_base_swa(config.rope_local_theta)


def gemma_differences(blocks_of_27b: int, config: ModelConfig) -> Iterator[str]:
    """Yield the differences of a Gemma. blocks_of_27b: see GEMMA2_27B."""
    width = gemma_query_scalar(vars(config), blocks_of_27b)
    if config.query_pre_attn_scalar not in (None, width):
        yield f"query_pre_attn_scalar={config.query_pre_attn_scalar}"
    pattern = layer_pattern(config.num_hidden_layers, config.family_spec.window_pattern)
    if config.layer_types and tuple(config.layer_types) != tuple(pattern):
        yield f"layer_types={[kind == SLIDING for kind in config.layer_types]}"
    if config.rope_local_theta not in (None, 10_000.0):
        yield f"rope_local_base_freq={config.rope_local_theta}"


# --- Phi


def add_phi3(writer: GGUFWriter, config: ModelConfig) -> None:
    """Add the window and the length of the training, both of which llama.cpp requires."""
    writer.add_sliding_window(config.sliding_window or 0)
    original = config.source.get("original_max_position_embeddings")
    writer.add_rope_scaling_orig_ctx_len(original or config.max_position_embeddings)


# --- experts


def add_experts(writer: GGUFWriter, config: ModelConfig) -> None:
    add_sizes_of_experts(writer, config, config.moe_intermediate_size, config.shared_size)


def add_sizes_of_experts(
    writer: GGUFWriter, config: ModelConfig, each: int | None, shared: int | None
) -> None:
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if each:
        writer.add_expert_feed_forward_length(each)
    if shared:
        writer.add_expert_shared_feed_forward_length(shared)


def expert_differences(normalized: bool, config: ModelConfig) -> Iterator[str]:
    """Yield the differences of a model with experts in each block.

    normalized: True if llama.cpp divides the weights of a token's experts by their sum.
    """
    if config.normalizes_experts != normalized:
        yield f"norm_topk_prob={str(config.normalizes_experts).lower()}"
    if set(config.feed_forwards) != {EXPERTS}:
        yield "dense feed-forwards in some blocks"


def olmo2_differences(config: ModelConfig) -> Iterator[str]:
    """Yield the difference of an OLMo 2 whose head is its embedding, which llama.cpp asks for."""
    if config.tie_word_embeddings:
        yield "tie_word_embeddings=true"


def olmoe_differences(config: ModelConfig) -> Iterator[str]:
    """Yield the differences of an OLMoE, whose heads all have keys of their own."""
    yield from expert_differences(False, config)
    if config.num_key_value_heads != config.num_attention_heads:
        yield f"num_key_value_heads={config.num_key_value_heads}"


ARCH = gguf.MODEL_ARCH
MODELS = {
    "llama": GgufModel(ARCH.LLAMA),
    "mistral": GgufModel(ARCH.LLAMA),
    "mixtral": GgufModel(ARCH.LLAMA, add_experts, partial(expert_differences, True)),
    "qwen2": GgufModel(ARCH.QWEN2),
    "qwen2_moe": GgufModel(ARCH.QWEN2MOE, add_experts, partial(expert_differences, False)),
    "qwen3": GgufModel(ARCH.QWEN3),
    "qwen3_moe": GgufModel(ARCH.QWEN3MOE, add_experts, partial(expert_differences, True)),
    "gemma2": GgufModel(
        ARCH.GEMMA2, add_gemma, partial(gemma_differences, GEMMA2_27B), space=False
    ),
    "gemma3_text": GgufModel(
        ARCH.GEMMA3, add_gemma, partial(gemma_differences, GEMMA3_27B), space=False
    ),
    "olmo2": GgufModel(ARCH.OLMO2, differences=olmo2_differences),
    "olmoe": GgufModel(ARCH.OLMOE, add_experts, olmoe_differences),
    "phi3": GgufModel(ARCH.PHI3, add_phi3),
}
"""By model_type. llama.cpp knows Mistral's models as Llama's."""
