"""Kernel calls of ring attention: this rank's queries against the keys of one rank at a time."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fsdp_trainer.base.distributed import to_device
from fsdp_trainer.base.round_up import round_up
from fsdp_trainer.base.torch_private import Bounds
from fsdp_trainer.models.document_calls import LENGTH_MULTIPLE, Lengths, group_by_cost
from fsdp_trainer.parallel.split_rows import TokenRuns, find_runs


class RingCall(NamedTuple):
    """One kernel call over n pieces of documents.

    queries: [n, longest] int64, flat indices into this rank's tokens of all rows. keys: [n,
    longest] int64, flat indices into the tokens of the rank that the keys come from. A shorter
    piece repeats its last index. A slice: these tokens of each row; both None: all of them.
    mask: bool, True if a query may attend to a key, broadcastable to [n, 1, queries, keys]; None:
    no mask. causal: True: a query sees keys up to its own index. sees: [n, 1, queries] bool, False
    if a query sees none of these keys; None: all queries see some.
    results: int64, indices of the results of non-repeated queries among n · longest; tokens:
    int64, this rank's tokens that these results belong to.
    real: [n, longest, 1, 1] bool, False for repeated queries; None: there are none.
    kernel: see `unmasked_attention`; None: the kernel that takes masks. bounds: pieces are not
    repeated to one length, n is 1, and these are their ends.
    """

    mask: Tensor | None = None
    causal: bool = False
    sees: Tensor | None = None
    queries: Tensor | slice | None = None
    keys: Tensor | slice | None = None
    results: Tensor | None = None
    tokens: Tensor | None = None
    real: Tensor | None = None
    kernel: str | None = None
    bounds: Bounds | None = None


def whole_calls(
    parts: np.ndarray, rank: int, documents: np.ndarray, window: int | None, device: torch.device
) -> list[list[RingCall]]:
    """Return one masked call for each rank of the ring, this rank first, with fixed shapes.

    parts: [ranks, rows, tokens] int64, positions of each rank's tokens; documents: [rows, row], the
    number of each position's document, unique for each padded position.
    """
    own = parts[rank]
    numbers = np.take_along_axis(documents, own, 1)
    steps = []
    for source in sources(len(parts), rank):
        keys = parts[source]
        same = numbers[:, :, None] == np.take_along_axis(documents, keys, 1)[:, None, :]
        distance = own[:, :, None] - keys[:, None, :]
        visible = same & (distance >= 0)
        if window is not None:
            visible &= distance < window
        mask = to_device(visible[:, None], device)
        steps.append([RingCall(mask, sees=mask.any(-1))])
    return steps


def block_calls(parts: np.ndarray, rank: int, kernel: str) -> list[list[RingCall]]:
    """Return calls for rows that are one document each, with fixed shapes and without masks.

    parts: [ranks, tokens] int64, positions of each rank's tokens, equal in all rows.
    """
    own = parts[rank]
    steps = [[RingCall(causal=True, kernel=kernel)]]
    for source in sources(len(parts), rank)[1:]:
        count = np.searchsorted(parts[source], own)
        firsts = np.flatnonzero(np.diff(count, prepend=0))
        steps.append(
            [
                RingCall(queries=slice(first, end), keys=slice(0, int(count[first])), kernel=kernel)
                for first, end in pairwise([*firsts.tolist(), len(own)])
            ]
        )
    return steps


def piece_calls(
    parts: np.ndarray,
    rank: int,
    lengths: Lengths,
    row: int,
    window: int | None,
    device: torch.device,
    bounded: bool = False,
) -> list[list[RingCall]]:
    """Return the calls for the keys of each rank of the ring, this rank first.

    The first step starts with each token's own run, so that every token has seen itself.
    parts: see `whole_calls`. Without a window, no mask has the size queries · keys. bounded: by
    FlashAttention, one call for all pieces, without any mask or repeated token.
    """
    make, groups = (bounded_call, all_in_one) if bounded else (call_of, group_by_cost)
    runs = find_runs(parts[rank], lengths, row, window)
    rows = np.arange(len(lengths))[:, None] * row
    own = (parts[rank] + rows).ravel()
    steps = []
    for step, source in enumerate(sources(len(parts), rank)):
        calls = []
        if step == 0:
            for group in groups(runs.size, runs.size):
                pieces = runs.at(group)
                calls.append(make(pieces, pieces.place, pieces.size, device, causal=True))
        theirs = (parts[source] + rows).ravel()
        first = np.searchsorted(theirs, runs.start)
        count = np.searchsorted(theirs, runs.position) - first
        seen_by = np.flatnonzero(count)
        for chosen in groups(runs.size[seen_by], count[seen_by]):
            group = seen_by[chosen]
            pieces = runs.at(group)
            call = make(pieces, first[group], count[group], device)
            if window is not None:
                call = through_window(call, own, theirs, window, device)
            calls.append(call)
        steps.append(calls)
    return steps


def sources(ranks: int, rank: int) -> list[int]:
    return [(rank - step) % ranks for step in range(ranks)]


def call_of(
    runs: TokenRuns,
    first: np.ndarray,
    count: np.ndarray,
    device: torch.device,
    causal: bool = False,
) -> RingCall:
    """Return one call for these runs.

    first, count: first index and number of each run's keys, among the tokens of the rank that has
    them.
    """
    multiple = LENGTH_MULTIPLE[device.type]
    width = np.arange(round_up(int(runs.size.max()), multiple))
    key_width = np.arange(round_up(int(count.max()), multiple))
    queries = runs.place[:, None] + np.minimum(width, runs.size[:, None] - 1)
    keys = first[:, None] + np.minimum(key_width, count[:, None] - 1)
    real = width < runs.size[:, None]
    mask = None
    if not causal and (count < len(key_width)).any():
        mask = to_device((key_width < count[:, None])[:, None, None], device)
    return RingCall(
        mask,
        causal,
        queries=to_device(queries, device),
        keys=to_device(keys, device),
        results=to_device(np.flatnonzero(real), device),
        tokens=to_device(queries[real], device),
        real=None if real.all() else to_device(real[:, :, None, None], device),
    )


def all_in_one(queries: np.ndarray, keys: np.ndarray) -> list[np.ndarray]:
    """Return the indices of all pieces as one group; none: no group."""
    return [np.arange(len(queries))] if len(queries) else []


def bounded_call(
    runs: TokenRuns,
    first: np.ndarray,
    count: np.ndarray,
    device: torch.device,
    causal: bool = False,
) -> RingCall:
    """Return one call for these runs, one after the other. See `call_of`."""
    queries = to_device(consecutive(runs.place, runs.size), device)
    ends, key_ends = (
        to_device(np.cumsum([0, *sizes], dtype=np.int32), device) for sizes in (runs.size, count)
    )
    return RingCall(
        None,
        causal,
        queries=queries[None],
        keys=to_device(consecutive(first, count), device)[None],
        tokens=queries,
        kernel="flash",
        bounds=(ends, key_ends, int(runs.size.max()), int(count.max())),
    )


def consecutive(first: np.ndarray, count: np.ndarray) -> np.ndarray:
    before = np.cumsum(count) - count
    return np.repeat(first - before, count) + np.arange(count.sum())


def through_window(
    call: RingCall, own: np.ndarray, theirs: np.ndarray, window: int, device: torch.device
) -> RingCall:
    """Return a call restricted to keys less than a window before the query.

    own, theirs: positions of this rank's tokens and of the tokens of the keys' rank.
    """
    assert isinstance(call.queries, Tensor), "a call of pieces"
    assert isinstance(call.keys, Tensor), "a call of pieces"
    queries = to_device(own, device)[call.queries][:, None, :, None]
    keys = to_device(theirs, device)[call.keys][:, None, None, :]
    mask = queries - keys < window
    if call.mask is not None:
        mask &= call.mask
    return call._replace(mask=mask, sees=mask.any(-1))
