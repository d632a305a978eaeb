"""The protocol for sources of a trainer's micro-batches, and its implementation for stored rows."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice, pairwise
from typing import Protocol

import numpy as np

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.data.data_statistics import summary_lines
from fsdp_trainer.data.order.epoch_ends import EpochEnds
from fsdp_trainer.data.order.mixture import Mixture
from fsdp_trainer.data.prepared import Prepared
from fsdp_trainer.data.stream.row_stream import StreamedData
from fsdp_trainer.observe.observer import Observer
from fsdp_trainer.observe.step_log import StepReport
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.training.batches import (
    Batches,
    BatchOptions,
    GroupPart,
    StepPlan,
    count_steps,
    ranks_with_highest,
)
from fsdp_trainer.training.feed import Feed
from fsdp_trainer.training.progress import Progress
from fsdp_trainer.training.stopping.stop import StopSignals

Order = Mixture | StreamedData
"""The rows of training data, in order."""
LeaveTogether = Callable[[], None]
"""Called on all ranks if one of them has no data for a step; raises the exception to leave with."""


@dataclass
class SourceContext:
    """The arguments of every source, apart from its rows.

    options: those of Assembler. workers: number of workers if data.workers is null.
    attention_cost: function from lengths of documents to their attention costs.
    """

    cfg: TrainConfig
    options: BatchOptions
    dims: Dims
    workers: int
    attention_cost: Callable[[np.ndarray], np.ndarray]
    signals: StopSignals
    observer: Observer


class DataSource(Protocol):
    """Numbered rows, of which each step trains on the next ones.

    The data that follows is a function of the progress alone, so a checkpoint can be resumed on any
    number of ranks.
    """

    fingerprint: str
    """Hash of the data: equal fingerprints mean equal data."""
    source_names: list[str]
    """The files or data sets whose losses are reported separately."""
    first_row: int
    """The number of its first row; smaller numbers belong to the data before a change of data."""

    def total_steps(self, progress: Progress) -> int:
        """Return the total number of optimizer steps of the run."""

    def open(self, progress: Progress, leave: LeaveTogether, part: GroupPart) -> Feed:
        """Begin to read this group's part of the rows after `progress`. Collective."""

    def state(self, progress: Progress) -> Json:
        """Return the fields of Progress from which the source can resume. Collective."""

    def suspects(self, report: StepReport) -> Json:
        """Return the ranks and samples that may have caused a bad step. Collective."""

    def read_by_component(self, progress: Progress) -> list[Json]:
        """Return the data read so far from each component of a mixture; empty for a single one."""

    def about(self, prepared: Prepared, progress: Progress) -> list[str]:
        """Return printed lines that describe the data."""

    def epochs(self, progress: Progress) -> float | None:
        """Return the total number of epochs of the run; None for data without epochs."""


class StoredRows:
    """Rows of prepared data.

    Their order is a function of the row number, so no other state has to be saved.
    """

    def __init__(self, order: Mixture, context: SourceContext, last_row: int | None):
        """last_row: the row at which train.epochs end."""
        cfg = context.cfg
        self.order, self.options, self.rows = order, context.options, cfg.batch.rows
        self.batches = Batches(order, self.options)
        self.steps, self.last_row = cfg.train.steps or 0, last_row
        self.prefetch, self.signals = cfg.data.prefetch, context.signals
        ends = EpochEnds(order.start, order.rows_per_epoch)
        self.epoch_ends = None if cfg.batch.across_epochs else ends
        self.source_names = self.order.source_names
        self.fingerprint, self.first_row = self.order.fingerprint, self.order.start

    @classmethod
    def build(cls, order: Mixture, progress: Progress, context: SourceContext) -> "StoredRows":
        train, end = context.cfg.train, None
        if train.steps is None:
            end = last_row(train.epochs or 1, order.rows_per_epoch, progress.segments)
        return cls(order, context, end)

    @classmethod
    def validation(cls, order: Mixture, context: SourceContext) -> "StoredRows":
        return cls(order, context, None)

    def total_steps(self, progress: Progress) -> int:
        if self.last_row is None:
            return self.steps
        done, skipped = progress.rows, progress.skipped_row_ranges
        steps = count_steps(self.rows, self.last_row, done, skipped, self.epoch_ends)
        return progress.step + steps

    def plans(self, progress: Progress) -> Iterator[StepPlan]:
        plans = self._plans_from(progress.step, progress.rows, self.last_row, progress)
        return islice(plans, max(0, self.total_steps(progress) - progress.step))

    def plans_after(self, plan: StepPlan, progress: Progress) -> Iterator[StepPlan]:
        return self._plans_from(plan.step, plan.stop, None, progress)

    def _plans_from(
        self, step: int, row: int, last_row: int | None, progress: Progress
    ) -> Iterator[StepPlan]:
        skipped = progress.skipped_row_ranges
        return self.batches.plans(self.rows, last_row, step, row, skipped, self.epoch_ends)

    def open(self, progress: Progress, leave: LeaveTogether, part: GroupPart) -> Feed:
        """Begin to read this group's part of the rows after `progress`.

        A rank without data still takes part in the step's collectives.
        """
        batches = self.batches = Batches(self.order, self.options.of_group(part))
        plans = self.plans(progress)
        if part.is_own_step:
            plans = (batches.own_part(plan, part) for plan in plans)
        return self._feed(plans)

    def open_all(self) -> Feed:
        return self._feed(self.batches.plans(self.order.rows_per_epoch, self.order.rows_per_epoch))

    def _feed(self, plans: Iterator[StepPlan]) -> Feed:
        what = f"prepared in {self.order.folder}"
        return Feed(self.batches, what, self.batches.read(plans), self.prefetch, self.signals)

    def state(self, progress: Progress) -> Json:
        """Return the mixtures that rows were read from so far, the last one up to this progress."""
        return {"segments": [*progress.segments[:-1], self.order.state(progress.rows)]}

    def suspects(self, report: StepReport) -> Json:
        ranks = ranks_with_highest(report.worst_losses)
        samples = self.batches.samples_of(report.plan, ranks, report.worst_micro_batches)
        return self.batches.suspects_event(ranks, samples)

    def read_by_component(self, progress: Progress) -> list[Json]:
        """Return the data read so far from each component; empty for a single component."""
        return self.order.report(progress.rows) if len(self.order.components) > 1 else []

    def about(self, prepared: Prepared, progress: Progress) -> list[str]:
        notes = dict.fromkeys(part.note for part in self.order.orders if part.note)
        last = self._end(progress)
        lines = summary_lines(prepared, self.order.seq_len, self.order)
        return [*lines, *self.order.plan(last), *notes]

    def epochs(self, progress: Progress) -> float:
        return (self._end(progress) - self.order.start) / self.order.rows_per_epoch

    def _end(self, progress: Progress) -> int:
        if self.last_row:
            return self.last_row
        steps = self.total_steps(progress) - progress.step
        if self.epoch_ends:
            return self.epoch_ends.row_after(steps, self.rows, progress.rows)
        return progress.rows + steps * self.rows


def last_row(epochs: float, rows_per_epoch: int, segments: list[Json]) -> int:
    """Return the row at which train.epochs end.

    Epochs of earlier data, each measured in that data's own length, count as done. segments: see
    Mixture.state.
    """
    measured = [(one, following) for one, following in pairwise(segments) if one["rows_per_epoch"]]
    done = [
        Fraction(following["start"] - one["start"], one["rows_per_epoch"])
        for one, following in measured
    ]
    start = segments[-1]["start"] if segments else 0
    return start + max(0, math.ceil((epochs - sum(done)) * rows_per_epoch))
