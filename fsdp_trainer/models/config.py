"""What a decoder is: read from and written to Hugging Face's config.json, in the spelling of transformers 4 and of 5."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.families import FAMILIES, FULL, SLIDING, Family

if TYPE_CHECKING:
    import numpy as np  # a mistake in the configuration, and a process that only starts ranks, do without it

ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
ROPE_OPTIONS = (
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
)
ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu")
# A value that differs from the one here changes what the model computes in a way that the decoder does not know.
REFUSED_UNLESS: dict[str, tuple] = {
    "attention_dropout": (0, None),
    "resid_pdrop": (0, None),
    "embd_pdrop": (0, None),
    "use_bidirectional_attention": (False, None),
    "quantization_config": (None,),
}


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a decoder. The defaults are the tiny model's. `form` holds what its family fixes."""

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
    rope_local_theta: float | None = None  # of the blocks with a window, unscaled
    rope_scaling: dict[str, Any] | None = None
    partial_rotary_factor: float = 1.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    query_pre_attn_scalar: float | None = None  # scores are divided by its root; None: head_dim
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()  # empty: by the family's pattern
    vocab_multiple: int = (
        1  # the embedding has rows up to the next multiple; those beyond vocab_size are never seen
    )
    initializer: str = "plain"
    source: dict[str, Any] = field(
        default_factory=dict, compare=False
    )  # config.json as it was read, for the export

    @property
    def form(self) -> Family:
        """What the family fixes."""
        return FAMILIES[self.family]

    @property
    def embedding_rows(self) -> int:
        """Rows of the embedding and the head, padding included."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    def has_bias(self, projection: str) -> bool:
        """Whether one of attention's projections has a bias."""
        return self.attention_bias or projection in self.form.biased

    @property
    def windows(self) -> list[int | None]:
        """Of each block, how many tokens a token sees, itself included; None: the whole document."""
        form, n = self.form, self.num_hidden_layers
        types = self.layer_types or [
            FULL if form.windows == "pattern" and (i + 1) % form.window_pattern == 0 else SLIDING
            for i in range(n)
        ]
        return [
            self.sliding_window if form.windows != "none" and kind == SLIDING else None
            for kind in types
        ]

    def attended(self, lengths: "np.ndarray") -> "np.ndarray":
        """[documents] of what attention costs: length², less what lies outside of windows, as a mean over the blocks."""
        windows = self.windows
        spans = [lengths.clip(max=window) if window else lengths for window in set(windows)]
        shares = [windows.count(window) / len(windows) for window in set(windows)]
        return sum(
            share * span * (2 * lengths - span) for share, span in zip(shares, spans, strict=True)
        )

    @classmethod
    def from_hf(cls, folder: str | Path) -> "ModelConfig":
        """Read `folder/config.json`. Raises UserError naming everything in it that the decoder does not support."""
        path = Path(folder) / "config.json"
        try:
            raw = json.loads(path.read_text())
            if not isinstance(raw, dict):
                raise ValueError("is not a JSON object")
        except (OSError, ValueError) as error:
            raise UserError(
                "cannot read the model's configuration", [Problem(str(path), str(error))]
            ) from None
        raw = _text_part(raw)
        if problems := _unsupported(raw):
            raise UserError(f"{path} describes a model that is not supported", problems)
        family = raw["model_type"]
        values = {name: found for name in STORED if (found := _read(raw, name)) is not None}
        values.setdefault("num_key_value_heads", values["num_attention_heads"])
        values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
        return cls(
            **values,
            **_windows(raw, values["num_hidden_layers"]),
            **_rope(raw),
            family=family,
            source=raw,
        )

    def to_hf(
        self, dtype: str, bos_id: int | None = None, eos_ids: list[int] | None = None
    ) -> dict[str, Any]:
        """config.json as both transformers 4 and 5 read it, with what the source's had besides."""
        ids = (
            {}
            if eos_ids is None
            else {
                "bos_token_id": bos_id,
                "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids,
            }
        )
        return {
            **self.source,
            "architectures": [self.form.architecture],
            "model_type": self.family,
            **{
                self.form.spelling.get(name, name): getattr(self, name)
                for name in STORED
                if self._is_told(name)
            },
            **self._told_windows(),
            **self._told_rope(),
            "torch_dtype": dtype,
            "dtype": dtype,
            "use_cache": True,
            **({} if self.source else ids),
        }

    def _is_told(self, name: str) -> bool:
        """Whether config.json needs the key: one of few families only where it says something."""
        return name not in EXTRAS or (
            name in self.form.options
            and (name in self.source or getattr(self, name) != getattr(ModelConfig, name))
        )

    def _told_windows(self) -> dict[str, Any]:
        if self.form.windows == "none":
            return {}
        windows = self.windows
        told: dict[str, Any] = {"sliding_window": self.sliding_window}
        if self.form.windows != "all":
            told["layer_types"] = [FULL if window is None else SLIDING for window in windows]
        if self.form.windows == "last":
            told["use_sliding_window"] = self.sliding_window is not None
        # transformers turns a window that is not used into null; a folder that says both is left as it was
        unchanged = self.source and self.sliding_window is None and self.form.windows == "last"
        return {} if unchanged else told

    def _told_rope(self) -> dict[str, Any]:
        rope: dict[str, Any] = {
            "rope_type": "default",
            **(self.rope_scaling or {}),
            "rope_theta": self.rope_theta,
        }
        if self.partial_rotary_factor != 1 or "partial_rotary_factor" in (
            self.source.get("rope_parameters") or {}
        ):
            rope["partial_rotary_factor"] = self.partial_rotary_factor
        told: dict[str, Any] = {
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling,
            "rope_parameters": rope,
        }
        if self.rope_local_theta is not None:
            local = {"rope_type": "default", "rope_theta": self.rope_local_theta}
            told["rope_parameters"] = {FULL: rope, SLIDING: local}
        if self.rope_scaling and self.rope_scaling["rope_type"] == "longrope":
            told["original_max_position_embeddings"] = self.rope_scaling[
                "original_max_position_embeddings"
            ]
        return told

    def parameters(self) -> int:
        """How many weights the model has; a tied head is counted once, padding not at all."""
        queries, keys = (
            self.num_attention_heads * self.head_dim,
            self.num_key_value_heads * self.head_dim,
        )
        projections = {
            "q_proj": queries,
            "k_proj": keys,
            "v_proj": keys,
            "o_proj": self.hidden_size,
        }
        biases = sum(size for name, size in projections.items() if self.has_bias(name))
        biases += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        norms = (4 if self.form.norms == "around" else 2) * self.hidden_size
        norms += {None: 0, "head": 2 * self.head_dim, "whole": queries + keys}[self.form.qk_norm]
        block = (
            2 * self.hidden_size * (queries + keys)
            + 3 * self.hidden_size * self.intermediate_size
            + norms
            + biases
        )
        embeddings = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        return self.num_hidden_layers * block + embeddings + self.hidden_size


SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
COMMON = (
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "initializer_range",
)
EXTRAS = (
    "attention_bias",
    "mlp_bias",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "rope_local_theta",
    "partial_rotary_factor",
)
STORED = (*SIZES, *COMMON, "hidden_act", *EXTRAS)
# where null says something else than the key's absence
NULL_SAYS = (
    "num_key_value_heads",
    "head_dim",
    "sliding_window",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)
OMITTED: dict[str, Any] = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def _text_part(raw: dict[str, Any]) -> dict[str, Any]:
    """The language model's configuration; that of a folder with images keeps it in a section of its own."""
    text = raw.get("text_config")
    if raw.get("model_type") != "gemma3" or not isinstance(text, dict):
        return raw
    shared = {
        name: raw[name]
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")
        if name in raw
    }
    return {**shared, **text, "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}


def _read(raw: dict[str, Any], name: str) -> Any:
    """A key of config.json by our name for it; what its absence means, else None."""
    form = FAMILIES[raw["model_type"]]
    spelled = form.spelling.get(name, name)
    if name == "rope_local_theta" or (name in EXTRAS and name not in form.options):
        return None  # told by the section about RoPE; not read by transformers either
    if name == "partial_rotary_factor":
        return _rope_section(raw).get(name) or raw.get(name)
    if raw.get(spelled) is not None:
        return raw[spelled]
    if spelled in raw and name in NULL_SAYS:
        return None
    return (OMITTED | form.defaults | form.omitted).get(name)


def _windows(raw: dict[str, Any], layers: int) -> dict[str, Any]:
    """Sliding windows: how long, and in which blocks."""
    form = FAMILIES[raw["model_type"]]
    window = (
        raw["sliding_window"] if "sliding_window" in raw else form.omitted.get("sliding_window")
    )
    types = raw.get("layer_types")
    if form.windows == "none" or (form.windows == "last" and not raw.get("use_sliding_window")):
        return {}
    if form.windows == "last" and not types:
        first = raw.get("max_window_layers", 28)
        types = [SLIDING if i >= first else FULL for i in range(layers)]
    if form.windows == "pattern" and not types and (pattern := raw.get("sliding_window_pattern")):
        types = [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(layers)]
    return {
        "sliding_window": window,
        "layer_types": tuple(types or ()) if form.windows != "all" else (),
    }


def _rope_section(raw: dict[str, Any]) -> dict[str, Any]:
    """RoPE of the blocks without a window, in one spelling: rope_type and what belongs to it, rope_theta."""
    parameters = raw.get("rope_parameters") or {}
    rope = {**(raw.get("rope_scaling") or {}), **parameters.get(FULL, parameters)}
    rope = {name: value for name, value in rope.items() if name not in (FULL, SLIDING)}
    kind = rope.pop("type", None) or rope.get("rope_type") or "default"
    # the first Phi-3 folders had other names for it
    rope["rope_type"] = (
        "longrope" if raw.get("model_type") == "phi3" and kind in ("su", "yarn") else kind
    )
    for name in ("rope_theta", "original_max_position_embeddings"):
        if rope.get(name) is None and raw.get(name) is not None:
            rope[name] = raw[name]
    return rope


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    form, rope = FAMILIES[raw["model_type"]], _rope_section(raw)
    found: dict[str, Any] = {
        "rope_theta": float(rope.get("rope_theta") or form.defaults.get("rope_theta", 10_000.0))
    }
    if "rope_local_theta" in form.defaults:
        local = ((raw.get("rope_parameters") or {}).get(SLIDING) or {}).get(
            "rope_theta"
        ) or raw.get("rope_local_base_freq")
        found["rope_local_theta"] = float(local or form.defaults["rope_local_theta"])
    kind = rope["rope_type"]
    if kind != "default":
        names = (
            "rope_type",
            *ROPE_TYPES[kind],
            *ROPE_OPTIONS,
            *(("factor",) if kind == "longrope" else ()),
        )
        found["rope_scaling"] = {name: rope[name] for name in names if rope.get(name) is not None}
    return found


def _unsupported(raw: dict[str, Any]) -> list[Problem]:
    family = raw.get("model_type")
    if family not in FAMILIES:
        return [Problem(f"model_type={family}", f"this decoder computes {', '.join(FAMILIES)}")]
    form = FAMILIES[family]
    problems = [
        Problem(name, "is missing")
        for name in SIZES
        if not isinstance(raw.get(name, form.omitted.get(name)), int)
    ]
    problems += [
        Problem(f"{name}={raw[name]}", "is not a number")
        for name in (
            *COMMON,
            "sliding_window",
            "query_pre_attn_scalar",
            "attn_logit_softcapping",
            "final_logit_softcapping",
        )
        if not isinstance(
            raw.get(name, 0), int | float | None if name in NULL_SAYS else int | float
        )
    ]
    sections = ("rope_scaling", "rope_parameters")
    problems += [
        Problem(f"{name}={raw[name]}", "is not an object")
        for name in sections
        if not isinstance(raw.get(name), dict | None)
    ]
    if problems:
        return problems
    architectures = raw.get("architectures") or [form.architecture]
    if architectures != [form.architecture]:
        problems.append(
            Problem(f"architectures={architectures}", f"only {form.architecture} is trained")
        )
    problems += [
        Problem(f"{name}={raw[name]}", f"only {allowed[0]} is computed")
        for name, allowed in REFUSED_UNLESS.items()
        if raw.get(name, allowed[0]) not in allowed
    ]
    if (activation := _read(raw, "hidden_act")) not in ACTIVATIONS:
        problems.append(
            Problem(
                f"{form.spelling.get('hidden_act', 'hidden_act')}={activation}",
                f"computed are {', '.join(ACTIVATIONS)}",
            )
        )
    types = raw.get("layer_types") or []
    if set(types) - {FULL, SLIDING} or (types and len(types) != raw["num_hidden_layers"]):
        problems.append(
            Problem(
                "layer_types",
                f"one of {FULL} and {SLIDING} for each of the {raw['num_hidden_layers']} blocks is computed",
            )
        )
    local = (raw.get("rope_parameters") or {}).get(SLIDING) or {}
    if local.get("rope_type", "default") != "default":
        problems.append(
            Problem(f"rope_parameters: {SLIDING}", "only rope_type=default is computed")
        )
    return problems + rope_problems(_rope_section(raw), "rope")


def rope_problems(rope: dict[str, Any], where: str) -> list[Problem]:
    """What is wrong with a RoPE scaling."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_TYPES:
        return [Problem(f"{where}: rope_type={kind}", f"computed are {', '.join(ROPE_TYPES)}")]
    lists = ("short_factor", "long_factor")
    missing = [
        name
        for name in ROPE_TYPES[kind]
        if not isinstance(rope.get(name), list if name in lists else int | float)
    ]
    return [Problem(f"{where}: rope_type={kind}", f"needs {', '.join(missing)}")] if missing else []
