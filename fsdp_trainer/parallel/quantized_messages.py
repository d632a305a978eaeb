"""Messages of fully_shard in 8-bit numbers: gathered weights, and gradients to be reduced.

See base/eight_bit_messages.py for the encoding. Every rank decodes the same bytes, so all compute
with equal weights: a weight differs from the stored one by at most 1 / 254 of the largest magnitude
in its block, and by the rounding of precision.param_dtype. A gradient is summed over ranks in
float32, in the order of the ranks, and each rank's addends are encoded once: the error of a sum is
at most the sum of 1 / 254 of the largest magnitudes in the ranks' blocks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fsdp_trainer.base.distributed import ALL_GATHER
from fsdp_trainer.base.eight_bit_messages import decode, encode
from fsdp_trainer.base.torch_private import replace_all_gathers, replace_reduce_scatters


class Messages:
    """Base class of what sends fully_shard's messages. See torch's AllGather and ReduceScatter."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class QuantizedAllGather(Messages):
    """Gathers weights in 8-bit numbers. Integers, and a second copy, are gathered as they are.

    ranks: number of ranks over which the weights are sharded. A smaller group gathers a second
    copy, of numbers that were encoded once already. See FSDPModule.set_custom_all_gather.
    """

    def __init__(self, ranks: int):
        self.ranks = ranks

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        if not input_tensor.is_floating_point() or group.size() < self.ranks:
            return ALL_GATHER(output_tensor, input_tensor, group=group, async_op=async_op)
        own = encode(input_tensor[None])
        parts = own.new_empty(group.size(), own.shape[1])
        ALL_GATHER(parts, own, group=group)
        decode(parts, output_tensor.view(group.size(), -1))
        return None


class QuantizedReduceScatter(Messages):
    """Sums gradients over ranks in float32; each rank sends its addends in 8-bit numbers.

    feedback: True to add what encoding has cut off to the next message of the same unit, which
    takes as much memory as the unit's whole gradient in float32. See
    FSDPModule.set_custom_reduce_scatter.
    """

    def __init__(self, feedback: bool):
        self.feedback = feedback
        self._cut_off: Tensor | None = None

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        size = len(output_tensor)
        addends = input_tensor.view(group.size(), size)
        if self.feedback:
            cut_off = 0.0 if self._cut_off is None else self._cut_off
            addends = addends.float() + cut_off
        own = encode(addends)
        if self.feedback:
            sent = torch.empty_like(addends)
            decode(own, sent)
            # an update that is skipped because a gradient is not finite must not stay
            self._cut_off = addends.sub_(sent).nan_to_num_(0.0, 0.0, 0.0)
        parts = torch.empty_like(own)
        dist.all_to_all_single(parts, own, group=group)
        total = own.new_zeros(1, size, dtype=torch.float32)
        addend = torch.empty_like(total)
        for part in parts:
            decode(part[None], addend)
            total += addend
        output_tensor.copy_(total[0])
        return None


def quantize_messages(modules: list[FSDPModule], which: str, feedback: bool) -> None:
    """Let units gather weights, or reduce gradients, in 8-bit numbers.

    which: sharding.quantize; feedback: sharding.error_feedback.
    """
    for module in modules:
        if which in ("weights", "both"):
            replace_all_gathers(module, QuantizedAllGather)
        if which in ("gradients", "both"):
            replace_reduce_scatters(module, lambda: QuantizedReduceScatter(feedback))
