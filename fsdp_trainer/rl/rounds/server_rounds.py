"""Rounds of generation by a server, in the background of training."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from fsdp_trainer.base import phases
from fsdp_trainer.base.distributed import gather
from fsdp_trainer.errors import RunFailed, UserError
from fsdp_trainer.rl.rounds.rounds import Check, RoundMaker, RoundResult, RoundWork
from fsdp_trainer.rl.serving.server_sampler import ServerSampler
from fsdp_trainer.training.stopping.stop import DataLost

POLL_SECONDS = 0.5
"""Seconds between two exchanges among the ranks on whether their rollouts are done."""


class Background:
    """A function that runs in a daemon thread. error: what it raised; None: nothing yet."""

    def __init__(self, function: Callable[[], None]):
        self.error: Exception | None = None
        self._is_done = threading.Event()
        self._function = function
        threading.Thread(target=self._run, daemon=True).start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it has ended, at most `seconds`; return True if it has."""
        return self._is_done.wait(seconds)

    def _run(self) -> None:
        try:
            self._function()
        except Exception as error:  # if the thread just ended, the ranks would wait forever
            self.error = error
        finally:
            self._is_done.set()


@dataclass(eq=False)
class ServerRounds:
    """Rounds in which each rank lets a server answer its part of the prompts; see Rounds.

    maker: plays with `sampler`, without a collective.
    """

    maker: RoundMaker
    sampler: ServerSampler

    def __post_init__(self) -> None:
        self._work: Background | None = None

    def start(self, work: RoundWork, check: Check) -> None:
        """Send the weights, and begin to send prompts. See Rounds."""
        check()
        try:
            self.sampler.update(work.version)
        except (RunFailed, UserError) as error:
            raise DataLost(error) from None
        phases.enter("rollouts", work.version + 1)
        self._work = Background(lambda: self.maker.play(work, lambda: None))

    def finish(self, check: Check) -> RoundResult:
        assert self._work
        while True:
            is_done = self._work.wait(POLL_SECONDS)
            check()
            states = gather((is_done, self._work.error))
            if error := next((error for _, error in states if error), None):
                raise DataLost(explained(error))
            if all(done for done, _ in states):
                break
        self._work = None
        try:
            return self.maker.judge()
        except (RunFailed, UserError) as error:
            raise DataLost(error) from None

    def forget(self) -> None:
        if self._work:
            self.sampler.stop()
            self._work.wait()
            self._work = None
        self.maker.forget()


def explained(error: Exception) -> RunFailed | UserError:
    if isinstance(error, RunFailed | UserError):
        return error
    return RunFailed(f"the rollouts failed: {type(error).__name__}: {error}")
