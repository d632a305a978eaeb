"""A rank's micro-batches, step by step, prefetched.

A rank without data continues with empty micro-batches, so that the others do not wait for it.
"""

import traceback
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from fsdp_trainer.errors import RunFailed, Stopped, UserError
from fsdp_trainer.models.decoder import MicroBatch
from fsdp_trainer.training.batches import Assembler, StepPlan
from fsdp_trainer.training.prefetch import Prefetcher
from fsdp_trainer.training.stopping.stop import StopSignals

PREFETCH_ON_GPU = 2
"""Micro-batches to prefetch on a GPU: one being made and one ready.

Two are enough because assembling one takes a small part of a step.
"""


class Feed(Prefetcher):
    """The steps of some plans, each with this rank's micro-batches.

    The prefetched items are each plan followed by its micro-batches: `plan, batch, batch, plan, …`.
    Closing it ends the reading thread.
    """

    def __init__(
        self,
        assembler: Assembler,
        what: str,
        items: Iterator[Any],
        prefetch: int | None,
        signals: StopSignals,
    ):
        """Begin to prefetch.

        what: name of the data in messages. items: plans and micro-batches, see Feed. prefetch:
        number of micro-batches to prefetch; None: the default for the device.
        """
        self.assembler, self.what, self.signals = assembler, what, signals
        default = PREFETCH_ON_GPU if assembler.options.device.type == "cuda" else 0
        depth = default if prefetch is None else prefetch
        self.plan = StepPlan(0, 0, 0)
        """The plan of the current step."""
        super().__init__(items, depth, assembler.options.device, counted=MicroBatch)

    def next_step(self, step: int) -> "StepBatches":
        """Return the next step, whose number is `step`. Raises StopIteration after the last one."""
        self.plan = self.get()
        assert self.plan.step == step
        return StepBatches(self)

    def next_micro_batch(self) -> MicroBatch:
        """Return this rank's next micro-batch of the step; an empty one if its rows are missing.

        The rank must go through the step all the same: the others wait for it in collectives.
        """
        try:
            if not self.signals.data_missing:
                with self.signals.waiting():
                    return self.get()
        except Stopped:
            self.signals.data_wait_interrupted = True
        except Exception as error:
            self.record_data_error(error)
        return self.assembler.empty()

    def record_data_error(self, error: BaseException) -> None:
        if isinstance(error, UserError):
            self.signals.data_error = error
            return
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, RunFailed):
            reason = error.args[0]
        elif not isinstance(error, OSError):
            traceback.print_exception(error)
        message = f"rank {dist.get_rank()} cannot read its part of {self.describe()}: {reason}"
        self.signals.data_error = RunFailed(message)

    def describe(self) -> str:
        return f"rows {self.plan.start:,} to {self.plan.stop - 1:,}, {self.what}"


class StepBatches:
    def __init__(self, feed: Feed):
        self.plan, self._feed = feed.plan, feed
        self.count = feed.assembler.count(feed.plan)

    def __iter__(self) -> Iterator[MicroBatch]:
        return (self._feed.next_micro_batch() for _ in range(self.count))

    def empty(self) -> MicroBatch:
        return self._feed.assembler.empty()

    @property
    def data_missing(self) -> bool:
        return self._feed.signals.data_missing

    @property
    def reader(self) -> tuple[int | None, int]:
        """The number of this rank among those that read different rows of the step, and theirs.

        The first is None on a rank that gets no rows.
        """
        return self._feed.assembler.options.rank, self._feed.assembler.options.ranks
