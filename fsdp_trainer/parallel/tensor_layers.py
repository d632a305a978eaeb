"""The modules of a decoder under tensor parallelism: each computes one rank's part.

Parameters are DTensors. All computation uses this rank's plain tensors: torch's DTensor modules
cost about twice as much host time.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_trainer.base.distributed import local_slice
from fsdp_trainer.models.adapters.adapters import row_squares
from fsdp_trainer.models.attention import Cache, PackedAttention
from fsdp_trainer.models.decoder import Attention, Auxiliary, Decoder
from fsdp_trainer.models.four_bit import DecodedProduct, Linear4
from fsdp_trainer.models.head import Head, ScoreHead, Scores, StatesHead, score_columns
from fsdp_trainer.models.moe import Gate, Router
from fsdp_trainer.models.norm import RMSNorm
from fsdp_trainer.models.soft_targets import local_columns
from fsdp_trainer.parallel.convert import float8_product, is_float8
from fsdp_trainer.parallel.tensor_ranks import (
    TOKENS,
    Gather,
    ShareGradient,
    Sum,
    SumGradient,
    SumValue,
    TensorRanks,
    all_gather,
    sum_over_ranks,
)


class TensorModule(nn.Module):
    tensor_ranks: TensorRanks

    def set_part(self) -> None:
        """Prepare this rank's part. Called once, after the module's parameters are sharded."""


def local(parameter: Any) -> Tensor:
    """Return this rank's part of a parameter (all, if replicated), attached to the graph."""
    return parameter.to_local()


def replicated(parameter: Any, ranks: TensorRanks) -> Tensor:
    """Return a replicated parameter whose gradient is the sum of the ranks' gradients.

    DTensor's own sum (`grad_placements`) takes more host time. Besides, torch caches groups by the
    shape of a mesh, so a second run in one process could sum over groups of the first.
    """
    return SumGradient.apply(parameter.to_local(), ranks.group)


class TensorLinear(TensorModule):
    """Base class of linear layers under tensor parallelism: torch's, in float8 or in 4 bits."""

    weight: Tensor
    bias: Tensor | None
    lora_A: Any
    lora_B: Any
    lora_scale: float
    lora_magnitude_vector: Tensor

    def forward(self, x: Tensor) -> Tensor:
        out = self.multiplied(x)
        return out if self.bias is None else out + self.own(self.bias)

    def multiplied(self, x: Tensor) -> Tensor:
        return product(self, x, local(self.weight))

    def own(self, parameter: Tensor) -> Tensor:
        """Return the part of a vector over output channels that this rank's outputs need."""
        return local(parameter)

    def row_squares(self) -> Tensor:
        """Return the squared length, including the adapter, of each row of the outputs: [out]."""
        a, b = (local(matrix.weight) for matrix in (self.lora_A, self.lora_B))
        return row_squares(self, local(self.weight), a, b)


class ColumnLinear(TensorLinear):
    """A linear layer sharded over its outputs: each rank computes a part of them for all tokens.

    Maps [batch, length, in] to [batch, length, out / ranks].
    """


class RowLinear(TensorLinear):
    """A linear layer sharded over its inputs: the ranks' products are summed.

    Maps [batch, length, in / ranks] to [batch, length / ranks, out].
    """

    def set_part(self) -> None:
        """Set the number of columns that are decoded from a 4-bit matrix."""
        if isinstance(self, Linear4):
            self.in_features //= self.tensor_ranks.size

    def multiplied(self, x: Tensor) -> Tensor:
        """See TensorLinear. Collective."""
        return self.tensor_ranks.sum_and_shard_tokens(super().multiplied(x))

    def own(self, parameter: Tensor) -> Tensor:
        return replicated(parameter, self.tensor_ranks)

    def row_squares(self) -> Tensor:
        """See TensorLinear. Collective."""
        return sum_over_ranks(super().row_squares(), self.tensor_ranks.group)


class ReplicatedLinear(TensorLinear):
    """A replicated linear layer.

    Each rank's gradient is for its tokens or for its output channels only; they are summed.
    """

    def multiplied(self, x: Tensor) -> Tensor:
        return product(self, x, replicated(self.weight, self.tensor_ranks))

    def own(self, parameter: Tensor) -> Tensor:
        return replicated(parameter, self.tensor_ranks)


class LoraLinear(TensorLinear):
    """A linear layer with an adapter, whose matrices are such layers too and communicate."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.lora_B(self.lora_A(x)) * self.lora_scale


class DoraLinear(TensorLinear):
    """A linear layer with an adapter and a magnitude of each row of W + scale · B·A."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute DoRA as models.adapters does. Collective; for o and down so are the lengths."""
        with torch.no_grad():
            lengths = self.row_squares().clamp_min(0).sqrt()
        factor = (self.own(self.lora_magnitude_vector).float() / lengths).to(x.dtype)
        out = self.multiplied(x) + self.lora_B(self.lora_A(x)) * self.lora_scale
        return factor * out if self.bias is None else factor * out + self.own(self.bias)


def product(linear: Any, x: Tensor, weight: Tensor) -> Tensor:
    if isinstance(linear, Linear4):
        return DecodedProduct.apply(x, weight, None)
    if is_float8(linear):
        return float8_product(linear, x, weight)
    return F.linear(x, weight)


class ReplicatedRouter(TensorModule, Router):
    def matrix(self) -> Tensor:
        return replicated(self.weight, self.tensor_ranks)

    def offsets(self) -> Tensor | None:
        return None if self.bias is None else replicated(self.bias, self.tensor_ranks)


class ReplicatedGate(TensorModule, Gate):
    def matrix(self) -> Tensor:
        return replicated(self.weight, self.tensor_ranks)


class GatheredInput(TensorModule):
    """A module that reads all tokens: they are gathered from the ranks."""

    def forward(self, x: Tensor, *args: Any) -> Any:
        return super().forward(self.tensor_ranks.gather_tokens(x), *args)


class TensorAttention(GatheredInput, Attention):
    def set_part(self) -> None:
        """Gather the key head of this rank's queries if there are fewer key heads than ranks.

        Each rank then computes a part of a key head, and hooks gather the parts.
        """
        size = self.head_dim
        heads = self.k_proj.out_features // size
        ranks = self.tensor_ranks
        if heads >= ranks.size:
            return
        first = ranks.rank * heads // ranks.size * size

        def gather(module: nn.Module, args: tuple, out: Tensor) -> Tensor:
            return Gather.apply(out, 2, ranks.group)[..., first : first + size]

        # a norm over all heads together is applied before the parts are gathered
        keys = self.k_norm if self.qk_norm == "whole" else self.k_proj
        for module in (keys, self.v_proj):
            module.register_forward_hook(gather)

    def local_sinks(self) -> Tensor | None:
        return None if self.sinks is None else local(self.sinks)


class ReplicatedNorm(TensorModule, RMSNorm):
    """A replicated norm of complete vectors.

    Each rank's gradient is for its tokens, heads or columns only; they are summed.
    """

    def forward(self, x: Tensor) -> Tensor:
        return self.normalize(x, replicated(self.weight, self.tensor_ranks))


class ColumnNorm(TensorModule, RMSNorm):
    """A norm of vectors that are sharded over ranks."""

    def forward(self, x: Tensor) -> Tensor:
        return self.normalize(x, local(self.weight))

    def mean_square(self, x: Tensor) -> Tensor:
        """Return the mean square over the parts of all ranks: [..., 1]. Collective."""
        ranks = self.tensor_ranks
        total = Sum.apply(x.pow(2).sum(-1, keepdim=True), ranks.group)
        return total / (x.shape[-1] * ranks.size)


class TensorEmbedding(TensorModule, nn.Embedding):
    def set_part(self) -> None:
        rows = local_slice(self.weight)[0]
        self.first, self.rows = rows.start, rows.stop - rows.start

    def forward(self, tokens: Tensor) -> Tensor:
        """Return [batch, length / ranks, hidden] for tokens: [batch, length] int64."""
        index = tokens - self.first
        is_other = (index < 0) | (index >= self.rows)
        x = F.embedding(index.clamp(0, self.rows - 1), local(self.weight))
        return self.tensor_ranks.sum_and_shard_tokens(x.masked_fill(is_other.unsqueeze(-1), 0))


class TensorHead(TensorModule, Head):
    """A head sharded over the vocabulary, with one collective for each chunk.

    All ranks have the same number of rows (ModelConfig.with_equal_rows); the last ranks may have
    only padding. The gradient of the hidden states is this rank's summand.
    """

    def set_part(self) -> None:
        rows = local_slice(self.weight)[0]
        self.first = rows.start
        self.columns = max(0, min(self.vocab_size, rows.stop) - rows.start)
        self.score = score_columns

    def rows(self) -> Tensor:
        return local(self.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """See Head. Used for inference, has no gradient. Collective."""
        logits = self.capped(F.linear(hidden, local(self.weight)))
        return all_gather(logits, -1, self.tensor_ranks.group)[..., : self.vocab_size]

    def score_logits(
        self, product: Tensor, logits: Tensor, targets: Tensor, with_mean: bool
    ) -> tuple[Scores, Tensor]:
        """See Head. Collective.

        For each token the ranks exchange their `score_columns`.
        """
        if self.columns:
            own, is_own = local_columns(self, targets, self.columns)
            columns = self.score(product, logits, own, is_own, self.scored_softcap, with_mean)
        else:  # this rank has only padding
            columns = torch.zeros(3 + with_mean, len(targets), device=product.device)
            columns[0] = -torch.inf
        ranks = self.tensor_ranks
        gathered = all_gather(columns, 0, ranks.group).unflatten(0, (ranks.size, -1))
        largest = gathered[:, 0].amax(0)
        total = (gathered[:, 1] * (gathered[:, 0] - largest).exp()).sum(0)
        logsumexp = largest + total.log()
        log_probability = gathered[:, 2].sum(0) - logsumexp
        mean = gathered[:, 3].sum(0) / self.vocab_size - logsumexp if with_mean else None
        # divisor of this rank's exponentials; infinite on a rank with only padding
        divisor = (logsumexp - columns[0]).exp()
        return Scores(log_probability, logsumexp, mean), torch.stack([columns[0], divisor], 1)

    def write_gradient(
        self,
        product: Tensor,
        logits: Tensor,
        total: Tensor,
        targets: Tensor,
        derivatives: Sequence[Tensor | None],
    ) -> None:
        if self.columns:
            rest = *local_columns(self, targets, self.columns), self.vocab_size
            self.differentiate(product, logits, total, self.scored_softcap, *rest, *derivatives)

    def joint_logsumexp(self, own: Tensor) -> Tensor:
        """See Head. Collective."""
        return all_gather(own[None], 0, self.tensor_ranks.group).logsumexp(0)

    def joint_sum(self, own: Tensor) -> Tensor:
        """See Head. Collective."""
        return sum_over_ranks(own, self.tensor_ranks.group)

    def joint_columns(self, own: Tensor) -> Tensor:
        """See Head. Collective."""
        return all_gather(own, -1, self.tensor_ranks.group)


class TensorScoreHead(TensorModule, ScoreHead):
    """A replicated head of scores: each rank computes them for all tokens.

    The gradient of the hidden states is this rank's summand, as TensorHead's.
    """

    def numbers(self, hidden: Tensor) -> Tensor:
        ranks = self.tensor_ranks
        bias = None if self.bias is None else replicated(self.bias, ranks)
        numbers = F.linear(hidden, replicated(self.weight, ranks), bias)
        return ShareGradient.apply(numbers, ranks.size)


class TensorStatesHead(TensorModule, StatesHead):
    def numbers(self, hidden: Tensor) -> Tensor:
        return ShareGradient.apply(hidden, self.tensor_ranks.size)


class TensorDecoder(TensorModule, Decoder):
    def all_tokens(self, x: Tensor) -> Tensor:
        return self.tensor_ranks.gather_tokens(x)

    def inference(self) -> AbstractContextManager[None]:
        """See Decoder. The number of tokens need not be divisible by the number of ranks."""
        return self.tensor_ranks.whole_rows()

    def run_blocks(
        self,
        x: Tensor,
        positions: Tensor,
        layout: PackedAttention,
        blocks: Mapping[str, nn.Module],
        caches: Mapping[str, Cache] = MappingProxyType({}),
        token_share: Tensor | None = None,
    ) -> tuple[Tensor, Auxiliary]:
        """See Decoder. Auxiliary values are summed over all ranks' tokens, on every rank."""
        ranks = self.tensor_ranks
        if token_share is not None:
            token_share = token_share.chunk(ranks.size, TOKENS)[ranks.rank]
        x, auxiliary = super().run_blocks(x, positions, layout, blocks, caches, token_share)
        sums = {name: SumValue.apply(value, ranks.group) for name, value in auxiliary.items()}
        return x, sums
