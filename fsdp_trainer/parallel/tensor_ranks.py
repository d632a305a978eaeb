"""The ranks of a tensor group, and their collectives with a gradient."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_trainer.base.distributed import ALL_GATHER, REDUCE_SCATTER

TOKENS = 1  # the dimension of [batch, length, hidden] that is sharded between blocks
Gradients = tuple[Tensor | None, ...]


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
        return Gather.apply(x, TOKENS, self.group) if self.shards_tokens else x

    def sum_and_shard_tokens(self, x: Tensor) -> Tensor:
        """Return the sum over ranks, for this rank's part of the tokens.

        x: [batch, length, hidden], this rank's summand for all tokens.
        """
        if self.shards_tokens:
            return Scatter.apply(x, TOKENS, self.group)
        return sum_over_ranks(x, self.group)

    @contextmanager
    def whole_rows(self) -> Iterator[None]:
        self.shards_tokens = False
        try:
            yield
        finally:
            self.shards_tokens = True


class Gather(torch.autograd.Function):
    """All-gather along one dimension. Backward is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        return reduce_scatter(gradients[0], ctx.dim, ctx.group), None, None


class Scatter(torch.autograd.Function):
    """Reduce-scatter along one dimension. Backward is an all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        return all_gather(gradients[0], ctx.dim, ctx.group), None, None


class Sum(torch.autograd.Function):
    """All-reduce in forward and in backward, for a sum that ranks use for different outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return sum_over_ranks(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        return sum_over_ranks(gradients[0], ctx.group), None


class SumGradient(torch.autograd.Function):
    """Identity in forward, all-reduce in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        return sum_over_ranks(gradients[0], ctx.group), None


class ShareGradient(torch.autograd.Function):
    """Identity in forward; backward divides by the number of ranks, which then sum gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        ctx.size = size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        return gradients[0] / ctx.size, None


class SumValue(torch.autograd.Function):
    """All-reduce in forward, identity in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return sum_over_ranks(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        return gradients[0], None


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return along(dim, x, x.shape[dim] * dist.get_world_size(group), ALL_GATHER, group)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
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
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x
