"""Folders with weights of other tools, and where their architecture is described.

Does not import torch.
"""

from pathlib import Path

from fsdp_trainer.base.folders import LONGEST_NAME, is_inside
from fsdp_trainer.base.json_files import Json, read_object
from fsdp_trainer.errors import UserError
from fsdp_trainer.interop.folders.gguf_description import described_by_gguf, gguf_files

METADATA = ".metadata"
"""The file that describes a distributed checkpoint of torch."""
META_FILES, META_PARAMS = "consolidated.*.pth", "params.json"
TORCH_SINGLE, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
SHARDED_BELOW = "pytorch_model_fsdp_*"
"""The folder in which accelerate puts a distributed checkpoint."""
LATEST_OF_MEGATRON = "latest_checkpointed_iteration.txt"
ZERO_STATES = "*zero_pp_rank_*_mp_rank_00_optim_states.pt"
ZERO_MODEL = "*mp_rank_00_model_states.pt"
"""Files of DeepSpeed's ZeRO: a part of the weights of each rank, and their shapes."""
NOT_WEIGHTS = ("optimizer", "scheduler", "rng_state", "random_states", "training_args",
               "recipe_state", "sampler", "adapter", "scaler")  # fmt: skip
"""Beginnings of the names of torch's files that hold other states."""
CONFIG, OWN = "config.json", "config.yaml"
"""Files with the architecture, and with the keys of a run in each checkpoint of this trainer."""
LLAMA_2_ROWS, LLAMA_3_WIDTH = 32000, 4096
"""Rows of the embedding where params.json says -1, as in Llama 1 and 2. Width of the smallest Llama
3.1; the narrower Llama 3.2 ties its head and scales positions by more, which nothing says."""


def sharded_folder(folder: Path) -> Path | None:
    if (folder / METADATA).is_file():
        return folder
    below = [*sorted(folder.glob(SHARDED_BELOW)), *latest_of_megatron(folder)]
    folders = [each for each in below if (each / METADATA).is_file()]
    return folders[0] if len(folders) == 1 else None


def latest_of_megatron(folder: Path) -> list[Path]:
    try:
        return [folder / f"iter_{int((folder / LATEST_OF_MEGATRON).read_text()):07}"]
    except (OSError, ValueError):
        return []


def zero_folder(folder: Path) -> Path | None:
    """Return the ZeRO checkpoint that is `folder`, or that its file `latest` names in it."""
    named = folder / _named_by(folder / "latest")
    return next((each for each in (folder, named) if _is_zero(each)), None)


def _is_zero(folder: Path) -> bool:
    return any(folder.glob(ZERO_STATES)) and any(folder.glob(ZERO_MODEL))


def _named_by(file: Path) -> str:
    try:
        with file.open(encoding="utf-8") as opened:
            name = opened.read(LONGEST_NAME + 1).strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return name if is_inside(name) else ""


def torch_files(folder: Path) -> list[Path]:
    return sorted(
        file
        for pattern in ("*.bin", "*.pt", "*.pth")
        for file in folder.glob(pattern)
        if not file.name.startswith(NOT_WEIGHTS)
    )


def kind_of_weights(folder: Path) -> str | None:
    """Return the kind of another tool's weights, None for others: a key of known_weights.py."""
    if (folder / OWN).is_file():
        return None
    if gguf_files(folder):
        return "gguf"
    if (folder / META_PARAMS).is_file() and any(folder.glob(META_FILES)):
        return "meta"
    if zero_folder(folder):
        return "zero"
    if sharded_folder(folder):
        return "sharded"
    return "torch" if torch_files(folder) else None


def described_at(folder: Path) -> Path:
    """Return the folder with config.json: the given one, or one up to two levels above weights."""
    if (folder / CONFIG).is_file() or not folder.is_dir() or not kind_of_weights(folder):
        return folder
    above = [folder.parent, folder.parent.parent]
    return next((each for each in above if (each / CONFIG).is_file()), folder)


def is_described(folder: Path) -> bool:
    return (folder / CONFIG).is_file() or kind_of_weights(folder) in ("gguf", "meta")


def described_otherwise(folder: Path) -> Json | None:
    return described_by_gguf(folder) or described_by_meta(folder)


def described_by_meta(folder: Path) -> Json | None:
    """Return a config.json for Meta's params.json; None if there is none. Raises UserError."""
    file = folder / META_PARAMS
    if not file.is_file():
        return None
    title = "cannot read the model's configuration"
    try:
        return _llama_config(read_object(file, title))
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise UserError(
            title, str(file), f"is not Meta's: {type(error).__name__} {error}"
        ) from None


def _llama_config(params: Json) -> Json:
    width, heads = params["dim"], params["n_heads"]
    if params.get("moe_args") or "vision_chunk_size" in params or "vision_args" in params:
        raise ValueError("only Llama 1 to 3 of text are read")
    hidden = int(2 * 4 * width / 3)
    hidden = int(params.get("ffn_dim_multiplier", 1) * hidden)
    multiple = params.get("multiple_of", 256)
    vocabulary = params.get("vocab_size", -1)
    says_factor = "rope_scaling_factor" in params
    is_3_2 = bool(params.get("use_scaled_rope")) and width < LLAMA_3_WIDTH and not says_factor
    config: Json = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": -(-hidden // multiple) * multiple,
        "num_hidden_layers": params["n_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": params.get("n_kv_heads") or heads,
        "vocab_size": vocabulary if vocabulary > 0 else LLAMA_2_ROWS,
        "rms_norm_eps": params.get("norm_eps", 1e-5),
        "rope_theta": params.get("rope_theta", 10000.0),
        "max_position_embeddings": params.get("max_seq_len", _length(params)),
        "tie_word_embeddings": bool(params.get("tie_word_embeddings", is_3_2)),
        "hidden_act": "silu",
    }
    if params.get("use_scaled_rope"):
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": float(params.get("rope_scaling_factor", 32.0 if is_3_2 else 8.0)),
            "low_freq_factor": 1.0,
            "high_freq_factor": float(params.get("rope_high_freq_factor", 4.0)),
            "original_max_position_embeddings": 8192,
        }
    return config


def _length(params: Json) -> int:
    """Return the length that Meta trained with, which params.json does not say."""
    if params.get("use_scaled_rope"):
        return 131072
    return 8192 if params.get("rope_theta") == 500000.0 else 4096
