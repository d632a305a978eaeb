"""Context parallelism: ranks that divide each row's tokens.

A rank of a context group holds the same part of every row in all blocks. Only attention needs the
other parts. The layouts in this file fetch them and pass complete rows to the layouts of
models/attention.py, so that packed documents, windows and softcap need no further code.

ulysses (Jacobs et al. 2023): an all-to-all turns all heads of a part of the tokens into some heads
of all tokens; a second one does the reverse for the results.

gathered (as in Llama 3, §3.3.2): an all-gather brings the keys and values of all ranks to the
queries of this rank's tokens. Tokens are assigned so that all ranks' queries cost the same.

ring: see ring.py.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_trainer.base.distributed import ALL_GATHER, REDUCE_SCATTER, to_device
from fsdp_trainer.models.attention import LAYOUTS
from fsdp_trainer.models.sdpa import PLAIN, Scoring
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.local_queries import LOCAL_QUERIES
from fsdp_trainer.parallel.ring import Ring
from fsdp_trainer.parallel.split_rows import ContextRanks, DealtByCost, Gradients, SplitRows


def context_ranks(
    dims: Dims, method: str, windows: Sequence[int | None] = (None,)
) -> ContextRanks | None:
    """Return the ranks that have parts of this rank's rows; None: each rank has complete rows."""
    group = dims.group("context")
    if group is None:
        return None
    rank, size = dims.coordinates["context"], dims.sizes["context"]
    return ContextRanks(CONTEXT_LAYOUTS[method], group, rank, size, windows)


class Ulysses(SplitRows):
    """Layout in which each rank computes attention over complete rows, for some of the heads.

    The number of query heads must be divisible by the number of ranks; key heads are repeated
    until theirs is.
    """

    def prepare(self) -> None:
        whole = LAYOUTS[self.attention](self.lengths, self.row, self.device)
        self.whole = whole if self.causal else whole.in_both_directions()

    def with_window(self, window: int | None) -> "Ulysses":
        windowed = super().with_window(window)
        windowed.whole = self.whole.with_window(window)
        return windowed

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring = PLAIN) -> Tensor:
        """See PackedAttention. Two collectives."""
        size = self.ranks.size
        repeats = size // math.gcd(k.shape[2], size)
        if repeats > 1:
            k = k.repeat_interleave(repeats, 2)
            v = v.repeat_interleave(repeats, 2)
        # one message with q, k and v of each rank's heads: [rows, part, ranks, heads, head_dim]
        by_rank = torch.cat([x.unflatten(2, (size, -1)) for x in (q, k, v)], 3)
        received = Exchange.apply(by_rank.permute(2, 0, 1, 3, 4), self.ranks.group)
        heads = [x.shape[2] // size for x in (q, k, v)]
        q, k, v = received.transpose(0, 1).flatten(1, 2).split(heads, 2)
        if scoring.sinks is not None:  # keep those of this rank's heads
            scoring = scoring._replace(sinks=scoring.sinks.chunk(size)[self.ranks.rank])
        mixed = self.whole.attend(q, k, v, scoring)
        by_part = mixed.unflatten(1, (size, -1)).transpose(0, 1)
        received = Exchange.apply(by_part, self.ranks.group)
        return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


class Gathered(DealtByCost):
    """Layout in which each rank's queries attend to the gathered keys and values of all ranks."""

    def prepare(self) -> None:
        layout = LOCAL_QUERIES[self.attention if self.causal else "mask"]
        whole = layout(self.local_positions(), self.lengths, self.row, self.device)
        self.whole = whole if self.causal else whole.in_both_directions()
        starts = np.arange(len(self.lengths))[None, :, None] * self.row
        flat = (self.parts + starts).reshape(-1)
        self.places = to_device(flat, self.device)
        """[tokens of all ranks] int64: flat position in the rows of each rank's tokens."""
        self.order = to_device(np.argsort(flat), self.device)

    def with_window(self, window: int | None) -> "Gathered":
        windowed = super().with_window(window)
        windowed.whole = self.whole.with_window(window)
        return windowed

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring = PLAIN) -> Tensor:
        """See PackedAttention. One collective."""
        both = torch.cat([k, v], 2)
        whole = GatherRows.apply(both, self.order, self.places, self.ranks.group)
        k, v = whole.chunk(2, 2)
        return self.whole.attend(q, k, v, scoring)


CONTEXT_LAYOUTS: dict[str, type[SplitRows]] = {
    "ulysses": Ulysses,
    "gathered": Gathered,
    "ring": Ring,
}
"""Layouts by sharding.context_method."""


class Exchange(torch.autograd.Function):
    """All-to-all: x[i] is sent to rank i and replaced by that rank's part. Its own transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        return all_to_all(gradients[0], ctx.group), None


class GatherRows(torch.autograd.Function):
    """All ranks' tokens in the order of their rows. Backward sums the ranks' gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, order: Tensor, places: Tensor, group: dist.ProcessGroup
    ) -> Tensor:
        """Return complete rows, [rows, row, ...].

        x: [rows, part, ...]; order: [tokens of all rows], index of each token among the gathered
        tokens; places: its inverse.
        """
        ctx.group, ctx.shape = group, x.shape
        ctx.save_for_backward(places)
        x = x.contiguous()
        tokens = x.new_empty(len(order), *x.shape[2:])
        ALL_GATHER(tokens, x.flatten(0, 1), group=group)
        return tokens.index_select(0, order).unflatten(0, (x.shape[0], -1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        (places,) = ctx.saved_tensors
        by_rank = gradients[0].flatten(0, 1).index_select(0, places)
        own = by_rank.new_empty(ctx.shape)
        REDUCE_SCATTER(own.flatten(0, 1), by_rank, group=ctx.group)
        return own, None, None, None


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return [ranks, ...], where element j on rank i is x[i] of rank j. Collective."""
    # gloo silently writes wrong numbers into a strided result
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received
