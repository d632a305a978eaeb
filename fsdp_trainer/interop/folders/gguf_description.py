"""The architecture that a GGUF file describes, as a config.json."""

import os
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.errors import UserError
from fsdp_trainer.interop.folders.gguf_header import GgufHeader, GgufTensor, read_header

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor with the divisors of Llama 3.1's frequencies."""
LLAMA_3_LENGTH = 8192
EXPERTS = "blk.0.ffn_gate_exps.weight"
GEMMA2_27B, GEMMA3_27B = 46, 62
"""Numbers of blocks by which llama.cpp knows models that scale queries by their width."""

NUMBERS = ("attention.head_count", "embedding_length", "feed_forward_length", "block_count",
           "context_length", "attention.layer_norm_rms_epsilon")  # fmt: skip
OTHER_NUMBERS = ("attention.head_count_kv", "attention.key_length", "rope.freq_base",
                 "rope.dimension_count", "rope.scaling.factor", "expert_count",
                 "rope.scaling.original_context_length", "expert_used_count",
                 "attention.sliding_window", "attn_logit_softcapping",
                 "final_logit_softcapping")  # fmt: skip
"""Facts of every model, and of some, that are read as numbers."""


def gguf_files(path: Path) -> list[Path]:
    """Return the GGUF file at a path, or all parts of the model in a folder."""
    if path.suffix == ".gguf":
        if "-of-" not in path.name or not path.is_file():
            return [path] if path.is_file() else []
        return sorted(path.parent.glob(f"{path.name.rpartition('-of-')[0][:-5]}*-of-*.gguf"))
    return sorted(path.glob("*.gguf")) if path.is_dir() else []


def open_gguf(file: Path) -> GgufHeader:
    if not find_spec("gguf"):
        raise UserError(
            "cannot read the model",
            str(file),
            "needs the package gguf:  pip install 'fsdp_trainer[gguf]'",
        )
    try:
        return _opened(file, os.stat(file).st_mtime_ns)
    except (OSError, ValueError) as error:
        raise UserError(
            "cannot read the model", str(file), f"is no GGUF file, or not the whole of it: {error}"
        ) from None


@lru_cache(maxsize=4)
def _opened(file: Path, changed: int) -> GgufHeader:
    return read_header(file)


def described_by_gguf(path: Path) -> Json | None:
    """Return a config.json for a GGUF file or a folder with one; None if there is none."""
    files = gguf_files(path)
    if not files:
        return None
    headers = [open_gguf(file) for file in files]
    facts = headers[0].facts
    tensors = {name: each for header in headers for name, each in header.tensors.items()}
    kind = facts.get("general.architecture")
    if kind not in DESCRIPTIONS or "token_embd.weight" not in tensors:
        reason = f"holds {kind}; read are whole models of  {' '.join(DESCRIPTIONS)}"
        raise UserError("cannot read the model", str(files[0]), reason)
    own = {name.removeprefix(f"{kind}."): value for name, value in facts.items()}
    try:
        for name in (*NUMBERS, *OTHER_NUMBERS):
            if type(own.get(name, 0)) not in (int, float):
                raise ValueError(f"{kind}.{name} is no number")
        return _config(own, tensors, kind)
    except KeyError as error:
        reason = f"does not say {kind}.{error.args[0]}"
    except (ValueError, ArithmeticError, TypeError) as error:
        reason = f"describes no model: {error}"
    raise UserError("cannot read the model", str(files[0]), reason)


def _config(facts: Json, tensors: Json, kind: str) -> Json:
    """facts: the metadata, without the name of the architecture in front."""
    heads, width = facts["attention.head_count"], facts["embedding_length"]
    config: Json = {
        "hidden_size": width,
        "intermediate_size": facts["feed_forward_length"],
        "num_hidden_layers": facts["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": facts.get("attention.head_count_kv", heads),
        "head_dim": facts.get("attention.key_length", width // heads),
        "vocab_size": _rows(tensors["token_embd.weight"]),
        "max_position_embeddings": facts["context_length"],
        "rms_norm_eps": facts["attention.layer_norm_rms_epsilon"],
        "rope_theta": facts.get("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
    }
    if scaling := _scaling(facts, tensors):
        config["rope_scaling"] = scaling
    return config | DESCRIPTIONS[kind](config, facts, tensors)


def _rows(matrix: GgufTensor) -> int:
    if len(matrix.shape) < 2:
        raise ValueError(f"{matrix.name} is no matrix")
    return matrix.shape[1]


# --- what each architecture has besides


def _named(architecture: str, model_type: str, **others: Any) -> Json:
    return {"architectures": [f"{architecture}ForCausalLM"], "model_type": model_type, **others}


def _plain(architecture: str, model_type: str) -> Callable[[Json, Json, Json], Json]:
    return lambda config, facts, tensors: _named(architecture, model_type)


def _llama(config: Json, facts: Json, tensors: Json) -> Json:
    if facts.get("expert_count"):
        experts = _experts(facts, tensors, None)
        width = experts["moe_intermediate_size"]
        number = {"num_local_experts": experts["num_experts"], "intermediate_size": width}
        return _named(
            "Mixtral", "mixtral", **number, num_experts_per_tok=facts["expert_used_count"]
        )
    return _named(
        "Llama",
        "llama",
        attention_bias="blk.0.attn_q.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
    )


def _experts(facts: Json, tensors: Json, normalized: bool | None) -> Json:
    """normalized: whether llama.cpp divides the weights of a token's experts by their sum."""
    if EXPERTS not in tensors:
        raise KeyError(EXPERTS)
    return {
        "num_experts": facts["expert_count"],
        "num_experts_per_tok": facts["expert_used_count"],
        "moe_intermediate_size": _rows(tensors[EXPERTS]),
        "norm_topk_prob": normalized,
    }


def _qwen2_moe(config: Json, facts: Json, tensors: Json) -> Json:
    shared = _rows(tensors["blk.0.ffn_gate_shexp.weight"])
    own = {"shared_expert_intermediate_size": shared, "decoder_sparse_step": 1}
    return _named("Qwen2Moe", "qwen2_moe", **_experts(facts, tensors, False), **own)


def _qwen3_moe(config: Json, facts: Json, tensors: Json) -> Json:
    experts = _experts(facts, tensors, True)
    return _named("Qwen3Moe", "qwen3_moe", **experts, decoder_sparse_step=1, mlp_only_layers=[])


def _olmoe(config: Json, facts: Json, tensors: Json) -> Json:
    experts = _experts(facts, tensors, False)
    experts["intermediate_size"] = experts.pop("moe_intermediate_size")
    return _named("Olmoe", "olmoe", **experts)


def gemma_query_scalar(config: Json, blocks_of_27b: int) -> int:
    """Return the width by whose root llama.cpp divides a Gemma's queries. config: config.json's."""
    if config["num_hidden_layers"] == blocks_of_27b:
        return config["hidden_size"] // config["num_attention_heads"]
    return config["head_dim"]


def _gemma(config: Json, facts: Json, blocks_of_27b: int) -> Json:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": gemma_query_scalar(config, blocks_of_27b),
        "sliding_window": facts["attention.sliding_window"],
        "attn_logit_softcapping": facts.get("attn_logit_softcapping"),
        "final_logit_softcapping": facts.get("final_logit_softcapping"),
    }


def _gemma2(config: Json, facts: Json, tensors: Json) -> Json:
    return _named("Gemma2", "gemma2", **_gemma(config, facts, GEMMA2_27B))


def _gemma3(config: Json, facts: Json, tensors: Json) -> Json:
    own = _gemma(config, facts, GEMMA3_27B)
    theta = facts.get("rope.freq_base", 1_000_000.0)
    return _named("Gemma3", "gemma3_text", **own, rope_theta=theta, rope_local_base_freq=10_000.0)


def _phi3(config: Json, facts: Json, tensors: Json) -> Json:
    return _named(
        "Phi3",
        "phi3",
        sliding_window=facts.get("attention.sliding_window") or None,
        partial_rotary_factor=facts["rope.dimension_count"] / config["head_dim"],
        original_max_position_embeddings=config["max_position_embeddings"],
        pad_token_id=None,
    )


DESCRIPTIONS: dict[str, Callable[[Json, Json, Json], Json]] = {
    "llama": _llama,
    "qwen2": _plain("Qwen2", "qwen2"),
    "qwen2moe": _qwen2_moe,
    "qwen3": _plain("Qwen3", "qwen3"),
    "qwen3moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "olmo2": _plain("Olmo2", "olmo2"),
    "olmoe": _olmoe,
    "phi3": _phi3,
}
"""By general.architecture: a function from the configuration so far, facts and tensors to more."""


def _scaling(facts: Json, tensors: Json) -> Json | None:
    if ROPE_FACTORS in tensors:  # the reader of the weights compares them with these
        return {
            "rope_type": "llama3",
            "factor": max(tensors[ROPE_FACTORS].numbers()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": LLAMA_3_LENGTH,
        }
    kind = facts.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": facts["rope.scaling.factor"]}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = facts["rope.scaling.original_context_length"]
    return scaling
