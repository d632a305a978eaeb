"""Groups that divide the rows of each step, and sum their gradients before the update."""

from datetime import timedelta

import torch
from torch import Tensor

from fsdp_trainer.base import phases
from fsdp_trainer.base.distributed import local_part
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.replicas.exchange import Patience, sum_over_groups
from fsdp_trainer.replicas.membership import Membership
from fsdp_trainer.replicas.roll_call import RollCall
from fsdp_trainer.training.batches import GroupPart
from fsdp_trainer.training.groups import CheckStop, Lead
from fsdp_trainer.training.progress import Progress


class SyncGroups:
    """See ReplicaGroups. All groups have the same weights after every step.

    A step's gradients and metrics are sums over its rows, so it does not matter how many groups
    compute them. A group that misses one update, because a sum failed there alone or because it
    was away, takes over the state of one that has made it.
    """

    def __init__(self, membership: Membership, roll_call: RollCall):
        self._membership, self._roll_call = membership, roll_call
        self._patience = Patience()
        self._part: GroupPart | None = None
        """The part of the next step, if the groups have met for it already."""
        self._lead: Lead | None = None

    @property
    def leads(self) -> bool:
        return self._roll_call.leads

    def enter(self, progress: Progress, lead: Lead, check_stop: CheckStop) -> None:
        self._lead = lead
        self._part = self._meet(progress, check_stop)

    def begin_step(self, progress: Progress, check_stop: CheckStop) -> GroupPart:
        part, self._part = self._part or self._meet(progress, check_stop), None
        self._patience.begin()
        phases.enter("data", progress.step + 1)
        return part

    def _meet(self, progress: Progress, check_stop: CheckStop) -> GroupPart:
        assert self._lead
        phases.enter("groups")
        self._roll_call.meet(progress, check_stop)
        rank, count = self._membership.participating_rank(), self._membership.num_participants()
        self._roll_call.appoint(rank == 0, count, progress, self._lead)
        return GroupPart(rank, count)

    @torch.no_grad()
    def sum_step(self, model: Decoder, sums: Tensor, worst: Tensor, missing: bool) -> bool:
        phases.enter("groups")
        if missing:
            self._membership.report_error(RuntimeError("this rank has no data for the step"))
        elif self._membership.present > 1:
            try:
                self._sum(model, sums, worst, self._patience.left())
            except RuntimeError as error:
                self._membership.report_error(error)
        return self._membership.should_commit()

    def _sum(self, model: Decoder, sums: Tensor, worst: Tensor, wait: timedelta) -> None:
        group = self._membership.group
        gradients = [local_part(p.grad) for p in model.parameters() if p.grad is not None]
        sum_over_groups(group, gradients, wait)
        numbers = torch.cat([sums, worst.flatten()]).to(gradients[0].device)
        sum_over_groups(group, [numbers], wait)
        sums.copy_(numbers[: len(sums)])
        worst.copy_(numbers[len(sums) :].view_as(worst))

    def exchange_due(self, progress: Progress) -> bool:
        return False

    def exchange(self, progress: Progress) -> None:
        """Do nothing."""

    def leave(self) -> None:
        self._membership.shutdown(wait=False)
