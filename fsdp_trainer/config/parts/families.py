"""Properties common to all models of a family. A new family is a row of families.yaml, not a class.

docs/add-a-model.md describes the effect of each field on the computation.
"""

import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.config.parts.own_parts import own_names, usable_part
from fsdp_trainer.config.yaml_text import table_beside

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
    defaults: Json = field(default_factory=dict)
    """Values of keys that are set neither in config.json nor in the configuration."""
    hf_defaults: Json = field(default_factory=dict)
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


def _with_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_tuples(inner) for name, inner in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


TABLE = table_beside(__file__)


class Families(dict[str, Family]):
    """The program's families by `model_type` of config.json, and those of the user's own.

    The latter are known by name; what lists the families has those of this program.
    """

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in own_names("family")

    def __missing__(self, name: str) -> Family:
        family: Family = usable_part("family", name, Family)
        return family


FAMILIES = Families({name: Family(**_with_tuples(row)) for name, row in TABLE["families"].items()})
OTHER = Family("", windows="pattern")
"""Stands for the family of a model that transformers' own class computes."""


def nearest_family(raw: Json) -> str:
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
