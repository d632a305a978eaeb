"""Expert parallelism (Lepikhin et al. 2021): the ranks of an expert group divide a block's experts.

Each rank routes its own tokens. An all-to-all brings every row to the rank that has its expert, and
another brings the results back; no row is dropped, and any number of them may go anywhere.

Experts are on a view of the mesh of their own: what a rank of a group holds of them, fully_shard
divides further over the ranks that hold the same ones. That view takes the ranks of `shard`,
`context` and `tensor` alike, since all of them have other tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_trainer.models.config import EXPERTS as FEED_FORWARD
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.moe import ClampedExperts, Experts, MixtureOfExperts, Rearranged
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.torch_private import placement_on

EXPERTS = 0  # the dimension of [experts, out, in] that an expert group divides
ROWS = 1  # the one that fully_shard divides where there are more ranks than experts


def share_experts(model: Decoder, dims: Dims) -> None:
    """Have the ranks of an expert group compute a part of the experts each, if there are several.

    After adapters and freezing, before activation checkpointing, compile and fully_shard.
    """
    size = dims.expert_sizes["expert"]
    if size == 1:
        return
    mesh = dims.expert_mesh["expert"]
    ranks = ExpertRanks(mesh.get_group(), size)
    for experts in all_experts(model):
        experts.__class__ = SHARED[type(experts)]
        experts.expert_ranks = ranks
        for module in experts.modules():  # matrices, and those of their adapters
            for name, parameter in list(module.named_parameters(recurse=False)):
                # no rank sends anything: there are no numbers yet
                placed = distribute_tensor(
                    parameter.detach(), mesh, [Shard(EXPERTS)], src_data_rank=None
                )
                setattr(module, name, nn.Parameter(placed, parameter.requires_grad))


def expert_placement(model: Decoder, dims: Dims) -> Callable[[nn.Parameter], Any] | None:
    """Return what tells fully_shard of a block's parameters which mesh, and which dimension.

    Experts are divided over the ranks that hold the same ones. None: all are on one mesh.
    """
    if FEED_FORWARD not in model.config.feed_forwards or not dims.parts_experts:
        return None
    # on all stages of a pipeline, also those without experts: the mesh is made by all ranks
    mesh = dims.expert_mesh
    names = [name for name in mesh.mesh_dim_names or () if name in ("replicate", "eshard")]
    experts = {id(p): p for module in all_experts(model) for p in module.parameters()}
    place = placement_on(mesh[tuple(names)])
    shards = dims.expert_sizes["eshard"]

    def placement(parameter: nn.Parameter) -> Any:
        if id(parameter) not in experts:
            return None
        return place(Shard(divided(parameter, dims.expert_sizes["expert"], shards)))

    return placement


def divided(parameter: Tensor, ranks: int, shards: int) -> int:
    """Return the dimension of experts' weights that fully_shard divides over `shards` ranks.

    ranks: those that divide the experts among them.
    """
    own = parameter.shape[EXPERTS] // ranks
    # FSDP2 divides no other dimension than the first unevenly
    divides = parameter.ndim > ROWS and parameter.shape[ROWS] % shards == 0
    return ROWS if own < shards and divides else EXPERTS


def all_experts(model: nn.Module) -> list[Any]:
    """Return the experts of each block that has some."""
    return [module.experts for module in model.modules() if isinstance(module, MixtureOfExperts)]


@dataclass(eq=False)
class ExpertRanks:
    """The ranks that divide a block's experts among them: each has as many, one after the other."""

    group: dist.ProcessGroup | None
    size: int

    def exchange(
        self,
        received: Tensor,
        sent: Tensor,
        come: list[int] | None = None,
        to: list[int] | None = None,
    ) -> None:
        """Fill `received` with what all ranks send to this one. Collective.

        come, to: rows from and for each rank; None: as many for each.
        """
        # gloo writes wrong numbers where memory is not contiguous, and says nothing
        dist.all_to_all_single(received, sent.contiguous(), come, to, group=self.group)

    def row_numbers(self, counts: Tensor, received: Tensor) -> list[list[int]]:
        """Return how many rows go to each rank, and come from each. The host waits for them.

        counts, received: [ranks, experts of a rank].
        """
        return torch.stack([counts.sum(1), received.sum(1)]).tolist()


class RowNumbers(NamedTuple):
    """Rows that travel for a block and micro-batch.

    received: [ranks, experts of a rank], of those that come; to, come: by rank, on the host.
    """

    received: Tensor
    to: list[int]
    come: list[int]


class SharedExperts(Experts):
    """Experts of which each rank has some."""

    expert_ranks: ExpertRanks
    known: list[RowNumbers] | None = None
    """Keeps the numbers of rows from forward until backward computes the block again."""

    def own(self, parameter: Any) -> Tensor:
        """See Experts: with its graph."""
        return parameter.to_local()

    @torch.compiler.disable
    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """See Experts: of all experts, the rows of this rank's tokens. Collective.

        The host waits for the numbers of rows, once for each micro-batch.
        """
        ranks = self.expert_ranks
        received, sent_to, received_from = self.row_numbers(ends)
        # from each rank come the rows of one expert after the other
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


class SharedClampedExperts(SharedExperts, ClampedExperts):
    """GPT-OSS's experts of which each rank has some."""


SHARED: dict[type[Experts], type[SharedExperts]] = {
    Experts: SharedExperts,
    ClampedExperts: SharedClampedExperts,
}


def with_known_rows(block: Any, known: list[RowNumbers], *args: Any) -> Any:
    """Return a block's output, computed with known numbers of rows; an empty list is filled.

    Routing is the same when a block is computed again, so its ranks need not exchange them again.
    """
    block.mlp.experts.known = known
    return type(block).forward(block, *args)


def divides_experts(block: nn.Module) -> bool:
    """Return True for a block whose experts are on several ranks."""
    return any(isinstance(module, SharedExperts) for module in block.modules())


def exchange_counts(counts: Tensor, ranks: ExpertRanks) -> Tensor:
    """Return how many rows come from each rank for each of this rank's experts. Collective.

    counts: [ranks, experts of a rank], of the rows that go to each.
    """
    counts = counts.long()
    received = torch.empty_like(counts, memory_format=torch.contiguous_format)
    ranks.exchange(received, counts)
    return received


class ExchangeRows(torch.autograd.Function):
    """An all-to-all of rows, as many as there are for each rank. Its own transpose."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, to: list[int], come: list[int], ranks: ExpertRanks
    ) -> Tensor:
        """Return [Σ come, width], those of rank 0 first.

        rows: [Σ to, width], those for rank 0 first; to, come: by rank.
        """
        ctx.to, ctx.come, ctx.ranks = to, come, ranks
        return exchange_rows(rows, to, come, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Send each row of the gradient back to where the row came from."""
        return exchange_rows(gradients[0], ctx.come, ctx.to, ctx.ranks), None, None, None


def exchange_rows(rows: Tensor, to: list[int], come: list[int], ranks: ExpertRanks) -> Tensor:
    """Return the rows that come, [Σ come, width], contiguous. Collective."""
    received = rows.new_empty(sum(come), *rows.shape[1:])
    ranks.exchange(received, rows, come, to)
    return received
