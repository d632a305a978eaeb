"""A rank's micro-batches, step by step, made ahead.

A rank that lacks its rows does not keep the others waiting.
"""

import traceback
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from fsdp_trainer.errors import RunFailed, Stopped, UserError
from fsdp_trainer.models.decoder import MicroBatch
from fsdp_trainer.training.batches import Assembler, StepPlan
from fsdp_trainer.training.prefetch import Prefetcher
from fsdp_trainer.training.stop import StopSignals

PREFETCH_ON_GPU = 2
"""Micro-batches made ahead on a GPU: one on its way and one ready.

Assembling takes a small part of a step.
"""


class Feed(Prefetcher):
    """The steps of some plans, each with this rank's micro-batches.

    What it reads ahead are plans and micro-batches in turn: `plan, batch, batch, plan, batch, …`.
    When it is closed, the thread that reads ends.
    """

    def __init__(
        self,
        assembler: Assembler,
        what: str,
        items: Iterator[Any],
        prefetch: int | None,
        signals: StopSignals,
    ):
        """Begin to read ahead.

        what: names what is read, in messages. prefetch: micro-batches to make ahead; None: as many
        as the device needs.
        """
        self.assembler, self.what, self.signals = assembler, what, signals
        default = PREFETCH_ON_GPU if assembler.device.type == "cuda" else 0
        depth = default if prefetch is None else prefetch
        self.plan = StepPlan(0, 0, 0)
        """The plan of the step that is read now."""
        super().__init__(items, depth, assembler.device, counted=MicroBatch)

    def next_step(self, step: int) -> "StepBatches":
        """Return the next step, which is `step`. Raises StopIteration where there is none."""
        self.plan = self.get()
        assert self.plan.step == step
        return StepBatches(self)

    def next_micro_batch(self) -> MicroBatch:
        """Return this rank's next micro-batch of the step; an empty one where it lacks its rows.

        The other ranks wait for it in this step's collectives.
        """
        try:
            if not self.signals.data_missing:
                with self.signals.waiting():
                    return self.get()
        except Stopped:
            self.signals.data_wait_interrupted = True
        except Exception as error:
            self.lose(error)
        return self.assembler.empty()

    def lose(self, error: BaseException) -> None:
        """Take note that this rank cannot read its part of a step."""
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
        """Return what this rank reads for the step."""
        return f"rows {self.plan.start:,} to {self.plan.stop - 1:,}, {self.what}"


class StepBatches:
    """This rank's micro-batches of one step, `count` of them."""

    def __init__(self, feed: Feed):
        self.plan, self._feed = feed.plan, feed
        self.count = feed.assembler.count(feed.plan)

    def __iter__(self) -> Iterator[MicroBatch]:
        return (self._feed.next_micro_batch() for _ in range(self.count))

    def empty(self) -> MicroBatch:
        """Return a micro-batch without a token."""
        return self._feed.assembler.empty()

    @property
    def data_missing(self) -> bool:
        """Return whether this rank lacked its rows."""
        return self._feed.signals.data_missing
