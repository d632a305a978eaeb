"""One decoder for the dense Llama family. Module names are Hugging Face's, so that state dicts need no adapter. Knows no parallelism."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_trainer.models.attention import Cache, Layout, attend
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.head import Head, Scores
from fsdp_trainer.models.rope import inverse_frequencies, rotate, rotation

Rotation = tuple[Tensor, Tensor]


@dataclass
class MicroBatch:
    """What one forward sees.

    tokens, positions: [rows, seq_len] int64; positions restart in every document.
    index: [supervised] int64, flat positions whose next token is learnt, padded to a fixed step by weight 0.
    targets: [supervised] int64; weights: [supervised] float32.
    """

    tokens: Tensor
    positions: Tensor
    layout: Layout
    index: Tensor
    targets: Tensor
    weights: Tensor


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang & Sennrich 2019); the mean square is taken in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., size]."""
        scaled = x.float()
        scaled = scaled * torch.rsqrt(scaled.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; Qwen3 normalises queries and keys per head before the rotation."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, turn: Rotation, layout: Layout, cache: Cache | None = None) -> Tensor:
        """x: [batch, length, hidden]."""
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *turn), rotate(k, *turn)
        if cache is not None:
            k, v = cache.append(k, v)
        return self.o_proj(attend(q, k, v, layout).flatten(-2))


class MLP(nn.Module):
    """SwiGLU feed-forward (Shazeer 2020)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, length, hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention, then feed-forward, each on the normed stream and added to it."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, turn: Rotation, layout: Layout, cache: Cache | None = None) -> Tensor:
        """x: [batch, length, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), turn, layout, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """Embedding, blocks and final norm: what transformers calls `model`. The decoder calls its parts."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        # a dictionary: a pipeline stage that holds some of the blocks keeps their names
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.num_hidden_layers)})
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """A causal language model. Build it on the meta device; `models.initialize` or an import fills it."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = Head(config.vocab_size, config.hidden_size)
        self.tie_weights()
        self.frequencies = inverse_frequencies(config)  # no buffer: to_empty would wipe it

    def tie_weights(self) -> None:
        """Make a tied head and the embedding one parameter; again after to_empty, which parts them."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, batch: MicroBatch) -> Scores:
        """Scores of the micro-batch's supervised tokens, in the order of `batch.index`."""
        hidden = self.hidden(batch.tokens, batch.positions, batch.layout)
        hidden = hidden.flatten(0, 1).index_select(0, batch.index)  # only supervised positions pay for norm and head
        return self.lm_head(self.model.norm(hidden), batch.targets)

    def hidden(self, tokens: Tensor, positions: Tensor, layout: Layout, caches: list[Cache] | None = None) -> Tensor:
        """[batch, length, hidden]: the residual stream after the last block."""
        if self.frequencies.device != tokens.device:
            self.frequencies = inverse_frequencies(self.config).to(tokens.device)
        x = self.model.embed_tokens(tokens)
        turn = rotation(positions, self.frequencies, x.dtype)
        for i, block in enumerate(self.model.layers.values()):
            x = block(x, turn, layout, caches[i]) if caches else block(x, turn, layout)
        return x

    def logits(self, tokens: Tensor) -> Tensor:
        """[batch, length] int64 → [batch, length, vocabulary]. For inference on an unsharded model; each row is one document."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return self.lm_head(self.model.norm(self.hidden(tokens, positions, Layout())))

    @torch.no_grad()
    def next_logits(self, tokens: Tensor, caches: list[Cache]) -> Tensor:
        """[batch, vocabulary] after `tokens` [batch, new], which follow what the caches (one per block, empty at first) hold."""
        done = 0 if caches[0].keys is None else caches[0].keys.shape[1]
        positions = torch.arange(done, done + tokens.shape[1], device=tokens.device).expand_as(tokens)
        hidden = self.hidden(tokens, positions, Layout(), caches)[:, -1]
        return self.lm_head(self.model.norm(hidden))  # by its forward: sharded with the norm, both must run
