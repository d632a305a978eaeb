"""The architecture that a GGUF file describes, as a config.json."""

import os
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fsdp_trainer.errors import Problem, UserError

ARCHITECTURES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""Values of general.architecture that are read, and transformers' names of the classes."""
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor with the divisors of Llama 3.1's frequencies."""
LLAMA_3_LENGTH = 8192


def gguf_files(path: Path) -> list[Path]:
    """Return the GGUF file at a path, or all parts of the model in a folder."""
    if path.suffix == ".gguf":
        if "-of-" not in path.name or not path.is_file():
            return [path] if path.is_file() else []
        return sorted(path.parent.glob(f"{path.name.rpartition('-of-')[0][:-5]}*-of-*.gguf"))
    return sorted(path.glob("*.gguf")) if path.is_dir() else []


def open_gguf(file: Path) -> Any:
    """Return a GGUFReader. Raises UserError."""
    if not find_spec("gguf"):
        problem = Problem(str(file), "needs the package gguf:  pip install 'fsdp_trainer[gguf]'")
        raise UserError("cannot read the model", [problem])
    try:
        return _opened(str(file), os.stat(file).st_mtime_ns)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        problem = Problem(str(file), f"is no GGUF file, or not the whole of it: {error}")
        raise UserError("cannot read the model", [problem]) from None


@lru_cache(maxsize=4)
def _opened(file: str, changed: int) -> Any:
    import gguf

    return gguf.GGUFReader(file)


def described_by_gguf(path: Path) -> dict[str, Any] | None:
    """Return a config.json for a GGUF file or a folder with one; None if there is none."""
    files = gguf_files(path)
    if not files:
        return None
    readers = [open_gguf(file) for file in files]
    facts = {name: field.contents() for name, field in readers[0].fields.items()
             if not name.startswith("tokenizer.")}  # fmt: skip
    tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
    kind = facts.get("general.architecture")
    if kind not in ARCHITECTURES or "token_embd.weight" not in tensors:
        reason = f"holds {kind}; read are whole models of  {' '.join(ARCHITECTURES)}"
        raise UserError("cannot read the model", [Problem(str(files[0]), reason)])
    own = {name.removeprefix(f"{kind}."): value for name, value in facts.items()}
    try:
        return _config(own, tensors, kind)
    except KeyError as error:
        problem = Problem(str(files[0]), f"does not say {kind}.{error.args[0]}")
        raise UserError("cannot read the model", [problem]) from None


def _config(facts: dict[str, Any], tensors: dict[str, Any], kind: str) -> dict[str, Any]:
    """facts: the metadata, without the name of the architecture in front."""
    heads, width = facts["attention.head_count"], facts["embedding_length"]
    config = {
        "architectures": [f"{ARCHITECTURES[kind]}ForCausalLM"],
        "model_type": kind,
        "hidden_size": width,
        "intermediate_size": facts["feed_forward_length"],
        "num_hidden_layers": facts["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": facts.get("attention.head_count_kv", heads),
        "head_dim": facts.get("attention.key_length", width // heads),
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "max_position_embeddings": facts["context_length"],
        "rms_norm_eps": facts["attention.layer_norm_rms_epsilon"],
        "rope_theta": facts.get("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
    }
    if kind == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    if scaling := _scaling(facts, tensors):
        config["rope_scaling"] = scaling
    return config


def _scaling(facts: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any] | None:
    if ROPE_FACTORS in tensors:  # the reader of the weights compares them with these
        return {
            "rope_type": "llama3",
            "factor": float(tensors[ROPE_FACTORS].data.max()),
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
