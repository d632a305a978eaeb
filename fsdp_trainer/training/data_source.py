"""The source of a trainer's micro-batches: a protocol, and stored rows as its first
implementation."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NoReturn, Protocol

from fsdp_trainer.data.mixture import Mixture
from fsdp_trainer.data.prepare import Prepared
from fsdp_trainer.data.summary import two_lines
from fsdp_trainer.observe.step_log import StepReport
from fsdp_trainer.training.batches import Batches, StepPlan, count_steps
from fsdp_trainer.training.feed import Feed, plans_and_micro_batches
from fsdp_trainer.training.progress import Progress
from fsdp_trainer.training.stop import StopSignals

LeaveTogether = Callable[[], NoReturn]
"""Called on all ranks where one of them has no data for a step: raises what they leave with."""


class DataSource(Protocol):
    """Rows by number, of which each step takes the next ones.

    What it yields is a function of the progress, so any number of ranks can go on from a
    checkpoint.
    """

    @property
    def fingerprint(self) -> str:
        """Return what all content depends on: equal fingerprints are equal data."""

    @property
    def source_names(self) -> list[str]:
        """Return the names of the files or data sets whose losses are told apart."""

    @property
    def first_row(self) -> int:
        """Return the number of its first row: those before were other data's."""

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
        order: Mixture,
        batches: Batches,
        rows: int,
        steps: int | None,
        last_row: int | None,
        prefetch: int | None,
        signals: StopSignals,
    ):
        """rows: of a step; steps: of the run, or last_row: where the data of a run in epochs
        ends."""
        self.order, self.batches, self.rows = order, batches, rows
        self.steps, self.last_row = steps, last_row
        self.prefetch, self.signals = prefetch, signals
        self.source_names = order.source_names
        self.fingerprint, self.first_row = order.fingerprint, order.start

    def total_steps(self, progress: Progress) -> int:
        """Return train.steps, or how many steps the rows up to last_row make."""
        if self.last_row is None:
            assert self.steps is not None
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
        items = plans_and_micro_batches(self.batches, plans)
        what = f"prepared in {self.order.folder}"
        return Feed(self.batches, what, items, self.prefetch, self.signals)

    def state(self, progress: Progress) -> dict[str, Any]:
        """Return the mixtures that rows came from so far; the last as of this progress."""
        return {"segments": [*progress.segments[:-1], self.order.state(progress.rows)]}

    def suspects(self, report: StepReport) -> dict[str, Any]:
        """Return the ranks with the highest loss, and the samples of their micro-batches."""
        worst = report.worst_losses, report.worst_micro_batches
        return self.batches.suspects(report.plan, *worst)

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
