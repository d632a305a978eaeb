"""The source of a trainer's micro-batches: a protocol, and stored rows as its first
implementation."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Protocol

from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.data.prepare import Prepared
from fsdp_trainer.data.summary import two_lines
from fsdp_trainer.models.decoder import MicroBatch
from fsdp_trainer.observe.step_log import StepReport
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
