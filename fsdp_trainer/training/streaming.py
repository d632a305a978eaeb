"""Training on data that is streamed. What a step weighs is known when its rows are there: the ranks add it up on their hosts, before the step."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fsdp_trainer import phases
from fsdp_trainer.checkpoint.store import gather
from fsdp_trainer.data.order import Rows
from fsdp_trainer.data.stream import START, Cursor, StreamedData, StreamedRow, place_of
from fsdp_trainer.data.stream_readers import Readers, ReadersElsewhere
from fsdp_trainer.errors import Stopped
from fsdp_trainer.models.decoder import MicroBatch
from fsdp_trainer.training.batches import SHOWN, Batches, StepPlan, suspected, told_of
from fsdp_trainer.training.feed import Feed
from fsdp_trainer.training.progress import Progress
from fsdp_trainer.training.stop import StopRequests

ROUND_SECONDS = (
    5.0  # that a rank waits for its rows before it tells the others, who wait in a collective
)
TELL_EVERY_ROUNDS = 12
REMEMBERED = 100  # steps whose samples can still be named


@dataclass
class Made:
    """A rank's part of a step. sums: weight, tokens, supervised tokens and what attention costs; cursors: of its streams, behind it."""

    sums: list[float]
    cursors: dict[int, Cursor]
    skipped: list[str]


class StreamBatches(Batches):
    """This rank's micro-batches of streamed rows. Slot s of every step has the next row of stream s, so a rank reads the same streams all along."""

    order: StreamedData  # type: ignore[assignment]

    def __init__(
        self,
        data: StreamedData,
        micro_rows: int,
        rank: int,
        ranks: int,
        device: torch.device,
        attended: Callable[[np.ndarray], np.ndarray],
        processes: int,
        pad_to_multiple: int | None = None,
    ):
        """attended: what attention costs a model, of documents' lengths; processes: that make rows, 1: this one."""
        super().__init__(data, micro_rows, rank, ranks, device, pad_to_multiple)  # type: ignore[arg-type]
        self.attended, self.processes = attended, processes
        self.cursors: dict[int, dict[int, Cursor]] = {}
        """Of this rank's streams, by the row that they stand before."""
        self.where: dict[int, list[list[tuple[str, int, int]]]] = {}
        """Of this rank's documents in each micro-batch of the last steps."""

    def slots(self) -> list[list[int]]:
        """This rank's streams, in each micro-batch of a step. Consecutive ones go to consecutive ranks."""
        each, n = self.micro_rows, self.order.streams
        firsts = range(
            self.rank * each, -(-n // (each * self.ranks)) * each * self.ranks, each * self.ranks
        )
        return [list(range(first, min(first + each, n))) for first in firsts]

    def laid(self, rows: list[StreamedRow]) -> Rows:
        """With padding."""
        laid = Rows.empty(len(rows), self.order.seq_len)
        for i, row in enumerate(rows):
            n = len(row.tokens)
            laid.tokens[i, :n], laid.labels[i, :n], laid.weights[i, :n] = (
                row.tokens,
                row.labels,
                row.weights,
            )
            laid.positions[i, :n] = np.concatenate([np.arange(length) for length in row.documents])
            laid.sources[i, :n] = np.repeat(row.sources, row.documents)
            laid.documents[i] = row.documents
        return laid

    def sums(self, row: StreamedRow) -> list[float]:
        """As of RowOrder.totals, of one row."""
        squares = self.attended(np.array(row.documents)).sum()
        return [
            row.weights.sum(dtype=np.float64),
            len(row.tokens),
            np.count_nonzero(row.labels != -100),
            squares,
        ]

    def suspects(
        self, plan: StepPlan, worst: Sequence[float], which: Sequence[float]
    ) -> dict[str, Any]:
        """As of Batches. Collective: each rank knows its own samples."""
        ranks = suspected(worst)
        mine = self.where.get(plan.start) if self.rank in ranks else None
        own = [] if mine is None else [*dict.fromkeys(mine[int(which[self.rank])])]
        told = [place_of(where) for where in own[:SHOWN]]
        return told_of(ranks, [where for of_rank in gather(told) for where in of_rank])

    def place(self, progress: Progress) -> list[list[int]]:
        """Where all streams stand before row progress.rows. Collective."""
        if (
            own := self.cursors.get(progress.rows)
        ) is None:  # nothing was trained since it was asked last
            return progress.streams
        all_cursors = {
            stream: cursor for of_rank in gather(own) for stream, cursor in of_rank.items()
        }
        return [list(cursor) for _, cursor in sorted(all_cursors.items())]


class StreamFeed(Feed):
    """All micro-batches of `plans`, from where `progress` stands. A thread makes them, a step ahead."""

    batches: StreamBatches

    def __init__(
        self,
        batches: StreamBatches,
        plans: Iterator[StepPlan],
        prefetch: int | None,
        stop: StopRequests,
        progress: Progress,
        patience: float,
        tell: Callable[..., Any],
        say: Callable[[str], Any],
    ):
        """patience: seconds after which a rank that waits for its files gives up; tell, say: hear of that, as an event and as a line."""
        self.patience, self.tell, self.say = patience, tell, say
        slots = batches.slots()
        cursors = {
            s: progress.streams[s] if progress.streams else START
            for of_batch in slots
            for s in of_batch
        }
        processes = min(batches.processes, len(cursors))
        self._readers = (
            ReadersElsewhere(batches.order, cursors, processes)
            if processes > 1
            else Readers(batches.order, cursors)
        )
        self._made = SimpleQueue[Made | BaseException]()
        self._skipped = 0
        batches.cursors.clear()
        ahead = max(prefetch or 0, len(slots) + 1)
        super().__init__(
            batches, plans, ahead, stop, self._make(batches, plans, slots, progress.rows)
        )

    def _make(
        self, batches: StreamBatches, plans: Iterator[StepPlan], slots: list[list[int]], at: int
    ) -> Iterator[MicroBatch]:
        """In the thread: what a step weighs, then its micro-batches."""
        try:
            for plan in plans:
                assert (plan.start - at) % batches.order.streams == 0
                while (
                    at <= plan.start
                ):  # rows before it are left out, but must be read to know where they end
                    rows = [
                        [self._readers.next(stream) for stream in of_batch] for of_batch in slots
                    ]
                    at += batches.order.streams
                every = [row for of_batch in rows for row in of_batch]
                batches.where[plan.start] = [
                    [where for row in of_batch for where in row.where] for of_batch in rows
                ]
                batches.where.pop(plan.start - REMEMBERED * batches.order.streams, None)
                sums = (
                    np.sum([batches.sums(row) for row in every], axis=0).tolist()
                    if every
                    else [0.0] * 4
                )
                cursors = {
                    s: row.cursor
                    for s, row in zip(
                        (s for of_batch in slots for s in of_batch), every, strict=True
                    )
                }
                self._made.put(
                    Made(sums, cursors, [where for row in every for where in row.skipped])
                )
                for of_batch in rows:
                    yield batches.assemble(batches.laid(of_batch))
        except BaseException as error:
            self._made.put(error)
            raise

    def complete(self, plan: StepPlan) -> StepPlan:
        """With what it weighs, as soon as every rank has its rows. Collective, over the hosts.

        Nobody waits long in a collective: where a rank's files are slow, all meet again every few seconds.
        """
        began, made = time.monotonic(), None
        for meeting in count():
            made = made or self._wait(plan, time.monotonic() - began)
            waits = made is None and self.stop.missing is None
            states = waits, self.stop.missing is not None, len(made.skipped) if made else 0
            mine = torch.tensor([*(made.sums if made else [0.0] * 4), *states], dtype=torch.float64)
            if dist.get_world_size() > 1:
                dist.all_reduce(mine)
            weight, tokens, supervised, squares, waiting, missing, skipped = mine.tolist()
            if missing and waits:
                self.stop.missing = ""  # nobody will do this step
            if missing or not waiting:
                break
            if (
                meeting % TELL_EVERY_ROUNDS == 0
            ):  # which is the same on all ranks; their clocks are not
                self._tell_waiting(plan, waits, time.monotonic() - began)
            phases.enter("data")
        if skipped:
            self._tell_skipped(plan, made.skipped if made else [])
        if made:
            self.batches.cursors[plan.stop] = made.cursors
            for past in sorted(self.batches.cursors)[
                :-2
            ]:  # but where the step before ended, in case that this one cannot be done
                del self.batches.cursors[past]
        return replace(
            plan,
            weight=weight,
            tokens=int(tokens),
            supervised=int(supervised),
            squares=int(squares),
        )

    def _wait(self, plan: StepPlan, waited: float) -> Made | None:
        """This rank's part of the step; None if it is not there soon, or will never be: then `stop.missing` says why."""
        if self.stop.missing is not None:
            return None
        try:
            with self.stop.waiting():
                made = self._made.get(timeout=ROUND_SECONDS)
            if isinstance(made, Made):
                return made
            self.lacks(plan, made)
        except Empty:
            if waited > self.patience:
                self.lacks(
                    plan,
                    TimeoutError(
                        f"{self._readers.waits_for} gave nothing for {waited:.0f} s (launch.data_timeout)"
                    ),
                )
        except Stopped:
            self.stop.missing = ""
        return None

    def _tell_waiting(self, plan: StepPlan, waits: bool, seconds: float) -> None:
        for rank, file in enumerate(gather(self._readers.waits_for if waits else None)):
            if file is not None:
                self.tell(
                    "data_wait", step=plan.step, rank=rank, file=file, seconds=round(seconds, 1)
                )
                self.say(
                    f"rank {rank} waits for {file or 'its data'}, {seconds:.0f} s so far; the others wait for it"
                )

    def _tell_skipped(self, plan: StepPlan, skipped: list[str]) -> None:
        """Rows that cannot be read, with data.on_error=skip: a few are shown, events.jsonl has all."""
        every = [where for of_rank in gather(skipped) for where in of_rank]
        self.tell("rows_skipped", step=plan.step, rows=every)
        for where in islice(every, max(0, SHOWN - self._skipped)):
            self.say(f"skipped {where}")
        self._skipped += len(every)

    def where(self, plan: StepPlan) -> str:
        """What it reads."""
        return f"the data of step {plan.step:,}" + (
            f" from {self._readers.waits_for}" if self._readers.waits_for else ""
        )

    def close(self) -> None:
        """End what reads, then the thread that waits for it."""
        self._closed = True
        self._readers.close()
        super().close()
