"""Expert parallelism (Lepikhin et al. 2021): the ranks of an expert group divide a block's experts.

Each rank routes its own tokens. An all-to-all sends every row (a token's hidden state) to the rank
that has its expert, and another one returns the results. No row is dropped, and any number of rows
may go to any rank.

Experts are on a separate mesh of the same ranks: fully_shard shards the experts of a rank further
over the ranks that have the same experts. That mesh treats the ranks of `shard`, `context` and
`tensor` equally, since all of them have different tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from fsdp_trainer.base.distributed import place
from fsdp_trainer.base.torch_private import placement_on
from fsdp_trainer.models.config import EXPERTS as FEED_FORWARD
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.moe import ClampedExperts, Experts, MixtureOfExperts, Rearranged
from fsdp_trainer.parallel.dims import Dims

EXPERTS = 0  # the dimension of [experts, out, in] that an expert group divides
ROWS = 1  # the dimension that fully_shard divides if there are more ranks than experts


def shard_experts(model: Decoder, dims: Dims) -> None:
    """Divide the experts of each block among the ranks of an expert group, if it has several.

    Must be called after adapters and freezing, before activation checkpointing, compile and
    fully_shard.
    """
    size = dims.expert_sizes["expert"]
    if size == 1:
        return
    mesh = dims.expert_mesh["expert"]
    ranks = ExpertRanks(mesh.get_group(), size)
    for experts in all_experts(model):
        experts.__class__ = SHARDED[type(experts)]
        experts.expert_ranks = ranks
        for module in experts.modules():  # the experts and their adapters
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, place(parameter, mesh, Shard(EXPERTS)))


def expert_placement(model: Decoder, dims: Dims) -> Callable[[nn.Parameter], Any] | None:
    """Return fully_shard's function from a block's parameter to its mesh and sharded dimension.

    Experts are sharded over the ranks that hold the same experts. None: all parameters are on one
    mesh.
    """
    if FEED_FORWARD not in model.config.feed_forwards or not dims.separates_experts:
        return None
    # on all pipeline stages, including those without experts: creating the mesh is collective
    mesh = dims.expert_mesh
    names = [name for name in mesh.mesh_dim_names or () if name in ("replicate", "eshard")]
    experts = {id(p): p for module in all_experts(model) for p in module.parameters()}
    on_mesh = placement_on(mesh[tuple(names)])
    shards = dims.expert_sizes["eshard"]

    def placement(parameter: nn.Parameter) -> Any:
        if id(parameter) not in experts:
            return None
        return on_mesh(Shard(divided(parameter, dims.expert_sizes["expert"], shards)))

    return placement


def divided(parameter: Tensor, ranks: int, shards: int) -> int:
    """Return the dimension of experts' weights that fully_shard divides over `shards` ranks.

    ranks: number of ranks that divide the experts among them.
    """
    own = parameter.shape[EXPERTS] // ranks
    # FSDP2 shards only the first dimension unevenly
    divides = parameter.ndim > ROWS and parameter.shape[ROWS] % shards == 0
    return ROWS if own < shards and divides else EXPERTS


def all_experts(model: nn.Module) -> list[Any]:
    return [module.experts for module in model.modules() if isinstance(module, MixtureOfExperts)]


@dataclass(eq=False)
class ExpertRanks:
    """The ranks of an expert group. Each has the same number of consecutive experts."""

    group: dist.ProcessGroup | None
    size: int

    def exchange(
        self,
        received: Tensor,
        sent: Tensor,
        come: list[int] | None = None,
        to: list[int] | None = None,
    ) -> None:
        """Exchange rows with all ranks: send `sent` and write to `received`. Collective.

        come, to: number of rows from and for each rank; None: the same for each.
        """
        # gloo silently writes wrong numbers if memory is not contiguous
        dist.all_to_all_single(received, sent.contiguous(), come, to, group=self.group)

    def row_numbers(self, counts: Tensor, received: Tensor) -> list[list[int]]:
        """Return the number of rows to each rank and from each rank. Synchronises with the device.

        counts, received: [ranks, experts of a rank], rows to and from each rank by expert.
        """
        return torch.stack([counts.sum(1), received.sum(1)]).tolist()


class RowNumbers(NamedTuple):
    """Numbers of rows that ranks exchange for one block and micro-batch.

    received: [ranks, experts of a rank], rows from each rank for each expert, on the device. to,
    come: rows to and from each rank, on the host.
    """

    received: Tensor
    to: list[int]
    come: list[int]


class ShardedExperts(Experts):
    expert_ranks: ExpertRanks
    known: list[RowNumbers] | None = None
    """Keeps the numbers of rows from forward until backward recomputes the block."""

    def local(self, parameter: Any) -> Tensor:
        return parameter.to_local()

    @torch.compiler.disable
    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """See Experts. rows: this rank's rows for all experts. Collective.

        Synchronises with the device once per micro-batch, for the numbers of rows.
        """
        ranks = self.expert_ranks
        received, sent_to, received_from = self.row_numbers(ends)
        # rows arrive sorted by rank, then by expert
        experts = torch.arange(received.shape[1], device=rows.device).repeat(ranks.size)
        of_rows = experts.repeat_interleave(received.flatten(), output_size=sum(received_from))
        order = of_rows.argsort(stable=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        own_ends = received.sum(0).cumsum(0, dtype=torch.int32)

        arrived = ExchangeRows.apply(rows, sent_to, received_from, ranks)
        computed = super().forward(Rearranged.apply(arrived, order, back, 1), own_ends)
        computed = Rearranged.apply(computed, back, order, 1)
        return ExchangeRows.apply(computed, received_from, sent_to, ranks)

    def row_numbers(self, ends: Tensor) -> RowNumbers:
        """Return the numbers of rows of this micro-batch. Collective, unless they are known.

        ends: as in `forward`.
        """
        if self.known:
            return self.known[0]
        ranks = self.expert_ranks
        counts = torch.diff(ends, prepend=ends.new_zeros(1)).view(ranks.size, -1)
        received = exchange_counts(counts, ranks)
        numbers = RowNumbers(received, *ranks.row_numbers(counts, received))
        if self.known is not None:
            self.known.append(numbers)
        return numbers


class ShardedClampedExperts(ShardedExperts, ClampedExperts):
    """GPT-OSS's experts that are divided among ranks."""


SHARDED: dict[type[Experts], type[ShardedExperts]] = {
    Experts: ShardedExperts,
    ClampedExperts: ShardedClampedExperts,
}


def with_known_rows(block: Any, known: list[RowNumbers], *args: Any) -> Any:
    """Run a block's forward with known numbers of rows; if the list is empty, fill it.

    Routing does not change in recomputation, so the numbers need not be exchanged again.
    """
    block.mlp.experts.known = known
    return type(block).forward(block, *args)


def divides_experts(block: nn.Module) -> bool:
    return any(isinstance(module, ShardedExperts) for module in block.modules())


def exchange_counts(counts: Tensor, ranks: ExpertRanks) -> Tensor:
    """Return the number of rows from each rank for each of this rank's experts. Collective.

    counts: [ranks, experts of a rank], number of rows to each rank for each of its experts.
    """
    counts = counts.long()
    received = torch.empty_like(counts, memory_format=torch.contiguous_format)
    ranks.exchange(received, counts)
    return received


class ExchangeRows(torch.autograd.Function):
    """All-to-all of different numbers of rows for each rank. Backward reverses it."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, to: list[int], come: list[int], ranks: ExpertRanks
    ) -> Tensor:
        """Return the received rows, sorted by rank: [Σ come, width].

        rows: [Σ to, width], sorted by rank; to, come: number of rows for and from each rank.
        """
        ctx.to, ctx.come, ctx.ranks = to, come, ranks
        return exchange_rows(rows, to, come, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return exchange_rows(gradients[0], ctx.come, ctx.to, ctx.ranks), None, None, None


def exchange_rows(rows: Tensor, to: list[int], come: list[int], ranks: ExpertRanks) -> Tensor:
    """Return the received rows, contiguous: [Σ come, width]. Collective."""
    received = rows.new_empty(sum(come), *rows.shape[1:])
    ranks.exchange(received, rows, come, to)
    return received
