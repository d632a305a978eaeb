"""This rank's micro-batches of the global order of rows: arithmetic on row numbers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdp_trainer.data.mixture import Mixture
from fsdp_trainer.data.order import Rows
from fsdp_trainer.distributed import to_device
from fsdp_trainer.models.attention import LAYOUTS
from fsdp_trainer.models.decoder import MicroBatch

INDEX_STEP = (
    128  # supervised positions are padded to a multiple of this, so that the device sees few shapes
)

MAX_SUSPECTS = 8
"""Ranks, and samples, that are named for a bad step."""


@dataclass(frozen=True)
class StepPlan:
    """The rows of one optimizer step; the same on every rank.

    start, stop: its rows in the running order, stop excluded.
    weight: Σ weight of their targets, which divides the loss.
    tokens, supervised: how many there are.
    attention_cost: Σ length² of their documents, less what windows leave out.
    """

    step: int
    start: int
    stop: int
    weight: float
    tokens: int
    supervised: int
    attention_cost: int


class Assembler:
    """Makes a rank's rows into micro-batches on its device."""

    def __init__(
        self,
        seq_len: int,
        sources: int,
        micro_rows: int,
        rank: int,
        ranks: int,
        device: torch.device,
        pad_to_multiple: int | None = None,
        attention: str = "documents",
        number_documents: bool = False,
    ):
        """sources: how many whose losses are told apart; rank, ranks: of those with different rows.

        pad_to_multiple: micro-batches are as long as their longest row, rounded up to this, at most
        seq_len. attention: a name of `LAYOUTS`. number_documents: for an objective that is no sum
        over single tokens, see MicroBatch.documents.
        """
        self.seq_len, self.sources, self.micro_rows = seq_len, sources, micro_rows
        self.rank, self.ranks = rank, ranks
        self.device, self.attention = device, attention
        self.number_documents = number_documents
        # flex attention's kernel is compiled for each length: all have one
        self.pad_to_multiple = None if attention == "flex" else pad_to_multiple

    def count(self, plan: StepPlan) -> int:
        """Return the number of micro-batches per rank; surplus slots are empty rows."""
        return -(-(plan.stop - plan.start) // (self.micro_rows * self.ranks))

    def empty(self) -> MicroBatch:
        """Return a micro-batch without a token."""
        return self.assemble(Rows.empty(0, self.seq_len))

    def assemble(self, rows: Rows) -> MicroBatch:
        """Return [micro_rows, length] tensors on the device; missing rows are empty."""
        if len(rows.documents) < self.micro_rows:
            given, rows = rows, Rows.empty(self.micro_rows, self.seq_len)
            rows.put(range(len(given.documents)), given)
        length = self.length(rows)
        labels, weights, sources = (
            part[:, :length].reshape(-1) for part in (rows.labels, rows.weights, rows.sources)
        )
        index = np.flatnonzero(labels != -100)
        padding = (0, -len(index) % INDEX_STEP if len(index) else INDEX_STEP)

        def supervised(values: np.ndarray) -> Tensor:
            return to_device(np.pad(values, padding), self.device)

        def whole(values: np.ndarray) -> Tensor:
            return to_device(np.ascontiguousarray(values[:, :length]), self.device)

        documents = groups = None
        if self.number_documents:
            numbers, group_numbers = number_documents(rows, index, length)
            padded = np.pad(numbers, padding, constant_values=len(group_numbers))
            documents = to_device(padded, self.device)
            groups = to_device(group_numbers, self.device)
        return MicroBatch(
            whole(rows.tokens),
            whole(rows.positions),
            LAYOUTS[self.attention](rows.documents, length, self.device),
            supervised(index),
            supervised(labels[index]),
            supervised(weights[index]),
            supervised(sources[index]) if self.sources > 1 else None,
            documents,
            groups,
        )

    def length(self, rows: Rows) -> int:
        """Return the tokens of a row of this micro-batch, padding included."""
        if self.pad_to_multiple is None:
            return self.seq_len
        longest = max(1, *(sum(documents) for documents in rows.documents))
        rounded = -(-longest // self.pad_to_multiple) * self.pad_to_multiple
        return min(self.seq_len, rounded)


class Batches(Assembler):
    """This rank's micro-batches of any range of stored rows."""

    def __init__(self, order: Mixture, *args: Any, **options: Any):
        """args, options: those of Assembler behind `sources`."""
        super().__init__(order.seq_len, len(order.source_names), *args, **options)
        self.order = order

    def plans(
        self,
        rows: int,
        last_row: int | None,
        step: int = 0,
        start: int = 0,
        skipped: Sequence[Sequence[int]] = (),
    ) -> Iterator[StepPlan]:
        """Yield the plans of the ranges of `row_ranges`, behind `step` steps."""
        ranges = row_ranges(rows, last_row, start, skipped)
        for number, (first, stop) in enumerate(ranges, step + 1):
            yield StepPlan(number, first, stop, *self.order.totals(first, stop))

    def micro_batches(self, plan: StepPlan) -> Iterator[MicroBatch]:
        """Yield this rank's part of a step."""
        for rows in self.assign_rows_to_ranks(plan)[:, self.rank]:
            yield self.assemble(self.order.read_rows(rows[rows >= 0]))

    def assign_rows_to_ranks(self, plan: StepPlan) -> np.ndarray:
        """Return [micro-batches, ranks, micro_rows] int64: which rows of a step go where; -1: none.

        Ranks wait for each other in every micro-batch, so all should take equally long. Rows that
        cost attention about the same go into the same micro-batch, the costliest first, and are
        given to the ranks in one direction and then in the other.
        """
        shape = (self.count(plan), self.ranks, self.micro_rows)
        rows = np.full(math.prod(shape), -1)
        rows[: plan.stop - plan.start] = np.arange(plan.start, plan.stop)
        costs = np.zeros(1)
        if self.ranks > 1:
            costs = self.order.attention_costs(range(plan.start, plan.stop))
        if (costs == costs[0]).all():
            return rows.reshape(shape)
        rows[: len(costs)] = rows[np.argsort(-costs, kind="stable")]
        rounds = rows.reshape(-1, self.ranks)
        rounds[plan.step % 2 :: 2] = rounds[plan.step % 2 :: 2, ::-1].copy()
        return rounds.reshape(shape[0], self.micro_rows, self.ranks).swapaxes(1, 2)

    def suspects(
        self, plan: StepPlan, worst_losses: Sequence[float], micro_batches: Sequence[float]
    ) -> dict[str, Any]:
        """Return the ranks whose micro-batch had the highest loss, or none that is finite, and its
        samples.

        worst_losses: of each rank the highest mean loss of its micro-batches (inf: not finite);
        micro_batches: which one that was. At most MAX_SUSPECTS ranks and samples are named.
        """
        ranks, rows = ranks_with_highest(worst_losses), self.assign_rows_to_ranks(plan)
        own = [row for rank in ranks for row in rows[int(micro_batches[rank]), rank].tolist()]
        samples = [where for row in own if row >= 0 for where in self.order.where(row)]
        return suspects_event(ranks, samples)


def number_documents(rows: Rows, index: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the document of each position, [positions] int64, and the group of each document.

    index: [positions] int64 in rows of `length`, none of them padding. Numbers count over all rows.
    """
    ends = [i * length + np.cumsum(row, dtype=np.int64) for i, row in enumerate(rows.documents)]
    starts = [start for row in rows.group_starts for start in row]
    groups = np.cumsum(starts, dtype=np.int64) - 1
    return np.searchsorted(np.concatenate(ends), index, side="right"), groups


def ranks_with_highest(values: Sequence[float]) -> list[int]:
    """Return the ranks with the highest value, at most MAX_SUSPECTS."""
    highest = max(values)
    return [rank for rank, value in enumerate(values) if value == highest][:MAX_SUSPECTS]


def suspects_event(ranks: list[int], samples: list[str]) -> dict[str, Any]:
    """Return what an event says of them: at most MAX_SUSPECTS samples, and how many more
    there are."""
    different = [*dict.fromkeys(samples)]
    event = {"ranks": ranks, "samples": different[:MAX_SUSPECTS]}
    more = len(different) - MAX_SUSPECTS
    return event | ({"more_samples": more} if more > 0 else {})


def row_ranges(
    rows: int, last_row: int | None, start: int, skipped: Sequence[Sequence[int]]
) -> Iterator[tuple[int, int]]:
    """Yield [start, stop) of the rows of each step.

    A step has `rows` rows, or fewer before last_row (None: there is no end) and before a skipped
    range.
    """
    while True:
        while inside := [stop for first, stop in skipped if first <= start < stop]:
            start = max(inside)
        if last_row is not None and start >= last_row:
            return
        edges = [first for first, _ in skipped if first > start]
        edges += [] if last_row is None else [last_row]
        stop = min([start + rows, *edges])
        yield start, stop
        start = stop


def count_steps(rows: int, last_row: int, start: int, skipped: Sequence[Sequence[int]]) -> int:
    """Return how many ranges `row_ranges` gives, without going through those behind the last
    skipped range."""
    whole_from = max([start, *(min(stop, last_row) for _, stop in skipped)])
    steps = sum(1 for _ in row_ranges(rows, whole_from, start, skipped))
    return steps + max(0, math.ceil((last_row - whole_from) / rows))
