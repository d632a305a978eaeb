"""What a rank computes on: its micro-batches, made ahead. A rank that lacks them does not keep the others waiting."""

import traceback
from collections.abc import Iterator

import torch.distributed as dist

from fsdp_trainer.data.order import Rows
from fsdp_trainer.errors import RunFailed, Stopped, UserError
from fsdp_trainer.models.decoder import MicroBatch
from fsdp_trainer.training.batches import Batches, StepPlan
from fsdp_trainer.training.prefetch import Ahead
from fsdp_trainer.training.stop import StopRequests

PREFETCH_ON_GPU = 2  # one on its way and one ready; assembling takes a small part of a step


class Feed(Ahead[MicroBatch]):
    """All micro-batches of `plans`. Where they cannot be had, or a stop does not wait for them, `stop.missing` says why."""

    def __init__(
        self,
        batches: Batches,
        plans: Iterator[StepPlan],
        prefetch: int | None,
        stop: StopRequests,
        made: Iterator[MicroBatch] | None = None,
    ):
        """made: the micro-batches, by another way than `batches` makes them."""
        depth = (
            prefetch
            if prefetch is not None
            else PREFETCH_ON_GPU
            if batches.device.type == "cuda"
            else 0
        )
        self.batches, self.stop = batches, stop
        super().__init__(
            made or (batch for plan in plans for batch in batches.micro_batches(plan)),
            depth,
            batches.device,
        )

    def complete(self, plan: StepPlan) -> StepPlan:
        """The next of the plans, with what it weighs."""
        return plan

    def of(self, plan: StepPlan) -> Iterator[MicroBatch]:
        """This rank's part of the next plan; empty rows where it lacks them: the other ranks wait in this step's collectives."""
        for _ in range(self.batches.count(plan)):
            yield self._next(plan) or self.batches.assemble(
                Rows.empty(0, self.batches.order.seq_len)
            )

    def _next(self, plan: StepPlan) -> MicroBatch | None:
        if self.stop.missing is not None:
            return None
        try:
            with self.stop.waiting():
                return next(self)
        except Stopped:
            self.stop.missing = ""
        except Exception as error:
            self.lacks(plan, error)
        return None

    def lacks(self, plan: StepPlan, error: BaseException) -> None:
        """This rank does not have its part of a step."""
        if not isinstance(error, OSError | UserError | RunFailed):
            traceback.print_exception(error)
        told = error.args[0] if isinstance(error, RunFailed) else f"{type(error).__name__}: {error}"
        why = f"rank {dist.get_rank()} cannot read its part of {self.where(plan)}: {told}"
        self.stop.missing = error if isinstance(error, UserError) else why

    def where(self, plan: StepPlan) -> str:
        """What it reads."""
        return f"rows {plan.start:,} to {plan.stop - 1:,}, prepared in {self.batches.order.folder}"
