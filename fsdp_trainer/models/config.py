"""What a decoder is: read from and written to Hugging Face's config.json, in the spelling of transformers 4 and of 5."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_trainer.config.paths import is_hub_id, model_folder
from fsdp_trainer.config.schema import Model, TrainConfig
from fsdp_trainer.errors import Problem, UserError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
# A value that differs from the one here changes what the model computes in a way that the decoder does not know.
REFUSED_UNLESS: dict[str, tuple] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
}
ROPE = ("rope_scaling", "rope_parameters")
CONTEXT_KEYS = ("max_position_embeddings", "rope_theta", "rope_scaling")


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a decoder. The defaults are the tiny model's."""

    family: str = "llama"
    vocab_size: int = 0
    hidden_size: int = 128
    intermediate_size: int = 352
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 2048
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02
    source: dict[str, Any] = field(default_factory=dict, compare=False)  # config.json as it was read, for the export

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head before rotation."""
        return self.family == "qwen3"

    @classmethod
    def from_hf(cls, folder: str | Path) -> "ModelConfig":
        """Read `folder/config.json`. Raises UserError naming everything in it that the decoder does not support."""
        path = Path(folder) / "config.json"
        try:
            raw = json.loads(path.read_text())
            if not isinstance(raw, dict):
                raise ValueError("is not a JSON object")
        except (OSError, ValueError) as error:
            raise UserError("cannot read the model's configuration", [Problem(str(path), str(error))]) from None
        if problems := _unsupported(raw):
            raise UserError(f"{path} describes a model that is not supported", problems)
        heads = raw["num_attention_heads"]
        rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
        theta = rope.pop("rope_theta", None) or raw.get("rope_theta") or 10_000.0
        rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
        values = {name: raw[name] for name in _SIZES} | {
            "family": raw["model_type"],
            "num_key_value_heads": raw.get("num_key_value_heads") or heads,
            "head_dim": raw.get("head_dim") or (128 if raw["model_type"] == "qwen3" else raw["hidden_size"] // heads),
            "max_position_embeddings": raw.get("max_position_embeddings", 2048),
            "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
            "tie_word_embeddings": raw.get("tie_word_embeddings", False),
            "initializer_range": raw.get("initializer_range", 0.02),
        }
        rope_scaling = None if rope["rope_type"] == "default" else {k: rope[k] for k in ("rope_type", *ROPE_TYPES[rope["rope_type"]])}
        return cls(**values, rope_theta=float(theta), rope_scaling=rope_scaling, source=raw)

    def to_hf(self, dtype: str, bos_id: int | None = None, eos_ids: list[int] | None = None) -> dict[str, Any]:
        """config.json as both transformers 4 and 5 read it, with what the source's had besides."""
        rope = {"rope_type": "default", **(self.rope_scaling or {})}
        ids = {} if eos_ids is None else {"bos_token_id": bos_id, "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids}
        return {
            **self.source,
            "architectures": [ARCHITECTURES[self.family]],
            "model_type": self.family,
            **{name: getattr(self, name) for name in (*_SIZES, *_OPTIONAL)},
            "hidden_act": "silu",
            "attention_bias": False,
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling,
            "rope_parameters": rope | {"rope_theta": self.rope_theta},
            "torch_dtype": dtype,
            "dtype": dtype,
            "use_cache": True,
            **({} if self.source else ids),
        }

    def parameters(self) -> int:
        """How many weights the model has; a tied head is counted once."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_attention_heads + self.num_key_value_heads)
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        block = attention + 3 * self.hidden_size * self.intermediate_size + norms
        embeddings = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        return self.num_hidden_layers * block + embeddings + self.hidden_size


_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_OPTIONAL = ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "initializer_range")


def _accepted(name: str) -> Any:
    """Types of an optional key; null stands for the default where transformers allows it."""
    return int | float | None if name in ("num_key_value_heads", "head_dim") else int | float


def _unsupported(raw: dict[str, Any]) -> list[Problem]:
    family = raw.get("model_type")
    if family not in ARCHITECTURES:
        return [Problem(f"model_type={family}", f"this decoder computes {' and '.join(ARCHITECTURES)}")]
    problems = [Problem(name, "is missing") for name in _SIZES if not isinstance(raw.get(name), int)]
    problems += [
        Problem(f"{name}={raw[name]}", "is not a number")
        for name in _OPTIONAL
        if name in raw and not isinstance(raw[name], _accepted(name))
    ]
    problems += [Problem(f"{name}={raw[name]}", "is not an object") for name in ROPE if not isinstance(raw.get(name), dict | None)]
    if problems:
        return problems
    architectures = raw.get("architectures") or [ARCHITECTURES[family]]
    if architectures != [ARCHITECTURES[family]]:
        problems.append(Problem(f"architectures={architectures}", f"only {ARCHITECTURES[family]} is trained"))
    problems += [
        Problem(f"{name}={raw[name]}", f"only {allowed[0]} is computed")
        for name, allowed in REFUSED_UNLESS.items()
        if raw.get(name, allowed[0]) not in allowed
    ]
    if any(kind != "full_attention" for kind in raw.get("layer_types") or []):
        problems.append(Problem("layer_types", "only full_attention is computed"))
    return problems + rope_problems({**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}, "rope")


def rope_problems(rope: dict[str, Any], where: str) -> list[Problem]:
    """What is wrong with a RoPE scaling."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_TYPES:
        return [Problem(f"{where}: rope_type={kind}", f"computed are {', '.join(ROPE_TYPES)}")]
    missing = [name for name in ROPE_TYPES[kind] if not isinstance(rope.get(name), int | float)]
    return [Problem(f"{where}: rope_type={kind}", f"needs {', '.join(missing)}")] if missing else []


def resolve_model(model: Model, vocab_size: int | None = None) -> ModelConfig:
    """The architecture that `model` asks for: init_from's, else the tiny model's, with the keys that are set laid over it.

    vocab_size: the tokenizer's, which random weights follow unless model.vocab_size says otherwise. Raises UserError.
    """
    asked = {f.name: getattr(model, f.name) for f in dataclasses.fields(ModelConfig) if getattr(model, f.name, None) is not None}
    if model.init_from is not None:
        found = ModelConfig.from_hf(model_folder(model.init_from))
        if problems := _differences(model, asked, found):
            raise UserError("the model asked for is not the one in model.init_from", problems)
        return dataclasses.replace(found, **{name: asked[name] for name in CONTEXT_KEYS if name in asked})
    asked.setdefault("vocab_size", vocab_size or 0)
    if "hidden_size" in asked or "num_attention_heads" in asked:
        tiny = ModelConfig()
        asked.setdefault(
            "head_dim", asked.get("hidden_size", tiny.hidden_size) // asked.get("num_attention_heads", tiny.num_attention_heads)
        )
    return ModelConfig(**asked)


def _differences(model: Model, asked: dict[str, Any], found: ModelConfig) -> list[Problem]:
    named = model.name != "auto"
    free = {"initializer_range", "vocab_size", *(() if named else CONTEXT_KEYS)}
    different = {name: getattr(found, name) for name, value in asked.items() if name not in free and value != getattr(found, name)}
    where = f"config.json of {model.init_from}"
    if named and different:
        details = "\n".join(f"{name} is {value}, not {asked[name]}" for name, value in different.items())
        return [Problem(f"model={model.name}", f"{where} is another model's: use  model=auto  to take it as it is\n{details}")]
    return [Problem(f"model.{name}={asked[name]}", f"{where} has {value}: drop it") for name, value in different.items()]


def model_problems(cfg: TrainConfig) -> list[Problem]:
    """What is wrong with the model, seen without torch, data or tokenizer."""
    if cfg.model.rope_scaling and (problems := rope_problems(cfg.model.rope_scaling, "model.rope_scaling")):
        return problems
    if cfg.model.init_from and is_hub_id(cfg.model.init_from):
        return []
    if cfg.model.init_from and not (model_folder(cfg.model.init_from) / "config.json").is_file():
        return []  # reported as a missing path
    try:
        config = resolve_model(cfg.model)
    except UserError as error:
        return error.problems
    problems = []
    if config.num_attention_heads % config.num_key_value_heads:
        problems.append(
            Problem(
                f"model.num_key_value_heads={config.num_key_value_heads}", f"must divide num_attention_heads={config.num_attention_heads}"
            )
        )
    if config.head_dim % 2:
        problems.append(Problem(f"model.head_dim={config.head_dim}", "must be even for rotary position embedding"))
    if cfg.batch.seq_len > config.max_position_embeddings:
        problems.append(
            Problem(
                f"batch.seq_len={cfg.batch.seq_len}",
                f"longer than the model's context ({config.max_position_embeddings:,} positions).\n"
                f"Use  batch.seq_len={config.max_position_embeddings}  or  model.max_position_embeddings={cfg.batch.seq_len}"
                "  with a  model.rope_scaling={…}",
            )
        )
    return problems
