"""Multi-head latent attention (DeepSeek-V2, 2024, §2.1).

Keys and values of all heads are projected from one latent vector of each token.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fsdp_trainer.models.attention import Cache, PackedAttention
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.norm import RMSNorm
from fsdp_trainer.models.rope import rotate, yarn_temperature
from fsdp_trainer.models.sdpa import Scoring, same_width

CosSin = tuple[Tensor, Tensor]
NORM_EPS = 1e-6
"""Epsilon of the norms of latent vectors, independent of rms_norm_eps (as in DeepSeek's code)."""


class LatentAttention(nn.Module):
    """Attention whose keys and values are projected from a latent vector of each token.

    A head's key consists of its own channels, which are not rotated, and of rotated channels that
    all heads have in common. Queries may be projected from another latent vector.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        hidden = config.hidden_size
        heads = config.num_attention_heads
        self.plain = config.qk_nope_head_dim
        self.rotated = config.qk_rope_head_dim
        self.rank = config.kv_lora_rank
        self.value_dim = config.v_head_dim
        self.width = config.head_dim
        self.interleaved = config.rope_interleave
        bias = config.attention_bias
        self.narrows_queries = config.q_lora_rank is not None
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden, heads * self.width, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(config, config.q_lora_rank, NORM_EPS)
            self.q_b_proj = nn.Linear(config.q_lora_rank, heads * self.width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.rank + self.rotated, bias=bias)
        self.kv_a_layernorm = RMSNorm(config, self.rank, NORM_EPS)
        self.kv_b_proj = nn.Linear(self.rank, heads * (self.plain + self.value_dim), bias=False)
        self.o_proj = nn.Linear(heads * self.value_dim, hidden, bias=bias)
        self.scoring = Scoring(self.width**-0.5 * temperature(config.rope_scaling or {}) ** 2)

    def forward(
        self, x: Tensor, cos_sin: CosSin, layout: PackedAttention, cache: Cache | None = None
    ) -> Tensor:
        """Return the output of attention, shaped as x: [batch, length, hidden].

        cache: holds latent vectors and rotated channels of keys.
        """
        q_plain, q_rotated = self.queries(x).split([self.plain, self.rotated], -1)
        latent, k_rotated = self.kv_a_proj_with_mqa(x).split([self.rank, self.rotated], -1)
        latent = self.kv_a_layernorm(latent).unsqueeze(-2)
        q_rotated = rotate(self.in_halves(q_rotated), *cos_sin)
        k_rotated = rotate(self.in_halves(k_rotated.unsqueeze(-2)), *cos_sin)
        if cache is not None:
            latent, k_rotated = cache.append(latent, k_rotated)
        both = self.kv_b_proj(latent.squeeze(-2)).unflatten(-1, (-1, self.plain + self.value_dim))
        k_plain, v = both.split([self.plain, self.value_dim], -1)
        q = torch.cat((q_plain, q_rotated), -1)
        k = torch.cat((k_plain, k_rotated.expand(-1, -1, k_plain.shape[-2], -1)), -1)
        # no kernel for packed documents accepts values of another width than the keys
        q, k, v = same_width(q, k, v)
        mixed = layout.attend(q, k, v, self.scoring)[..., : self.value_dim]
        return self.o_proj(mixed.flatten(-2))

    def queries(self, x: Tensor) -> Tensor:
        if self.narrows_queries:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        else:
            q = self.q_proj(x)
        return q.unflatten(-1, (-1, self.width))

    def in_halves(self, x: Tensor) -> Tensor:
        """Return rotated channels in the order that `rotate` expects: pairs of i and i + half."""
        if not self.interleaved:
            return x
        return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def temperature(scaling: dict[str, Any]) -> float:
    """Return DeepSeek's YaRN factor on queries and keys, for all their channels.

    `rope` applies the quotient of the factor for `mscale` and this one to the rotated channels.
    """
    weight = scaling.get("mscale_all_dim")
    return yarn_temperature(scaling["factor"], weight) if weight else 1.0
