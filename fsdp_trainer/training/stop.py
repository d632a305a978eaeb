"""A stop in order: all ranks agree on it once a step, so that they leave at the same line."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from fsdp_trainer.distributed import gather
from fsdp_trainer.errors import RunFailed, Stopped, UserError
from fsdp_trainer.process import start_ticks, wait_until
from fsdp_trainer.training.signals import WAIT_SECONDS, SignalListener, name_of
from fsdp_trainer.training.time_limits import LIMITS, TimeLimits

GRACE_SECONDS = 2.0
"""Seconds that a rank has to leave by itself after another rank has ended."""
T = TypeVar("T")


class Agreement(NamedTuple):
    """Facts that are true on at least one rank, known to all of them."""

    reason: str = ""
    """Why the run stops: a signal's name, `time_limit` or `slurm_time_limit`; empty: it goes on."""
    save_failed: bool = False
    data_missing: bool = False


class Stop(Stopped):
    """All ranks have agreed to stop: they raise it at the same line. args[0] is the reason."""


class DataLost(Exception):
    """A rank could not read its part of a step: all ranks raise it at the same line.

    args[0] is the error to end with.
    """


class StopSignals(SignalListener):
    """This rank's reasons to stop, and what all ranks agreed on.

    Signals and a failure also travel through the store that the ranks share: collectives do not
    help while a rank waits.
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
        """True once this rank is done with the others, so that their end means nothing to it."""
        self.data_error: Exception | None = None
        """Why this rank cannot read its part of a step."""
        self.data_wait_interrupted = False
        """True if this rank has no data for a step because a stop ended its wait for them."""
        self._store: dist.Store = dist.HashStore()
        """The store that the ranks share; this rank's own until they are connected."""
        self._shared_in: dist.Store | None = None
        """The store that knows of this rank's signal."""
        self._main = False
        self._started: dict[int, tuple[int, int | None]] = {}
        super().__init__(say, on_forced_exit)
        if self.active:
            self._start_thread(self._watch)

    @property
    def data_missing(self) -> bool:
        """True if this rank has no data for this step."""
        return self.data_error is not None or self.data_wait_interrupted

    def sync(self, seconds_to_checkpoint: float = 0.0, save_failed: bool = False) -> Agreement:
        """Return what is true on any rank. Collective over the host's gloo: no device waits.

        seconds_to_checkpoint: until the next step and a checkpoint after it would be done. The
        first reason to stop stays the reason.
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
        """Raise DataLost with one error for all ranks, if any could not read its data. Collective.

        It is the first UserError if there is one, else a RunFailed with every rank's message.
        """
        errors = [*filter(None, gather(self.data_error))]
        messages = "\n".join(str(error.args[0]) for error in errors)
        mistakes = (error for error in errors if isinstance(error, UserError))
        if errors:
            raise DataLost(next(mistakes, RunFailed(messages)))

    def stoppable(self, work: Callable[[], T]) -> T:
        """Return `work()`. Raises Stopped, also amid `work`, after a signal to any rank.

        `work` contains no collective and leaves nothing to save.
        """
        if self.received:
            raise Stopped(self.reason)
        with self.waiting():
            return work()

    def connect(self, store: dist.Store, main: bool) -> None:
        """Exchange signals with the other ranks through their store.

        main: rank 0, which also ends the run when another rank has reported a failure.
        """
        self._main = main
        # a clone, since the owner of the original may wait in it for hours
        self._store = store.clone()  # type: ignore[attr-defined]

    def watch_ranks(self, pids: Mapping[int, int]) -> None:
        """Notice when another rank of this node ends. pids: by rank."""
        self._started = {rank: (pid, start_ticks(pid)) for rank, pid in pids.items()}

    @property
    def ended_ranks(self) -> list[int]:
        """The ranks of this node that have ended since `watch_ranks`."""
        return [rank for rank, process in self._started.items() if has_ended(*process)]

    def wait_for_ended_ranks(self) -> list[int]:
        """Return the ranks of this node that have ended; call it when a collective has failed.

        A collective fails a little before its cause is known here, so this waits WAIT_SECONDS.
        """
        wait_until(lambda: self.ended_ranks, WAIT_SECONDS, pause=0.02)
        return self.ended_ranks

    def report_failure(self, text: str) -> None:
        """Have rank 0 end the run with this message, which only this rank knows."""
        with suppress(RuntimeError):  # the store may have ended with its owner
            self._store.set("failure", text)

    def reported_failure(self) -> str | None:
        """Return the failure that another rank has reported, if there is one."""
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
            # the main thread may wait for a device that waits for the rank that failed
            if self._main and (failure := self.reported_failure()):
                self._exit_unless_leaving(failure)
            with suppress(RuntimeError):
                self._exchange_signals()

    def _exit_unless_leaving(self, reason: str) -> None:
        """End the process unless it leaves by itself within GRACE_SECONDS."""
        if not self._closed.wait(GRACE_SECONDS) and not self.leaving:
            self.exit_now(reason, 1)

    def _exchange_signals(self) -> None:
        """Share this rank's signal. Look for others' only amid a wait, to spare the store."""
        store = self._store
        if self.received and self._shared_in is not store:
            store.set("stop", str(self.received))
            self._shared_in = store
        elif not self.received and self.waits_long() and store.check(["stop"]):
            self.received = int(store.get("stop"))


def has_ended(pid: int, start: int | None) -> bool:
    """Return whether the process with this start time has ended; not where that cannot be read."""
    try:
        return start_ticks(pid) != start
    except OSError:
        return False
