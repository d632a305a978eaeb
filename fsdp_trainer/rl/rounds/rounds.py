"""Rounds of generation: the tokens that one version of the weights adds to rollouts."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from fsdp_trainer.base import phases
from fsdp_trainer.base.distributed import gather
from fsdp_trainer.config.methods import ObjectiveChoice
from fsdp_trainer.errors import RunFailed, UserError
from fsdp_trainer.rl.rollouts.answer_maker import AnswerMaker
from fsdp_trainer.rl.rollouts.episode import Episode, OpenEpisode
from fsdp_trainer.rl.rollouts.episode_player import Questions
from fsdp_trainer.rl.rollouts.rollout import Rollout
from fsdp_trainer.rl.rollouts.sampler import Request
from fsdp_trainer.training.stopping.stop import DataLost

Check = Callable[[], None]
"""Called from time to time on all ranks together; may raise."""


@dataclass
class RoundWork:
    """The work of a round; the same on all ranks.

    version: optimizer steps done by the weights. requests: of rollouts to begin. stored: rollouts
    to go on with that a checkpoint has brought; those of earlier rounds are with the ranks already.
    questions: of all of these. due: rollouts of prompts in rows before this one must end, others
    may remain open; None: all must end.
    """

    version: int
    requests: list[Request]
    questions: Questions
    stored: list[OpenEpisode] = field(default_factory=list)
    due: int | None = None


class RoundResult(NamedTuple):
    """The rollouts that have ended in a round, and those that go on. The same on all ranks."""

    ended: list[Rollout]
    open: list[OpenEpisode]


class Rounds(Protocol):
    """Runner of rounds. All methods are collective, and raise the same errors on all ranks."""

    def start(self, work: RoundWork, check: Check) -> None:
        """Start a round with the present weights. The one before must be finished."""

    def finish(self, check: Check) -> RoundResult:
        """Wait for the round, and return its rollouts. May be called again if `check` raised."""

    def forget(self) -> None:
        """Give up the round, if there is one, and all open rollouts."""


@dataclass
class RoundMaker:
    """Runs rounds on the ranks that generate. It holds this rank's open rollouts."""

    maker: AnswerMaker
    choice: ObjectiveChoice

    def __post_init__(self) -> None:
        self._episodes: list[Episode] = []
        self._questions: Questions = {}

    def play(self, work: RoundWork, check: Check) -> None:
        """Begin rollouts, and go on with all that are open. Collective if the player is."""
        self._questions |= work.questions
        if work.stored:
            self._episodes += self.maker.begin_again(work.stored, work.questions)
        self._episodes += self.maker.begin(work.requests, work.questions)
        drops = self.choice.unfinished == "drop"
        limit = self.choice.round_tokens
        for episode in self._episodes:
            is_due = work.due is None or episode.request.row < work.due
            episode.allow(None if is_due and not drops else limit)
        self.maker.player.go_on(self._episodes, work.version, check)
        for episode in self._episodes:
            if drops and episode.is_open:
                episode.fail(f"it had not ended after objective.round_tokens={limit}")

    def judge(self) -> RoundResult:
        """Score the rollouts that have ended, and return them with the open ones. Collective."""
        ended = [episode for episode in self._episodes if not episode.is_open]
        self._episodes = [episode for episode in self._episodes if episode.is_open]
        rollouts = self.maker.judge(ended, self._questions)
        going_on = self.maker.stored(self._episodes)
        self._questions = {e.request.row: self._questions[e.request.row] for e in self._episodes}
        parts = gather((rollouts, going_on))
        return RoundResult(
            [rollout for ended_there, _ in parts for rollout in ended_there],
            [episode for _, open_there in parts for episode in open_there],
        )

    def forget(self) -> None:
        for episode in self._episodes:
            episode.fail("given up")
        self.maker.player.close(self._episodes)
        self._episodes, self._questions = [], {}


@dataclass
class OwnRounds:
    """Rounds on the training ranks, one after the other with training."""

    maker: RoundMaker
    _result: RoundResult | None = None

    def start(self, work: RoundWork, check: Check) -> None:
        phases.enter("rollouts")
        try:
            self.maker.play(work, check)
            self._result = self.maker.judge()
        except (RunFailed, UserError) as error:  # from an environment or a reward, on all ranks
            raise DataLost(error) from None

    def finish(self, check: Check) -> RoundResult:
        assert self._result
        return self._result

    def forget(self) -> None:
        self.maker.forget()
