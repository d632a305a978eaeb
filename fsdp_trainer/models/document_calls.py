"""Documents grouped into kernel calls: those of similar length share one."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fsdp_trainer.distributed import to_device
from fsdp_trainer.rounding import round_up

Lengths = list[list[int]]
PADDING_WASTE_LIMIT = 1.25
"""Documents share a call if padding them to the longest costs at most this factor."""
CALL_COST = 64**2
"""The fixed cost of a kernel call, in units of length² of a document."""
LENGTH_MULTIPLE = {"cpu": 1, "cuda": 128}
"""Lengths of a call are multiples of this: cuDNN plans 0.1 s for each shape that is new to it."""


class KernelCall(NamedTuple):
    """One kernel call over n pieces of documents: their queries and the keys that they may see.

    queries: [n, longest] and keys: [n, longest or more] int64, positions in the flattened
    micro-batch. A shorter piece repeats its last position, behind all that its queries look at.
    mask: [queries, keys] bool; None: causal, keys are queries.
    """

    queries: np.ndarray
    keys: np.ndarray
    mask: Tensor | None


class CallPlan(NamedTuple):
    """All kernel calls of a micro-batch.

    queries, keys: int64, those of all calls, one after the other. order: [rows · row] int64, where
    in the concatenated results each position's result is. width: if every row begins with its only
    document and all are about as long, that length: nothing need be gathered; else None.
    """

    calls: list[KernelCall]
    queries: Tensor
    keys: Tensor
    order: Tensor
    width: int | None


def plan_calls(lengths: Lengths, row: int, window: int | None, device: torch.device) -> CallPlan:
    """Group documents into kernel calls.

    A document longer than the window is cut into pieces of the window's length: the first piece is
    causal, each later one also sees the piece before it.
    """
    # an empty micro-batch computes one token, so that keys and values get gradients: without them
    # this rank's gradient reduction would have fewer entries than the other ranks'
    documents = _documents(lengths, row) or [(0, 1)]
    longest = min(window or row, row)
    first = [(start, min(longest, size)) for start, size in documents]
    later = [
        (start + offset, min(longest, size - offset))
        for start, size in documents
        for offset in range(longest, size, longest)
    ]
    order = np.zeros(len(lengths) * row, np.int64)
    computed = 0
    calls: list[KernelCall] = []
    for pieces, before in ((first, 0), (later, longest)):
        starts, sizes = np.array(pieces, np.int64).reshape(-1, 2).T
        for group in group_by_cost(sizes, sizes):
            call = _kernel_call(starts[group], sizes[group], longest, before, device)
            calls.append(call)
            width = call.queries.shape[1]
            real = np.arange(width) < sizes[group][:, None]
            order[call.queries[real]] = computed + np.flatnonzero(real)
            computed += real.size
    one_per_row = len(calls) == 1 and all(len(row) == 1 for row in lengths)
    queries = np.concatenate([call.queries.ravel() for call in calls])
    keys = np.concatenate([call.keys.ravel() for call in calls])
    return CallPlan(
        calls,
        to_device(queries, device),
        to_device(keys, device),
        to_device(order, device),
        calls[0].queries.shape[1] if one_per_row else None,
    )


def _documents(lengths: Lengths, row: int) -> list[tuple[int, int]]:
    """Return the start of each document in the flattened micro-batch, and its length."""
    return [
        (i * row + sum(sizes[:j]), size)
        for i, sizes in enumerate(lengths)
        for j, size in enumerate(sizes)
    ]


def _kernel_call(
    starts: np.ndarray, sizes: np.ndarray, longest: int, before: int, device: torch.device
) -> KernelCall:
    """Return one call for all these pieces, which also see `before` tokens before them."""
    multiple = LENGTH_MULTIPLE[device.type]
    width = min(round_up(int(sizes.max()), multiple), longest)
    queries = _positions(starts, sizes, width)
    if not before:
        return KernelCall(queries, queries, None)
    keys = _positions(starts - before, sizes + before, width + before)
    mask = torch.ones(width, width + before, dtype=torch.bool, device=device)
    return KernelCall(queries, keys, mask.triu(1).tril(before))


def group_by_cost(queries: np.ndarray, keys: np.ndarray) -> list[np.ndarray]:
    """Return groups of indices of pieces that share a call, the costliest first.

    queries, keys: how many each piece has.
    """
    groups: list[list[int]] = []
    most_queries = most_keys = needed = 0
    for i in np.argsort(-queries * keys, kind="stable").tolist():
        cost = int(queries[i]) * int(keys[i])
        padded = 0
        if groups:
            widest = max(most_queries, int(queries[i])) * max(most_keys, int(keys[i]))
            padded = (len(groups[-1]) + 1) * widest
        if groups and padded <= PADDING_WASTE_LIMIT * (needed + cost) + CALL_COST:
            groups[-1].append(i)
            most_queries = max(most_queries, int(queries[i]))
            most_keys = max(most_keys, int(keys[i]))
            needed += cost
        else:
            groups.append([i])
            most_queries = int(queries[i])
            most_keys = int(keys[i])
            needed = cost
    return [np.array(group) for group in groups]


def _positions(starts: np.ndarray, sizes: np.ndarray, width: int) -> np.ndarray:
    """[pieces, width] int64: each piece's positions; a shorter piece repeats its last one."""
    within = np.minimum(np.arange(width), sizes[:, None] - 1)
    return starts[:, None] + within
