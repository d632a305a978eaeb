"""Rows that are streamed during training.

The Σ weight of a step is known only when its rows have been read, so the ranks sum it before each
step.
"""

import time
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice
from queue import Empty

import numpy as np
import torch

from fsdp_trainer.base import phases
from fsdp_trainer.base.distributed import gather
from fsdp_trainer.base.json_files import Json
from fsdp_trainer.base.round_up import round_up
from fsdp_trainer.config.durations import parse_duration
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.data.data_statistics import warning_lines
from fsdp_trainer.data.prepared import Prepared
from fsdp_trainer.data.stream.row_stream import START, Cursor, StreamedData, StreamedRow, place_of
from fsdp_trainer.data.stream.stream_readers import Readers, WorkerReaders
from fsdp_trainer.errors import Stopped
from fsdp_trainer.models.decoder import MicroBatch
from fsdp_trainer.observe.observer import Observer
from fsdp_trainer.observe.step_log import StepReport
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.training.batches import (
    MAX_SUSPECTS,
    REMEMBERED_STEPS,
    Assembler,
    GroupPart,
    StepPlan,
    ranks_with_highest,
    row_ranges,
)
from fsdp_trainer.training.data_source import LeaveTogether, SourceContext
from fsdp_trainer.training.feed import Feed, StepBatches
from fsdp_trainer.training.progress import Progress
from fsdp_trainer.training.stopping.stop import StopSignals

ROUND_SECONDS = 5.0
"""Seconds that a rank waits for its rows before it meets the others in a collective again."""
ROUNDS_PER_MESSAGE = 12
MAX_SHOWN_SKIPPED = 8
NO_ROW = [0.0] * 5
"""LocalStep.sums without any row."""


@dataclass
class LocalStep:
    """This rank's part of a step.

    sums: weight, tokens, supervised tokens, attention cost and skipped input rows. cursors: those
    of its streams after the step. skipped: FILE:LINE of input rows that could not be read.
    """

    plan: StepPlan
    sums: list[float]
    cursors: dict[int, Cursor]
    skipped: list[str]


@dataclass
class StreamedRows:
    """Rows of streamed files.

    Slot s of every step gets the next row of stream s, so each rank always reads the same streams.
    """

    cfg: TrainConfig
    data: StreamedData
    assembler: Assembler
    dims: Dims
    attention_cost: Callable[[np.ndarray], np.ndarray]
    """Function from lengths of documents to their attention costs."""
    workers: int
    """Number of processes that make rows; 1: only this process."""
    signals: StopSignals
    observer: Observer
    cursors: dict[int, dict[int, Cursor]] = field(default_factory=dict)
    """Cursors of this rank's streams, by the number of the row that they read next."""
    samples: dict[int, list[list[tuple[str, int, int]]]] = field(default_factory=dict)
    """Places of this rank's documents in each micro-batch of recent steps, by the step's first row.
    """

    def __post_init__(self) -> None:
        self.steps = self.cfg.train.steps or 0
        self.patience = parse_duration(self.cfg.launch.data_timeout)
        """Seconds after which a rank that waits for its files fails."""
        self.source_names = self.data.source_names
        self.fingerprint, self.first_row = self.data.fingerprint, self.data.start

    @classmethod
    def build(
        cls, order: StreamedData, progress: Progress, context: SourceContext
    ) -> "StreamedRows":
        cfg, dims = context.cfg, context.dims
        assembler = Assembler(order.seq_len, len(order.source_names), context.options)
        workers = cfg.data.workers or context.workers
        cost, signals = context.attention_cost, context.signals
        return cls(cfg, order, assembler, dims, cost, workers, signals, context.observer)

    def total_steps(self, progress: Progress) -> int:
        return self.steps

    def plans(self, progress: Progress) -> Iterator[StepPlan]:
        ranges = row_ranges(self.data.streams, None, progress.rows, progress.skipped_row_ranges)
        steps = range(progress.step + 1, self.steps + 1)
        for step, (start, stop) in zip(steps, ranges, strict=False):
            yield StepPlan(step, start, stop)

    def slots(self) -> list[range]:
        """Return this rank's streams in each micro-batch of a step.

        Consecutive groups of micro_rows streams go to consecutive ranks.
        """
        rows, streams = self.assembler.options.micro_rows, self.data.streams
        assert self.assembler.options.rank is not None
        stride = rows * self.assembler.options.ranks
        firsts = range(self.assembler.options.rank * rows, round_up(streams, stride), stride)
        return [range(first, min(first + rows, streams)) for first in firsts]

    def open(self, progress: Progress, leave: LeaveTogether, part: GroupPart) -> "StreamFeed":
        self.cursors.clear()
        return StreamFeed(self, progress, leave)

    def state(self, progress: Progress) -> Json:
        """Return the mixtures read so far and the cursors of all streams at row progress.rows.

        Collective.
        """
        segments = [*progress.segments[:-1], self.data.state(progress.rows)]
        streams = progress.streams
        if progress.rows in self.cursors:  # otherwise progress.streams is still up to date
            cursors = ChainMap(*gather(self.cursors[progress.rows]))
            streams = [list(cursors[stream]) for stream in sorted(cursors)]
        return {"segments": segments, "streams": streams}

    def suspects(self, report: StepReport) -> Json:
        """Return the ranks with the highest loss, and the samples of their micro-batches.

        Collective.
        """
        ranks, rank = ranks_with_highest(report.worst_losses), self.assembler.options.rank
        own: list[tuple[str, int, int]] = []
        if rank in ranks and report.plan.start in self.samples:
            own = self.samples[report.plan.start][int(report.worst_micro_batches[rank])]
        samples = [place_of(where) for where in [*dict.fromkeys(own)][:MAX_SUSPECTS]]
        return self.assembler.suspects_event(ranks, [*chain(*gather(samples))])

    def read_by_component(self, progress: Progress) -> list[Json]:
        """Return an empty list, since streams are not mixed by shares."""
        return []

    def about(self, prepared: Prepared, progress: Progress) -> list[str]:
        """Return printed lines about the files and some samples."""
        return [*prepared.report, *warning_lines(prepared, self.data.seq_len)]

    def epochs(self, progress: Progress) -> None:
        """Return None, since streams have no epochs."""

    def sums(self, row: StreamedRow) -> list[float]:
        cost = self.attention_cost(np.array(row.documents)).sum()
        supervised = np.count_nonzero(row.labels != -100)
        weight = row.weights.sum(dtype=np.float64)
        return [weight, len(row.tokens), supervised, cost, len(row.skipped)]


class StreamFeed(Feed):
    """The steps of streamed rows, which a thread reads at least one step ahead."""

    def __init__(self, source: StreamedRows, progress: Progress, leave: LeaveTogether):
        """Begin to read. leave: see LeaveTogether."""
        self.source, self.leave = source, leave
        self._slots = source.slots()
        self._streams = [*chain(*self._slots)]
        starts: Sequence[Sequence[int]] = progress.streams or [START] * source.data.streams
        cursors = {stream: starts[stream] for stream in self._streams}
        workers = min(source.workers, len(cursors))
        self._readers = (
            WorkerReaders(source.data, cursors, workers)
            if workers > 1
            else Readers(source.data, cursors)
        )
        self._shown_skipped = 0
        ahead = max(source.cfg.data.prefetch or 0, len(self._slots) + 1)
        super().__init__(source.assembler, "", self._read_steps(progress), ahead, source.signals)

    def close(self) -> None:
        """End the processes that read, then the thread that waits for them."""
        self.stop()
        self._readers.close()
        super().close()

    def _read_steps(self, progress: Progress) -> Iterator[LocalStep | MicroBatch]:
        """Yield this rank's part of each step, then its micro-batches. Runs in the thread."""
        row, source = progress.rows, self.source
        for plan in source.plans(progress):
            assert (plan.start - row) % source.data.streams == 0
            while row <= plan.start:  # skipped rows must be read to advance the cursors
                rows = [[self._readers.next(stream) for stream in slot] for slot in self._slots]
                row += source.data.streams
            yield self._local_step(plan, rows)
            for slot in rows:
                yield source.assembler.assemble(source.data.padded(slot))

    def _local_step(self, plan: StepPlan, rows: list[list[StreamedRow]]) -> LocalStep:
        source = self.source
        source.samples[plan.start] = [[*chain(*(row.where for row in slot))] for slot in rows]
        source.samples.pop(plan.start - REMEMBERED_STEPS * source.data.streams, None)
        every = [*chain(*rows)]
        sums = np.sum([NO_ROW, *map(source.sums, every)], axis=0).tolist()
        cursors = {stream: row.cursor for stream, row in zip(self._streams, every, strict=True)}
        return LocalStep(plan, sums, cursors, [*chain(*(row.skipped for row in every))])

    def next_step(self, step: int) -> StepBatches:
        """Return the next step, with its Σ weight, as soon as every rank has its rows. Collective.

        If a rank cannot read its rows, all ranks leave.
        """
        self.plan = StepPlan(step, 0, 0)  # its content is not known yet
        local, (weight, *counts, skipped) = self._wait_for_all()
        if skipped:
            self._report_skipped(local.skipped)
        cursors = self.source.cursors
        cursors[local.plan.stop] = local.cursors
        for past in sorted(cursors)[:-2]:  # keeps the previous step's: it may still be saved
            del cursors[past]
        start, stop = local.plan.start, local.plan.stop
        self.plan = StepPlan(step, start, stop, weight, *map(int, counts))
        return StepBatches(self)

    def _wait_for_all(self) -> tuple[LocalStep, list[float]]:
        """Return this rank's part of the step, and the sums over all ranks. Collective.

        No rank waits long in a collective: if a rank's files are slow, all ranks meet in one every
        ROUND_SECONDS.
        """
        began, local = time.monotonic(), None
        for rounds in count():
            local = local or self._wait(time.monotonic() - began)
            missing = self.signals.data_missing
            waits = local is None and not missing
            sums = local.sums if local else NO_ROW
            state = torch.tensor([*sums, waits, missing], dtype=torch.float64)
            self.source.dims.sum_over_batch(state)
            *totals, waiting, lost = state.tolist()
            if lost:
                # all ranks know that data is missing, and none trains this step
                self.signals.data_wait_interrupted |= waits
                self.leave()
            if not waiting:
                break
            if rounds % ROUNDS_PER_MESSAGE == 0:  # rounds are the same on all ranks, clocks are not
                self._report_waiting(waits, time.monotonic() - began)
            phases.enter("data")
        assert local
        return local, totals

    def _wait(self, waited: float) -> LocalStep | None:
        """Return this rank's part of the step; None if it is not ready in time or is missing."""
        if self.signals.data_missing:
            return None
        try:
            with self.signals.waiting():
                return self.get(timeout=ROUND_SECONDS)
        except Empty:
            if waited > self.source.patience:
                reads = self._readers.waits_for
                reason = f"{reads} gave nothing for {waited:.0f} s (launch.data_timeout)"
                self.record_data_error(TimeoutError(reason))
        except Stopped:
            self.signals.data_wait_interrupted = True
        except Exception as error:
            self.record_data_error(error)
        return None

    def _report_waiting(self, waits: bool, seconds: float) -> None:
        observer, step = self.source.observer, self.plan.step
        files = gather(self._readers.waits_for if waits else None)
        for rank, file in enumerate(files):
            if file is not None:
                rounded = round(seconds, 1)
                observer.event("data_wait", step=step, rank=rank, file=file, seconds=rounded)
                observer.say(
                    f"rank {rank} waits for {file or 'its data'}, {seconds:.0f} s so far; "
                    "the others wait for it"
                )

    def _report_skipped(self, skipped: list[str]) -> None:
        """Record all rows left out by data.on_error=skip in events.jsonl, and print a few."""
        places = [*dict.fromkeys(chain(*gather(skipped)))]  # several ranks may read the same rows
        self.source.observer.event("rows_skipped", step=self.plan.step, rows=places)
        for where in islice(places, max(0, MAX_SHOWN_SKIPPED - self._shown_skipped)):
            self.source.observer.say(f"skipped {where}")
        self._shown_skipped += len(places)

    def describe(self) -> str:
        reads = self._readers.waits_for
        return f"the data of step {self.plan.step:,}" + (f" from {reads}" if reads else "")
