"""The groups of ranks that share a run's steps: their protocol, and a run with a single group.

A group is one launch. Its ranks always divide their rows among themselves (`Dims`); with several
groups, each takes a part of a step's rows first.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.training.batches import GroupPart
from fsdp_trainer.training.data_source import DataSource, LeaveTogether
from fsdp_trainer.training.feed import Feed, StepBatches
from fsdp_trainer.training.progress import Progress

Lead = Callable[[], None]
"""Opens the run's files, and records its start. Collective in the group."""
CheckStop = Callable[[Progress], None]
"""Raises Stop on all ranks of a group if one of them has a reason. Collective in the group."""


class ReplicaGroups(Protocol):
    """This group's membership among those that share a run's steps. Its methods are collective."""

    @property
    def leads(self) -> bool:
        """True if this group writes the run's files."""

    def enter(self, progress: Progress, lead: Lead, check_stop: CheckStop) -> None:
        """Meet the other groups before training.

        If they are ahead, this group's whole state becomes theirs, `progress` included. Raises
        Stop. lead: called now or at a later step, when it falls to this group to write the run's
        files.
        """

    def begin_step(self, progress: Progress, check_stop: CheckStop) -> GroupPart:
        """Meet the other groups before a step, see `enter`; return the part of its rows to compute.

        Raises Stop.
        """

    def sum_step(self, model: Decoder, sums: Tensor, worst: Tensor, missing: bool) -> bool:
        """Sum a step's gradients and metrics over the groups, in place.

        Returns False if that failed: no group that gets False updates its weights, and it computes
        the step again with those that are left. sums, worst: see ForwardBackward.run. missing: True
        if this rank has no data for the step.
        """

    def exchange_due(self, progress: Progress) -> bool:
        """Return True if `exchange` is due after this step."""

    def exchange(self, progress: Progress) -> None:
        """Exchange with the other groups what several steps have changed."""

    def leave(self) -> None:
        """Leave the other groups, which go on without this one. Not collective."""


class OneGroup:
    """A run whose ranks are all in one group."""

    leads = True

    def enter(self, progress: Progress, lead: Lead, check_stop: CheckStop) -> None:
        """Begin to write the run's files."""
        lead()

    def begin_step(self, progress: Progress, check_stop: CheckStop) -> GroupPart:
        return GroupPart()

    def sum_step(self, model: Decoder, sums: Tensor, worst: Tensor, missing: bool) -> bool:
        return True

    def exchange_due(self, progress: Progress) -> bool:
        return False

    def exchange(self, progress: Progress) -> None:
        """Do nothing: there are no others."""

    def leave(self) -> None:
        """Do nothing: there are no others."""


class SharedSteps:
    """The steps of a data source, of which this group computes its part.

    Which part that is can change before any step; the rows are then read anew.
    """

    def __init__(
        self,
        data: DataSource,
        groups: ReplicaGroups,
        progress: Progress,
        leave: LeaveTogether,
        check_stop: CheckStop,
    ):
        """Begin to read the rows after `progress`, at first those of one group. Collective.

        leave: see DataSource.open. check_stop: raises Stop if the ranks have agreed on it.
        """
        self.data, self.groups = data, groups
        self.leave, self.check_stop = leave, check_stop
        self._open(progress, GroupPart())

    def _open(self, progress: Progress, part: GroupPart) -> None:
        self._feed: Feed = self.data.open(progress, self.leave, part)
        self._part = part
        self._next = progress.step + 1
        """The step that the feed comes to."""

    def next_step(self, progress: Progress) -> StepBatches:
        """Return the step after `progress`. Collective. Raises Stop."""
        part = self.groups.begin_step(progress, self.check_stop)
        step = progress.step + 1
        if part != self._part or step != self._next:
            self.close()
            self._open(progress, part)
        self._next = step + 1
        return self._feed.next_step(step)

    def close(self) -> None:
        self._feed.close()
