"""The making of rollouts on the ranks that generate them: begun, gone on with, and scored."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from fsdp_trainer.base import phases
from fsdp_trainer.base.distributed import gather
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer
from fsdp_trainer.errors import RunFailed, UserError
from fsdp_trainer.rl.environments.environment import last_text
from fsdp_trainer.rl.reasoning import said_in
from fsdp_trainer.rl.rewards.reward import Attempt, Reward, score, totals
from fsdp_trainer.rl.rollouts.episode import Episode, OpenEpisode
from fsdp_trainer.rl.rollouts.episode_player import PROMPT_END, EpisodePlayer, Questions
from fsdp_trainer.rl.rollouts.rollout import EpisodeFacts, Rollout
from fsdp_trainer.rl.rollouts.sampler import AnswerSampler, Request

T = TypeVar("T")


@dataclass
class AnswerPlayer:
    """Lets the model answer each prompt once. longest: tokens of an answer at most.

    Its methods are those of EpisodePlayer.
    """

    sampler: AnswerSampler
    longest: int

    @property
    def titles(self) -> list[str]:
        """The names of the player's own rewards: it has none."""
        return []

    def begin(self, episodes: list[Episode], questions: Questions) -> None:
        for episode in episodes:
            episode.add_context([*episode.request.prompt])

    def begin_again(self, episodes: list[Episode], questions: Questions) -> None:
        """See EpisodePlayer."""

    def go_on(self, episodes: list[Episode], step: int, check: Callable[[], None]) -> None:
        running = [episode for episode in episodes if episode.can_go_on]
        requests = [episode.request_more(self.longest) for episode in running]
        answers = self.sampler.sample(requests, step, check)
        for episode, answer in zip(running, answers, strict=True):
            episode.add_answer(answer, self.longest)
            if not episode.is_paused:
                episode.end()

    def close(self, episodes: list[Episode]) -> None:
        """See EpisodePlayer."""


Player = AnswerPlayer | EpisodePlayer


@dataclass
class AnswerMaker:
    """Makes this rank's part of rollouts, and scores it.

    own_part, parts: index of this rank's part, and number of parts. is_first: False for a rank that
    makes the same rollouts as the first rank of its group.
    """

    player: Player
    rewards: Sequence[Reward]
    tokenizer: TextTokenizer
    own_part: int
    parts: int
    is_first: bool = True

    @property
    def titles(self) -> list[str]:
        """The names of all scores of a rollout, that of the environment's reward first."""
        return [*self.player.titles, *(reward.title for reward in self.rewards)]

    def begin(self, requests: Sequence[Request], questions: Questions) -> list[Episode]:
        """Begin this rank's part of the rollouts for all requests. Collective."""
        episodes = [Episode(request) for request in self._own(requests)]
        self.player.begin(episodes, questions)
        return episodes

    def begin_again(self, stored: Sequence[OpenEpisode], questions: Questions) -> list[Episode]:
        if all(each["parts"] == self.parts for each in stored):  # as the run before
            own: Sequence[OpenEpisode] = [one for one in stored if one["part"] == self.own_part]
        else:
            own = self._own(stored)
        episodes = [Episode.from_stored(each) for each in own]
        self.player.begin_again(episodes, questions)
        return episodes

    def stored(self, episodes: list[Episode]) -> list[OpenEpisode]:
        """Return open rollouts as a checkpoint stores them; none if another rank makes the same."""
        place = {"part": self.own_part, "parts": self.parts}
        return [each.stored() | place for each in episodes] if self.is_first else []

    def _own(self, items: Sequence[T]) -> Sequence[T]:
        count = len(items)
        first, stop = (count * part // self.parts for part in (self.own_part, self.own_part + 1))
        return items[first:stop]

    def judge(self, ended: list[Episode], questions: Questions) -> list[Rollout]:
        """Score ended rollouts; return this rank's, none if another one makes the same. Collective.

        Those that failed have no scores.
        """
        self.player.close(ended)
        phases.enter("rewards")
        held = ended if self.is_first else []
        used = [episode for episode in held if episode.failure is None]
        attempts = [self._attempt(episode, questions) for episode in used]
        scores = score_on_ranks(self.rewards, attempts)
        by_attempt = iter(zip(*scores, strict=True)) if self.rewards else iter([()] * len(used))
        sums = iter(totals(self.rewards, scores) if self.rewards else [0.0] * len(used))
        own = bool(self.player.titles)
        failed = [math.nan] * len(self.titles)
        return [
            rewarded(episode, math.nan, failed, False)
            if episode.failure
            else rewarded(episode, next(sums), next(by_attempt), own)
            for episode in held
        ]

    def _attempt(self, episode: Episode, questions: Questions) -> Attempt:
        """Return what rewards read: the last answer of a rollout, and all turns before it."""
        question, answer = questions[episode.request.row], episode.sampled()
        row, reference = question["row"], question["reference"]
        if not episode.messages:
            return Attempt(
                question["prompt"],
                self.tokenizer.decode(answer.tokens),
                row,
                reference,
                len(answer.tokens) - answer.finished,  # without the stop token
                answer.finished,
                question["messages"],
                question["tools"],
                self._said(episode.prompt, answer.tokens),
            )
        last = max(i for i, turn in enumerate(episode.messages) if turn["role"] == "assistant")
        return Attempt(
            question["prompt"],
            last_text(episode.messages),
            row,
            reference,
            answer.own_tokens,
            answer.finished,
            episode.messages[:last],
            episode.tools,
        )

    def _said(self, prompt: Sequence[int], answer: Sequence[int]) -> str:
        before = self.tokenizer.decode([*prompt[-PROMPT_END:]], skip_special=False)
        said = said_in(self.tokenizer.decode([*answer], skip_special=False), before)
        for text in self.tokenizer.special_tokens:
            said = said.replace(text, "")
        return said


def rewarded(episode: Episode, others: float, scores: Sequence[float], has_own: bool) -> Rollout:
    """Return an ended episode as a rollout. others: the weighted sum of the rewards' scores.

    has_own: the environment's own reward is the first score. One for each turn is kept as such, and
    the others are added to that of the last turn.
    """
    own, by_turn = episode.rewards if has_own else 0.0, ()
    if isinstance(own, list):
        by_turn = (*own[:-1], own[-1] + others)
        own = math.fsum(own)
    has_facts = episode.messages or episode.failure
    facts = EpisodeFacts(episode.wrong_calls, episode.seconds, episode.failure, episode.hides_tools)
    return Rollout(
        *episode.key,
        episode.prompt,
        episode.sampled(),
        own + others,
        [own, *scores] if has_own else [*scores],
        by_turn,
        facts if has_facts else None,
    )


# --- scores on every rank -------------------------------------------------------------------------


def score_on_ranks(rewards: Sequence[Reward], attempts: Sequence[Attempt]) -> list[list[float]]:
    """Return, for each reward, the unweighted scores of this rank's attempts. Collective.

    If a rank fails, raises the error of the first such rank on all ranks: a UserError or RunFailed.
    """
    scores: list[list[float]] = []
    failure: UserError | RunFailed | None = None
    try:
        scores = score(rewards, attempts)
    except (UserError, RunFailed) as error:
        failure = error
    except Exception as error:  # from a user's reward; the other ranks would wait for this rank
        failure = RunFailed(f"a reward failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
    own_rank = dist.get_rank() if dist.is_initialized() else 0
    for rank, other in enumerate(gather(failure)):
        if other is not None:
            raise failure if rank == own_rank and failure else other
    return scores
