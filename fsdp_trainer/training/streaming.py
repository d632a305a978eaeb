"""Rows that are streamed while training.

What a step weighs is known when its rows are there: the ranks add it up before the step.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from queue import Empty
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fsdp_trainer import phases
from fsdp_trainer.data.order import Rows
from fsdp_trainer.data.prepare import Prepared
from fsdp_trainer.data.stream import START, Cursor, StreamedData, StreamedRow, place_of
from fsdp_trainer.data.stream_readers import Readers, ReadersElsewhere
from fsdp_trainer.distributed import gather
from fsdp_trainer.errors import Stopped
from fsdp_trainer.models.decoder import MicroBatch
from fsdp_trainer.observe.observer import Observer
from fsdp_trainer.observe.step_log import StepReport
from fsdp_trainer.training.batches import (
    MAX_SUSPECTS,
    Assembler,
    StepPlan,
    ranks_with_highest,
    row_ranges,
    suspects_event,
)
from fsdp_trainer.training.data_source import LeaveTogether
from fsdp_trainer.training.feed import Feed, StepBatches
from fsdp_trainer.training.progress import Progress
from fsdp_trainer.training.stop import StopSignals

ROUND_SECONDS = 5.0
"""How long a rank waits for its rows before it tells the others, who wait in a collective."""
ROUNDS_PER_MESSAGE = 12
REMEMBERED_STEPS = 100
"""Steps whose samples can still be named."""
MAX_SHOWN_SKIPPED = 8


@dataclass
class LocalStep:
    """This rank's part of a step.

    sums: weight, tokens, supervised tokens and attention's cost; cursors: of its streams, behind
    the step; skipped: places of rows that could not be read.
    """

    plan: StepPlan
    sums: list[float]
    cursors: dict[int, Cursor]
    skipped: list[str]


class StreamedRows:
    """Rows of streamed files.

    Slot s of every step has the next row of stream s: a rank keeps its streams.
    """

    def __init__(
        self,
        data: StreamedData,
        assembler: Assembler,
        steps: int,
        attention_cost: Callable[[np.ndarray], np.ndarray],
        processes: int,
        prefetch: int | None,
        patience: float,
        signals: StopSignals,
        observer: Observer,
    ):
        """attention_cost: of documents' lengths; processes: that make rows, 1: this one alone.

        patience: seconds after which a rank that waits for its files gives up.
        """
        self.data, self.assembler, self.steps = data, assembler, steps
        self.attention_cost, self.processes = attention_cost, processes
        self.prefetch, self.patience = prefetch, patience
        self.signals, self.observer = signals, observer
        self.source_names = data.source_names
        self.fingerprint, self.first_row = data.fingerprint, data.start
        self.cursors: dict[int, dict[int, Cursor]] = {}
        """Of this rank's streams, by the row that they stand before."""
        self.samples: dict[int, list[list[tuple[str, int, int]]]] = {}
        """Places of this rank's documents in each micro-batch, by the first row of the last
        steps."""

    def total_steps(self, progress: Progress) -> int:
        """Return train.steps: streams have no end."""
        return self.steps

    def plans(self, progress: Progress) -> Iterator[StepPlan]:
        """Yield the plans of the steps behind `progress`; what they weigh is not known yet."""
        rows, skipped = self.data.streams, progress.skipped_row_ranges
        ranges = row_ranges(rows, None, progress.rows, skipped)
        for step, (start, stop) in zip(
            range(progress.step + 1, self.steps + 1), ranges, strict=False
        ):
            yield StepPlan(step, start, stop, 0.0, 0, 0, 0)

    def slots(self) -> list[list[int]]:
        """Return this rank's streams in each micro-batch of a step; consecutive ones go to
        consecutive ranks."""
        rows, streams = self.assembler.micro_rows, self.data.streams
        stride = rows * self.assembler.ranks
        rounds = -(-streams // stride)
        firsts = range(self.assembler.rank * rows, rounds * stride, stride)
        return [list(range(first, min(first + rows, streams))) for first in firsts]

    def open(self, progress: Progress, leave: LeaveTogether) -> "StreamFeed":
        """Begin to read from the cursors of `progress`."""
        self.cursors.clear()
        return StreamFeed(self, progress, leave)

    def state(self, progress: Progress) -> dict[str, Any]:
        """Return where all streams stand before row progress.rows. Collective."""
        segment = self.data.state(progress.rows)
        segments = [*progress.segments[:-1], segment]
        own = self.cursors.get(progress.rows)
        if own is None:  # nothing was trained since this was asked last
            return {"segments": segments, "streams": progress.streams}
        cursors = {stream: cursor for part in gather(own) for stream, cursor in part.items()}
        return {"segments": segments, "streams": [list(cursors[s]) for s in sorted(cursors)]}

    def suspects(self, report: StepReport) -> dict[str, Any]:
        """Return the ranks with the highest loss, and the samples of their micro-batches.

        Collective.
        """
        ranks, rank = ranks_with_highest(report.worst_losses), self.assembler.rank
        step = self.samples.get(report.plan.start) if rank in ranks else None
        own = step[int(report.worst_micro_batches[rank])] if step is not None else []
        samples = [place_of(where) for where in dict.fromkeys(own)][:MAX_SUSPECTS]
        return suspects_event(ranks, [where for part in gather(samples) for where in part])

    def shares(self, progress: Progress) -> list[dict[str, Any]]:
        """Return nothing: streams are not mixed by shares."""
        return []

    def about(self, prepared: Prepared, progress: Progress) -> list[str]:
        """Return lines on the files and what some samples look like."""
        return prepared.report

    def epochs(self, progress: Progress) -> None:
        """Return None: streams have no epochs."""

    def padded(self, rows: list[StreamedRow]) -> Rows:
        """Return the rows with padding up to batch.seq_len."""
        padded = Rows.empty(len(rows), self.data.seq_len)
        for i, row in enumerate(rows):
            n = len(row.tokens)
            padded.tokens[i, :n], padded.labels[i, :n] = row.tokens, row.labels
            padded.weights[i, :n] = row.weights
            padded.positions[i, :n] = np.concatenate([np.arange(n) for n in row.documents])
            padded.sources[i, :n] = np.repeat(row.sources, row.documents)
            padded.documents[i] = row.documents
            padded.group_starts[i] = [True] * len(row.documents)
        return padded

    def sums(self, row: StreamedRow) -> list[float]:
        """Return what RowOrder.totals says of stored rows, of one row."""
        cost = self.attention_cost(np.array(row.documents)).sum()
        supervised = np.count_nonzero(row.labels != -100)
        return [row.weights.sum(dtype=np.float64), len(row.tokens), supervised, cost]


class StreamFeed(Feed):
    """Steps of streamed rows. A thread reads them, at least one step ahead."""

    def __init__(self, source: StreamedRows, progress: Progress, leave: LeaveTogether):
        """leave: see LeaveTogether."""
        self.source, self.leave = source, leave
        self._slots = source.slots()
        streams = [stream for slot in self._slots for stream in slot]
        cursors = {s: progress.streams[s] if progress.streams else START for s in streams}
        processes = min(source.processes, len(cursors))
        self._readers: Readers | ReadersElsewhere = (
            ReadersElsewhere(source.data, cursors, processes)
            if processes > 1
            else Readers(source.data, cursors)
        )
        self._shown_skipped = 0
        ahead = max(source.prefetch or 0, len(self._slots) + 1)
        super().__init__(source.assembler, "", self._read_steps(progress), ahead, source.signals)

    def close(self) -> None:
        """End the processes that read, then the thread that waits for them."""
        self._items.stop()
        self._readers.close()
        super().close()

    def _read_steps(self, progress: Progress) -> Iterator[LocalStep | MicroBatch]:
        """Yield, in the thread, this rank's part of each step and then its micro-batches."""
        row, source = progress.rows, self.source
        for plan in source.plans(progress):
            assert (plan.start - row) % source.data.streams == 0
            while row <= plan.start:  # skipped rows must be read to know where they end
                rows = [[self._readers.next(stream) for stream in slot] for slot in self._slots]
                row += source.data.streams
            yield self._local_step(plan, rows)
            for slot in rows:
                yield source.assembler.assemble(source.padded(slot))

    def _local_step(self, plan: StepPlan, rows: list[list[StreamedRow]]) -> LocalStep:
        source = self.source
        source.samples[plan.start] = [[w for row in slot for w in row.where] for slot in rows]
        source.samples.pop(plan.start - REMEMBERED_STEPS * source.data.streams, None)
        streams = [stream for slot in self._slots for stream in slot]
        every = [row for slot in rows for row in slot]
        sums = np.sum([source.sums(row) for row in every], axis=0).tolist() if every else [0.0] * 4
        cursors = {stream: row.cursor for stream, row in zip(streams, every, strict=True)}
        return LocalStep(plan, sums, cursors, [where for row in every for where in row.skipped])

    def next_step(self, step: int) -> StepBatches:
        """Return the next step, with what it weighs, as soon as every rank has its rows.

        Collective. Where a rank cannot read its rows, all leave.
        """
        local, (weight, tokens, supervised, cost, skipped) = self._wait_for_all(step)
        if skipped:
            self._report_skipped(step, local.skipped)
        cursors = self.source.cursors
        cursors[local.plan.stop] = local.cursors
        for past in sorted(cursors)[:-2]:  # the step before may be where the run is to go on
            del cursors[past]
        plan = replace(
            local.plan,
            weight=weight,
            tokens=int(tokens),
            supervised=int(supervised),
            attention_cost=int(cost),
        )
        return StepBatches(plan, self)

    def _wait_for_all(self, step: int) -> tuple[LocalStep, list[float]]:
        """Return this rank's part of the step, and all ranks' sums with the rows skipped.

        Nobody waits long in a collective: where a rank's files are slow, all meet again every few
        seconds.
        """
        began, local = time.monotonic(), None
        for rounds in count():
            local = local or self._wait(step, time.monotonic() - began)
            missing = self.signals.data_missing
            waits = local is None and not missing
            sums = [*local.sums, len(local.skipped)] if local else [0.0] * 5
            mine = torch.tensor([*sums, waits, missing], dtype=torch.float64)
            if dist.get_world_size() > 1:
                dist.all_reduce(mine)
            *totals, waiting, lost = mine.tolist()
            if lost:
                # all ranks know it: none does this step
                self.signals.data_wait_interrupted |= waits
                self.leave()
            if not waiting:
                break
            if rounds % ROUNDS_PER_MESSAGE == 0:  # rounds are the same on all ranks, clocks are not
                self._report_waiting(step, waits, time.monotonic() - began)
            phases.enter("data")
        assert local
        return local, totals

    def _wait(self, step: int, waited: float) -> LocalStep | None:
        """Return this rank's part of the step; None if it is not there soon, or never will be."""
        if self.signals.data_missing:
            return None
        try:
            with self.signals.waiting():
                return self._next_item(LocalStep, timeout=ROUND_SECONDS)
        except Empty:
            if waited > self.source.patience:
                reads = self._readers.waits_for
                reason = f"{reads} gave nothing for {waited:.0f} s (launch.data_timeout)"
                self.lose(TimeoutError(reason), self._describe_step(step))
        except Stopped:
            self.signals.data_wait_interrupted = True
        except Exception as error:
            self.lose(error, self._describe_step(step))
        return None

    def _report_waiting(self, step: int, waits: bool, seconds: float) -> None:
        observer = self.source.observer
        files = gather(self._readers.waits_for if waits else None)
        for rank, file in enumerate(files):
            if file is not None:
                rounded = round(seconds, 1)
                observer.event("data_wait", step=step, rank=rank, file=file, seconds=rounded)
                observer.console.say(
                    f"rank {rank} waits for {file or 'its data'}, {seconds:.0f} s so far; "
                    "the others wait for it"
                )

    def _report_skipped(self, step: int, skipped: list[str]) -> None:
        """Record the rows that data.on_error=skip left out; a few are shown, events.jsonl has
        all."""
        places = [where for part in gather(skipped) for where in part]
        self.source.observer.event("rows_skipped", step=step, rows=places)
        for where in islice(places, max(0, MAX_SHOWN_SKIPPED - self._shown_skipped)):
            self.source.observer.console.say(f"skipped {where}")
        self._shown_skipped += len(places)

    def describe(self, plan: StepPlan) -> str:
        """Return what this rank reads for the step."""
        return self._describe_step(plan.step)

    def _describe_step(self, step: int) -> str:
        reads = self._readers.waits_for
        return f"the data of step {step:,}" + (f" from {reads}" if reads else "")
