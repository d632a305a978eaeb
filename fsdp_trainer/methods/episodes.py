"""Answers over several turns: the model and an environment in turn, until the environment ends."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fsdp_trainer.base import phases
from fsdp_trainer.base.distributed import gather
from fsdp_trainer.config.methods import ObjectiveChoice
from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.templates.turn_tokens import TurnTokens
from fsdp_trainer.environments.bounded_calls import call_all
from fsdp_trainer.environments.environment import Message, row_of
from fsdp_trainer.environments.known_environments import EnvironmentSpec
from fsdp_trainer.environments.tool_calls import format_of, parse_answer
from fsdp_trainer.errors import RunFailed, UserError
from fsdp_trainer.methods.sampler import AnswerSampler, Request, SampledAnswer

CUT = " … (cut)"
"""End of an environment's text that was longer than allowed."""
TRY_AGAIN = "The tool calls could not be read, and none was made: {problem}."
FAILED_PROMPT = [0]
"""The tokens of a rollout that failed; it is not trained on."""


@dataclass
class Episode:
    """One rollout with an environment.

    prompt, tokens: before the first answer, and from it on. turns: numbers of tokens, of the
    model's and of the environment's in turn. log_probabilities: of the model's tokens, 0 for
    others. failure: the reason why it cannot be used. rewards: a number, one for each of the
    model's turns, or None. messages, environment: only on the rank that calls the environment.
    """

    request: Request
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    is_open: bool = True
    is_complete: bool = True
    failure: str | None = None
    wrong_calls: int = 0
    seconds: float = 0.0
    version: int = 0
    rewards: Any = None
    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    environment: Any = None

    @property
    def key(self) -> tuple[int, int]:
        """Row of its prompt, and number of the sample."""
        return self.request.row, self.request.sample

    @property
    def context(self) -> list[int]:
        """All tokens so far."""
        return [*self.prompt, *self.tokens]

    @property
    def answers(self) -> int:
        """Number of the model's turns."""
        return (len(self.turns) + 1) // 2

    def add_answer(self, answer: SampledAnswer) -> None:
        """Append an answer of the model; one that was cut is the last."""
        self.tokens += answer.tokens
        self.log_probabilities += answer.log_probabilities
        self.turns.append(len(answer.tokens))
        self.version = answer.version
        if not answer.finished:
            self.is_open = self.is_complete = False

    def add_context(self, tokens: list[int]) -> None:
        """Append tokens of the environment; the first are the prompt."""
        if not self.prompt:
            self.prompt = tokens
            return
        self.tokens += tokens
        self.log_probabilities += [0.0] * len(tokens)
        self.turns.append(len(tokens))

    def fail(self, reason: str) -> None:
        """End it; it is not trained on, so that its tokens are dropped."""
        self.is_open, self.failure = False, reason
        self.prompt, self.tokens, self.log_probabilities, self.turns = FAILED_PROMPT, [], [], []

    def update(self, update: "EpisodeUpdate") -> None:
        """Make the changes that the rank with the environment has sent."""
        if update.failure is not None:
            self.fail(update.failure)
            return
        if update.tokens:
            self.add_context(update.tokens)
        self.is_open = self.is_open and not update.is_over

    def require_room(self, longest: int, answer: int) -> bool:
        """Return True if it goes on; end one without room for another answer."""
        if self.is_open and len(self.context) + answer > longest:
            if not self.turns:
                self.fail(f"the prompt of {len(self.prompt):,} tokens leaves no room")
            self.is_open = self.is_complete = False
        return self.is_open

    # --- on the rank that calls the environment

    def begin(self, spec: EnvironmentSpec, row: dict[str, Any]) -> Any:
        """Make the environment and return what its reset returns."""
        self.environment = spec.make()
        return self.environment.reset(row)

    def show(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> None:
        """Set the first turns and the tools."""
        self.messages, self.tools = messages, tools

    def count_wrong_call(self) -> None:
        """Count an answer whose tool calls could not be read."""
        self.wrong_calls += 1

    def reward(self, value: Any) -> "EpisodeUpdate":
        """Set the rewards that the environment returned."""
        self.rewards, failure = checked_rewards(value, self.answers)
        return EpisodeUpdate(failure=failure)

    def timed(self, function: Callable[["Episode"], Any]) -> Any:
        """Return the value of a function of it, and count the time."""
        began = time.monotonic()
        try:
            return function(self)
        finally:
            self.seconds += time.monotonic() - began

    def sampled(self) -> SampledAnswer:
        """Return it as one answer, to the prompt."""
        turns = self.turns[: 2 * self.answers - 1]  # what follows the last answer is not read
        length = sum(turns)
        return SampledAnswer(
            self.tokens[:length],
            self.log_probabilities[:length],
            self.is_complete,
            self.version,
            tuple(turns),
        )


@dataclass
class EpisodeUpdate:
    """The changes to an episode that other ranks must make too. tokens: of the environment."""

    tokens: list[int] = field(default_factory=list)
    is_over: bool = False
    failure: str | None = None


Updates = dict[tuple[int, int], EpisodeUpdate]
"""By the key of the episode."""


@dataclass
class EpisodePlayer:
    """Plays rollouts with an environment.

    longest: tokens of a rollout at most. is_first: see AnswerMaker. share: returns what each rank
    gives; all methods are collective if it is.
    """

    spec: EnvironmentSpec
    choice: ObjectiveChoice
    sampler: AnswerSampler
    turn_tokens: TurnTokens
    longest: int
    is_first: bool = True
    share: Callable[[Any], list[Any]] = gather

    def __post_init__(self) -> None:
        self.format = format_of("".join(self.turn_tokens.template.sources.values()))

    def play(
        self,
        requests: Sequence[Request],
        questions: dict[int, dict[str, Any]],
        step: int,
        check: Callable[[], None],
    ) -> list[Episode]:
        """Return a rollout for each request of this rank, ended and rewarded."""
        episodes = [Episode(request) for request in requests]
        self._update(episodes, lambda: self._begin(episodes, questions))
        room = self.longest, self.choice.max_new_tokens
        for turn in range(self.choice.turns):
            running = [episode for episode in episodes if episode.require_room(*room)]
            if not any(self.share(len(running))):
                break
            asked = [Request(e.context, e.request.row, e.request.sample) for e in running]
            phases.enter("rollouts")
            for episode, answer in zip(
                running, self.sampler.sample(asked, step, check), strict=True
            ):
                episode.add_answer(answer)
            phases.enter("environments")
            is_last = turn + 1 == self.choice.turns
            answered = [episode for episode in running if episode.is_open]
            cut = [episode for episode in running if not episode.is_open]
            self._update(episodes, lambda: self._reply(answered, cut, is_last))  # noqa: B023
        self._update(episodes, lambda: self._reward(episodes))
        return episodes

    def _update(
        self, episodes: list[Episode], work: Callable[[], dict[Any, EpisodeUpdate]]
    ) -> None:
        """Let the first rank of each group work, and make its updates on all."""
        updates: Updates = {}
        fault: Exception | None = None
        if self.is_first:
            try:
                updates = work()
            except (UserError, RunFailed) as error:
                fault = error
        everywhere: Updates = {}
        for others, other_fault in self.share((updates, fault)):
            if other_fault is not None:
                raise other_fault
            everywhere |= others
        for episode in episodes:
            episode.update(everywhere.get(episode.key, EpisodeUpdate()))

    # --- on the first rank of each group

    def _begin(self, episodes: list[Episode], questions: dict[int, dict[str, Any]]) -> Updates:
        """Make and reset all environments; the updates have the prompts' tokens."""

        def begin(episode: Episode) -> Any:
            return episode.begin(self.spec, row_of(questions[episode.request.row]))

        return {e.key: self._begun(e, value) for e, value in self._called(episodes, begin)}

    def _begun(self, episode: Episode, value: Any) -> EpisodeUpdate:
        if isinstance(value, Exception):
            return EpisodeUpdate(failure=reason_of("reset", value))
        if not (isinstance(value, tuple) and len(value) == 2 and are_turns(value[0]) and value[0]):
            return EpisodeUpdate(failure="reset returned no pair of turns and tools")
        messages, tools = value
        episode.show(self._bounded(messages), tools or None)
        return self._tokens(lambda: self.turn_tokens.prompt(episode.messages, episode.tools))

    def _reply(self, answered: list[Episode], cut: list[Episode], is_last: bool) -> Updates:
        """Return the environments' replies to the newest answers."""
        updates: Updates = {}
        asked = []
        for episode in [*answered, *cut]:
            parsed = parse_answer(self._text(episode), self.format, episode.tools)
            episode.messages.append(parsed.message)
            if episode in cut:
                continue
            if parsed.problem is None:
                asked.append(episode)
                continue
            episode.count_wrong_call()
            error = {"role": "user", "content": TRY_AGAIN.format(problem=parsed.problem)}
            updates[episode.key] = self._following(episode, [error], is_last)
        for episode, value in self._called(asked, lambda e: e.environment.step([*e.messages])):
            updates[episode.key] = self._replied(episode, value, is_last)
        return updates

    def _replied(self, episode: Episode, value: Any, is_last: bool) -> EpisodeUpdate:
        if isinstance(value, Exception):
            return EpisodeUpdate(failure=reason_of("step", value))
        if not (isinstance(value, tuple) and len(value) == 2 and are_turns(value[0])):
            return EpisodeUpdate(failure="step returned no pair of turns and whether it is over")
        new, is_over = value
        if not new and not is_over:
            return EpisodeUpdate(failure="step returned no turn, and is not over")
        return self._following(episode, self._bounded(new), bool(is_over) or is_last)

    def _following(self, episode: Episode, new: list[Message], is_over: bool) -> EpisodeUpdate:
        """Return the update for new turns; none is read after the last answer."""
        before = [*episode.messages]
        episode.messages.extend(new)
        if is_over:
            return EpisodeUpdate(is_over=True)
        return self._tokens(lambda: self.turn_tokens.following(before, new, episode.tools))

    def _reward(self, episodes: list[Episode]) -> Updates:
        """Set the rewards of all rollouts that have not failed, and close their environments."""
        updates: Updates = {}
        ended = [episode for episode in episodes if episode.failure is None]
        if self.spec.rewards:
            for episode, value in self._called(ended, lambda e: e.environment.reward(e.messages)):
                updates[episode.key] = episode.reward(value)
        closing = [e for e in episodes if callable(getattr(e.environment, "close", None))]
        for _ in self._called(closing, lambda episode: episode.environment.close()):
            pass  # what goes wrong in closing changes no rollout
        return updates

    def _called(
        self, episodes: list[Episode], function: Callable[[Episode], Any]
    ) -> list[tuple[Episode, Any]]:
        """Call a function for each episode; return its value, or its exception, with each.

        Raises UserError if an environment cannot work at all on this machine.
        """
        calls = [partial(episode.timed, function) for episode in episodes]
        limits = self.choice.environments_at_once, self.choice.environment_seconds
        values = call_all(calls, *limits)
        for value in values:
            if isinstance(value, UserError):
                raise value
        return list(zip(episodes, values, strict=True))

    def _tokens(self, make: Callable[[], list[int]]) -> EpisodeUpdate:
        try:
            return EpisodeUpdate(tokens=make())
        except RecordError as error:
            return EpisodeUpdate(failure=str(error))
        except Exception as error:  # turns of an environment may hold anything
            return EpisodeUpdate(failure=reason_of("its turns cannot be rendered", error))

    def _text(self, episode: Episode) -> str:
        """Return the text of the newest answer, with special tokens, without its stop token."""
        own = episode.tokens[len(episode.tokens) - episode.turns[-1] :]
        stop_ids = self.turn_tokens.tokenizer.stop_ids
        own = own[:-1] if own and own[-1] in stop_ids else own
        return self.turn_tokens.tokenizer.decode(own, skip_special=False)

    def _bounded(self, turns: list[Message]) -> list[Message]:
        """Return turns whose texts are cut to the longest allowed."""
        longest = self.choice.environment_output
        return [
            {**turn, "content": turn["content"][:longest] + CUT}
            if isinstance(turn.get("content"), str) and len(turn["content"]) > longest
            else turn
            for turn in turns
        ]


def reason_of(method: str, error: Exception) -> str:
    """Return the reason of a failure for people."""
    return f"{method}: {type(error).__name__}: {error}"


def are_turns(value: Any) -> bool:
    """Return True for a list of turns with a role and a text."""
    return isinstance(value, list) and all(
        isinstance(turn, dict) and isinstance(turn.get("role"), str) and "content" in turn
        for turn in value
    )


def checked_rewards(value: Any, answers: int) -> tuple[Any, str | None]:
    """Return a reward as a number or a list of one for each answer, and why it is neither."""
    if isinstance(value, Exception):
        return None, reason_of("reward", value)
    try:
        if isinstance(value, list | tuple):
            numbers = [float(each) for each in value]
            if len(numbers) != answers:
                return None, f"reward returned {len(numbers)} numbers for {answers} turns"
        else:
            numbers = [float(value)]
    except (TypeError, ValueError):
        return None, f"reward returned {value!r}, not a number or one for each turn"
    if not all(abs(number) < float("inf") for number in numbers):
        return None, f"reward returned {value!r}, which is not finite"
    return (numbers if isinstance(value, list | tuple) else numbers[0]), None
