"""The meetings of the groups: who is there, whether they are enough, and which group leads."""

import time
from collections.abc import Callable

from fsdp_trainer.base.distributed import run_on_rank_0
from fsdp_trainer.config.schema import Replicas
from fsdp_trainer.observe.observer import Observer
from fsdp_trainer.replicas.membership import Membership, Met
from fsdp_trainer.training.groups import CheckStop, Lead
from fsdp_trainer.training.progress import Progress

PAUSE_SECONDS = 0.2
"""Between two looks for further groups."""
ALONE_SECONDS = 60.0
"""Seconds that a new group waits for those whose ranks hold the run's folder."""


class RollCall:
    """This group's meetings with the others. The group with the lowest replicas.id leads."""

    def __init__(
        self,
        membership: Membership,
        cfg: Replicas,
        observer: Observer,
        others: Callable[[], bool],
    ):
        """others: returns True if ranks of other groups hold the run's folder; used on rank 0."""
        self.leads = False
        """True if this group writes the run's files."""
        self._membership, self._fewest, self._observer = membership, cfg.min, observer
        self._others, self._is_new = others, True
        self._count = 0

    def meet(self, progress: Progress, check_stop: CheckStop, exchanges: bool = False) -> Met:
        """Meet the other groups, again and again until they are at least replicas.min. Collective.

        A group that was behind has the state of another one then, `progress` included. A new group
        also waits for others that seem to be alive: a lighthouse that was started again does not
        know them yet, and a group alone would write over what they have written. Raises Stop.
        exchanges: True if this group is about to exchange what it has changed.
        """
        step = progress.step
        alone_until = time.monotonic() + ALONE_SECONDS
        met = self._membership.meet(progress.steps_done, exchanges)
        while self._too_few(alone_until):
            check_stop(progress)
            time.sleep(PAUSE_SECONDS)
            again = self._membership.meet(progress.steps_done, exchanges)
            met = again if again.was_behind else met
        self._is_new = False
        if met.was_behind:
            self.leads = False
            self._observer.stand_by()
            text = f"took over step {progress.step:,} of another group"
            self._observer.say(f"groups: {text}, after its own step {step:,}")
        return met

    def _too_few(self, alone_until: float) -> bool:
        if self._membership.num_participants() < self._fewest:
            return True
        if not self._is_new or self._membership.present > 1:
            return False
        waits: bool = run_on_rank_0(
            "look for other groups in the run's folder",
            lambda: time.monotonic() < alone_until and self._others(),
        )
        return waits

    def appoint(self, leads: bool, count: int, progress: Progress, lead: Lead) -> None:
        """Note whether this group leads, and report a change of the number of groups. Collective.

        lead: called if this group begins to lead.
        """
        led, self.leads = self.leads, leads
        if leads and not led:
            lead()
        elif not leads:
            self._observer.stand_by()
        if count != self._count:
            if leads:
                self._observer.event("groups", step=progress.step, groups=count)
            self._observer.say(f"groups: {count} from step {progress.step + 1:,} on")
        self._count = count
