"""Rounds of generation on ranks of their own: the side of the training ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fsdp_trainer.base import phases
from fsdp_trainer.base.distributed import gather
from fsdp_trainer.base.process import wait_until
from fsdp_trainer.errors import RunFailed
from fsdp_trainer.launch.rollout_link import FAILED, RolloutLink
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.rl.rounds.rounds import Check, RoundResult, RoundWork
from fsdp_trainer.rl.serving.weight_transfer import send_weights
from fsdp_trainer.training.stopping.stop import DataLost

POLL_SECONDS = 0.5
"""Seconds between two exchanges among the ranks on whether the round is done."""


class SentWork(NamedTuple):
    """A round for the rollout ranks. forgets: their open rollouts are to be given up before."""

    work: RoundWork
    forgets: bool


def work_key(number: int) -> str:
    return f"work{number}"


def ready_key(number: int) -> str:
    return f"ready{number}"


def go_key(number: int) -> str:
    return f"go{number}"


def result_key(number: int) -> str:
    return f"result{number}"


@dataclass(eq=False)
class RankRounds:
    """Rounds that rollout ranks run while these ranks train; see Rounds.

    ended_ranks: returns the ranks of this node that have ended.
    """

    model: Decoder
    link: RolloutLink
    device: torch.device
    ended_ranks: Callable[[], list[int]]

    def __post_init__(self) -> None:
        self._number = 0
        self._runs, self._forgets = False, False

    def start(self, work: RoundWork, check: Check) -> None:
        if self._runs:
            self.finish(check)  # of a round that was given up
        self._number += 1
        if self.link.number == 0:
            self.link.put(work_key(self._number), SentWork(work, self._forgets))
        self._forgets = False
        ready = ready_key(self._number)
        self._wait(lambda: self.link.count(ready) == self.link.generators, check)
        if self.link.number == 0:
            self.link.put(go_key(self._number), None)  # from here on nothing stops these ranks
        phases.enter("export")
        send_weights(self.model, self.link, self.device)
        phases.enter("rollouts")
        self._runs = True

    def finish(self, check: Check) -> RoundResult:
        key = result_key(self._number)
        self._wait(lambda: self.link.has(key), check)
        self._runs = False
        result = None
        if self.link.number == 0:
            result = self.link.get(key)
            self.link.delete(key)
            self.link.delete(work_key(self._number))
        shared = gather(result)[0]
        if not isinstance(shared, RoundResult):
            raise DataLost(shared)
        return shared

    def forget(self) -> None:
        """Let the next round begin with this. See Rounds."""
        self._forgets = self._number > 0

    def _wait(self, condition: Callable[[], bool], check: Check) -> None:
        """Wait until a condition holds on rank 0. Collective. Raises DataLost."""
        while True:
            states = gather((*self._state(condition), self.ended_ranks()))
            is_met, failure, _ = states[0]
            if is_met:
                return
            ended = sorted({rank for *_, ranks in states for rank in ranks})
            if failure or ended:
                text = f"rank {ended[0]}, which generates, has ended" if ended else ""
                raise DataLost(failure or RunFailed(text))
            check()

    def _state(self, condition: Callable[[], bool]) -> tuple[bool, Any]:
        """Return on rank 0 whether the condition holds, and the error of a rollout rank."""
        if self.link.number != 0:
            return False, None
        if wait_until(lambda: condition() or self.link.has(FAILED), POLL_SECONDS, 0.01):
            return condition(), self.link.get(FAILED) if self.link.has(FAILED) else None
        return False, None
