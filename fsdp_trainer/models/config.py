"""The architecture of a decoder, read from and written to Hugging Face's config.json.

Reads the key names of transformers 4 and of transformers 5.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

from fsdp_trainer.base.json_files import Json, read_object
from fsdp_trainer.base.round_up import round_up
from fsdp_trainer.config.parts.families import (
    FAMILIES,
    FULL,
    GROUPED_OPTIONS,
    LATENT,
    LATENT_OPTIONS,
    OTHER,
    SLIDING,
    Family,
    layer_pattern,
    nearest_family,
)
from fsdp_trainer.config.parts.own_parts import BUILT_IN, own_names
from fsdp_trainer.config.yaml_text import table_beside
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.interop.folders.other_weights import described_otherwise

if TYPE_CHECKING:
    import numpy as np  # not loaded by processes that only start ranks or report an error


ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
"""Supported RoPE scalings, and the keys that each requires."""
ROPE_OPTIONS = (
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "factor",
)
ROPE_OF_ALL_TYPES = ("rope_theta", "partial_rotary_factor")
LOGARITHMS = {"yarn": ("rope_theta",), "longrope": ("original_max_position_embeddings",)}
"""Entries of which a scaling divides by the logarithm."""
LISTS_OF_FACTORS = ("short_factor", "long_factor")
MOST_FACTOR = 2**50
"""The largest number in a description of RoPE."""
LANGUAGE_MODEL, CLASSIFIER, BARE_MODEL = "ForCausalLM", "ForSequenceClassification", "Model"
TAGGER, WITH_IMAGES = "ForTokenClassification", "ForConditionalGeneration"
"""Suffixes of transformers' class names; a reward model is a classifier with one label."""
ENDING = re.compile(r"(LMHeadModel|Model|For(?!ConditionalGeneration)\w+)$")
"""The end of the name of a class of transformers, which says what it is for."""
OF_TOKENS = "labels_of_tokens"
"""The problem of a model that labels tokens, and not texts; config.json has no such value."""
BIDIRECTIONAL = "bidirectional"
"""The direction of attention of a model whose tokens also attend to later ones."""
DIRECTIONS = ("is_causal", "use_bidirectional_attention")
"""Keys of config.json for it: transformers' own for all families, and Gemma 3's."""
ONE_LABEL = ("score",)
"""The labels of a model that gives a text one score."""
DENSE = "gated"
EXPERTS = "experts"
"""Kinds of feed-forward: keys of `decoder.FEED_FORWARDS`."""
RANDOM = ("attention_dropout", "resid_pdrop", "embd_pdrop", "router_jitter_noise")
"""Keys of config.json for what is random in training. It is left out, and `run.describe` says so:
the function that the model computes is the same."""
KEYS = table_beside(__file__, "config_keys.yaml")
SIZES, COMMON, REFUSED_UNLESS = KEYS["sizes"], KEYS["common"], KEYS["refused unless"]
EXTRAS = (*KEYS["extras"], *LATENT_OPTIONS, *GROUPED_OPTIONS)
"""Keys that only some families have, listed in their `Family.options`."""
DIVISORS = (*SIZES[1:], *KEYS["divisors"])
"""Keys of config.json that must be at least 1."""
BY_TRANSFORMERS = "transformers' class computes it:  model.implementation=transformers"
IN_A_COPY = "into the config.json of a copy"
KEY_OF = "it is a key of %s: with its own model_type, transformers' class computes the model"
INSTEAD = {
    "quantization_config": "read are float8 with scales of blocks of 128 × 128 (quant_method=fp8, "
    "weight_block_size=[128, 128]): convert the folder to bfloat16 and delete this key",
    **dict.fromkeys(("use_sliding_window", "clip_qkv", "qkv_bias"), BY_TRANSFORMERS),
    **{key: KEY_OF % family for key, family in KEYS["keys of"].items()},
}
"""Advice for keys of config.json that are refused."""
MOST_PARAMETERS = 10**15
OF_WINDOWS = {
    "layer_types": tuple[str, ...],
    "max_window_layers": int,
    "sliding_window_pattern": int,
    "use_sliding_window": bool,
}
"""Types of the keys of config.json from which the windows are read."""
AUTO, NATIVE, TRANSFORMERS = "auto", "native", "transformers"
ONLY_TEXT = "and the model reads only text. If it has a tower, use  implementation=transformers"
"""The end of a sentence about an image."""
"""Values of model.implementation."""
COMPUTED_BY = "fsdp_trainer_implementation"
"""Key in the config.json of a checkpoint of a model that transformers' class computes."""
TRAINED_MTP = "fsdp_trainer_mtp"
"""Key in the config.json of a checkpoint that holds MTP heads, for their number."""
OF_TRANSFORMERS = ("by_transformers", "counted")
"""Fields that only a model of transformers' classes sets."""
NOT_COMPUTED = ("vocab_multiple", "initializer", "initializer_range")
"""Fields without effect on a model that has its weights."""
HF_DEFAULTS: Json = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


@dataclass(frozen=True)
class WeightNames:
    """The names of some weights in a model's state dict.

    head_bias: "": the head has none. blocks: how the names of all weights of blocks begin. base:
    how the names of all weights but the head's begin in transformers' classes with a head.
    """

    embedding: str = "model.embed_tokens.weight"
    head: str = "lm_head.weight"
    head_bias: str = ""
    blocks: str = "model.layers."
    base: str = ""

    def with_base(self, has_head: bool) -> "WeightNames":
        begin = self.base if has_head else ""
        embedding, blocks = (
            begin + name.removeprefix(self.base) for name in (self.embedding, self.blocks)
        )
        return replace(self, embedding=embedding, blocks=blocks)

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.embedding, self.head, self.head_bias)))


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a decoder. The defaults are those of the tiny model."""

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
    rope_local_theta: float | None = None
    """RoPE theta of the blocks with a window; their RoPE is not scaled."""
    rope_scaling: Json | None = None
    partial_rotary_factor: float = 1.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    query_pre_attn_scalar: float | None = None
    """Attention scores are divided by the square root of this; None: head_dim."""
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()
    """FULL or SLIDING for each block; empty: the family's pattern."""
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int | None = None
    """Width of an expert; None: intermediate_size."""
    shared_expert_intermediate_size: int = 0
    """Width of the shared expert, which every token passes through."""
    norm_topk_prob: bool = False
    """True: the weights of a token's experts are divided by their sum."""
    mlp_only_layers: tuple[int, ...] = ()
    """Numbers of the blocks with a dense feed-forward in place of experts."""
    decoder_sparse_step: int = 1
    """Every n-th block has experts, unless another key makes it dense; 1: every block."""
    q_lora_rank: int | None = None
    """Width of the latent vector that queries are projected from; None: from the hidden state."""
    kv_lora_rank: int = 0
    """Width of the latent vector that keys and values are projected from."""
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    """Channels of queries and keys without and with rotation; their sum is head_dim."""
    v_head_dim: int = 0
    rope_interleave: bool = True
    """True: channels 2i and 2i + 1 are rotated as a pair; False: channels i and i + half."""
    first_k_dense_replace: int = 0
    """Number of first blocks that have a dense feed-forward in place of experts."""
    n_shared_experts: int = 0
    """Width of the shared expert, as a multiple of the width of one expert."""
    n_group: int = 1
    topk_group: int = 1
    """Number of expert groups, and the number of groups that a token chooses its experts from."""
    routed_scaling_factor: float = 1.0
    """Factor of the weights of a token's experts."""
    vocab_multiple: int = 1
    """The embedding's rows are padded from vocab_size to the next multiple of this."""
    initializer: str = "plain"
    labels: tuple[str, ...] = ()
    """Names of the scores that the head returns in place of logits; empty: a language model."""
    problem: str = ""
    """What the labels of a classifier are: a value of config.json's problem_type, or OF_TOKENS; "":
    not known."""
    pooling: str = ""
    """The states of a text that are its embedding: last, mean or cls; "": it is no embedding model.
    """
    attention_direction: str = "causal"
    """`bidirectional`: tokens also attend to later ones of their document."""
    by_transformers: bool = False
    """True: transformers' own class computes the model, False: `models.decoder`."""
    counted: tuple[int, int] = (0, 0)
    """With by_transformers: the number of all weights, and of those that one token uses."""
    expert_blocks: tuple[int, ...] = field(default=(), compare=False)
    """With by_transformers: numbers of the blocks whose routers' load can be measured."""
    names: WeightNames = field(default_factory=WeightNames, compare=False)
    documents_attention: bool = field(default=False, compare=False)
    """With by_transformers: `models.attention` computes attention, without a mask."""
    mixing: float = field(default=0.0, compare=False)
    """By how much documents of one row change each other's results; infinite: not known."""
    document_layers: tuple[str, ...] = field(default=(), compare=False)
    """With by_transformers: classes of layers that compute packed documents one by one."""
    autocast: bool = field(default=False, compare=False)
    """With by_transformers: the class multiplies float32 numbers with weights, under autocast."""
    logit_factor: float = field(default=1.0, compare=False)
    """With by_transformers: the head's logits are multiplied by it."""
    encoder: bool = field(default=False, compare=False)
    """True: each token sees all of its document, and transformers' class computes also the head."""
    second_after: int = field(default=-1, compare=False)
    """The token after which an encoder's second text begins, of another type; -1: of none."""
    mtp_heads: int = field(default=0, compare=False)
    """Number of heads for further tokens that are part of the model; folders may have more."""
    folder: str = field(default="", compare=False)
    """The folder with Python code that computes the model; "": none."""
    source: Json = field(default_factory=dict, compare=False)
    """The config.json that was read; the export keeps its other keys."""

    @property
    def reads_images(self) -> bool:
        return self.by_transformers and has_tower(self.source)

    @property
    def family_spec(self) -> Family:
        return OTHER if self.by_transformers else FAMILIES[self.family]

    @property
    def is_causal(self) -> bool:
        """True if tokens attend only to earlier ones and themselves."""
        return self.attention_direction != BIDIRECTIONAL

    @property
    def packs(self) -> bool:
        """False if a row must hold one document: several would change each other's results."""
        return self.mixing == 0

    @property
    def embedding_rows(self) -> int:
        """Rows of the embedding and of the head, including padding."""
        return round_up(self.vocab_size, self.vocab_multiple)

    @property
    def decisive(self) -> Json:
        """The fields and keys that determine the computed function, by name, for comparison."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.compare}
        values = {name: _as_json(v) for name, v in values.items() if name not in NOT_COMPUTED}
        if not self.by_transformers:
            return {name: v for name, v in values.items() if name not in OF_TRANSFORMERS}
        read = {name: v for name, v in self.source.items() if name not in KEYS["without effect"]}
        return values | {f"config.json: {name}": value for name, value in read.items()}

    @property
    def scores(self) -> int:
        return len(self.labels)

    @property
    def tags(self) -> bool:
        return self.problem == OF_TOKENS

    @property
    def predicts(self) -> bool:
        """True for a language model: its head makes logits."""
        return not (self.labels or self.pooling or self.encoder)

    def with_pooling(self, pooling: str) -> "ModelConfig":
        """Return this architecture without a head: the last states embed texts."""
        return replace(
            self,
            pooling=pooling,
            labels=(),
            problem="",
            tie_word_embeddings=False,
            logit_factor=1.0,
            mtp_heads=0,
            names=self.names.with_base(has_head=False),
        )

    def with_labels(self, labels: tuple[str, ...] = ONE_LABEL, problem: str = "") -> "ModelConfig":
        """Return this architecture with a head that returns a score of each label, not logits."""
        names = self.names.with_base(has_head=True)
        return replace(
            self,
            labels=labels,
            problem=problem,
            pooling="",
            tie_word_embeddings=False,
            logit_factor=1.0,
            mtp_heads=0,
            names=names,
        )

    @property
    def architecture(self) -> str:
        name = self.family_spec.architecture
        if self.by_transformers:
            name = str((self.source.get("architectures") or [""])[0])
            name = ENDING.sub(LANGUAGE_MODEL, name)
            if self.reads_images and not self.predicts:
                name = name.replace(WITH_IMAGES, LANGUAGE_MODEL)
        if self.pooling or (self.encoder and not self.scores):
            return name.replace(LANGUAGE_MODEL, BARE_MODEL)
        if self.scores:
            return name.replace(LANGUAGE_MODEL, TAGGER if self.tags else CLASSIFIER)
        return name

    def with_equal_rows(self, ranks: int) -> "ModelConfig":
        """Return this architecture with vocabulary rows padded to divide evenly among ranks."""
        return replace(self, vocab_multiple=math.lcm(self.vocab_multiple, ranks))

    def on_tensor_rank(self, ranks: int) -> "RankConfig":
        if ranks == 1:
            return RankConfig(self)
        part = replace(
            self,
            num_attention_heads=self.num_attention_heads // ranks,
            num_key_value_heads=max(1, self.num_key_value_heads // ranks),
            intermediate_size=self.intermediate_size // ranks,
            vocab_size=-(-self.embedding_rows // ranks),
            vocab_multiple=1,
            shared_expert_intermediate_size=self.shared_size // ranks,
            n_shared_experts=0,
            # experts are not split: each rank has its own tokens
            moe_intermediate_size=self.expert_size if self.num_experts else None,
        )
        return RankConfig(part)

    @property
    def rotary_dim(self) -> int:
        if self.is_latent:
            return self.qk_rope_head_dim
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def is_latent(self) -> bool:
        return self.family_spec.mixer == LATENT

    @property
    def value_dim(self) -> int:
        return self.v_head_dim if self.is_latent else self.head_dim

    @property
    def attention_width(self) -> float:
        """Channels of all heads, as the mean of query/key channels and value channels."""
        return self.num_attention_heads * (self.head_dim + self.value_dim) / 2

    @property
    def projection_sizes(self) -> dict[str, int]:
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        return {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": self.hidden_size}

    def has_bias(self, projection: str) -> bool:
        return self.attention_bias or projection in self.family_spec.biased

    @property
    def windows(self) -> list[int | None]:
        """Window of each block in tokens, including the token itself; None: the whole document."""
        spec = self.family_spec
        types = self.layer_types or layer_pattern(self.num_hidden_layers, spec.window_pattern)
        window = None if spec.windows == "none" else self.sliding_window
        return [window if kind == SLIDING else None for kind in types]

    @property
    def feed_forwards(self) -> list[str]:
        """Kind of feed-forward of each block: a key of `decoder.FEED_FORWARDS`."""
        kind = self.family_spec.feed_forward
        if self.expert_blocks:
            numbers = range(self.num_hidden_layers)
            return [EXPERTS if i in self.expert_blocks else DENSE for i in numbers]
        if kind != EXPERTS:
            return [kind] * self.num_hidden_layers
        return [kind if self._has_experts(i) else DENSE for i in range(self.num_hidden_layers)]

    def _has_experts(self, block: int) -> bool:
        if block < self.first_k_dense_replace:
            return False
        return block not in self.mlp_only_layers and (block + 1) % self.decoder_sparse_step == 0

    @property
    def expert_size(self) -> int:
        return self.moe_intermediate_size or self.intermediate_size

    @property
    def normalizes_experts(self) -> bool:
        return self.norm_topk_prob or self.family_spec.normalizes_experts

    @property
    def shared_size(self) -> int:
        if not self.family_spec.shared_expert:
            return 0
        return self.shared_expert_intermediate_size + self.n_shared_experts * self.expert_size

    def attention_cost(self, lengths: "np.ndarray") -> "np.ndarray":
        """Return the cost of attention over documents of these lengths, shaped as `lengths`.

        A document costs length², minus the part outside the window, averaged over the blocks; twice
        as much where tokens also attend to later ones.
        """
        if not self.is_causal:
            return 2 * lengths * lengths
        windows = self.windows
        cost: Any = 0
        for window in set(windows):
            span = lengths.clip(max=window) if window else lengths
            cost = cost + windows.count(window) / len(windows) * span * (2 * lengths - span)
        return cost

    def parameters(self, active: bool = False) -> int:
        """Return the number of weights, without padding; a tied head is counted once.

        active: only those that one token uses.
        """
        if self.by_transformers:
            return self.counted[active]
        hidden = self.hidden_size
        embeddings = (1 if self.tie_word_embeddings else 2) * self.vocab_size * hidden
        if not self.predicts:
            embeddings = (self.vocab_size + self.scores) * hidden + self.scores * self.tags
        mixers = self.num_hidden_layers * (self._mixer_parameters() + self._norm_parameters())
        fed = sum(self._feed_forward_parameters(kind, active) for kind in self.feed_forwards)
        return mixers + fed + embeddings + hidden + self._mtp_parameters(active)

    def _mtp_parameters(self, active: bool) -> int:
        hidden = self.hidden_size
        if not self.mtp_heads:
            return 0
        block = self._mixer_parameters() + self._norm_parameters()
        block += self._feed_forward_parameters(self.feed_forwards[-1], active)
        return self.mtp_heads * (block + 2 * hidden * hidden + 3 * hidden)

    def _mixer_parameters(self) -> int:
        if self.is_latent:
            return self._latent_parameters()
        sizes = self.projection_sizes
        queries = sizes["q_proj"]
        keys = sizes["k_proj"]
        biases = sum(size for name, size in sizes.items() if self.has_bias(name))
        norms = {None: 0, "head": 2 * self.head_dim, "whole": queries + keys}
        matrices = 2 * self.hidden_size * (queries + keys)
        sinks = self.num_attention_heads * self.family_spec.sinks
        return matrices + biases + norms[self.family_spec.qk_norm] + sinks

    def _latent_parameters(self) -> int:
        hidden = self.hidden_size
        heads = self.num_attention_heads
        rank = self.kv_lora_rank
        narrowed = rank + self.qk_rope_head_dim
        numbers = hidden * narrowed + rank
        numbers += rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
        numbers += heads * self.v_head_dim * hidden
        queries = heads * self.head_dim
        of_queries = self.q_lora_rank or 0
        numbers += (of_queries or hidden) * queries + of_queries * (hidden + 1)
        return numbers + self.attention_bias * (of_queries + narrowed + hidden)

    def _norm_parameters(self) -> int:
        return (4 if self.family_spec.norms == "around" else 2) * self.hidden_size

    def _feed_forward_parameters(self, kind: str, active: bool) -> int:
        hidden = self.hidden_size
        inner = self.intermediate_size
        if kind == EXPERTS:
            experts = self.num_experts_per_tok if active else self.num_experts
            shared = 3 * hidden * self.shared_size
            shared += hidden * self.family_spec.gates_shared_expert
            router = self.num_experts * (hidden + self.family_spec.router_bias)
            return router + experts * self._expert_parameters() + shared
        return 3 * hidden * inner + self.mlp_bias * (2 * inner + hidden)

    def _expert_parameters(self) -> int:
        hidden, inner = self.hidden_size, self.expert_size
        biases = self.family_spec.clamped_experts * (2 * inner + hidden)
        return 3 * hidden * inner + biases

    @classmethod
    def from_hf(cls, folder: str | Path) -> "ModelConfig":
        """Read `folder/config.json`. See also `read_architecture`.

        Raises UserError with everything that the decoder does not support.
        """
        path = Path(folder) / "config.json"
        raw = _without_mxfp4(_text_part(read_config_file(path)))
        mtp_heads = int(raw.pop(TRAINED_MTP, 0) == 1)
        if problems := _unsupported(raw):
            raise UserError(f"{path} describes a model that is not supported", problems)
        family = raw["model_type"]
        values = _read_values(raw, FAMILIES[family])
        heads = values["num_attention_heads"]
        values.setdefault("num_key_value_heads", heads)
        values.setdefault("head_dim", values["hidden_size"] // heads)
        if FAMILIES[family].mixer == LATENT:
            values["head_dim"] = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
        values |= _read_windows(raw, FAMILIES[family]) | _read_rope(raw, FAMILIES[family])
        if raw.get("is_causal") is False or raw.get("use_bidirectional_attention") is True:
            values["attention_direction"] = BIDIRECTIONAL
        config = cls(**values, family=family, source=raw, mtp_heads=mtp_heads)
        if problems := factors_misfit(config):
            raise UserError(f"{path} describes a model that is not supported", problems)
        if config.parameters() > MOST_PARAMETERS:
            raise UserError(
                "there is no model of this size",
                str(path),
                f"describes {config.parameters():.1e} parameters",
            )
        if is_embedding(raw):
            config = config.with_pooling(stored_pooling(Path(folder)))
        elif is_classifier(raw):
            config = config.with_labels(*stored_labels(raw))
        if problems := [*direction_problems(config), *_wrong_reader(config)]:
            raise UserError(f"{path} describes a model that is not supported", problems)
        return config

    def to_hf(
        self, dtype: str, bos_id: int | None = None, eos_ids: list[int] | None = None
    ) -> Json:
        """Return a config.json for transformers 4 and 5, with all other keys of the source.

        bos_id, eos_ids: token ids, written if there is no source and eos_ids is not None.
        """
        if self.by_transformers:
            return self._export_source(dtype)
        exported: Json = {
            **self.source,
            "architectures": [self.architecture],
            "model_type": self.family,
        }
        options = filter(self._is_exported, self.family_spec.options)
        for name in (*SIZES, *COMMON, "hidden_act", *options):
            exported[self._exported_name(name)] = _as_json(getattr(self, name))
        if "query_pre_attn_scalar" in exported:  # transformers requires a number, without ".0"
            scalar = exported["query_pre_attn_scalar"] or self.head_dim
            exported["query_pre_attn_scalar"] = _without_fraction(scalar)
        if self.is_latent:  # in transformers head_dim counts only the rotated channels
            exported.pop("head_dim")
            exported |= {key: self.source[key] for key in ("head_dim",) if key in self.source}
        exported.pop("quantization_config", None)  # exported weights are decoded
        exported |= self._export_labels() | self._export_direction()
        if self.family_spec.further_blocks:
            exported[self.family_spec.further_blocks] = self.mtp_heads
        exported |= self._export_heads()
        exported |= self._export_windows() | self._export_rope()
        exported |= {"torch_dtype": dtype, "dtype": dtype, "use_cache": True}
        if not self.source and eos_ids is not None:
            exported["bos_token_id"] = bos_id
            exported["eos_token_id"] = eos_ids[0] if len(eos_ids) == 1 else eos_ids
        return exported

    def _export_source(self, dtype: str) -> Json:
        """Return the config.json of a checkpoint of a model that transformers' class computes."""
        exported: Json = {**self.source, COMPUTED_BY: TRANSFORMERS, "dtype": dtype}
        exported |= self._export_heads()
        text = self.source.get("text_config")
        if isinstance(text, dict) and "vocab_size" in text:
            exported["text_config"] = text | {"vocab_size": self.vocab_size}
        else:
            exported["vocab_size"] = self.vocab_size
        if not self.predicts:
            exported |= {"architectures": [self.architecture], **self._export_labels()}
        return exported

    def _export_heads(self) -> Json:
        return {TRAINED_MTP: self.mtp_heads} if self.mtp_heads else {}

    def _export_labels(self) -> Json:
        if not self.labels:
            return {}
        numbered: Json = {str(i): label for i, label in enumerate(self.labels)}
        label2id = {label: i for i, label in enumerate(self.labels)}
        named = {"problem_type": self.problem} if self.problem and not self.tags else {}
        return {"id2label": numbered, "label2id": label2id, **named}

    def _export_direction(self) -> Json:
        said = dict(zip(DIRECTIONS, (self.is_causal, not self.is_causal), strict=True))
        names = [name for name in DIRECTIONS if name in self.source]
        if not self.is_causal:
            names += ["is_causal"]
        return {name: said[name] for name in names}

    def _exported_name(self, name: str) -> str:
        """Return the name of a key in config.json: the source's, if the family has several."""
        spec = self.family_spec
        names = (spec.key_aliases.get(name, name), *spec.other_names.get(name, ()))
        return next((known for known in names if known in self.source), names[0])

    def _is_exported(self, option: str) -> bool:
        spec = self.family_spec
        absent = getattr(ModelConfig, option)
        when_read = (spec.defaults | spec.hf_defaults).get(option, absent)
        is_default = getattr(self, option) == absent == when_read
        return not is_default or self._exported_name(option) in self.source

    def _export_windows(self) -> Json:
        kind = self.family_spec.windows
        window = self.sliding_window
        # transformers writes null for an unused window; the keys of a source with a window and
        # use_sliding_window=false are not changed
        if kind == "none" or (kind == "last" and window is None and self.source):
            return {}
        exported: Json = {"sliding_window": window}
        if kind != "all":
            exported["layer_types"] = [FULL if span is None else SLIDING for span in self.windows]
        if kind == "last":
            exported["use_sliding_window"] = window is not None
        return exported

    def _export_rope(self) -> Json:
        """Return the RoPE keys of both transformers 4 and 5."""
        scaling = self.rope_scaling or {}
        theta = self.rope_theta
        partial = "partial_rotary_factor"
        rope: Json = {"rope_type": "default", **scaling, "rope_theta": theta}
        if self.partial_rotary_factor != 1 or partial in (self.source.get("rope_parameters") or {}):
            rope[partial] = self.partial_rotary_factor
        exported: Json = {
            "rope_theta": theta,
            "rope_scaling": self.rope_scaling,
            "rope_parameters": rope,
        }
        if self.rope_local_theta is not None:
            local = {"rope_type": "default", "rope_theta": self.rope_local_theta}
            exported["rope_parameters"] = {FULL: rope, SLIDING: local}
        if scaling.get("rope_type") == "longrope":
            original = "original_max_position_embeddings"
            exported[original] = scaling[original]
        return exported


@dataclass(frozen=True)
class RankConfig:
    """The part of a model that one rank of a tensor group computes.

    It is no ModelConfig, so that neither is taken for the other. shape: the configuration of a
    model as large as the part. If there are fewer key heads than ranks, each rank is counted with a
    full key head, although it holds only a part of it.
    """

    shape: ModelConfig


def direction_problems(config: ModelConfig) -> Iterator[Problem]:
    windows = {window for window in config.windows if window}
    if windows and not config.is_causal:
        reason = f"its blocks have windows of {min(windows):,} tokens, which are causal here.\nUse"
        reason += "  model.attention_direction=causal"
        yield Problem(f"attention_direction={BIDIRECTIONAL}", reason)


def _wrong_reader(config: ModelConfig) -> Iterator[Problem]:
    if config.predicts and not config.is_causal:
        name = next(name for name in DIRECTIONS if name in config.source)
        shown = str(config.source[name]).lower()
        yield Problem(f"{name}={shown}", "such a model makes embeddings, and writes no text")


# --- reading config.json --------------------------------------------------------------------------


def read_config_file(path: Path) -> Json:
    """Return the content of a config.json, or what describes another tool's weights.

    Raises UserError if it is no JSON object.
    """
    if not path.exists() and (described := described_otherwise(path.parent)):
        return described
    return read_object(path, "cannot read the model's configuration")


def needs_transformers(raw: Json, implementation: str) -> bool:
    if implementation == AUTO and raw.get(COMPUTED_BY) == TRANSFORMERS:
        return True
    kind = _text_part(raw).get("model_type")
    is_unknown = isinstance(kind, str) and kind not in FAMILIES
    return implementation == TRANSFORMERS or (implementation == AUTO and is_unknown)


def reads_images(folder: str | Path, implementation: str) -> bool:
    """Return True if the model of a folder reads images. implementation: model.implementation."""
    raw = read_config_file(Path(folder) / "config.json")
    return has_tower(raw) and needs_transformers(raw, implementation)


def has_tower(raw: Json) -> bool:
    return isinstance(raw.get("vision_config"), dict)


def _text_part(raw: Json) -> Json:
    text = raw.get("text_config")
    if raw.get("model_type") != "gemma3" or not isinstance(text, dict):
        return raw
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")
    common = {name: raw[name] for name in names if name in raw}
    return {**common, **text, "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}


def _without_mxfp4(raw: Json) -> Json:
    """Return the configuration without MXFP4 quantization, which is decoded on reading."""
    family, stored = str(raw.get("model_type")), raw.get("quantization_config")
    is_mxfp4 = isinstance(stored, dict) and stored.get("quant_method") == "mxfp4"
    if is_mxfp4 and family in FAMILIES and FAMILIES[family].clamped_experts:
        return {name: value for name, value in raw.items() if name != "quantization_config"}
    return raw


def _keys(raw: Json, spec: Family) -> dict[str, str]:
    """Return the names in config.json of all keys except windows and RoPE, by our name."""
    names = (*SIZES, *COMMON, "hidden_act", *spec.options)
    keys = {name: spec.key_aliases.get(name, name) for name in names}
    return keys | {
        name: other
        for name, others in spec.other_names.items()
        for other in others
        if keys[name] not in raw and other in raw
    }


def _read_values(raw: Json, spec: Family) -> Json:
    """Return all keys except windows and RoPE under our names, with defaults for absent ones."""
    keys = _keys(raw, spec)
    given = {
        name: tuple(raw[key]) if isinstance(raw[key], list) else raw[key]
        for name, key in keys.items()
        if raw.get(key) is not None or (key in raw and name in KEYS["null differs from absent"])
    }
    values = HF_DEFAULTS | spec.defaults | spec.hf_defaults | given
    return {name: values[name] for name in keys if values.get(name) is not None}


def _read_windows(raw: Json, spec: Family) -> Json:
    if spec.windows == "none" or (spec.windows == "last" and not raw.get("use_sliding_window")):
        return {}
    window = (spec.hf_defaults | raw).get("sliding_window")
    return {"sliding_window": window, "layer_types": tuple(_layer_types(raw, spec.windows))}


def _layer_types(raw: Json, windows: str) -> list[str]:
    if windows == "all":
        return []
    if raw.get("layer_types"):
        return raw["layer_types"]
    layers = raw["num_hidden_layers"]
    if windows == "last":
        first = raw.get("max_window_layers", 28)
        return [SLIDING if i >= first else FULL for i in range(layers)]
    period = raw.get("sliding_window_pattern")
    return layer_pattern(layers, period) if period else []


def _read_rope(raw: Json, spec: Family) -> Json:
    rope = _rope_section(raw, spec)
    defaults = spec.defaults
    values: Json = {"rope_theta": float(rope.get("rope_theta") or defaults.get("rope_theta", 1e4))}
    if "rope_local_theta" in spec.options:
        local = _local_rope(raw).get("rope_theta") or raw.get("rope_local_base_freq")
        values["rope_local_theta"] = float(local or defaults["rope_local_theta"])
    partial = "partial_rotary_factor"
    if partial in spec.options and rope.get(partial):
        values[partial] = rope[partial]
    kind = rope["rope_type"]
    if kind != "default":
        names = ("rope_type", *ROPE_TYPES[kind], *ROPE_OPTIONS)
        values["rope_scaling"] = {name: rope[name] for name in names if name in rope}
    return values


def _rope_section(raw: Json, spec: Family) -> Json:
    """Return the RoPE settings of the blocks without a window, in one spelling, without nulls.

    As in transformers 5, `rope_scaling` counts before `rope_parameters`, and the length of the
    training that config.json says outside of them before the one inside.
    """
    scaling: Json = raw.get("rope_scaling") or {}
    parameters = raw.get("rope_parameters")
    if parameters is None:
        parameters = spec.hf_defaults.get("rope_parameters", {})
    if "rope_local_theta" in spec.options:
        inner = {"rope_type": "default", **(parameters.get(FULL) or {}), **scaling}
        length = None
    else:
        inner = scaling or parameters
        length = (spec.hf_defaults | raw).get("original_max_position_embeddings")
    rope = _without_nulls({"rope_theta": raw.get("rope_theta")}) | _without_nulls(inner)
    rope = one_rope_type(rope | _without_nulls({"original_max_position_embeddings": length}))
    kind = rope["rope_type"]
    return rope | {"rope_type": spec.rope_type_aliases.get(str(kind), kind)}


def one_rope_type(rope: Json) -> Json:
    """Return a RoPE scaling without the older name `type` of its rope_type, which counts second."""
    others = {name: value for name, value in rope.items() if name != "type"}
    return others | {"rope_type": rope.get("rope_type") or rope.get("type") or "default"}


def _without_nulls(values: Json) -> Json:
    return {name: value for name, value in values.items() if value is not None}


def _local_rope(raw: Json) -> Json:
    return (raw.get("rope_parameters") or {}).get(SLIDING) or {}


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _without_fraction(number: float) -> float:
    """Return a whole number as an int, and another one unchanged."""
    return int(number) if float(number).is_integer() else number


def is_classifier(raw: Json) -> bool:
    names = raw.get("architectures")
    return isinstance(names, list) and str(next(iter(names), "")).endswith((CLASSIFIER, TAGGER))


def is_embedding(raw: Json) -> bool:
    names = raw.get("architectures")
    name = str(next(iter(names), "")) if isinstance(names, list) else ""
    return name.endswith(BARE_MODEL) and not name.endswith("LMHeadModel")


POOLING = "1_Pooling/config.json"
"""The file of sentence-transformers that says how a text's states become its embedding."""
POOLINGS = {"lasttoken": "last", "mean_tokens": "mean", "cls_token": "cls"}
"""Our names of sentence-transformers' ways, by the ends of their keys; newer versions have a value,
without what follows the underscore."""


def stored_pooling(folder: Path, otherwise: str = "last") -> str:
    if not (folder / POOLING).is_file():
        return otherwise
    raw = read_config_file(folder / POOLING)
    named = [own for key, own in POOLINGS.items() if raw.get(f"pooling_mode_{key}")]
    newer = {key.partition("_")[0]: own for key, own in POOLINGS.items()}
    return named[0] if named else newer.get(str(raw.get("pooling_mode")), otherwise)


def stored_labels(raw: Json) -> tuple[tuple[str, ...], str]:
    """Return a classifier's labels in the order of its scores, and its problem.

    Without names they are transformers' own, LABEL_0 and LABEL_1 unless num_labels says otherwise.
    """
    named = raw.get("id2label")
    if not isinstance(named, dict) or not all(str(number).isdecimal() for number in named):
        named = {i: f"LABEL_{i}" for i in range(int(raw.get("num_labels") or 2))}
    labels = tuple(str(named[number]) for number in sorted(named, key=int))
    is_tagger = str(raw["architectures"][0]).endswith(TAGGER)
    return labels, OF_TOKENS if is_tagger else str(raw.get("problem_type") or "")


# --- checking config.json -------------------------------------------------------------------------


def _unsupported(raw: Json) -> list[Problem]:
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        return [Problem(f"model_type={family}", why_unknown(raw))]
    spec = FAMILIES[family]
    return list(_form_problems(raw, spec)) or list(_content_problems(raw, spec))


def why_unknown(raw: Json) -> str:
    """Return a message about a model_type that is not in FAMILIES: what there is, what to do."""
    near = nearest_family(raw)
    named = {"model_type": near, "architectures": [FAMILIES[near].architecture]}
    missing = _unsupported(raw | named)
    if any(problem.what in SIZES for problem in missing):
        lines = ["None of them is near: config.json is not that of a plain decoder"]
    elif missing:
        lines = [f"The nearest is {near}, which does not have"]
        lines += [f"  {problem.what} ({problem.reason.splitlines()[0]})" for problem in missing]
    else:
        lines = [
            f"The nearest is {near}. If the model is the same but for its name, write",
            f"  {json.dumps(named)[1:-1]}",
            "into the config.json of a copy: a weight that does not fit is refused",
        ]
    families = f"is not computed here; these are: {', '.join(FAMILIES)}"
    return "\n".join([families, *lines, "To add a family: docs/add-a-model.md"])


def _form_problems(raw: Json, spec: Family) -> Iterator[Problem]:
    """Yield a problem for each missing key, and each value of a wrong type or an absurd size."""
    for name in SIZES:
        if not isinstance(raw.get(name, spec.hf_defaults.get(name)), int):
            yield Problem(name, "is missing")
    keys = _keys(raw, spec) | {name: name for name in ("sliding_window", "rope_theta")}
    kinds = {f.name: f.type for f in fields(ModelConfig)} | OF_WINDOWS
    keys |= {name: name for name in OF_WINDOWS}
    for name in COMMON:
        if raw.get(name, 0) is None and name not in KEYS["null differs from absent"]:
            yield Problem(f"{name}=null", "is not a number")
    for name, key in keys.items():
        if raw.get(key) is not None and (reason := _why_no_value(name, kinds[name], raw[key])):
            yield Problem(f"{key}={str(raw[key])[:40]}", reason)
    yield from _random_problems(raw)
    yield from _object_problems(raw, spec)


def _random_problems(raw: Json) -> Iterator[Problem]:
    for name in RANDOM:
        value = raw.get(name, 0)
        is_strength = value is None or (type(value) in (int, float) and 0 <= value < 1)
        if not is_strength:
            yield Problem(f"{name}={str(value)[:40]}", "is no number from 0 to 1")


def _object_problems(raw: Json, spec: Family) -> Iterator[Problem]:
    for name in ("rope_scaling", "rope_parameters", "id2label"):
        if not isinstance(raw.get(name), dict | None):
            yield Problem(f"{name}={raw[name]}", "is not an object")
    nested = raw.get("rope_parameters")
    parameters = nested if isinstance(nested, dict) else {}
    for name in (FULL, SLIDING):
        if not isinstance(parameters.get(name), dict | None):
            yield Problem(f"rope_parameters: {name}", "is not an object")
        elif name in parameters and "rope_local_theta" not in spec.options:
            yield Problem(f"rope_parameters: {name}", "only one RoPE for all blocks is computed")


def _why_no_value(name: str, kind: Any, value: Any) -> str:
    types = {*get_args(kind), kind, get_origin(kind)}
    if bool in types:
        return "" if isinstance(value, bool) else "is neither true nor false"
    if str in types and tuple not in types:
        return "" if isinstance(value, str) else "is not a text"
    if tuple in types:
        item = get_args(kind)[0]
        is_list = isinstance(value, list) and all(type(each) is item for each in value)
        return "" if is_list else "is not a list of such values"
    return _why_no_number(name, int in types, value)


def _why_no_number(name: str, is_whole: bool, value: Any) -> str:
    if is_whole and type(value) is not int:
        return "is not a whole number"
    if type(value) not in (int, float):
        return "is not a number"
    smallest = 1 if name in DIVISORS else 0
    largest = KEYS["largest"].get(name, 2**24)
    return "" if smallest <= value <= largest else f"is not from {smallest} to {largest:,}"


def _content_problems(raw: Json, spec: Family) -> Iterator[Problem]:
    """Yield a problem for each well-formed value that the decoder does not support."""
    architectures = raw.get("architectures") or [spec.architecture]
    heads = (LANGUAGE_MODEL, CLASSIFIER, TAGGER, BARE_MODEL)
    if architectures not in [[spec.architecture.replace(LANGUAGE_MODEL, head)] for head in heads]:
        name = spec.architecture
        own = f'If its weights are there, write  "architectures": ["{name}"]  {IN_A_COPY}'
        yield Problem(f"architectures={architectures}", f"only {name} is trained\n{own}")
    yield from _refused_keys(raw, spec)
    activation = _read_values(raw, spec)["hidden_act"]
    known = [*BUILT_IN["activation"], *own_names("activation")]
    if activation not in known:
        name = spec.key_aliases.get("hidden_act", "hidden_act")
        reason = f"supported are {', '.join(known)}\n{BY_TRANSFORMERS}"
        yield Problem(f"{name}={activation}", reason)
    yield from _layer_type_problems(raw, spec)
    if _read_windows(raw, spec).get("sliding_window") == 0:
        yield Problem("sliding_window=0", "is not from 1 on. For no window, write null")
    yield from _local_rope_problems(raw)
    rope = _rope_section(raw, spec)
    advice = "" if rope["rope_type"] in [*ROPE_TYPES] else f"\n{BY_TRANSFORMERS}"
    for problem in rope_problems(rope, "rope"):
        yield Problem(problem.what, problem.reason + advice)


def _local_rope_problems(raw: Json) -> Iterator[Problem]:
    """Yield a problem for each value of the RoPE of blocks with a window that is not computed."""
    if _local_rope(raw).get("rope_type", "default") != "default":
        yield Problem(f"rope_parameters: {SLIDING}", "only rope_type=default is computed")
    for theta in (_local_rope(raw).get("rope_theta"), raw.get("rope_local_base_freq")):
        if not _is_factor(theta):
            yield Problem(f"rope_theta={theta} of blocks with a window", "is no positive number")


def _layer_type_problems(raw: Json, spec: Family) -> Iterator[Problem]:
    types = raw.get("layer_types") or []
    layers = raw["num_hidden_layers"]
    if not {FULL, SLIDING}.issuperset(types) or len(types) not in (0, layers):
        reason = f"one of {FULL} and {SLIDING} for each of the {layers} blocks is computed"
        own = f"If the model has no other blocks, write such a list {IN_A_COPY}"
        yield Problem("layer_types", f"{reason}\n{own}")
    elif SLIDING in types and spec.windows == "none":
        yield Problem("layer_types", f"{raw['model_type']} has no {SLIDING}")


def _refused_keys(raw: Json, spec: Family) -> Iterator[Problem]:
    """Yield a problem for each key that changes the computation in an unsupported way."""
    read = {"quantization_config"} if _is_in_blocks(raw.get("quantization_config")) else set()
    for name, allowed in (REFUSED_UNLESS | spec.refused_unless).items():
        if raw.get(name, allowed[0]) not in allowed and name not in read:
            reason = _why_refused(name, json.dumps(allowed[0]))
            yield Problem(f"{name}={raw[name]}", reason)


def _why_refused(name: str, usual: str) -> str:
    """Return why a key of config.json is refused, and what to do. usual: its value in a model."""
    advice = INSTEAD.get(name, "")
    if name == "quantization_config":
        return advice
    own = f'If the weights are of a model without it, write  "{name}": {usual}  {IN_A_COPY}'
    return "\n".join(filter(None, [f"only {usual} is computed", advice, own]))


def _is_in_blocks(quantization: Any) -> bool:
    """Return True for weights in float8 with a scale for each block of 128 × 128."""
    if not isinstance(quantization, dict):
        return False
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    return method == "fp8" and block == [128, 128]


def rope_problems(rope: Json, where: str) -> list[Problem]:
    kind = one_rope_type(rope)["rope_type"]
    where = f"{where}: rope_type={kind}"
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        return [Problem(where, f"supported are {', '.join(ROPE_TYPES)}")]
    missing = []
    for name in ROPE_TYPES[kind]:
        form = list if name in LISTS_OF_FACTORS else int | float
        if not isinstance(rope.get(name), form):
            missing.append(name)
    if missing:
        return [Problem(where, f"needs {', '.join(missing)}")]
    factors = {*ROPE_TYPES[kind], "factor", "attention_factor", *ROPE_OF_ALL_TYPES}
    problems = [
        Problem(f"{where}, {name}={value}", "is no positive number")
        for name, value in rope.items()
        if not _is_sound(name, value, factors)
    ]
    for name in LOGARITHMS.get(kind, ()):
        if not problems and rope.get(name, 2) <= 1:
            problems.append(Problem(f"{where}, {name}={rope[name]}", "is not above 1"))
    return problems


def factors_misfit(config: ModelConfig) -> list[Problem]:
    """Return a problem for each list of factors with another length than RoPE has frequencies."""
    lists = {name: (config.rope_scaling or {}).get(name, ()) for name in LISTS_OF_FACTORS}
    count = config.rotary_dim // 2
    reason = f"one for each of the {count} frequencies are needed"
    return [
        Problem(f"{name} with {len(factors)} numbers", reason)
        for name, factors in lists.items()
        if len(factors) not in (0, count)
    ]


def _is_sound(name: str, value: Any, factors: set[str]) -> bool:
    """Return True unless an entry of a RoPE scaling should be a factor and is none.

    factors: entries above 0; other known ones may be 0.
    """
    if name in factors:
        return _is_factor(value, is_list=name in LISTS_OF_FACTORS)
    return name not in ROPE_OPTIONS or value == 0 or _is_factor(value)


def _is_factor(value: Any, is_list: bool = False) -> bool:
    """Return True for a value of a RoPE scaling: a finite positive number, null, true or false;
    `is_list`: a list of such numbers.
    """
    if is_list and isinstance(value, list):
        return all(map(_is_factor, value))
    if type(value) in (int, float):
        return 0 < value < MOST_FACTOR
    return value is None or isinstance(value, bool)
