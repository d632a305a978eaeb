"""From the global order of rows to what this rank computes: every number here is arithmetic on a row count."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from fsdp_trainer.data.order import RowData, RowOrder
from fsdp_trainer.models.attention import LAYOUTS, to_device
from fsdp_trainer.models.decoder import MicroBatch

INDEX_STEP = 128  # supervised positions are padded to a multiple of this, so that the device sees few shapes


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

    def __init__(self, order: RowOrder, micro_rows: int, rank: int, ranks: int, device: torch.device, attention: str = "documents"):
        """attention: a name of `LAYOUTS`."""
        self.order, self.micro_rows, self.rank, self.ranks, self.device = order, micro_rows, rank, ranks, device
        self.attention = attention
        self.source_names = order.store.source_names

    def steps(self, rows: int, last_row: int | None, step: int = 0, start: int = 0) -> Iterator[StepPlan]:
        """Plans of `rows` rows each, going on after `step` steps and `start` rows; up to last_row if given, the last one partial."""
        while last_row is None or start < last_row:
            step, stop = step + 1, start + rows if last_row is None else min(start + rows, last_row)
            yield StepPlan(step, start, stop, *self.order.totals(start, stop))
            start = stop

    def count(self, plan: StepPlan) -> int:
        """Micro-batches per rank; where rows do not divide, the surplus slots are empty rows."""
        return -(-(plan.stop - plan.start) // (self.micro_rows * self.ranks))

    def micro_batches(self, plan: StepPlan) -> Iterator[MicroBatch]:
        """This rank's part of a step. Consecutive rows go to consecutive ranks."""
        for m in range(self.count(plan)):
            first = plan.start + (m * self.ranks + self.rank) * self.micro_rows
            yield self.assemble([self.order.read(i) for i in range(first, min(first + self.micro_rows, plan.stop))])

    def assemble(self, rows: list[RowData]) -> MicroBatch:
        """[micro_rows, seq_len] tensors on the device; missing rows are empty."""
        shape = (self.micro_rows, self.order.seq_len)
        tokens, positions, labels = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.full(shape, -100, np.int64)
        weights, sources = np.zeros(shape, np.float32), np.zeros(shape, np.int64)
        lengths: list[list[int]] = [[] for _ in range(self.micro_rows)]
        for i, row in enumerate(rows):
            tokens[i], labels[i], weights[i], lengths[i] = row.tokens, row.labels, row.weights, row.documents
            sources[i, : sum(row.documents)] = np.repeat(row.sources, row.documents)
            positions[i, : sum(row.documents)] = np.concatenate([np.arange(n) for n in row.documents])
        learnt = np.flatnonzero(labels.reshape(-1) != -100)
        padding = (0, -len(learnt) % INDEX_STEP or (INDEX_STEP if not len(learnt) else 0))
        on_device = partial(to_device, device=self.device)
        return MicroBatch(
            on_device(tokens),
            on_device(positions),
            LAYOUTS[self.attention](lengths, shape[1], self.device),
            on_device(np.pad(learnt, padding)),
            on_device(np.pad(labels.reshape(-1)[learnt], padding)),
            on_device(np.pad(weights.reshape(-1)[learnt], padding)),
            on_device(np.pad(sources.reshape(-1)[learnt], padding)) if len(self.source_names) > 1 else None,
        )
