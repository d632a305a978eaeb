"""The source of a trainer's micro-batches: a protocol, and stored rows as its first
implementation."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice, pairwise
from typing import Any, Protocol, Self

import numpy as np

from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.data.mixture import Mixture
from fsdp_trainer.data.prepare import Prepared
from fsdp_trainer.data.summary import two_lines
from fsdp_trainer.models.decoder import MicroBatch
from fsdp_trainer.observe.observer import Observer
from fsdp_trainer.observe.step_log import StepReport
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.training.batches import (
    Batches,
    StepPlan,
    count_steps,
    ranks_with_highest,
)
from fsdp_trainer.training.feed import Feed
from fsdp_trainer.training.progress import Progress
from fsdp_trainer.training.stop import StopSignals

LeaveTogether = Callable[[], None]
"""Called on all ranks where one of them has no data for a step: raises what they leave with."""


@dataclass
class SourceContext:
    """The arguments of every source besides its rows.

    assembler: options of Assembler; workers: to start where data.workers does not say how many;
    attention_cost: of documents' lengths.
    """

    cfg: TrainConfig
    assembler: dict[str, Any]
    dims: Dims
    workers: int
    attention_cost: Callable[[np.ndarray], np.ndarray]
    signals: StopSignals
    observer: Observer
    answers: Any = None
    """The AnswerMaker of a source of prompts."""


class DataSource(Protocol):
    """Rows by number, of which each step takes the next ones.

    What it yields is a function of the progress, so any number of ranks can go on from a
    checkpoint.
    """

    fingerprint: str
    """Equal fingerprints are equal data."""
    source_names: list[str]
    """The files or data sets whose losses are told apart."""
    first_row: int
    """The number of its first row: those before were other data's."""

    @classmethod
    def build(cls, order: Any, progress: Progress, context: SourceContext) -> Self:
        """Return the source of the rows of `order`."""

    def total_steps(self, progress: Progress) -> int:
        """Return the number of optimizer steps of the whole run."""

    def open(self, progress: Progress, leave: LeaveTogether) -> Feed:
        """Begin to read behind `progress`. Collective."""

    def state(self, progress: Progress) -> dict[str, Any]:
        """Return the fields of Progress that it goes on from, as of a checkpoint. Collective."""

    def suspects(self, report: StepReport) -> dict[str, Any]:
        """Return the ranks, and samples, that a bad step may come from. Collective."""

    def shares(self, progress: Progress) -> list[dict[str, Any]]:
        """Return what each component of a mixture has given so far; empty for a single one."""

    def about(self, prepared: Prepared, progress: Progress) -> list[str]:
        """Return lines on the data for people."""

    def epochs(self, progress: Progress) -> float | None:
        """Return how many epochs the whole run has; None where there are none."""


class StoredRows:
    """Rows of prepared data.

    The order is a function of the row number; there is nothing else to save.
    """

    def __init__(
        self,
        cfg: TrainConfig,
        batches: Batches,
        last_row: int | None,
        signals: StopSignals,
    ):
        """last_row: where the data of a run in epochs ends; None: it has train.steps."""
        self.order, self.batches, self.rows = batches.order, batches, cfg.batch.rows
        self.steps, self.last_row = cfg.train.steps or 0, last_row
        self.prefetch, self.signals = cfg.data.prefetch, signals
        self.source_names = self.order.source_names
        self.fingerprint, self.first_row = self.order.fingerprint, self.order.start

    @classmethod
    def build(cls, order: Mixture, progress: Progress, context: SourceContext) -> "StoredRows":
        """Return the source of the rows of a mixture."""
        cfg, end = context.cfg, None
        if cfg.train.steps is None:
            end = last_row(cfg.train.epochs or 1, order.rows_per_epoch, progress.segments)
        return cls(cfg, Batches(order, **context.assembler), end, context.signals)

    @classmethod
    def validation(cls, order: Mixture, context: SourceContext) -> "StoredRows":
        """Return the source of rows that are read from beginning to end, as by `open_all`."""
        return cls(context.cfg, Batches(order, **context.assembler), None, context.signals)

    def total_steps(self, progress: Progress) -> int:
        """Return train.steps, or how many steps the rows up to last_row make."""
        if self.last_row is None:
            return self.steps
        skipped = progress.skipped_row_ranges
        return progress.step + count_steps(self.rows, self.last_row, progress.rows, skipped)

    def plans(self, progress: Progress) -> Iterator[StepPlan]:
        """Return the plans of the steps behind `progress`."""
        skipped = progress.skipped_row_ranges
        plans = self.batches.plans(self.rows, self.last_row, progress.step, progress.rows, skipped)
        return islice(plans, max(0, self.total_steps(progress) - progress.step))

    def open(self, progress: Progress, leave: LeaveTogether) -> Feed:
        """Begin to read behind `progress`.

        A rank without data takes part in the step's collectives.
        """
        return self._feed(self.plans(progress))

    def open_all(self) -> Feed:
        """Begin to read all rows of an epoch as one step: a validation."""
        return self._feed(self.batches.plans(self.order.rows_per_epoch, self.order.rows_per_epoch))

    def _feed(self, plans: Iterator[StepPlan]) -> Feed:
        what = f"prepared in {self.order.folder}"
        return Feed(self.batches, what, self._read(plans), self.prefetch, self.signals)

    def _read(self, plans: Iterator[StepPlan]) -> Iterator[StepPlan | MicroBatch]:
        """Yield each plan, followed by this rank's micro-batches of it."""
        for plan in plans:
            yield plan
            yield from self.batches.micro_batches(plan)

    def state(self, progress: Progress) -> dict[str, Any]:
        """Return the mixtures that rows came from so far; the last as of this progress."""
        return {"segments": [*progress.segments[:-1], self.order.state(progress.rows)]}

    def suspects(self, report: StepReport) -> dict[str, Any]:
        """Return the ranks with the highest loss, and the samples of their micro-batches."""
        ranks = ranks_with_highest(report.worst_losses)
        samples = self.batches.samples_of(report.plan, ranks, report.worst_micro_batches)
        return self.batches.suspects_event(ranks, samples)

    def shares(self, progress: Progress) -> list[dict[str, Any]]:
        """Return what each component has given so far; empty for a single one."""
        return self.order.report(progress.rows) if len(self.order.components) > 1 else []

    def about(self, prepared: Prepared, progress: Progress) -> list[str]:
        """Return lines on the store, the mixture and its packing."""
        notes = dict.fromkeys(part.note for part in self.order.orders if part.note)
        last = self._end(progress)
        lines = two_lines(prepared, self.order.seq_len, self.order)
        return [*lines, *self.order.plan(last), *notes]

    def epochs(self, progress: Progress) -> float:
        """Return how many epochs the whole run has."""
        return (self._end(progress) - self.order.start) / self.order.rows_per_epoch

    def _end(self, progress: Progress) -> int:
        """Return the row at which the run ends."""
        if self.last_row:
            return self.last_row
        return progress.rows + (self.total_steps(progress) - progress.step) * self.rows


def last_row(epochs: float, rows_per_epoch: int, segments: list[dict[str, Any]]) -> int:
    """Return the row at which train.epochs end.

    What earlier data has done of them, measured in its own epochs, is done. segments: see
    Mixture.state.
    """
    measured = [(one, following) for one, following in pairwise(segments) if one["rows_per_epoch"]]
    done = [
        Fraction(following["start"] - one["start"], one["rows_per_epoch"])
        for one, following in measured
    ]
    start = segments[-1]["start"] if segments else 0
    return start + max(0, math.ceil((epochs - sum(done)) * rows_per_epoch))
