"""The decoder of all model families, independent of any parallelism.

Module names are Hugging Face's, so state dicts need no renaming.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp_trainer.config.parts.families import LATENT
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.attention import Cache, OneDocument, PackedAttention
from fsdp_trainer.models.balance import Balance, Balancing
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.feed_forward import MLP
from fsdp_trainer.models.head import Head, Objective, ScoreHead, Scores, StatesHead
from fsdp_trainer.models.latent_attention import CosSin, LatentAttention
from fsdp_trainer.models.moe import MixtureOfExperts
from fsdp_trainer.models.mtp import MtpBlock, of_next_tokens, scores_with_mtp
from fsdp_trainer.models.norm import RMSNorm
from fsdp_trainer.models.rope import Rope, rotate
from fsdp_trainer.models.sdpa import Scoring
from fsdp_trainer.models.soft_targets import SoftTargets

Auxiliary = dict[str, Tensor]
"""Values that a block returns in addition to its output, by name. Scalars are summed over the
blocks, others stacked. A scalar whose name ends in `_loss` is minimised with the objective."""
NORMS: dict[str, tuple[str | None, ...]] = {
    "before": ("input_layernorm", None, "post_attention_layernorm", None),
    "after": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "around": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
"""Hugging Face's names of the norms before and after attention, before and after feed-forward."""


AXES = 3
"""Number of axes of an image token's position (M-RoPE): time, height and width."""


@dataclass
class MediaInputs:
    """The media of a micro-batch.

    arrays: what the model's tower takes, by transformers' names, of all media in the order of
    their tokens, or of a black one if there are none. tokens: number of tokens that stand for
    media. positions: [axes, rows, length] int64; None for a model whose media have the positions
    of their tokens.
    """

    arrays: dict[str, Tensor]
    tokens: int
    positions: Tensor | None = None


@dataclass
class DocumentTargets:
    """What is to be learnt of whole documents, counted over the micro-batch's rows.

    index: [supervised] int64, the document of each target; padding after the last target has the
    number of documents. groups: [documents] int64, the index of the set of documents that a
    document belongs to, in the order of the data. group_sizes: how many documents each such set
    has, on the host.
    reference: [documents] float64, the sum of the log-probabilities of each document's targets
    under a reference model; None without one. kinds: [documents] int64, as in the data's samples;
    None: all are answers. values: [documents, numbers] float64, what a head is to learn of each;
    None for a language model, and for rows without documents.
    """

    index: Tensor
    groups: Tensor
    group_sizes: tuple[int, ...] = ()
    reference: Tensor | None = None
    kinds: Tensor | None = None
    values: Tensor | None = None


@dataclass
class MicroBatch:
    """The tokens of one forward pass and their supervision.

    tokens, positions: [rows, length] int64; positions restart at every document.
    index: [supervised] int64, flat positions whose next token is supervised; padding has weight 0.
    targets: [supervised] int64; weights: [supervised] float32.
    sources: [supervised] int64, the data source of each target; None: there is one source.
    document_targets: None if the objective does not use them.
    token_share: [rows, length] float32, 1 / (tokens of the whole step) for each token, 0 for
    padding; None if the load of experts is not measured. 1 for each token until the number of
    tokens of the step is known.
    columns: further values for each target by name, [supervised, ...].
    soft: a teacher's probabilities for the targets; None without a teacher.
    media: None for data without media.
    """

    tokens: Tensor
    positions: Tensor
    layout: PackedAttention
    index: Tensor
    targets: Tensor
    weights: Tensor
    sources: Tensor | None = None
    document_targets: DocumentTargets | None = None
    token_share: Tensor | None = None
    columns: dict[str, Tensor] = field(default_factory=dict)
    soft: SoftTargets | None = None
    media: MediaInputs | None = None

    @property
    def documents(self) -> DocumentTargets:
        """The targets of whole documents, for an objective that uses them."""
        assert self.document_targets is not None
        return self.document_targets


class DecoderOutput(NamedTuple):
    """Result of a forward pass.

    value: the objective plus the blocks' auxiliary losses; None without an objective. scores: in
    the order of `batch.index`. Scores and auxiliary values (of all blocks combined) have no
    gradient.
    """

    value: Tensor | None
    scores: Scores
    auxiliary: Auxiliary


def normed_heads(attention: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Return queries, keys and values by head, the first two as `attention` normalises them."""
    if attention.qk_norm == "whole":
        q, k = attention.q_norm(q), attention.k_norm(k)
    heads = (-1, attention.head_dim)
    q, k, v = (projected.unflatten(-1, heads) for projected in (q, k, v))
    if attention.qk_norm == "head":
        q, k = attention.q_norm(q), attention.k_norm(k)
    return q, k, v


class Attention(nn.Module):
    """Grouped-query attention with rotary positions.

    Some families normalise queries and keys before the rotation.
    """

    sinks: Tensor | None

    def __init__(self, config: ModelConfig):
        super().__init__()
        sizes = config.projection_sizes

        def project(name: str, inputs: int) -> nn.Linear:
            return nn.Linear(inputs, sizes[name], bias=config.has_bias(name))

        self.q_proj = project("q_proj", config.hidden_size)
        self.k_proj = project("k_proj", config.hidden_size)
        self.v_proj = project("v_proj", config.hidden_size)
        self.o_proj = project("o_proj", sizes["q_proj"])
        self.head_dim = config.head_dim
        self.qk_norm = config.family_spec.qk_norm
        if self.qk_norm:
            whole = self.qk_norm == "whole"
            self.q_norm = RMSNorm(config, sizes["q_proj"] if whole else config.head_dim)
            self.k_norm = RMSNorm(config, sizes["k_proj"] if whole else config.head_dim)
        scalar = config.query_pre_attn_scalar
        scale = None if scalar is None else scalar**-0.5
        self.scoring = Scoring(scale, config.attn_logit_softcapping)
        has_sinks = config.family_spec.sinks
        sinks = nn.Parameter(torch.empty(config.num_attention_heads)) if has_sinks else None
        self.register_parameter("sinks", sinks)

    def local_sinks(self) -> Tensor | None:
        """Return the sinks of the heads that this process computes."""
        return self.sinks

    def forward(
        self, x: Tensor, cos_sin: CosSin, layout: PackedAttention, cache: Cache | None = None
    ) -> Tensor:
        """Return the output of attention, shaped as x: [batch, length, hidden]."""
        q, k, v = normed_heads(self, self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q = rotate(q, *cos_sin)
        k = rotate(k, *cos_sin)
        if cache is not None:
            k, v = cache.append(k, v)
        mixed = layout.attend(q, k, v, self.scoring._replace(sinks=self.local_sinks()))
        return self.o_proj(mixed.flatten(-2))


MIXERS: dict[str, Callable[[ModelConfig], nn.Module]] = {
    "attention": Attention,
    LATENT: LatentAttention,
}
"""Token mixers of a block by `Family.mixer`, called like `Attention`."""
FEED_FORWARDS: dict[str, Callable[[ModelConfig], nn.Module]] = {
    "gated": MLP,
    "experts": MixtureOfExperts,
}
"""Feed-forwards of a block by `Family.feed_forward`, called like `MLP`. An entry of either table
returns a tensor, or a tensor and an `Auxiliary` whose names are listed in the class attribute
`auxiliary_names`."""


class Block(nn.Module):
    """Decoder layer: mixer, then feed-forward, each added to the residual stream, with norms
    before, after, or both.
    """

    def __init__(self, config: ModelConfig, number: int):
        super().__init__()
        family = config.family_spec
        self.self_attn = MIXERS[family.mixer](config)
        self.mlp = FEED_FORWARDS[config.feed_forwards[number]](config)
        self.norms = NORMS[family.norms]
        for name in filter(None, self.norms):
            self.add_module(name, RMSNorm(config))

    def forward(
        self,
        x: Tensor,
        cos_sin: CosSin,
        layout: PackedAttention,
        cache: Cache | None = None,
        balancing: Balancing | None = None,
    ) -> tuple[Tensor, Auxiliary]:
        """Return the residual stream after the block, [batch, length, hidden], and its auxiliary
        values.

        balancing: inputs of the losses of a block with experts.
        """
        before_mixer, after_mixer, before_mlp, after_mlp = self.norms
        mixed = self.self_attn(self._norm(before_mixer, x), cos_sin, layout, cache)
        mixed, auxiliary = mixed if isinstance(mixed, tuple) else (mixed, {})
        x = x + self._norm(after_mixer, mixed)
        x_fed = self._norm(before_mlp, x)
        fed = self.mlp(x_fed) if balancing is None else self.mlp(x_fed, balancing)
        fed, more = fed if isinstance(fed, tuple) else (fed, {})
        return x + self._norm(after_mlp, fed), auxiliary | more

    def _norm(self, name: str | None, x: Tensor) -> Tensor:
        return x if name is None else getattr(self, name)(x)


class MtpHead(MtpBlock, Block):  # type: ignore[misc]  # it takes two inputs
    """A block like the last one, which predicts a further token."""

    def __init__(self, config: ModelConfig):
        super().__init__(config, config.num_hidden_layers - 1)
        self.add_parts(config.hidden_size, lambda: RMSNorm(config))


class Backbone(nn.Module):
    """Embedding, blocks and final norm: the module called `model` in transformers."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed_tokens: Any = nn.Embedding(config.embedding_rows, config.hidden_size)
        # a dictionary, so that blocks keep their names in a pipeline stage that holds some of them
        self.layers = nn.ModuleDict(
            {str(i): Block(config, i) for i in range(config.num_hidden_layers)}
        )
        if config.mtp_heads:  # as in a folder
            self.layers[str(config.num_hidden_layers)] = MtpHead(config)
        self.norm: Any = RMSNorm(config)


SCORES = ("score", "classifier")
"""transformers' names of the head of scores. It is new in a run from a language model."""


class Decoder(nn.Module):
    """Causal language model or reward model.

    Built on the meta device; `models.initialize` or an import sets the weights.
    """

    inference_methods: tuple[str, ...] = ("next_logits",)
    """Methods that are called on a sharded model in place of forward."""
    mtp_weight = 0.0
    """Weight of the loss of MTP heads in training; 0: they are not computed."""
    gathered_dtype: torch.dtype | None = None
    """Number format of weights where they are computed with; None: as they are stored."""

    def __init__(self, config: ModelConfig, balance: Balance | None = None):
        """balance: of the load of a model with experts; None: the load is not measured."""
        super().__init__()
        self.config, self.balance = config, balance
        self.model = Backbone(config)
        self.lm_head: Any
        if config.scores:
            self.score = ScoreHead(config)
            self.__dict__["lm_head"] = self.score  # one module, by transformers' name
        else:
            self.lm_head = StatesHead(config) if config.pooling else Head(config)
        """None in a pipeline stage without the head, as are embedding and norm."""
        self.tie_weights()
        # True: RoPE of the blocks with a window; created in the first forward, not as buffers,
        # which to_empty would erase
        self.ropes: dict[bool, Rope] = {}
        self.cut_from: tuple[Decoder, ...] = ()
        """The complete model, if this is a part of its blocks; in a tuple, since a module that is
        an attribute would be a part of this one. `parallel.pipeline` sets it."""

    def tie_weights(self) -> None:
        """Make a tied head and the embedding one parameter, again after to_empty, which separates
        them.
        """
        if self.config.tie_word_embeddings and self.lm_head is not None:
            self.lm_head.weight = self.embedding.weight

    @property
    def embedding(self) -> Any:
        return self.model.embed_tokens

    @property
    def final_norm(self) -> Any:
        return self.model.norm

    def ends(self) -> list[nn.Module]:
        """Return the modules after the blocks, and a tied embedding, which are sharded together."""
        tied = [self.embedding] if self.config.tie_word_embeddings else []
        return [*tied, self.final_norm, self.lm_head]

    media_positions: Any = None
    """Returns the positions of a document with media; None if they are as of text."""

    def part_of(self, name: str) -> str | None:
        """Return the part of a model for media that a weight or module belongs to, else None."""
        return None

    def image_parts(self) -> list[nn.Module]:
        """Return the modules for media that are sharded one by one, inner ones first."""
        return []

    def image_blocks(self) -> list[nn.Module]:
        return []

    def fill_buffers(self) -> None:
        """Compute the buffers that no file holds. Must be called after to_empty."""

    def gather_as(self, dtype: torch.dtype) -> None:
        """Note the number format of gathered weights."""
        self.gathered_dtype = dtype

    @property
    def whole(self) -> "Decoder":
        """The complete model; for a pipeline stage the one it was cut from.

        Its parameters then have no storage, and the shapes from before sharding.
        """
        return self.cut_from[0] if self.cut_from else self

    def blocks(self) -> dict[str, nn.Module]:
        return {n: b for n, b in self.model.layers.items() if not isinstance(b, MtpBlock)}

    def describe_as(self, config: ModelConfig) -> None:
        self.config = config

    def train_mtp(self, weight: float) -> None:
        self.mtp_weight = weight

    def mtp_heads(self) -> list[nn.Module]:
        return [block for block in self.model.layers.values() if isinstance(block, MtpBlock)]

    @property
    def head_names(self) -> set[str]:
        """Names of the weights that the folder of a language model lacks, and that are drawn."""
        return {n for n, _ in self.named_parameters() if n.rpartition(".")[0] in SCORES}

    def named_weights(self) -> dict[str, Tensor]:
        """Return the parameters, each once, and buffers by name, as checkpoints and exports do."""
        return {**dict(self.named_parameters()), **stored_buffers(self)}

    @property
    def auxiliary_names(self) -> list[str]:
        modules = [module for block in self.blocks().values() for module in block.modules()]
        names = [getattr(module, "auxiliary_names", ()) for module in modules]
        return sorted({name for each in names for name in each})

    def forward(self, batch: MicroBatch, objective: Objective | None = None) -> DecoderOutput:
        """Compute the objective and the scores of the micro-batch's supervised tokens."""
        share = batch.token_share if objective else None  # a validation has no auxiliary losses
        if objective is not None and self.mtp_weight:
            value, scores, auxiliary = scores_with_mtp(self, batch, objective, share)
        else:
            hidden, auxiliary = self._supervised(batch, share)
            value, scores = self.lm_head(self.normed(hidden), batch.targets, objective, batch.soft)
        if value is not None:
            losses = (scalar for name, scalar in auxiliary.items() if name.endswith("_loss"))
            value = sum(losses, start=value)
        detached = {name: scalar.detach() for name, scalar in auxiliary.items()}
        return DecoderOutput(value, scores, detached)

    def states_with_mtp(
        self, batch: MicroBatch, token_share: Tensor | None
    ) -> tuple[Tensor, Tensor, Auxiliary]:
        """Return the output head's input of the model and of its MTP head, and auxiliary values.

        The states are [rows, length, hidden].
        """
        positions, layout = batch.positions, batch.layout
        embedded = self.embed(batch.tokens)
        x, auxiliary = self.run_blocks(
            embedded, positions, layout, self.blocks(), token_share=token_share
        )
        states = self.normed(x)
        (head,) = self.mtp_heads()
        cos_sin = self.ropes[False](positions, x.dtype, layout)
        return states, head(of_next_tokens(embedded), states, cos_sin, layout), auxiliary

    def states_for_head(self, batch: MicroBatch) -> Tensor:
        """Return the states of the supervised tokens that a head makes logits of.

        For a model whose own head passes them on: FSDP2 requires its forward to be called.
        """
        hidden, _ = self._supervised(batch, None)
        return self.lm_head(self.normed(hidden))

    def normed(self, hidden: Tensor) -> Tensor:
        """Return the head's input for states after the last block, shaped as they are."""
        return self.model.norm(hidden)

    def _supervised(
        self, batch: MicroBatch, token_share: Tensor | None
    ) -> tuple[Tensor, Auxiliary]:
        """Return the states after the last block, [supervised, hidden], and auxiliary values.

        Norm and head are computed for these positions only.
        """
        media: Any = {} if batch.media is None else {"media": batch.media}
        if media and not self.config.reads_images:
            reason = "reads only text, and the data has media"
            raise UserError("a second model reads no media", self.config.family, reason)
        hidden, auxiliary = self.hidden(
            batch.tokens, batch.positions, batch.layout, token_share=token_share, **media
        )
        return hidden.flatten(0, 1).index_select(0, batch.index), auxiliary

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: PackedAttention,
        caches: Mapping[str, Cache] = MappingProxyType({}),
        token_share: Tensor | None = None,
    ) -> tuple[Tensor, Auxiliary]:
        """Return the residual stream after the last block, [batch, length, hidden], and auxiliary
        values.

        caches: by block name; token_share: as in MicroBatch.
        """
        x = self.embed(tokens)
        x, auxiliary = self.run_blocks(x, positions, layout, self.blocks(), caches, token_share)
        return self.all_tokens(x), auxiliary

    def embed(self, tokens: Tensor) -> Tensor:
        return self.scaled_embedding(self.embedding(tokens))

    def scaled_embedding(self, x: Tensor) -> Tensor:
        """Return the embedding of tokens as the first block reads it."""
        if self.config.family_spec.scaled_embedding:
            # the factor is rounded to the number format of the weights
            scale = self.config.hidden_size**0.5
            x = x * torch.full((), scale, dtype=x.dtype, device=x.device)
        return x

    def run_blocks(
        self,
        x: Tensor,
        positions: Tensor,
        layout: PackedAttention,
        blocks: Mapping[str, nn.Module],
        caches: Mapping[str, Cache] = MappingProxyType({}),
        token_share: Tensor | None = None,
    ) -> tuple[Tensor, Auxiliary]:
        """Return the residual stream after these consecutive blocks, and their auxiliary values.

        blocks, caches: by block name; token_share: as in MicroBatch.
        """
        if not self.config.is_causal:
            layout = layout.in_both_directions()
        has_local = self.config.rope_local_theta is not None
        windows = self.config.windows
        self.ropes = self.ropes or {local: Rope(self.config, local) for local in {False, has_local}}
        cos_sins = {local: rope(positions, x.dtype, layout) for local, rope in self.ropes.items()}
        layouts = {window: layout.with_window(window) for window in set(windows)}
        values: list[Auxiliary] = []
        for name, block in blocks.items():
            window = windows[int(name)]
            cos_sin = cos_sins[has_local and window is not None]
            inputs: list[Any] = [x, cos_sin, layouts[window], caches.get(name)]
            if self.balance is not None and token_share is not None:
                inputs.append(self.balance.of_block(int(name), token_share))
            x, auxiliary = block(*inputs)
            values.append(auxiliary)
        return x, combine_auxiliary(values)

    def all_tokens(self, x: Tensor) -> Tensor:
        """Return the residual stream of all tokens; parallel.tensor overrides this to gather it."""
        return x

    def inference(self) -> AbstractContextManager[None]:
        """Return a context that allows a forward pass with any number of tokens."""
        return nullcontext()

    def logits(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, length, vocabulary] for tokens [batch, length] int64.

        For inference on an unsharded model; each row is one document.
        """
        length = tokens.shape[1]
        positions = torch.arange(length, device=tokens.device).expand_as(tokens)
        hidden = self.inference_hidden(tokens, positions, OneDocument(length))
        return self.logits_of(hidden)

    @torch.no_grad()
    def next_logits(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: PackedAttention,
        index: Tensor,
        caches: Mapping[str, Cache] = MappingProxyType({}),
    ) -> Tensor:
        """Return the next-token logits at the flat positions `index`: [index, vocabulary].

        Calls the forward of norm and head, as is required if they are one FSDP unit.
        """
        hidden = self.inference_hidden(tokens, positions, layout, caches)
        return self.logits_of(hidden.flatten(0, 1).index_select(0, index))

    def logits_of(self, states: Tensor) -> Tensor:
        return self.lm_head(self.normed(states))

    def inference_hidden(self, *args: Any) -> Tensor:
        with self.inference():
            return self.hidden(*args)[0]


def combine_auxiliary(blocks: list[Auxiliary]) -> Auxiliary:
    names = dict.fromkeys(name for values in blocks for name in values)
    stacks = {name: [values[name] for values in blocks if name in values] for name in names}
    return {
        name: torch.stack(stack) if stack[0].ndim else sum(stack[1:], start=stack[0])
        for name, stack in stacks.items()
    }


def stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
