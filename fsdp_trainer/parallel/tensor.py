"""Tensor parallelism (Shoeybi et al. 2019) with sequence parallelism (Korthikanti et al. 2022).

The ranks of a tensor group divide each block's heads and feed-forward channels, and the rows of
the vocabulary. Outside attention and feed-forward each rank holds a part of the tokens of a row: an
all-gather before either of them collects the tokens, and a reduce-scatter after it sums the ranks'
results and divides the tokens again.

Parameters are DTensors, as fully_shard, checkpoints and the optimizer need. All computation uses
this rank's plain tensors: torch's DTensor modules cost about twice as much host time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType, MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from fsdp_trainer.base.distributed import ALL_GATHER, REDUCE_SCATTER, local_slice
from fsdp_trainer.models.adapters.adapter_spec import MAGNITUDE, A
from fsdp_trainer.models.adapters.adapters import row_squares
from fsdp_trainer.models.attention import Cache, PackedAttention
from fsdp_trainer.models.decoder import COLUMNS, ROWS, WHOLE, Attention, Auxiliary, Decoder
from fsdp_trainer.models.four_bit import DecodedProduct, Linear4
from fsdp_trainer.models.head import Head, Scores, cap_logits, write_logits
from fsdp_trainer.models.moe import Gate, MixtureOfExperts, Router
from fsdp_trainer.models.norm import RMSNorm
from fsdp_trainer.models.soft_targets import own_columns
from fsdp_trainer.parallel.convert import float8_product, is_float8
from fsdp_trainer.parallel.dims import Dims

TOKENS = 1  # the dimension of [batch, length, hidden] that is sharded between blocks
Gradients = tuple[Tensor | None, ...]


def shard_tensors(model: Any, dims: Dims) -> None:
    """Shard a model over the ranks of a tensor group, if it has several.

    model: a Decoder, which becomes a TensorDecoder. Must be called after adapters and freezing,
    before activation checkpointing, compile and fully_shard.
    """
    if dims.tensor_mesh is None:
        return
    mesh = dims.tensor_mesh
    group = mesh.get_group()
    ranks = TensorRanks(group, dist.get_rank(group), dist.get_world_size(group))
    for block in model.model.layers.values():
        shard_block(block, ranks, mesh)
        gather_key_heads(block.self_attn, model.config.num_key_value_heads, ranks)
    # a pipeline stage may lack norm, embedding or head
    if model.model.norm is not None:
        turn_into(model.model.norm, ReplicatedNorm, ranks, mesh, Replicate())
    tables = {TensorEmbedding: model.model.embed_tokens, TensorHead: model.lm_head}
    tables = {kind: table for kind, table in tables.items() if table is not None}
    for kind, table in tables.items():
        turn_into(table, kind, ranks, mesh, Shard(0))
    model.tie_weights()
    for table in tables.values():
        table.set_rows()
    model.__class__ = TensorDecoder
    model.tensor_ranks = ranks


# --- collectives ----------------------------------------------------------------------------------


@dataclass(eq=False)
class TensorRanks:
    """The ranks of this rank's tensor group.

    shards_tokens: True: each holds a part of the tokens between two modules; False, for inference
    on any number of tokens: each holds all tokens.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    shards_tokens: bool = True

    def gather_tokens(self, x: Tensor) -> Tensor:
        """Return all tokens, [batch, length, hidden]. x: this rank's part of them."""
        return Gather.apply(x, TOKENS, self.group) if self.shards_tokens else x

    def sum_and_shard_tokens(self, x: Tensor) -> Tensor:
        """Return the sum over ranks, for this rank's part of the tokens.

        x: [batch, length, hidden], this rank's summand for all tokens.
        """
        if self.shards_tokens:
            return Scatter.apply(x, TOKENS, self.group)
        return sum_over_ranks(x, self.group)

    def gather_first_argument(self, module: nn.Module, args: tuple) -> tuple:
        """Gather all tokens of a module's input, as a forward_pre_hook."""
        return (self.gather_tokens(args[0]), *args[1:])

    @contextmanager
    def whole_rows(self) -> Iterator[None]:
        """Return a context in which each rank holds all tokens between the modules."""
        self.shards_tokens = False
        try:
            yield
        finally:
            self.shards_tokens = True


class Gather(torch.autograd.Function):
    """All-gather along one dimension. Backward is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        """Return the concatenated parts of all ranks. x: this rank's part."""
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        """Return the gradient of this rank's part. gradients: this rank's summand for all."""
        return reduce_scatter(gradients[0], ctx.dim, ctx.group), None, None


class Scatter(torch.autograd.Function):
    """Reduce-scatter along one dimension. Backward is an all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        """Return this rank's part of the sum over ranks. x: this rank's summand."""
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        """Return the gradient of the summand. gradients: gradient of this rank's part."""
        return all_gather(gradients[0], ctx.dim, ctx.group), None, None


class Sum(torch.autograd.Function):
    """All-reduce in forward and in backward, for a sum that ranks use for different outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the sum over ranks. x: this rank's summand."""
        ctx.group = group
        return sum_over_ranks(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        """Return the sum of the ranks' gradients. gradients: this rank's summand."""
        return sum_over_ranks(gradients[0], ctx.group), None


class SumGradient(torch.autograd.Function):
    """Identity in forward, all-reduce in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return x unchanged. x: equal on every rank."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        """Return the sum of the ranks' gradients. gradients: this rank's summand."""
        return sum_over_ranks(gradients[0], ctx.group), None


class SumValue(torch.autograd.Function):
    """All-reduce in forward, identity in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the sum over ranks. x: this rank's summand."""
        return sum_over_ranks(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        """Return the gradient unchanged. gradients: equal on every rank."""
        return gradients[0], None


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return the ranks' parts concatenated along `dim`, contiguous. Collective."""
    return along(dim, x, x.shape[dim] * dist.get_world_size(group), ALL_GATHER, group)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part, along `dim`, of the sum over ranks, contiguous. Collective."""
    return along(dim, x, x.shape[dim] // dist.get_world_size(group), REDUCE_SCATTER, group)


def along(
    dim: int, x: Tensor, size: int, collective: Callable[..., Any], group: dist.ProcessGroup
) -> Tensor:
    """Apply a collective for dimension 0 to dimension `dim`, whose size becomes `size`."""
    dim %= x.ndim
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    if before.numel() != 1:
        moved = x.movedim(dim, 0)
        return along(0, moved, size, collective, group).movedim(0, dim).contiguous()
    out = torch.empty((*before, size, *after), dtype=x.dtype, device=x.device)
    # gloo silently reads and writes wrong numbers if memory is not contiguous
    collective(out.view(-1), x.contiguous().view(-1), group=group)
    return out


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks. Collective."""
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


# --- parameters -----------------------------------------------------------------------------------


def place(module: nn.Module, mesh: DeviceMesh, placement: Placement, *names: str) -> None:
    """Turn parameters without storage into DTensors on the tensor mesh."""
    for name in names:
        parameter = getattr(module, name)
        if parameter is not None:
            # src_data_rank=None: nothing to send, since the weights are on the meta device
            placed = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
            setattr(module, name, nn.Parameter(placed, parameter.requires_grad))


def turn_into(
    module: Any, cls: type, ranks: TensorRanks, mesh: DeviceMesh, placement: Placement
) -> None:
    """Change a module's class to one with the forward of `cls`, and place its weight."""
    kind: Any = type(module)
    module.__class__ = cls if issubclass(cls, kind) else combined_class(cls, kind)
    module.tensor_ranks = ranks
    place(module, mesh, placement, "weight")


@lru_cache
def combined_class(cls: type, kind: type) -> type:
    """Return a subclass of both; its forward is that of `cls`. kind: a class of linear layers."""
    return type(f"{cls.__name__}{kind.__name__}", (cls, kind), {})


def local(parameter: Any) -> Tensor:
    """Return this rank's part of a parameter (all, if replicated), attached to the graph."""
    return parameter.to_local()


def replicated(parameter: Any, ranks: TensorRanks) -> Tensor:
    """Return a replicated parameter whose gradient is the sum of the ranks' gradients.

    DTensor's own sum (`grad_placements`) takes more host time. Besides, torch caches groups by the
    shape of a mesh, so a second run in one process could sum over groups of the first.
    """
    return SumGradient.apply(parameter.to_local(), ranks.group)


# --- modules --------------------------------------------------------------------------------------


class SharedLinear(nn.Module):
    """Base class of linear layers under tensor parallelism: torch's, in float8 or in 4 bits."""

    tensor_ranks: TensorRanks
    weight: Tensor
    bias: Tensor | None
    lora_A: Any
    lora_B: Any
    lora_magnitude_vector: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for x: [batch, tokens, in]."""
        out = self.multiplied(x)
        return out if self.bias is None else out + self.own(self.bias)

    def multiplied(self, x: Tensor) -> Tensor:
        """Return the product with the matrix."""
        return product(self, x, local(self.weight))

    def own(self, parameter: Tensor) -> Tensor:
        """Return the part of a vector over output channels that this rank's outputs need."""
        return local(parameter)

    def row_squares(self) -> Tensor:
        """Return the squared length, including the adapter, of each row of the outputs: [out]."""
        a, b = (local(matrix.weight) for matrix in (self.lora_A, self.lora_B))
        return row_squares(self, local(self.weight), a, b)


class ColumnLinear(SharedLinear):
    """A linear layer sharded over its outputs: each rank computes a part of them for all tokens.

    Maps [batch, length, in] to [batch, length, out / ranks].
    """


class RowLinear(SharedLinear):
    """A linear layer sharded over its inputs: the ranks' products are summed.

    Maps [batch, length, in / ranks] to [batch, length / ranks, out].
    """

    def multiplied(self, x: Tensor) -> Tensor:
        """See SharedLinear. Collective."""
        return self.tensor_ranks.sum_and_shard_tokens(super().multiplied(x))

    def own(self, parameter: Tensor) -> Tensor:
        """See SharedLinear."""
        return replicated(parameter, self.tensor_ranks)

    def row_squares(self) -> Tensor:
        """See SharedLinear. Collective."""
        return sum_over_ranks(super().row_squares(), self.tensor_ranks.group)


class ReplicatedLinear(SharedLinear):
    """A replicated linear layer.

    Each rank's gradient is for its tokens or for its output channels only; they are summed.
    """

    def multiplied(self, x: Tensor) -> Tensor:
        """See SharedLinear."""
        return product(self, x, replicated(self.weight, self.tensor_ranks))

    def own(self, parameter: Tensor) -> Tensor:
        """See SharedLinear."""
        return replicated(parameter, self.tensor_ranks)


def product(linear: Any, x: Tensor, weight: Tensor) -> Tensor:
    """Return x Wᵀ, computed in the layer's format. weight: this rank's part of its matrix."""
    if isinstance(linear, Linear4):
        return DecodedProduct.apply(x, weight, None)
    if is_float8(linear):
        return float8_product(linear, x, weight)
    return F.linear(x, weight)


class ReplicatedRouter(Router):
    """A replicated router for this rank's tokens."""

    tensor_ranks: TensorRanks

    def matrix(self) -> Tensor:
        """See Router."""
        return replicated(self.weight, self.tensor_ranks)

    def offsets(self) -> Tensor | None:
        """See Router."""
        return None if self.bias is None else replicated(self.bias, self.tensor_ranks)


class ReplicatedGate(Gate):
    """A replicated gate of a shared expert, for this rank's tokens."""

    tensor_ranks: TensorRanks

    def matrix(self) -> Tensor:
        """See Gate."""
        return replicated(self.weight, self.tensor_ranks)


class HeadSinks(Attention):
    """Attention with sinks, sharded over heads."""

    def own_sinks(self) -> Tensor | None:
        """See Attention."""
        return local(self.sinks)


class ReplicatedNorm(RMSNorm):
    """A replicated norm of complete vectors.

    Each rank's gradient is for its tokens, heads or columns only; they are summed.
    """

    tensor_ranks: TensorRanks

    def forward(self, x: Tensor) -> Tensor:
        """Return x normalised, shaped as x: [..., size]."""
        return self.normalize(x, replicated(self.weight, self.tensor_ranks))


class ColumnNorm(RMSNorm):
    """A norm of vectors that are sharded over ranks."""

    tensor_ranks: TensorRanks

    def forward(self, x: Tensor) -> Tensor:
        """Return x normalised, shaped as x: [..., size / ranks]."""
        return self.normalize(x, local(self.weight))

    def mean_square(self, x: Tensor) -> Tensor:
        """Return the mean square over the parts of all ranks: [..., 1]. Collective."""
        ranks = self.tensor_ranks
        total = Sum.apply(x.pow(2).sum(-1, keepdim=True), ranks.group)
        return total / (x.shape[-1] * ranks.size)


class TensorEmbedding(nn.Embedding):
    """An embedding sharded over rows."""

    tensor_ranks: TensorRanks

    def set_rows(self) -> None:
        """Set the first row and the number of rows of this rank."""
        rows = local_slice(self.weight)[0]
        self.first, self.rows = rows.start, rows.stop - rows.start

    def forward(self, tokens: Tensor) -> Tensor:
        """Return [batch, length / ranks, hidden] for tokens: [batch, length] int64."""
        index = tokens - self.first
        is_other = (index < 0) | (index >= self.rows)
        x = F.embedding(index.clamp(0, self.rows - 1), local(self.weight))
        return self.tensor_ranks.sum_and_shard_tokens(x.masked_fill(is_other.unsqueeze(-1), 0))


class TensorHead(Head):
    """A head sharded over the vocabulary, with one collective for each chunk.

    All ranks have the same number of rows (ModelConfig.with_equal_rows); the last ranks may have
    only padding. The gradient of the hidden states is this rank's summand.
    """

    tensor_ranks: TensorRanks

    def set_rows(self) -> None:
        """Set the first token and the number of logits of this rank."""
        rows = local_slice(self.weight)[0]
        self.first = rows.start
        self.columns = max(0, min(self.vocab_size, rows.stop) - rows.start)
        self.score = score_columns

    def rows(self) -> Tensor:
        """See Head."""
        return local(self.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """See Head. Used for inference, has no gradient. Collective."""
        logits = F.linear(hidden, local(self.weight))
        logits = logits if self.softcap is None else cap_logits(logits, self.softcap)
        return all_gather(logits, -1, self.tensor_ranks.group)[..., : self.vocab_size]

    def score_logits(
        self, product: Tensor, logits: Tensor, targets: Tensor, with_mean: bool
    ) -> tuple[Scores, Tensor, Tensor | None]:
        """See Head. Collective.

        For each token the ranks exchange their largest logit, Σ exp(logit - largest), the target's
        logit or 0, and with `with_mean` the sum of the logits.
        """
        softcap_grad = None
        if self.columns:
            own, is_own = own_columns(self, targets, self.columns)
            columns, softcap_grad = self.score(
                product, logits, own, is_own, self.scored_softcap, with_mean
            )
        else:  # this rank has only padding
            columns = logits.new_zeros(3 + with_mean, len(targets))
            columns[0] = -torch.inf
        ranks = self.tensor_ranks
        gathered = all_gather(columns, 0, ranks.group).unflatten(0, (ranks.size, -1))
        largest = gathered[:, 0].amax(0)
        total = (gathered[:, 1] * (gathered[:, 0] - largest).exp()).sum(0)
        logsumexp = largest + total.log()
        log_probability = gathered[:, 2].sum(0) - logsumexp
        mean = gathered[:, 3].sum(0) / self.vocab_size - logsumexp if with_mean else None
        # divisor of this rank's exponentials; infinite on a rank with only padding
        divisor = (logsumexp - columns[0]).exp()[:, None]
        return Scores(log_probability, logsumexp, mean), divisor, softcap_grad

    def write_gradient(
        self,
        product: Tensor,
        logits: Tensor,
        total: Tensor,
        softcap_grad: Tensor | None,
        targets: Tensor,
        derivatives: Sequence[Tensor],
    ) -> None:
        """See Head."""
        if self.columns:
            own, is_own = own_columns(self, targets, self.columns)
            size = self.vocab_size
            self.differentiate(
                product, logits, total, softcap_grad, own, is_own, size, *derivatives
            )

    def joint_logsumexp(self, own: Tensor) -> Tensor:
        """See Head. Collective."""
        return all_gather(own[None], 0, self.tensor_ranks.group).logsumexp(0)

    def joint_sum(self, own: Tensor) -> Tensor:
        """See Head. Collective."""
        return sum_over_ranks(own, self.tensor_ranks.group)

    def joint_columns(self, own: Tensor) -> Tensor:
        """See Head. Collective."""
        return all_gather(own, -1, self.tensor_ranks.group)


class TensorDecoder(Decoder):
    """A decoder made of the modules above."""

    tensor_ranks: TensorRanks

    def all_tokens(self, x: Tensor) -> Tensor:
        """Return the tokens gathered from all ranks. See Decoder."""
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


def score_columns(
    product: Tensor,
    logits: Tensor,
    targets: Tensor,
    is_own: Tensor,
    softcap: float | None,
    with_mean: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return this rank's part of a chunk's scores, [3 or 4, rows], and the softcap's derivative.

    The scores of a token are the largest logit, Σ exp(logit - largest), the target's logit or 0,
    and with `with_mean` Σ logit. product, logits: see models.head.score_chunk. targets, is_own:
    columns on this rank, and True if the target is among them.
    """
    softcap_grad = write_logits(product, logits, softcap)
    target_logits = torch.where(is_own, logits.gather(-1, targets[:, None])[:, 0], 0.0)
    sums = [logits.sum(-1)] if with_mean else []
    largest = logits.amax(-1)
    total = logits.sub_(largest[:, None]).exp_().sum(-1)
    return torch.stack([largest, total, target_logits, *sums]), softcap_grad


def shard_block(block: Any, ranks: TensorRanks, mesh: DeviceMesh) -> None:
    """Convert a block's modules to the classes above."""
    readers = [block.self_attn, block.mlp]
    if getattr(block.self_attn, "sinks", None) is not None:
        block.self_attn.__class__ = HeadSinks
        place(block.self_attn, mesh, Shard(0), "sinks")
    experts: set[nn.Module] = set()
    if isinstance(block.mlp, MixtureOfExperts):
        replicate_router(block.mlp, ranks, mesh)
        readers.remove(block.mlp)
        if block.mlp.shared:
            readers.append(getattr(block.mlp, block.mlp.shared))
        experts = set(block.mlp.experts.modules())
    for name, module in list(block.named_modules()):
        if module not in experts:
            shard_module(name.rpartition(".")[2], module, ranks, mesh)
    for reader in readers:
        reader.register_forward_pre_hook(ranks.gather_first_argument)


def replicate_router(mixture: MixtureOfExperts, ranks: TensorRanks, mesh: DeviceMesh) -> None:
    """Replicate router and gate, so that each rank routes its own tokens.

    The experts are on a separate mesh. A shared expert is sharded like a dense feed-forward.
    """
    turn_into(mixture.gate, ReplicatedRouter, ranks, mesh, Replicate())
    place(mixture.gate, mesh, Replicate(), "bias")
    if mixture.gates_shared:
        turn_into(mixture.shared_expert_gate, ReplicatedGate, ranks, mesh, Replicate())


def shard_module(name: str, module: Any, ranks: TensorRanks, mesh: DeviceMesh) -> None:
    """Convert a module of a block to one of the classes above. name: its name in its parent."""
    if name in COLUMNS:
        turn_into(module, ColumnLinear, ranks, mesh, Shard(0))
        place(module, mesh, Shard(0), "bias")
        shard_adapter(module, ReplicatedLinear, Replicate(), ColumnLinear, Shard(0), ranks, mesh)
        if hasattr(module, MAGNITUDE):
            place(module, mesh, Shard(0), MAGNITUDE)
    elif name in ROWS:
        turn_into(module, RowLinear, ranks, mesh, Shard(1))
        place(module, mesh, Replicate(), "bias")
        shard_adapter(module, RowLinear, Shard(1), ReplicatedLinear, Replicate(), ranks, mesh)
        if hasattr(module, MAGNITUDE):
            place(module, mesh, Replicate(), MAGNITUDE)
        if isinstance(module, Linear4):
            module.in_features //= ranks.size
    elif name in WHOLE:
        keep_whole(module, ranks, mesh)
    elif isinstance(module, Attention) and module.qk_norm == "whole":
        for norm in (module.q_norm, module.k_norm):
            turn_into(norm, ColumnNorm, ranks, mesh, Shard(0))
    elif type(module) is RMSNorm:
        turn_into(module, ReplicatedNorm, ranks, mesh, Replicate())


def keep_whole(module: Any, ranks: TensorRanks, mesh: DeviceMesh) -> None:
    """Replicate a linear layer; the ranks' gradients of it are summed."""
    vectors = [name for name in ("bias", MAGNITUDE) if hasattr(module, name)]
    turn_into(module, ReplicatedLinear, ranks, mesh, Replicate())
    place(module, mesh, Replicate(), *vectors)
    shard_adapter(module, ReplicatedLinear, Replicate(), ReplicatedLinear, Replicate(), ranks, mesh)


def shard_adapter(
    linear: Any,
    a: type,
    placement_a: Placement,
    b: type,
    placement_b: Placement,
    ranks: TensorRanks,
    mesh: DeviceMesh,
) -> None:
    """Convert the matrices of a linear layer's adapter, if it has one, to classes `a` and `b`."""
    if hasattr(linear, A):
        turn_into(linear.lora_A, a, ranks, mesh, placement_a)
        turn_into(linear.lora_B, b, ranks, mesh, placement_b)
        forward = dora_forward if hasattr(linear, MAGNITUDE) else lora_forward
        linear.forward = MethodType(forward, linear)


def lora_forward(self: Any, x: Tensor) -> Tensor:
    """Return W x + scale · B(A x) plus the bias; the matrices' forwards communicate."""
    return type(self).forward(self, x) + self.lora_B(self.lora_A(x)) * self.lora_scale


def dora_forward(self: Any, x: Tensor) -> Tensor:
    """Compute DoRA as models.adapters does. Collective; for o and down so are the lengths."""
    with torch.no_grad():
        lengths = self.row_squares().clamp_min(0).sqrt()
    factor = (self.own(self.lora_magnitude_vector).float() / lengths).to(x.dtype)
    out = self.multiplied(x) + self.lora_B(self.lora_A(x)) * self.lora_scale
    return factor * out if self.bias is None else factor * out + self.own(self.bias)


def gather_key_heads(attention: Attention, heads: int, ranks: TensorRanks) -> None:
    """Gather the key head that each rank's queries attend to, if there are fewer heads than ranks.

    Each rank computes a part of a key head; a hook gathers the parts. heads: number of key heads.
    """
    if heads >= ranks.size:
        return
    size = attention.head_dim
    first = ranks.rank * heads // ranks.size * size

    def gather(module: nn.Module, args: tuple, out: Tensor) -> Tensor:
        return Gather.apply(out, 2, ranks.group)[..., first : first + size]

    # a norm over all heads together is applied before the parts are gathered
    keys = attention.k_norm if attention.qk_norm == "whole" else attention.k_proj
    for module in (keys, attention.v_proj):
        module.register_forward_hook(gather)
