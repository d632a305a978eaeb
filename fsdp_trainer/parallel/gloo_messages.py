"""Messages of fully_shard over gloo, with half the processor time of gloo's own collectives.

gloo gathers into a buffer that it then copies, and it scatters a sum by summing everything on every
rank. Here each number goes to the ranks that need it, straight from and to FSDP2's buffers. Sums
are added in gloo's order, so that they are the same to the last bit.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fsdp_trainer.base.distributed import ALL_GATHER, REDUCE_SCATTER
from fsdp_trainer.base.round_up import round_up
from fsdp_trainer.base.torch_private import replace_all_gathers, replace_reduce_scatters
from fsdp_trainer.parallel.quantized_messages import Messages

SEGMENT = 2**20
"""Bytes that gloo sums at once, at most."""


class DirectAllGather(Messages):
    """Gathers weights by a broadcast from each rank. See FSDPModule.set_custom_all_gather."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        if not is_gloo(group):
            return ALL_GATHER(output_tensor, input_tensor, group=group, async_op=async_op)
        parts = output_tensor.view(group.size(), -1)
        parts[group.rank()].copy_(input_tensor)  # nothing, where FSDP2 has put it there
        sent = [
            dist.broadcast(part, group=group, group_src=rank, async_op=True)
            for rank, part in enumerate(parts)
        ]
        for work in sent:
            work.wait()
        return None


class DirectReduceScatter(Messages):
    """Sums gradients from the other ranks' parts. See FSDPModule.set_custom_reduce_scatter."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        ranks, rank = group.size(), group.rank()
        if not (is_gloo(group) and adds_in_turn(input_tensor, ranks, op)):
            return REDUCE_SCATTER(output_tensor, input_tensor, op, group=group, async_op=async_op)
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        first, second, *others = (parts.view(ranks, -1)[rank - i] for i in range(1, ranks + 1))
        torch.add(first, second, out=output_tensor)
        for part in others:
            output_tensor.add_(part)
        return None


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Return True if a group sends over gloo, and not as fake ranks do."""
    return dist.get_backend(group) == "gloo"


def adds_in_turn(addends: Tensor, ranks: int, op: Any) -> bool:
    """Return True if gloo would sum each rank's part in one order: from the rank before it down.

    gloo divides what is summed into as many segments for each rank. Where these do not end with the
    ranks' parts, a part has two orders. With two ranks the order is nothing.
    """
    segments = max(math.ceil(addends.nbytes / SEGMENT), 2 * ranks)
    of_a_rank = round_up(segments, ranks) // ranks
    is_even = ranks == 2 or addends.numel() // ranks % of_a_rank == 0
    return op == dist.ReduceOp.SUM and addends.dtype == torch.float32 and is_even


def send_directly(modules: list[FSDPModule]) -> None:
    """Let units that several ranks share send their messages so."""
    for module in modules:
        replace_all_gathers(module, lambda ranks: DirectAllGather())
        replace_reduce_scatters(module, DirectReduceScatter)
