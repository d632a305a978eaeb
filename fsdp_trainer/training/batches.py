"""This rank's micro-batches, computed from row numbers in the global order of rows."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fsdp_trainer.base.distributed import to_device
from fsdp_trainer.base.round_up import round_up
from fsdp_trainer.data.order.epoch_ends import EpochEnds
from fsdp_trainer.data.order.mixture import Mixture
from fsdp_trainer.data.order.row_order import Rows
from fsdp_trainer.models.attention import LAYOUTS, PackedAttention
from fsdp_trainer.models.decoder import DocumentTargets, MicroBatch
from fsdp_trainer.models.document_calls import Lengths
from fsdp_trainer.parallel.context import ContextRanks
from fsdp_trainer.training.media_loader import Arrays, MediaLoader

INDEX_STEP = 128
"""Supervised positions are padded to a multiple of this, so that few different shapes occur."""
MAX_SUSPECTS = 8
"""Maximum number of ranks, and of samples, that are named for a bad step."""
REMEMBERED_STEPS = 100
"""Number of recent steps whose samples or prompts are kept, so that a bad step can name them."""


@dataclass(frozen=True)
class StepPlan:
    """The rows of one optimizer step; the same on every rank.

    start, stop: range of its rows in the running order, stop excluded.
    weight: Σ weight of the targets in these rows; the loss is divided by it.
    tokens, supervised: number of tokens, and of supervised tokens, in these rows.
    attention_cost: Σ length² of the documents, less the part outside attention windows.
    documents: number of documents. packed: number of packed rows, where the range is one of prompts
    and the answers to them are packed; None: the rows of the range are packed.
    metrics: further metrics for the step's line.
    of_all: the plan of the whole step if this is the part of one group, which updates its weights
    from these rows alone; None: this is the whole step.
    """

    step: int
    start: int
    stop: int
    weight: float = 0.0
    tokens: int = 0
    supervised: int = 0
    attention_cost: int = 0
    documents: int = 0
    packed: int | None = field(default=None, kw_only=True)
    metrics: dict[str, Any] = field(default_factory=dict, compare=False, kw_only=True)
    of_all: "StepPlan | None" = field(default=None, kw_only=True)

    @property
    def whole(self) -> "StepPlan":
        """The plan of the whole step, of all groups."""
        return self.of_all or self

    @property
    def rows(self) -> int:
        """The number of rows that micro-batches are made of."""
        return self.stop - self.start if self.packed is None else self.packed


@dataclass(frozen=True)
class GroupPart:
    """The part of each step's rows that this group computes: number `index` of `count` parts.

    index: None while this group gets its state from another one, and computes no rows.
    is_own_step: True if the group updates its weights from its part alone.
    """

    index: int | None = 0
    count: int = 1
    is_own_step: bool = False


@dataclass
class BatchOptions:
    """The form of a rank's micro-batches.

    rank, ranks: index and number of the data-parallel positions, each with different rows. rank is
    None on a rank that gets no rows.
    pad_to_multiple: micro-batches are as long as their longest row, rounded up to this, at most
    seq_len; None: always seq_len.
    same_rows: number of consecutive ranks that get the same rows and so count as one of `ranks`.
    groups: number of groups that share the steps; those of a group have neighbouring numbers.
    stages: number of pipeline stages of a group, each with ranks / groups · same_rows ranks.
    context: the ranks among which each row is divided; None: this rank holds complete rows.
    attention: a key of `LAYOUTS`. number_documents: True for an objective that is not a sum over
    single tokens, see DocumentTargets. pooling: of a model that scores or embeds
    documents, the tokens that have a target: `last`, `cls` (the first) or `mean` (all); "": as the
    data says. mark_tokens: see MicroBatch.token_share.
    media: loads the media of rows; None for data without any.
    """

    micro_rows: int
    rank: int | None
    ranks: int
    device: torch.device
    pad_to_multiple: int | None = None
    attention: str = "documents"
    number_documents: bool = False
    pooling: str = ""
    mark_tokens: bool = False
    same_rows: int = 1
    stages: int = 1
    groups: int = 1
    context: ContextRanks | None = None
    media: MediaLoader | None = None

    def of_group(self, part: GroupPart) -> "BatchOptions":
        """Return the options with which this group computes its part of each step."""
        if part.is_own_step:  # its plans have only the rows of its part
            return self
        own = None
        if part.index is not None and self.rank is not None:
            own = part.index * self.ranks + self.rank
        return replace(self, rank=own, ranks=part.count * self.ranks, groups=part.count)


class Assembler:
    def __init__(self, seq_len: int, sources: int, options: BatchOptions):
        """sources: number of data sources whose losses are reported separately."""
        self.seq_len, self.sources, self.options = seq_len, sources, options

    def count(self, plan: StepPlan) -> int:
        """Return the number of micro-batches per rank; surplus slots get empty rows."""
        return math.ceil(plan.rows / (self.options.micro_rows * self.options.ranks))

    def suspects_event(self, ranks: list[int], samples: list[str]) -> dict[str, Any]:
        """Return the fields of an event that name the suspects of a bad step.

        They are at most MAX_SUSPECTS ranks and samples, and the number of further samples. ranks:
        numbered like `rank`; the event has global ranks, those of each group after another.
        """
        stages, same_rows = self.options.stages, self.options.same_rows
        own = self.options.ranks // self.options.groups  # positions of a group
        size = own * same_rows  # ranks of a stage
        readers = [
            (rank // own * stages + stage) * size + rank % own * same_rows + i
            for rank in ranks
            for stage in range(stages)
            for i in range(same_rows)
        ]
        different = [*dict.fromkeys(samples)]
        event = {"ranks": readers[:MAX_SUSPECTS], "samples": different[:MAX_SUSPECTS]}
        more = len(different) - MAX_SUSPECTS
        return event | ({"more_samples": more} if more > 0 else {})

    def empty(self) -> MicroBatch:
        return self.assemble(Rows.empty(0, self.seq_len))

    def assemble(self, rows: Rows, media: Sequence[Arrays] | None = None) -> MicroBatch:
        """Return a micro-batch of [micro_rows, length] tensors on the device.

        media: the arrays of the rows' media, in order; None: they are loaded here. Missing rows
        are filled with padding. If rows are divided among ranks, the shape is
        [micro_rows, length / ranks]: rows are cut here, where every token already has its label.
        """
        if len(rows.documents) < self.options.micro_rows:
            given, rows = rows, Rows.empty(self.options.micro_rows, self.seq_len)
            rows.put(range(len(given.documents)), given)
        if self.options.pooling:
            rows = at_pooled_tokens(rows, self.options.pooling)
        length = self.length(rows)
        layout = self.layout(rows.documents, length)
        own = layout.local_positions()
        index = np.flatnonzero(np.take_along_axis(rows.labels, own, 1) != -100)
        padding = (0, round_up(max(1, len(index)), INDEX_STEP) - len(index))

        def part(values: np.ndarray) -> Tensor:
            return to_device(np.take_along_axis(values, own, 1), self.options.device)

        def padded(values: np.ndarray, fill: int = 0) -> Tensor:
            sizes = [padding, *[(0, 0)] * (values.ndim - 1)]
            return to_device(np.pad(values, sizes, constant_values=fill), self.options.device)

        def supervised(values: np.ndarray) -> Tensor:
            in_rows = np.arange(len(own))[:, None]
            return padded(values[in_rows, own].reshape(-1, *values.shape[2:])[index])

        def of_documents(values: list[list[Any]] | None, dtype: type) -> Tensor | None:
            if values is None:
                return None
            return to_device(np.array([*chain(*values)], dtype), self.options.device)

        documents = None
        if self.options.number_documents:
            rows_before = np.arange(len(own))[:, None] * length
            places = (own + rows_before).reshape(-1)[index]
            numbers, groups = number_documents(rows, places, length)
            documents = DocumentTargets(
                padded(numbers, fill=len(groups)),
                to_device(groups, self.options.device),
                tuple(np.bincount(groups).tolist()),
                of_documents(rows.reference, np.float64),
                of_documents(rows.kinds, np.int64),
                of_documents(rows.label_values, np.float64),
            )
        loader, device = self.options.media, self.options.device
        return MicroBatch(
            part(rows.tokens),
            part(rows.positions),
            layout,
            padded(index),
            supervised(rows.labels),
            supervised(rows.weights),
            supervised(rows.sources) if self.sources > 1 else None,
            documents,
            part(tokens_of_documents(rows.documents, length)) if self.options.mark_tokens else None,
            {name: supervised(values) for name, values in rows.columns.items()},
            media=loader.inputs(rows, media, length, device) if loader else None,
        )

    def layout(self, documents: Lengths, length: int) -> PackedAttention:
        """Return the attention over documents in rows of `length`, for this rank's part of them."""
        kind, device = self.options.attention, self.options.device
        if self.options.context:
            return self.options.context.layout(kind, documents, length, device)
        return LAYOUTS[kind](documents, length, device)

    def length(self, rows: Rows) -> int:
        """Return the row length of this micro-batch in tokens, padding included."""
        # flex attention compiles a kernel for each length, so it always gets the same one
        if self.options.pad_to_multiple is None or self.options.attention == "flex":
            return self.seq_len
        longest = max(1, *map(sum, rows.documents))
        return min(self.seq_len, round_up(longest, self.options.pad_to_multiple))


class PackedRows(Protocol):
    """Numbered rows that micro-batches are made of: stored ones, or the answers of a step."""

    seq_len: int

    @property
    def source_names(self) -> Sequence[str]:
        """The data sources whose losses are reported separately."""

    def attention_costs(self, rows: Any) -> np.ndarray:
        """Return the attention cost of each of these rows, [rows]."""

    def where(self, row: int) -> list[str]:
        """Return FILE:LINE of the samples in a row."""

    def read_rows(self, indices: Any) -> Rows:
        """Return the rows with these indices, in this order."""


class RowBatches(Assembler):
    """This rank's micro-batches of numbered rows."""

    def __init__(self, order: PackedRows, options: BatchOptions):
        super().__init__(order.seq_len, len(order.source_names), options)
        self.order = order

    def read(self, plans: Iterator[StepPlan]) -> Iterator[StepPlan | MicroBatch]:
        """Yield each plan, followed by this rank's micro-batches of that step."""
        items = self._plans_and_rows(plans)
        if self.options.media is None:
            yield from (self.assemble(one) if isinstance(one, Rows) else one for one in items)
            return
        for item, media in self.options.media.ahead(items):
            yield self.assemble(item, media) if isinstance(item, Rows) else item

    def _plans_and_rows(self, plans: Iterator[StepPlan]) -> Iterator[StepPlan | Rows]:
        for plan in plans:
            yield plan
            assigned = self.assign_rows_to_ranks(plan)
            own = (
                np.full_like(assigned[:, 0], -1)
                if self.options.rank is None
                else assigned[:, self.options.rank]
            )
            for rows in own:
                yield self.order.read_rows(rows[rows >= 0])

    def micro_batches(self, plan: StepPlan) -> Iterator[MicroBatch]:
        return (item for item in self.read(iter([plan])) if isinstance(item, MicroBatch))

    def assign_rows_to_ranks(self, plan: StepPlan) -> np.ndarray:
        """Return [micro-batches, ranks, micro_rows] int64, the row in each slot; -1: none.

        Ranks wait for each other in every micro-batch, so all should take equally long. Rows with
        about the same attention cost go into the same micro-batch, the costliest first, and are
        dealt to the ranks alternately from first to last and from last to first.
        """
        count, numbers = self.count(plan), np.arange(plan.start, plan.stop)
        rows = np.full(count * self.options.micro_rows * self.options.ranks, -1)
        rows[: len(numbers)] = numbers
        costs = self.order.attention_costs(numbers) if self.options.ranks > 1 else np.zeros(1)
        if (costs == costs[0]).all():
            return rows.reshape(count, self.options.ranks, self.options.micro_rows)
        rows[: len(numbers)] = numbers[np.argsort(-costs, kind="stable")]
        rounds = rows.reshape(-1, self.options.ranks)
        rounds[plan.step % 2 :: 2] = rounds[plan.step % 2 :: 2, ::-1].copy()
        return rounds.reshape(count, self.options.micro_rows, self.options.ranks).swapaxes(1, 2)

    def samples_of(
        self, plan: StepPlan, ranks: Sequence[int], micro_batches: Sequence[float]
    ) -> list[str]:
        """Return FILE:LINE of the samples in one micro-batch of each of these ranks.

        micro_batches: index of the micro-batch, by rank.
        """
        rows = self.assign_rows_to_ranks(plan)
        own = [row for rank in ranks for row in rows[int(micro_batches[rank]), rank]]
        return [where for row in own if row >= 0 for where in self.order.where(int(row))]


class Batches(RowBatches):
    """This rank's micro-batches of ranges of stored rows."""

    order: Mixture

    def plans(
        self,
        rows: int,
        last_row: int | None,
        step: int = 0,
        start: int = 0,
        skipped: Sequence[Sequence[int]] = (),
        epoch_ends: EpochEnds | None = None,
    ) -> Iterator[StepPlan]:
        """Yield a plan for each range of `row_ranges`; the first one has the number `step` + 1."""
        ranges = row_ranges(rows, last_row, start, skipped, epoch_ends)
        for number, (first, stop) in enumerate(ranges, step + 1):
            totals = self.order.totals(first, stop)
            yield StepPlan(number, first, stop, *totals, self.order.documents(first, stop))

    def own_part(self, plan: StepPlan, part: GroupPart) -> StepPlan:
        assert part.index is not None
        rows = plan.stop - plan.start
        first, stop = (plan.start + rows * i // part.count for i in (part.index, part.index + 1))
        totals = self.order.totals(first, stop)
        documents = self.order.documents(first, stop)
        return StepPlan(plan.step, first, stop, *totals, documents, of_all=plan)


def at_pooled_tokens(rows: Rows, pooling: str) -> Rows:
    """Return the rows with targets at the tokens that are pooled. pooling: see BatchOptions."""
    labels, weights = np.full_like(rows.labels, -100), np.zeros_like(rows.weights)
    for row, documents in enumerate(rows.documents):
        ends = np.cumsum(documents, dtype=np.int64)
        places = {"last": ends - 1, "cls": ends - documents, "mean": np.arange(sum(documents))}
        labels[row, places[pooling]], weights[row, places[pooling]] = 0, 1.0
    return replace(rows, labels=labels, weights=weights)


def tokens_of_documents(documents: Lengths, length: int) -> np.ndarray:
    """Return [rows, length] float32: 1 for a token of a document, 0 for padding."""
    filled = np.array([sum(row) for row in documents])
    return (np.arange(length) < filled[:, None]).astype(np.float32)


def number_documents(rows: Rows, index: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the document number of each position, [positions] int64, and each document's group.

    index: [positions] int64, flat positions in rows of `length`, none of them padding. Documents
    and groups are numbered across all rows.
    """
    ends = [i * length + np.cumsum(row, dtype=np.int64) for i, row in enumerate(rows.documents)]
    starts = [start for row in rows.group_starts for start in row]
    groups = np.cumsum(starts, dtype=np.int64) - 1
    return np.searchsorted(np.concatenate(ends), index, side="right"), groups


def ranks_with_highest(values: Sequence[float]) -> list[int]:
    """Return the ranks with the highest value, at most MAX_SUSPECTS.

    values: one per rank; inf in place of a value that is not finite.
    """
    highest = max(values)
    return [rank for rank, value in enumerate(values) if value == highest][:MAX_SUSPECTS]


def row_ranges(
    rows: int,
    last_row: int | None,
    start: int,
    skipped: Sequence[Sequence[int]],
    epoch_ends: EpochEnds | None = None,
) -> Iterator[tuple[int, int]]:
    """Yield the range of rows of each step, (start, stop) with stop excluded.

    A step has `rows` rows, or fewer if it ends at last_row (None: there is no end), at a skipped
    range or with an epoch.
    """
    end = math.inf if last_row is None else last_row
    while start < end:
        inside = [stop for first, stop in skipped if first <= start < stop]
        if inside:
            start = max(inside)
            continue
        following = [first for first, _ in skipped if first > start]
        following += [epoch_ends.after(start)] if epoch_ends else []
        stop = int(min(start + rows, end, *following))
        yield start, stop
        start = stop


def count_steps(
    rows: int,
    last_row: int,
    start: int,
    skipped: Sequence[Sequence[int]],
    epoch_ends: EpochEnds | None = None,
) -> int:
    """Return the number of ranges that `row_ranges` yields.

    Ranges after the last skipped range are counted without iterating over them.
    """
    whole_from = max([start, *(min(stop, last_row) for _, stop in skipped)])
    steps = sum(1 for _ in row_ranges(rows, whole_from, start, skipped, epoch_ends))
    if epoch_ends and whole_from < last_row:
        return steps + epoch_ends.steps(rows, whole_from, last_row)
    return steps + max(0, math.ceil((last_row - whole_from) / rows))
