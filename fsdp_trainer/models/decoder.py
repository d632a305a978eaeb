"""One decoder for the dense families. Module names are Hugging Face's, so that state dicts need no adapter. Knows no parallelism."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_trainer.models.attention import Cache, Layout, attend
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.head import Head, Objective, Scores
from fsdp_trainer.models.rope import Rope, rotate

Rotation = tuple[Tensor, Tensor]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
# which norm of a block comes before and after attention, before and after feed-forward, in Hugging Face's names
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


@dataclass
class MicroBatch:
    """What one forward sees.

    tokens, positions: [rows, seq_len] int64; positions restart in every document.
    index: [supervised] int64, flat positions whose next token is learnt, padded to a fixed step by weight 0.
    targets: [supervised] int64; weights: [supervised] float32.
    sources: [supervised] int64, which source a target is from; None: all are from one.
    """

    tokens: Tensor
    positions: Tensor
    layout: Layout
    index: Tensor
    targets: Tensor
    weights: Tensor
    sources: Tensor | None = None


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang & Sennrich 2019); the mean square is taken in float32. size: None for the width of the stream."""

    def __init__(self, config: ModelConfig, size: int | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size or config.hidden_size))
        self.eps, self.offset, self.in_float32 = (
            config.rms_norm_eps,
            config.form.norm_offset,
            config.form.norm_in_float32,
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., size]."""
        scaled = x.float()
        scaled = scaled * torch.rsqrt(scaled.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.in_float32:
            return (scaled * (self.offset + self.weight.float())).to(x.dtype)
        return self.weight * scaled.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; some families normalise queries and keys before the rotation."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        queries, keys = (
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
        )
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.has_bias("q_proj"))
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.has_bias("k_proj"))
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.has_bias("v_proj"))
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.has_bias("o_proj"))
        self.head_dim, self.qk_norm = config.head_dim, config.form.qk_norm
        if self.qk_norm:
            self.q_norm = RMSNorm(config, queries if self.qk_norm == "whole" else config.head_dim)
            self.k_norm = RMSNorm(config, keys if self.qk_norm == "whole" else config.head_dim)
        self.scale = (
            None if config.query_pre_attn_scalar is None else config.query_pre_attn_scalar**-0.5
        )
        self.softcap = config.attn_logit_softcapping

    def forward(
        self, x: Tensor, turn: Rotation, layout: Layout, cache: Cache | None = None
    ) -> Tensor:
        """x: [batch, length, hidden]."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.qk_norm == "whole":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (projected.unflatten(-1, (-1, self.head_dim)) for projected in (q, k, v))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *turn), rotate(k, *turn)
        if cache is not None:
            k, v = cache.append(k, v)
        return self.o_proj(attend(q, k, v, layout, self.scale, self.softcap).flatten(-2))


class MLP(nn.Module):
    """Gated feed-forward (Shazeer 2020)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(
            config.hidden_size, config.intermediate_size, bias=config.mlp_bias
        )
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(
            config.intermediate_size, config.hidden_size, bias=config.mlp_bias
        )
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, length, hidden]."""
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention, then feed-forward, each added to the stream; normalised before, after, or both."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.norms = NORMS[config.form.norms]
        for name in filter(None, self.norms):
            self.add_module(name, RMSNorm(config))

    def forward(
        self, x: Tensor, turn: Rotation, layout: Layout, cache: Cache | None = None
    ) -> Tensor:
        """x: [batch, length, hidden]."""
        before_attention, after_attention, before_mlp, after_mlp = self.norms
        x = x + self._norm(
            after_attention, self.self_attn(self._norm(before_attention, x), turn, layout, cache)
        )
        return x + self._norm(after_mlp, self.mlp(self._norm(before_mlp, x)))

    def _norm(self, name: str | None, x: Tensor) -> Tensor:
        return x if name is None else getattr(self, name)(x)


class Backbone(nn.Module):
    """Embedding, blocks and final norm: what transformers calls `model`. The decoder calls its parts."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.embedding_rows, config.hidden_size)
        # a dictionary: a pipeline stage that holds some of the blocks keeps their names
        self.layers = nn.ModuleDict(
            {str(i): Block(config) for i in range(config.num_hidden_layers)}
        )
        self.norm = RMSNorm(config)


class Decoder(nn.Module):
    """A causal language model. Build it on the meta device; `models.initialize` or an import fills it."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = Head(config)
        self.tie_weights()
        self.ropes: list[
            Rope
        ] = []  # made at the first forward: no buffers, which to_empty would wipe

    def tie_weights(self) -> None:
        """Make a tied head and the embedding one parameter; again after to_empty, which parts them."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self, batch: MicroBatch, objective: Objective | None = None
    ) -> Scores | tuple[Tensor, Scores]:
        """Scores of the micro-batch's supervised tokens, in the order of `batch.index`; before them the objective's value, if there is one."""
        hidden = self.hidden(batch.tokens, batch.positions, batch.layout)
        hidden = hidden.flatten(0, 1).index_select(
            0, batch.index
        )  # only supervised positions pay for norm and head
        return self.lm_head(self.model.norm(hidden), batch.targets, objective)

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: Layout,
        caches: list[Cache] | None = None,
        done: int = 0,
    ) -> Tensor:
        """[batch, length, hidden]: the residual stream after the last block. done: tokens before these, which the caches hold."""
        x = self.model.embed_tokens(tokens)
        if self.config.form.scaled_embedding:
            x = x * torch.full(
                (), self.config.hidden_size**0.5, dtype=x.dtype, device=x.device
            )  # rounded as the weights are
        if not self.ropes:
            self.ropes = [
                Rope(self.config, local)
                for local in ((False, True) if self.config.rope_local_theta else (False,))
            ]
        turns = [
            rope(positions, x.dtype, done + tokens.shape[1] if layout.one_document else None)
            for rope in self.ropes
        ]
        windows = self.config.windows
        layouts = {window: layout.within(window) for window in set(windows)}
        for i, (window, block) in enumerate(zip(windows, self.model.layers.values(), strict=True)):
            where = (turns[0 if window is None else -1], layouts[window])
            x = block(x, *where, caches[i]) if caches else block(x, *where)
        return x

    def logits(self, tokens: Tensor) -> Tensor:
        """[batch, length] int64 → [batch, length, vocabulary]. For inference on an unsharded model; each row is one document."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return self.lm_head(self.model.norm(self.hidden(tokens, positions, Layout())))

    @torch.no_grad()
    def next_logits(self, tokens: Tensor, caches: list[Cache]) -> Tensor:
        """[batch, vocabulary] after `tokens` [batch, new], which follow what the caches (one per block, empty at first) hold."""
        done = 0 if caches[0].keys is None else caches[0].keys.shape[1]
        positions = torch.arange(done, done + tokens.shape[1], device=tokens.device).expand_as(
            tokens
        )
        hidden = self.hidden(tokens, positions, Layout(), caches, done)[:, -1]
        return self.lm_head(
            self.model.norm(hidden)
        )  # by its forward: sharded with the norm, both must run
