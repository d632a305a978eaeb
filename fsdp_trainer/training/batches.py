"""This rank's micro-batches of the global order of rows: arithmetic on row numbers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdp_trainer.data.mixture import Mixture
from fsdp_trainer.data.order import Rows
from fsdp_trainer.distributed import to_device
from fsdp_trainer.models.attention import LAYOUTS, PackedAttention
from fsdp_trainer.models.decoder import MicroBatch
from fsdp_trainer.models.document_calls import Lengths
from fsdp_trainer.parallel.context import ContextRanks
from fsdp_trainer.rounding import round_up

INDEX_STEP = 128
"""Supervised positions are padded to a multiple of this, so that the device sees few shapes."""
MAX_SUSPECTS = 8
"""Ranks, and samples, that are named for a bad step."""


@dataclass(frozen=True)
class StepPlan:
    """The rows of one optimizer step; the same on every rank.

    start, stop: its rows in the running order, stop excluded.
    weight: Σ weight of their targets, which divides the loss.
    tokens, supervised: how many there are.
    attention_cost: Σ length² of their documents, less what windows leave out.
    documents: how many they hold. figures: what the step's line says of them besides.
    """

    step: int
    start: int
    stop: int
    weight: float = 0.0
    tokens: int = 0
    supervised: int = 0
    attention_cost: int = 0
    documents: int = 0
    figures: dict[str, Any] = field(default_factory=dict, compare=False, kw_only=True)


@dataclass
class Assembler:
    """Makes a rank's rows into micro-batches on its device.

    sources: how many whose losses are told apart; rank, ranks: of those with different rows.
    pad_to_multiple: micro-batches are as long as their longest row, rounded up to this, at most
    seq_len. same_rows: how many ranks, neighbours, are one of `ranks`: they get the same rows;
    stages: how many times that is so, in a pipeline.
    context: the ranks that share this rank's rows; None: it has whole rows.
    attention: a name of `LAYOUTS`. number_documents: for an objective that is no sum over
    single tokens, see MicroBatch.documents. last_tokens: the last token of each document is what
    counts, of a model that scores documents. mark_tokens: see MicroBatch.token_share.
    """

    seq_len: int
    sources: int
    micro_rows: int
    rank: int
    ranks: int
    device: torch.device
    pad_to_multiple: int | None = None
    attention: str = "documents"
    number_documents: bool = False
    last_tokens: bool = False
    mark_tokens: bool = False
    same_rows: int = 1
    stages: int = 1
    context: ContextRanks | None = None

    def count(self, plan: StepPlan) -> int:
        """Return the number of micro-batches per rank; surplus slots are empty rows."""
        return math.ceil((plan.stop - plan.start) / (self.micro_rows * self.ranks))

    def suspects_event(self, ranks: list[int], samples: list[str]) -> dict[str, Any]:
        """Return what an event says of a bad step: at most MAX_SUSPECTS ranks and samples, and how
        many more samples there are.

        ranks: as in `rank`.
        """
        size = self.ranks * self.same_rows  # of a stage
        readers = [
            stage * size + rank * self.same_rows + i
            for rank in ranks
            for stage in range(self.stages)
            for i in range(self.same_rows)
        ]
        different = [*dict.fromkeys(samples)]
        event = {"ranks": readers[:MAX_SUSPECTS], "samples": different[:MAX_SUSPECTS]}
        more = len(different) - MAX_SUSPECTS
        return event | ({"more_samples": more} if more > 0 else {})

    def empty(self) -> MicroBatch:
        """Return a micro-batch without a token."""
        return self.assemble(Rows.empty(0, self.seq_len))

    def assemble(self, rows: Rows) -> MicroBatch:
        """Return [micro_rows, length] tensors on the device; missing rows are empty.

        Of rows that ranks share, [micro_rows, length / ranks]: cut here, where every token has its
        label.
        """
        if len(rows.documents) < self.micro_rows:
            given, rows = rows, Rows.empty(self.micro_rows, self.seq_len)
            rows.put(range(len(given.documents)), given)
        if self.last_tokens:
            rows = at_last_tokens(rows)
        length = self.length(rows)
        layout = self.layout(rows.documents, length)
        own = layout.own_positions()
        index = np.flatnonzero(np.take_along_axis(rows.labels, own, 1) != -100)
        padding = (0, round_up(max(1, len(index)), INDEX_STEP) - len(index))

        def part(values: np.ndarray) -> Tensor:
            return to_device(np.take_along_axis(values, own, 1), self.device)

        def padded(values: np.ndarray, fill: int = 0) -> Tensor:
            sizes = [padding, *[(0, 0)] * (values.ndim - 1)]
            return to_device(np.pad(values, sizes, constant_values=fill), self.device)

        def supervised(values: np.ndarray) -> Tensor:
            in_rows = np.arange(len(own))[:, None]
            return padded(values[in_rows, own].reshape(-1, *values.shape[2:])[index])

        documents = groups = reference = kinds = None
        if self.number_documents:
            rows_before = np.arange(len(own))[:, None] * length
            places = (own + rows_before).reshape(-1)[index]
            numbers, group_numbers = number_documents(rows, places, length)
            documents = padded(numbers, fill=len(group_numbers))
            groups = to_device(group_numbers, self.device)
            if rows.reference is not None:
                values = np.concatenate([np.zeros(0), *map(np.array, rows.reference)])
                reference = to_device(values, self.device)
            if rows.kinds is not None:
                each = [np.array(row, np.int64) for row in rows.kinds]
                kinds = to_device(np.concatenate(each), self.device)
        return MicroBatch(
            part(rows.tokens),
            part(rows.positions),
            layout,
            padded(index),
            supervised(rows.labels),
            supervised(rows.weights),
            supervised(rows.sources) if self.sources > 1 else None,
            documents,
            groups,
            part(tokens_of_documents(rows.documents, length)) if self.mark_tokens else None,
            reference,
            kinds,
            {name: supervised(values) for name, values in (rows.columns or {}).items()},
        )

    def layout(self, documents: Lengths, length: int) -> PackedAttention:
        """Return what attends to documents in rows of `length`, of which this rank has a part."""
        if self.context:
            return self.context.layout(self.attention, documents, length, self.device)
        return LAYOUTS[self.attention](documents, length, self.device)

    def length(self, rows: Rows) -> int:
        """Return the tokens of a row of this micro-batch, padding included."""
        # flex attention's kernel is compiled for each length: all have one
        if self.pad_to_multiple is None or self.attention == "flex":
            return self.seq_len
        longest = max(1, *map(sum, rows.documents))
        return min(self.seq_len, round_up(longest, self.pad_to_multiple))


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
            totals = self.order.totals(first, stop)
            yield StepPlan(number, first, stop, *totals, self.order.documents(first, stop))

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
        count, numbers = self.count(plan), np.arange(plan.start, plan.stop)
        rows = np.full(count * self.micro_rows * self.ranks, -1)
        rows[: len(numbers)] = numbers
        costs = self.order.attention_costs(numbers) if self.ranks > 1 else np.zeros(1)
        if (costs == costs[0]).all():
            return rows.reshape(count, self.ranks, self.micro_rows)
        rows[: len(numbers)] = numbers[np.argsort(-costs, kind="stable")]
        rounds = rows.reshape(-1, self.ranks)
        rounds[plan.step % 2 :: 2] = rounds[plan.step % 2 :: 2, ::-1].copy()
        return rounds.reshape(count, self.micro_rows, self.ranks).swapaxes(1, 2)

    def samples_of(
        self, plan: StepPlan, ranks: Sequence[int], micro_batches: Sequence[float]
    ) -> list[str]:
        """Return the places of the samples in one micro-batch of each of these ranks.

        micro_batches: which one, by rank.
        """
        rows = self.assign_rows_to_ranks(plan)
        own = [row for rank in ranks for row in rows[int(micro_batches[rank]), rank]]
        return [where for row in own if row >= 0 for where in self.order.where(int(row))]


def at_last_tokens(rows: Rows) -> Rows:
    """Return rows whose targets are at the last token of each document, which is scored."""
    labels, weights = np.full_like(rows.labels, -100), np.zeros_like(rows.weights)
    for row, documents in enumerate(rows.documents):
        ends = np.cumsum(documents, dtype=np.int64) - 1
        labels[row, ends], weights[row, ends] = 0, 1.0
    return replace(rows, labels=labels, weights=weights)


def tokens_of_documents(documents: Lengths, length: int) -> np.ndarray:
    """Return [rows, length] float32: 1 for a token of a document, 0 for padding."""
    filled = np.array([sum(row) for row in documents])
    return (np.arange(length) < filled[:, None]).astype(np.float32)


def number_documents(rows: Rows, index: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the document of each position, [positions] int64, and the group of each document.

    index: [positions] int64 in rows of `length`, none of them padding. Numbers count over all rows.
    """
    ends = [i * length + np.cumsum(row, dtype=np.int64) for i, row in enumerate(rows.documents)]
    starts = [start for row in rows.group_starts for start in row]
    groups = np.cumsum(starts, dtype=np.int64) - 1
    return np.searchsorted(np.concatenate(ends), index, side="right"), groups


def ranks_with_highest(values: Sequence[float]) -> list[int]:
    """Return the ranks with the highest value, at most MAX_SUSPECTS.

    values: by rank; inf where it is not finite.
    """
    highest = max(values)
    return [rank for rank, value in enumerate(values) if value == highest][:MAX_SUSPECTS]


def row_ranges(
    rows: int, last_row: int | None, start: int, skipped: Sequence[Sequence[int]]
) -> Iterator[tuple[int, int]]:
    """Yield [start, stop) of the rows of each step.

    A step has `rows` rows, or fewer before last_row (None: there is no end) and before a skipped
    range.
    """
    end = math.inf if last_row is None else last_row
    while start < end:
        inside = [stop for first, stop in skipped if first <= start < stop]
        if inside:
            start = max(inside)
            continue
        following = [first for first, _ in skipped if first > start]
        stop = int(min(start + rows, end, *following))
        yield start, stop
        start = stop


def count_steps(rows: int, last_row: int, start: int, skipped: Sequence[Sequence[int]]) -> int:
    """Return how many ranges `row_ranges` gives, without going through those behind the last
    skipped range."""
    whole_from = max([start, *(min(stop, last_row) for _, stop in skipped)])
    steps = sum(1 for _ in row_ranges(rows, whole_from, start, skipped))
    return steps + max(0, math.ceil((last_row - whole_from) / rows))
