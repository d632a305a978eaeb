"""Layouts with queries for some tokens of each row, and keys and values for all tokens."""

from typing import Any, NamedTuple

import numpy as np
import torch

from fsdp_trainer.distributed import to_device
from fsdp_trainer.models.attention import DocumentAttention, MaskedAttention, PackedAttention
from fsdp_trainer.models.document_calls import (
    LENGTH_MULTIPLE,
    CallPlan,
    KernelCall,
    Lengths,
    group_by_cost,
)
from fsdp_trainer.rounding import round_up


class OwnDocuments(DocumentAttention):
    """Layout with one kernel call for each group of pieces of documents of similar size.

    Cost grows with Σ queries · visible keys.
    """

    def __init__(self, own: np.ndarray, *args: Any):
        """Plan the kernel calls.

        own: [rows, tokens] int64, ascending positions of the queries in the row; args: see
        PackedAttention.
        """
        self.own = own
        super().__init__(*args)

    def prepare(self) -> None:
        """See PackedAttention."""
        self.plan = plan_pieces(self.own, self.lengths, self.row, self.window, self.device)


class OwnMask(MaskedAttention):
    """Layout with one masked kernel call and fixed shapes. mask: [rows, 1, tokens, row] bool."""

    def __init__(self, own: np.ndarray, *args: Any):
        """Build the mask.

        own: [rows, tokens] int64, ascending positions of the queries in the row; args: see
        PackedAttention.
        """
        self.own = own
        super().__init__(*args)

    def prepare(self) -> None:
        """See PackedAttention."""
        keys = self.document_numbers(1)
        own = to_device(self.own, self.device)
        same = keys.gather(1, own)[:, :, None] == keys[:, None, :]
        distance = own[:, :, None] - torch.arange(self.row, device=self.device)
        visible = same & (distance >= 0)
        if self.window is not None:
            visible &= distance < self.window
        self.mask = visible[:, None]

    def with_window(self, window: int | None) -> "OwnMask":
        """See PackedAttention."""
        if window == self.window:
            return self
        windowed = PackedAttention.with_window(self, window)
        windowed.prepare()
        return windowed


OWN_QUERIES: dict[str, type[OwnDocuments | OwnMask]] = {"documents": OwnDocuments, "mask": OwnMask}
"""Layouts for a rank's own queries, by the name of the layout for complete rows."""


class QueryRun(NamedTuple):
    """A run of consecutive tokens of one document.

    query: index of the first token among all queries; key: index of the first visible key among
    all keys; size: number of tokens; before: number of visible keys before the first token.
    """

    query: int
    key: int
    size: int
    before: int


def plan_pieces(
    own: np.ndarray, lengths: Lengths, row: int, window: int | None, device: torch.device
) -> CallPlan:
    """Group the pieces of documents at the positions `own`, [rows, tokens], into kernel calls."""
    pieces = [
        piece
        for i, documents in enumerate(lengths)
        for piece in find_pieces(own[i], i, documents, row, window)
    ]
    # so that keys and values get gradients, see models.document_calls.plan_calls
    pieces = pieces or [QueryRun(0, int(own[0, 0]), 1, 0)]
    order = np.zeros(own.size, np.int64)
    computed = 0
    calls: list[KernelCall] = []
    for begins in (True, False):
        table = np.array([p for p in pieces if (p.before == 0) == begins], np.int64).reshape(-1, 4)
        query, key, size, before = table.T
        for group in group_by_cost(size, size + before):
            call = piece_call(query[group], key[group], size[group], before[group], window, device)
            calls.append(call)
            real = np.arange(call.queries.shape[1]) < size[group][:, None]
            order[call.queries[real]] = computed + np.flatnonzero(real)
            computed += real.size
    queries = np.concatenate([call.queries.ravel() for call in calls])
    keys = np.concatenate([call.keys.ravel() for call in calls])
    return CallPlan(
        calls, to_device(queries, device), to_device(keys, device), to_device(order, device), None
    )


def find_pieces(
    own: np.ndarray, number: int, documents: list[int], row: int, window: int | None
) -> list[QueryRun]:
    """Return the pieces of one row, without padding; no piece is longer than the window.

    own: [tokens] int64, ascending positions; number: index of the row.
    """
    ends = np.cumsum(documents, dtype=np.int64)
    document = np.searchsorted(ends, own, side="right")
    last = np.flatnonzero((np.diff(own) != 1) | (np.diff(document) != 0))
    firsts = np.concatenate([[0], last + 1])
    stops = np.concatenate([last + 1, [len(own)]])
    pieces = []
    for first, stop in zip(firsts.tolist(), stops.tolist(), strict=True):
        if document[first] == len(documents):
            continue  # padding
        start = int(ends[document[first]]) - documents[document[first]]
        step = window or row
        for begin in range(first, stop, step):
            size = min(step, stop - begin)
            position = int(own[begin])
            key = max(start, position + 1 - step)
            query = number * len(own) + begin
            pieces.append(QueryRun(query, number * row + key, size, position - key))
    return pieces


def piece_call(
    query: np.ndarray,
    key: np.ndarray,
    size: np.ndarray,
    before: np.ndarray,
    window: int | None,
    device: torch.device,
) -> KernelCall:
    """Return one call for these pieces. Arrays are [pieces], see QueryRun.

    Shorter pieces are padded with copies of their last query, and of their last key; no real query
    sees these keys.
    """
    multiple = LENGTH_MULTIPLE[device.type]
    width = round_up(int(size.max()), multiple)
    key_width = round_up(int((size + before).max()), multiple)
    within = np.minimum(np.arange(width), size[:, None] - 1)
    queries = query[:, None] + within
    keys = key[:, None] + np.minimum(np.arange(key_width), (size + before)[:, None] - 1)
    if not before.any():
        return KernelCall(queries, keys, None)
    places = to_device(before[:, None] + within, device)[:, None, :, None]
    distance = places - torch.arange(key_width, device=device)
    mask = distance >= 0
    return KernelCall(queries, keys, mask if window is None else mask & (distance < window))
