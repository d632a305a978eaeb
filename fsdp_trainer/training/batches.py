"""From the global order of rows to what this rank computes: every number here is arithmetic on a row count."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from fsdp_trainer.data.mixture import Mixture
from fsdp_trainer.data.order import Rows
from fsdp_trainer.models.attention import LAYOUTS, to_device
from fsdp_trainer.models.decoder import MicroBatch

INDEX_STEP = (
    128  # supervised positions are padded to a multiple of this, so that the device sees few shapes
)

SHOWN = 8  # ranks and samples that are told of a bad step


@dataclass(frozen=True)
class StepPlan:
    """What one optimizer step trains on; the same on every rank.

    rows [start, stop) of the running order; weight: Σ weight of their targets, which divides the loss; tokens, supervised: how many;
    squares: Σ length² of their documents, less what windows leave out: which attention costs.
    """

    step: int
    start: int
    stop: int
    weight: float
    tokens: int
    supervised: int
    squares: int


class Batches:
    """This rank's micro-batches of any range of rows."""

    attention = "documents"
    """A name of `LAYOUTS`."""

    def __init__(
        self,
        order: Mixture,
        micro_rows: int,
        rank: int,
        ranks: int,
        device: torch.device,
        pad_to_multiple: int | None = None,
    ):
        """pad_to_multiple: micro-batches are no longer than their longest row, up to the next multiple; None: batch.seq_len."""
        self.pad_to_multiple = pad_to_multiple
        self.order, self.micro_rows, self.rank, self.ranks, self.device = (
            order,
            micro_rows,
            rank,
            ranks,
            device,
        )
        self.source_names = order.source_names

    def steps(
        self,
        rows: int,
        last_row: int | None,
        step: int = 0,
        start: int = 0,
        left_out: Sequence[Sequence[int]] = (),
    ) -> Iterator[StepPlan]:
        """Plans of the ranges of `row_ranges`, going on after `step` steps."""
        for number, (first, stop) in enumerate(
            row_ranges(rows, last_row, start, left_out), step + 1
        ):
            yield StepPlan(number, first, stop, *self.order.totals(first, stop))

    def count(self, plan: StepPlan) -> int:
        """Micro-batches per rank; where rows do not divide, the surplus slots are empty rows."""
        return -(-(plan.stop - plan.start) // (self.micro_rows * self.ranks))

    def micro_batches(self, plan: StepPlan) -> Iterator[MicroBatch]:
        """This rank's part of a step."""
        for dealt in self.deal(plan)[:, self.rank]:
            yield self.assemble(self.order.read_rows(dealt[dealt >= 0]))

    def deal(self, plan: StepPlan) -> np.ndarray:
        """[micro-batches, ranks, micro_rows] int64: which rows of a step go where; -1: none.

        Ranks wait for one another in every micro-batch, so all should take as long: rows that attention costs about the same are in
        the same micro-batch, the costliest first, and go to the ranks to and fro.
        """
        shape = (self.count(plan), self.ranks, self.micro_rows)
        rows = np.full(math.prod(shape), -1)
        rows[: plan.stop - plan.start] = np.arange(plan.start, plan.stop)
        costs = self.order.costs(range(plan.start, plan.stop)) if self.ranks > 1 else np.zeros(1)
        if (costs == costs[0]).all():
            return rows.reshape(shape)
        rows[: len(costs)] = rows[np.argsort(-costs, kind="stable")]
        rounds = rows.reshape(-1, self.ranks)
        rounds[plan.step % 2 :: 2] = rounds[plan.step % 2 :: 2, ::-1].copy()
        return rounds.reshape(shape[0], self.micro_rows, self.ranks).swapaxes(1, 2)

    def suspects(
        self, plan: StepPlan, worst: Sequence[float], which: Sequence[float]
    ) -> dict[str, Any]:
        """Whose numbers were bad in a step: the ranks where a micro-batch's loss or gradient was not finite, else the one with the highest loss.

        worst, which: of each rank the highest mean loss of its micro-batches (inf: not finite), and the place of that micro-batch.
        Returns the ranks, and where the samples of those micro-batches come from, at most SHOWN of each.
        """
        ranks, dealt = suspected(worst), self.deal(plan)
        rows = [row for rank in ranks for row in dealt[int(which[rank]), rank].tolist() if row >= 0]
        return told_of(ranks, [where for row in rows for where in self.order.where(row)])

    def assemble(self, rows: Rows) -> MicroBatch:
        """[micro_rows, length] tensors on the device; missing rows are empty."""
        if len(rows.documents) < self.micro_rows:
            there, rows = rows, Rows.empty(self.micro_rows, self.order.seq_len)
            rows.put(range(len(there.documents)), there)
        length = self.length(rows)
        tokens, positions, *every = (
            part[:, :length]
            for part in (rows.tokens, rows.positions, rows.labels, rows.weights, rows.sources)
        )
        labels, weights, sources = (part.reshape(-1) for part in every)
        learnt = np.flatnonzero(labels != -100)
        padding = (0, -len(learnt) % INDEX_STEP or (INDEX_STEP if not len(learnt) else 0))
        on_device = partial(to_device, device=self.device)
        return MicroBatch(
            on_device(np.ascontiguousarray(tokens)),
            on_device(np.ascontiguousarray(positions)),
            LAYOUTS[self.attention](rows.documents, length, self.device),
            on_device(np.pad(learnt, padding)),
            on_device(np.pad(labels[learnt], padding)),
            on_device(np.pad(weights[learnt], padding)),
            on_device(np.pad(sources[learnt], padding)) if len(self.source_names) > 1 else None,
        )

    def length(self, rows: Rows) -> int:
        """Of a micro-batch of these rows, padding included."""
        if (
            self.pad_to_multiple is None or self.attention == "flex"
        ):  # whose kernel is compiled for each length
            return self.order.seq_len
        longest = max(1, *(sum(documents) for documents in rows.documents))
        return min(self.order.seq_len, -(-longest // self.pad_to_multiple) * self.pad_to_multiple)


def suspected(worst: Sequence[float]) -> list[int]:
    """The ranks with the highest number."""
    return [rank for rank, value in enumerate(worst) if value == max(worst)][:SHOWN]


def told_of(ranks: list[int], samples: list[str]) -> dict[str, Any]:
    """What an event says of them."""
    different = [*dict.fromkeys(samples)]
    more = len(different) - SHOWN
    return {
        "ranks": ranks,
        "samples": different[:SHOWN],
        **({"more_samples": more} if more > 0 else {}),
    }


def row_ranges(
    rows: int, last_row: int | None, start: int, left_out: Sequence[Sequence[int]]
) -> Iterator[tuple[int, int]]:
    """[start, stop) of the rows of each step: `rows` of them, fewer before last_row (None: endless) and before what is left out, which none holds."""
    while True:
        while hit := [stop for first, stop in left_out if first <= start < stop]:
            start = max(hit)
        if last_row is not None and start >= last_row:
            return
        edges = [first for first, _ in left_out if first > start] + (
            [] if last_row is None else [last_row]
        )
        stop = min([start + rows, *edges])
        yield start, stop
        start = stop
