"""Stopping in order: a signal or a time limit on any rank becomes a decision of all ranks at the next step boundary."""

import os
import signal
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from fsdp_trainer.launch.start import ECHO_SECONDS

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequests:
    """Listens from its creation on; a second signal ends the process at once, which no committed checkpoint minds."""

    def __init__(self, time_limit: float | None, say: Callable[[str], None]):
        self.deadline = None if time_limit is None else time.monotonic() + time_limit
        self.received, self.heard, self.say = 0, 0.0, say
        # only the main thread may listen: in a notebook's worker thread the time limit alone counts
        listens = threading.current_thread() is threading.main_thread()
        self._before = {signum: signal.signal(signum, self._receive) for signum in SIGNALS} if listens else {}

    def close(self) -> None:
        """Listen no longer."""
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _receive(self, signum: int, _frame: object) -> None:
        name = signal.Signals(signum).name
        if self.received and time.monotonic() - self.heard < ECHO_SECONDS:
            return
        if self.received:
            self.say(f"second signal ({name}): ended at once; what is committed stays")
            os._exit(128 + signum)
        self.received, self.heard = signum, time.monotonic()
        self.say(f"{name}: stops after this step, with a checkpoint; a second signal ends at once")

    def agreed(self, failed: bool = False) -> str | None:
        """Why all ranks stop now: a signal's name, `time_limit`, or `failed` if one of them says so; None to go on.

        Collective, over the host's gloo: no device waits.
        """
        late = self.deadline is not None and time.monotonic() > self.deadline
        mine = torch.tensor([self.received, int(late), int(failed)])
        if dist.get_world_size() > 1:
            dist.all_reduce(mine, dist.ReduceOp.MAX)
        if mine[2]:
            return "failed"
        if mine[0]:
            return signal.Signals(int(mine[0])).name
        return "time_limit" if mine[1] else None
