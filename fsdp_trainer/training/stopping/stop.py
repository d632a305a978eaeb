"""Clean stops: all ranks agree on a stop once per step, so that they leave at the same line."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from fsdp_trainer.base.distributed import gather
from fsdp_trainer.base.process import start_ticks, wait_until
from fsdp_trainer.errors import RunFailed, Stopped, UserError
from fsdp_trainer.training.stopping.signals import WAIT_SECONDS, SignalListener, name_of
from fsdp_trainer.training.stopping.time_limits import LIMITS, TimeLimits

GRACE_SECONDS = 2.0
"""Seconds that a rank has to leave by itself after another rank has ended or failed."""
T = TypeVar("T")


class Agreement(NamedTuple):
    """Facts that are true on at least one rank, known to all of them."""

    reason: str = ""
    """Reason to stop: a signal's name, `time_limit` or `slurm_time_limit`; empty: no stop."""
    save_failed: bool = False
    data_missing: bool = False


class Stop(Stopped):
    """Raised on all ranks at the same line after they agreed to stop. args[0] is the reason."""


class DataLost(Exception):
    """Raised on all ranks at the same line if a rank could not read its part of a step.

    args[0] is the error to end the run with.
    """


class Rewind(Exception):
    """Raised on all ranks at the same line to rewind the run after a spike.

    args[0] is the StepPlan of the spike.
    """


class StopSignals(SignalListener):
    """This rank's reasons to stop, and the agreement of all ranks.

    Signals and failures are also exchanged through the store that the ranks share, since a rank
    that waits cannot take part in a collective.
    """

    def __init__(
        self,
        time_limit: str | None,
        say: Callable[[str], None],
        on_forced_exit: Callable[[str, int], Any],
    ):
        self.limits = TimeLimits(time_limit)
        self.agreement = Agreement()
        self.leaving = False
        """True once this rank no longer needs the others, so that it may ignore their end."""
        self.data_error: Exception | None = None
        """The error that keeps this rank from reading its part of a step."""
        self.data_wait_interrupted = False
        """True if this rank has no data for a step because a stop interrupted its wait for it."""
        self._store: dist.Store = dist.HashStore()
        """The store that the ranks share; a local one until `connect`."""
        self._published_in: dist.Store | None = None
        """The store to which this rank's signal has been written."""
        self._main = False
        self._started: dict[int, tuple[int, int | None]] = {}
        super().__init__(say, on_forced_exit)
        if self.active:
            self._start_thread(self._watch)

    @property
    def data_missing(self) -> bool:
        return self.data_error is not None or self.data_wait_interrupted

    def sync(self, seconds_to_checkpoint: float = 0.0, save_failed: bool = False) -> Agreement:
        """Combine the states of all ranks. Collective on the CPU (gloo): no device waits.

        seconds_to_checkpoint: estimated seconds for the next step and a checkpoint after it.
        save_failed: whether a checkpoint has failed on this rank. If ranks agreed to stop before,
        the reason stays the same.
        """
        self.limits.seconds_to_checkpoint = seconds_to_checkpoint
        limit = LIMITS.index(self.limits.passed())
        state = torch.tensor([self.received, limit, int(save_failed), int(self.data_missing)])
        if dist.get_world_size() > 1:
            dist.all_reduce(state, dist.ReduceOp.MAX)
        number, limit, failed, missing = state.tolist()
        reason = name_of(number) or LIMITS[limit]
        self.agreement = Agreement(self.agreement.reason or reason, bool(failed), bool(missing))
        return self.agreement

    def raise_if_agreed(self) -> None:
        """Raise Stop if the ranks agreed to stop at the last `sync`."""
        if self.agreement.reason:
            raise Stop(self.agreement.reason)

    def raise_data_error(self) -> None:
        """Raise DataLost with the same error on all ranks if any could not read its data.

        The error is the first UserError if there is one, else a RunFailed with every rank's
        message. Collective.
        """
        errors = [*filter(None, gather(self.data_error))]
        messages = "\n".join(str(error.args[0]) for error in errors)
        mistakes = (error for error in errors if isinstance(error, UserError))
        if errors:
            raise DataLost(next(mistakes, RunFailed(messages)))

    def stoppable(self, work: Callable[[], T]) -> T:
        """Return `work()`. Raises Stopped, also during `work`, after a signal to any rank.

        `work` must contain no collective, and its interruption must leave nothing to save.
        """
        if self.received:
            raise Stopped(self.reason)
        with self.waiting():
            return work()

    def connect(self, store: dist.Store, main: bool) -> None:
        """Begin to exchange signals with the other ranks through their store.

        main: True on rank 0, which also ends the run if another rank reports a failure.
        """
        self._main = main
        # a clone, since the main thread may wait in the original for hours
        self._store = store.clone()  # type: ignore[attr-defined]

    def watch_ranks(self, pids: Mapping[int, int]) -> None:
        """Begin to watch the processes of this node's ranks. pids: process ids by rank."""
        self._started = {rank: (pid, start_ticks(pid)) for rank, pid in pids.items()}

    @property
    def ended_ranks(self) -> list[int]:
        return [rank for rank, process in self._started.items() if has_ended(*process)]

    def wait_for_ended_ranks(self) -> list[int]:
        """Return the ranks of this node that have ended, after a collective has failed.

        A collective may fail shortly before the end of a rank is visible, so if none has ended this
        waits for up to WAIT_SECONDS.
        """
        wait_until(lambda: self.ended_ranks, WAIT_SECONDS, pause=0.02)
        return self.ended_ranks

    def report_failure(self, text: str) -> None:
        """Make rank 0 end the run with this message, which only this rank knows."""
        with suppress(RuntimeError):  # the store may have ended with the rank that owned it
            self._store.set("failure", text)

    def reported_failure(self) -> str | None:
        with suppress(RuntimeError):
            if self._store.check(["failure"]):
                return self._store.get("failure").decode()
        return None

    def _watch(self) -> None:
        while not self._closed.wait(WAIT_SECONDS / 2):
            if self.waits_long() and (reason := self.reason or self.limits.passed()):
                self.interrupt(reason)
            if self.received and (ended := self.ended_ranks):
                self._exit_unless_leaving(f"{self.reason} after rank {ended[0]} had ended")
            # in this thread, since the main thread may wait for a device that waits for that rank
            if self._main and (failure := self.reported_failure()):
                self._exit_unless_leaving(failure)
            with suppress(RuntimeError):
                self._exchange_signals()

    def _exit_unless_leaving(self, reason: str) -> None:
        """End the process unless it leaves by itself within GRACE_SECONDS."""
        if not self._closed.wait(GRACE_SECONDS) and not self.leaving:
            self.exit_now(reason, 1)

    def _exchange_signals(self) -> None:
        """Publish this rank's signal; read others' only during a wait, to limit requests."""
        store = self._store
        if self.received and self._published_in is not store:
            store.set("stop", str(self.received))
            self._published_in = store
        elif not self.received and self.waits_long() and store.check(["stop"]):
            self.received = int(store.get("stop"))


def has_ended(pid: int, start: int | None) -> bool:
    """Return True if the process with this start time has ended; False if that is unknown."""
    try:
        return start_ticks(pid) != start
    except OSError:
        return False
