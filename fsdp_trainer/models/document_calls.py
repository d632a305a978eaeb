"""Documents of similar length, grouped into common kernel calls."""

from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fsdp_trainer.base.distributed import to_device
from fsdp_trainer.base.round_up import round_up

Lengths = list[list[int]]
PADDING_WASTE_LIMIT = 1.25
"""Documents are in one call if padding them to the longest increases the cost by at most this."""
CALL_COST = 64**2
"""Fixed cost of a kernel call, in units of a document's length²."""
LENGTH_MULTIPLE = {"cpu": 1, "cuda": 128}
"""The length of a call is a multiple of this: cuDNN plans 0.1 s for each new shape."""


class KernelCall(NamedTuple):
    """One kernel call over n pieces of documents, with their queries and visible keys.

    queries: [n, longest] and keys: [n, longest or more] int64, positions in the flattened
    micro-batch. A shorter piece repeats its last position, after all keys that its queries see.
    mask: [queries, keys] or [n, 1, 1, keys] bool; None: keys are those of the queries, and all are
    seen, or with causal attention those up to the query.
    """

    queries: np.ndarray
    keys: np.ndarray
    mask: Tensor | None


class CallPlan(NamedTuple):
    """All kernel calls of a micro-batch.

    queries, keys: int64, concatenated over all calls. order: [rows · row] int64, each position's
    place in the concatenated results. width: length of the only call if rows are single documents
    without a mask, so that nothing is gathered; else None.
    """

    calls: list[KernelCall]
    queries: Tensor
    keys: Tensor
    order: Tensor
    width: int | None


def plan_calls(
    lengths: Lengths, row: int, window: int | None, device: torch.device, causal: bool = True
) -> CallPlan:
    """Group documents into kernel calls.

    A longer document than the window is cut into pieces of its length. The first is causal, each
    later one also sees the preceding piece.
    """
    # compute one token for an empty micro-batch, so that keys and values get gradients: without
    # them this rank's gradient reduction would have fewer entries than that of other ranks
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
            if not causal:
                call = call._replace(mask=_without_padding(sizes[group], call, device))
            calls.append(call)
            width = call.queries.shape[1]
            real = np.arange(width) < sizes[group][:, None]
            order[call.queries[real]] = computed + np.flatnonzero(real)
            computed += real.size
    one_per_row = len(calls) == 1 and all(len(row) == 1 for row in lengths)
    one_per_row = one_per_row and calls[0].mask is None
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
    return [
        (start, size)
        for i, sizes in enumerate(lengths)
        for start, size in zip(accumulate(sizes, initial=i * row), sizes, strict=False)
    ]


def _kernel_call(
    starts: np.ndarray, sizes: np.ndarray, longest: int, before: int, device: torch.device
) -> KernelCall:
    """Return one call for these pieces, which also see the `before` preceding tokens."""
    multiple = LENGTH_MULTIPLE[device.type]
    width = min(round_up(int(sizes.max()), multiple), longest)
    queries = _positions(starts, sizes, width)
    if not before:
        return KernelCall(queries, queries, None)
    keys = _positions(starts - before, sizes + before, width + before)
    mask = torch.ones(width, width + before, dtype=torch.bool, device=device)
    return KernelCall(queries, keys, mask.triu(1).tril(before))


def _without_padding(sizes: np.ndarray, call: KernelCall, device: torch.device) -> Tensor | None:
    """Return a mask of the repeated positions of a call's pieces; None if there are none."""
    width = call.keys.shape[1]
    if (sizes == width).all():
        return None
    return to_device(np.arange(width) < sizes[:, None], device)[:, None, None]


def group_by_cost(queries: np.ndarray, keys: np.ndarray) -> list[np.ndarray]:
    """Return groups of indices of pieces that are in one call, most expensive first.

    queries, keys: numbers of each piece.
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
    """Return each piece's positions, with the last one repeated: [pieces, width] int64."""
    within = np.minimum(np.arange(width), sizes[:, None] - 1)
    return starts[:, None] + within
