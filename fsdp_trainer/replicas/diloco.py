"""Groups that train by themselves, and average what they have changed every so many steps."""

from torch import Tensor

from fsdp_trainer.base import phases
from fsdp_trainer.config.schema import Replicas
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.optim.outer_step import OuterStep
from fsdp_trainer.replicas.exchange import MeanInFlight, Patience
from fsdp_trainer.replicas.membership import Membership, Met
from fsdp_trainer.replicas.roll_call import RollCall
from fsdp_trainer.training.batches import GroupPart
from fsdp_trainer.training.groups import CheckStop, Lead
from fsdp_trainer.training.progress import Progress


class AverageTimes:
    """The steps after which a part of the model is sent, and those after which it is averaged.

    The parts take turns at equal distances, each once in `every` steps. One is sent `delay` steps
    before its average is used.
    """

    def __init__(self, cfg: Replicas):
        self.fragments, self.delay = cfg.fragments, cfg.delay
        self.distance = cfg.every // cfg.fragments

    def sends_after(self, step: int) -> bool:
        return self.averages_after(step + self.delay)

    def averages_after(self, step: int) -> bool:
        return step > 0 and step % self.distance == 0

    def fragment(self, step: int) -> int:
        """Return the part whose turn it is at a step: that of the next average, or of this one."""
        return (-(-step // self.distance) - 1) % self.fragments


class DilocoGroups:
    """See ReplicaGroups. The groups' weights differ between two averages.

    An average that fails because a group was lost is computed again by those that are left: each
    keeps what it has sent. A group that was away begins with the outer weights of another one,
    which equal those of all others; so what it adds to an average on its way is zero.
    """

    def __init__(
        self, membership: Membership, roll_call: RollCall, cfg: Replicas, outer: OuterStep
    ):
        self._membership, self._roll_call, self._outer = membership, roll_call, outer
        self._times, self._quantize = AverageTimes(cfg), cfg.quantize
        self._patience = Patience()
        self._part = GroupPart(is_own_step=True)
        self._own: list[Tensor] = []
        """This group's outer gradient of the part of the model that was sent."""
        self._mean: MeanInFlight | None = None
        self._counts = True
        """False if this group has just come back, and its outer gradient is 0."""
        self._lead: Lead | None = None
        self._check_stop: CheckStop | None = None

    @property
    def leads(self) -> bool:
        return self._roll_call.leads

    def enter(self, progress: Progress, lead: Lead, check_stop: CheckStop) -> None:
        """See ReplicaGroups. If others train, this waits until they average something."""
        self._lead, self._check_stop = lead, check_stop
        met = self._meet(progress, exchanges=False)
        if met.source_exchanges:
            self._send(progress)
            self._average_if_due(progress)
        else:
            self._take_part(progress)

    def begin_step(self, progress: Progress, check_stop: CheckStop) -> GroupPart:
        """See ReplicaGroups. The groups meet only when they exchange something."""
        return self._part

    def sum_step(self, model: Decoder, sums: Tensor, worst: Tensor, missing: bool) -> bool:
        """Return True: the group updates its weights from its own rows."""
        return True

    def exchange_due(self, progress: Progress) -> bool:
        step = progress.step
        return self._times.sends_after(step) or self._times.averages_after(step)

    def exchange(self, progress: Progress) -> None:
        if self._times.sends_after(progress.step):
            met = self._meet(progress, exchanges=True)
            if met.was_behind and not met.source_exchanges:
                self._take_part(progress)
                return
            self._send(progress)
        self._average_if_due(progress)

    def leave(self) -> None:
        self._membership.shutdown(wait=False)

    def _meet(self, progress: Progress, exchanges: bool) -> Met:
        assert self._check_stop
        phases.enter("groups")
        met = self._roll_call.meet(progress, self._check_stop, exchanges)
        if met.was_behind:
            self._outer.reset_model()
            self._counts = False
        return met

    def _take_part(self, progress: Progress) -> None:
        assert self._lead
        self._part = GroupPart(self._membership.place, self._membership.present, True)
        leads = self._part.index == 0
        self._roll_call.appoint(leads, self._part.count, progress, self._lead)
        self._patience.begin()
        self._counts = True

    def _send(self, progress: Progress) -> None:
        """Send this group's outer gradient of the part of the model whose turn it is."""
        self._own = self._outer.gradients(self._times.fragment(progress.step))
        self._begin_mean()

    def _begin_mean(self) -> None:
        self._mean = MeanInFlight(
            self._membership.group if self._membership.present > 1 else None,
            [tensor.clone() for tensor in self._own],
            self._counts,
            self._patience.left(),
            self._quantize,
        )

    def _average_if_due(self, progress: Progress) -> None:
        """Average the part of the model that was sent, if its turn is after this step."""
        while self._times.averages_after(progress.step):
            phases.enter("groups")
            means = self._finish_mean()
            if self._membership.should_commit():
                self._outer.step(self._times.fragment(progress.step), means)
                self._take_part(progress)
                return
            met = self._meet(progress, exchanges=True)
            if met.was_behind:
                if not met.source_exchanges:
                    self._take_part(progress)
                    return
                self._own = self._outer.gradients(self._times.fragment(progress.step))
            self._begin_mean()

    def _finish_mean(self) -> list[Tensor]:
        """Return the mean of the groups' outer gradients; if it fails, report that."""
        try:
            assert self._mean
            return self._mean.finish()
        except RuntimeError as error:
            self._membership.report_error(error)
            return self._own
