"""Layouts with queries for some tokens of each row, and keys and values for all tokens."""

from typing import Any

import numpy as np
import torch

from fsdp_trainer.base.distributed import to_device
from fsdp_trainer.base.round_up import round_up
from fsdp_trainer.models.attention import DocumentAttention, MaskedAttention, PackedAttention
from fsdp_trainer.models.document_calls import (
    LENGTH_MULTIPLE,
    CallPlan,
    KernelCall,
    Lengths,
    group_by_cost,
)
from fsdp_trainer.parallel.split_rows import TokenRuns, find_runs


class LocalDocuments(DocumentAttention):
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
        self.plan = plan_pieces(self.own, self.lengths, self.row, self.window, self.device)


class LocalMask(MaskedAttention):
    """Layout with one masked kernel call and fixed shapes. mask: [rows, 1, tokens, row] bool."""

    def __init__(self, own: np.ndarray, *args: Any):
        """Build the mask.

        own: [rows, tokens] int64, ascending positions of the queries in the row; args: see
        PackedAttention.
        """
        self.own = own
        super().__init__(*args)

    def prepare(self) -> None:
        keys = to_device(self.document_numbers(1), self.device)
        own = to_device(self.own, self.device)
        same = keys.gather(1, own)[:, :, None] == keys[:, None, :]
        distance = own[:, :, None] - torch.arange(self.row, device=self.device)
        visible = same & (distance >= 0) if self.causal else same
        if self.window is not None:
            visible &= distance < self.window
        self.mask = visible[:, None]

    def with_window(self, window: int | None) -> "LocalMask":
        if window == self.window:
            return self
        windowed = PackedAttention.with_window(self, window)
        windowed.prepare()
        return windowed


LOCAL_QUERIES: dict[str, type[LocalDocuments | LocalMask]] = {
    "documents": LocalDocuments,
    "mask": LocalMask,
}
"""Layouts for a rank's own queries, by the name of the layout for complete rows."""


def plan_pieces(
    own: np.ndarray, lengths: Lengths, row: int, window: int | None, device: torch.device
) -> CallPlan:
    """Group the pieces of documents at the positions `own`, [rows, tokens], into kernel calls."""
    runs = find_runs(own, lengths, row, window)
    if not runs.size.size:
        # so that keys and values get gradients, see models.document_calls.plan_calls
        runs = TokenRuns(*np.array([[0], [1], own[0, :1], own[0, :1]], np.int64))
    before = runs.position - runs.start
    order = np.zeros(own.size, np.int64)
    computed = 0
    calls: list[KernelCall] = []
    for chosen in (np.flatnonzero(before == 0), np.flatnonzero(before)):
        size = runs.size[chosen]
        for group in group_by_cost(size, size + before[chosen]):
            pieces = runs.at(chosen[group])
            call = piece_call(pieces, window, device)
            calls.append(call)
            real = np.arange(call.queries.shape[1]) < pieces.size[:, None]
            order[call.queries[real]] = computed + np.flatnonzero(real)
            computed += real.size
    queries = np.concatenate([call.queries.ravel() for call in calls])
    keys = np.concatenate([call.keys.ravel() for call in calls])
    return CallPlan(
        calls, to_device(queries, device), to_device(keys, device), to_device(order, device), None
    )


def piece_call(runs: TokenRuns, window: int | None, device: torch.device) -> KernelCall:
    """Return one call for these runs of tokens.

    Shorter runs are padded with copies of their last query, and of their last key; no real query
    sees these keys.
    """
    size, before = runs.size, runs.position - runs.start
    multiple = LENGTH_MULTIPLE[device.type]
    width = round_up(int(size.max()), multiple)
    key_width = round_up(int((size + before).max()), multiple)
    within = np.minimum(np.arange(width), size[:, None] - 1)
    queries = runs.place[:, None] + within
    keys = runs.start[:, None] + np.minimum(np.arange(key_width), (size + before)[:, None] - 1)
    if not before.any():
        return KernelCall(queries, keys, None)
    places = to_device(before[:, None] + within, device)[:, None, :, None]
    distance = places - torch.arange(key_width, device=device)
    mask = distance >= 0
    return KernelCall(queries, keys, mask if window is None else mask & (distance < window))
