"""One rollout while it is made: an answer of the model, or several in turn with an environment."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from fsdp_trainer.base.counted import counted
from fsdp_trainer.base.own_code import place_of
from fsdp_trainer.rl.environments.environment import Message
from fsdp_trainer.rl.environments.known_environments import EnvironmentSpec
from fsdp_trainer.rl.rewards.reward import number_of
from fsdp_trainer.rl.rollouts.sampler import Request, SampledAnswer

FAILED_PROMPT = [0]
"""The tokens of a rollout that failed; it is not trained on."""

OpenEpisode = dict[str, Any]
"""An episode that has not ended, as a checkpoint stores it: JSON."""


@dataclass
class EpisodeUpdate:
    """The changes to an episode that other ranks must make too. tokens: of the environment."""

    tokens: list[int] = field(default_factory=list)
    is_over: bool = False
    failure: str | None = None


@dataclass
class Episode:
    """One rollout, with an environment or without.

    prompt, tokens: before the first answer, and from it on. turns: numbers of tokens, of the
    model's and of the environment's in turn. log_probabilities: of the model's tokens, 0 for
    others. is_paused: the last answer is to be continued. budget: how many more tokens the model
    may write for now; None: any number. failure: the reason why it cannot be used. version:
    optimizer steps done by the weights that began it. rewards: a number, one for each of the
    model's turns, or None. messages, steps, environment: only on the rank that calls the
    environment; steps: numbers of messages at each call of its `step`. hides_tools: the template
    does not show its tools.
    """

    request: Request
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    is_open: bool = True
    is_complete: bool = True
    is_paused: bool = False
    budget: int | None = None
    failure: str | None = None
    wrong_calls: int = 0
    seconds: float = 0.0
    version: int = 0
    rewards: Any = None
    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    steps: list[int] = field(default_factory=list)
    environment: Any = None
    hides_tools: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return self.request.row, self.request.sample

    @property
    def context(self) -> list[int]:
        return [*self.prompt, *self.tokens]

    @property
    def answers(self) -> int:
        return (len(self.turns) + 1) // 2

    @property
    def can_go_on(self) -> bool:
        return self.is_open and self.budget != 0

    def allow(self, tokens: int | None) -> None:
        self.budget = tokens

    def request_more(self, longest: int) -> Request:
        """Return the request for the model's next tokens. longest: tokens of an answer at most."""
        room = longest - (self.turns[-1] if self.is_paused else 0)
        room = room if self.budget is None else min(room, self.budget)
        return Request(self.context, *self.key, room)

    def add_answer(self, answer: SampledAnswer, longest: int) -> None:
        """Append tokens of the model.

        An answer that is not finished is paused if only `budget` has cut it, else the last.
        """
        count = len(answer.tokens)
        if not self.turns:
            self.version = answer.version
        if self.is_paused:
            self.turns[-1] += count
        else:
            self.turns.append(count)
        self.tokens += answer.tokens
        self.log_probabilities += answer.log_probabilities
        if self.budget is not None:
            self.budget -= count
        self.is_paused = not answer.finished and self.budget == 0 and self.turns[-1] < longest
        if not answer.finished and not self.is_paused:
            self.is_open = self.is_complete = False

    def add_context(self, tokens: list[int]) -> None:
        if not self.prompt:
            self.prompt = tokens
            return
        self.tokens += tokens
        self.log_probabilities += [0.0] * len(tokens)
        self.turns.append(len(tokens))

    def end(self) -> None:
        self.is_open = False

    def fail(self, reason: str) -> None:
        """End it; it is not trained on, so that its tokens are dropped."""
        self.is_open, self.failure = False, reason
        self.prompt, self.tokens, self.log_probabilities, self.turns = FAILED_PROMPT, [], [], []

    def update(self, update: EpisodeUpdate) -> None:
        if update.failure is not None:
            self.fail(update.failure)
            return
        if update.tokens:
            self.add_context(update.tokens)
        self.is_open = self.is_open and not update.is_over

    def require_room(self, longest: int, answer: int) -> bool:
        if self.is_open and not self.is_paused and len(self.context) + answer > longest:
            if not self.turns:
                self.fail(f"the prompt of {len(self.prompt):,} tokens leaves no room")
            self.is_open = self.is_complete = False
        return self.can_go_on

    # --- on the rank that calls the environment

    def note_tools(self, are_shown: bool) -> None:
        self.hides_tools = not are_shown

    def begin(self, spec: EnvironmentSpec, row: dict[str, Any]) -> Any:
        self.environment = spec.make()
        return self.environment.reset(row)

    def show(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> None:
        self.messages, self.tools = messages, tools

    def step(self) -> Any:
        self.steps.append(len(self.messages))
        return self.environment.step([*self.messages])

    def step_again(self, number: int) -> Any:
        """Call the environment's step as it was called before, the first time with number=0."""
        return self.environment.step(self.messages[: self.steps[number]])

    def count_wrong_call(self) -> None:
        self.wrong_calls += 1

    def reward(self, value: Any) -> EpisodeUpdate:
        self.rewards, failure = checked_rewards(value, self.answers)
        return EpisodeUpdate(failure=failure)

    def timed(self, function: Callable[["Episode"], Any]) -> Any:
        began = time.monotonic()
        try:
            return function(self)
        finally:
            self.seconds += time.monotonic() - began

    def sampled(self) -> SampledAnswer:
        turns = self.turns[: 2 * self.answers - 1]  # what follows the last answer is not read
        length = sum(turns)
        return SampledAnswer(
            self.tokens[:length],
            self.log_probabilities[:length],
            self.is_complete,
            self.version,
            tuple(turns) if self.messages else (),
        )

    # --- in a checkpoint

    def stored(self) -> OpenEpisode:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name in STORED}
        return {**values, "request": asdict(self.request)}

    @classmethod
    def from_stored(cls, stored: OpenEpisode) -> "Episode":
        """Return the episode that `stored` returned; its environment is to be begun again."""
        values = {name: stored[name] for name in STORED}
        return cls(Request(**stored["request"]), **values)


STORED = (
    "prompt",
    "tokens",
    "log_probabilities",
    "turns",
    "is_paused",
    "wrong_calls",
    "seconds",
    "version",
    "messages",
    "tools",
    "steps",
)
"""Fields of an open episode in a checkpoint, besides its request."""


def reason_of(method: str, error: Exception) -> str:
    return f"{method}: {type(error).__name__}: {error}{place_of(error)}"


def checked_rewards(value: Any, answers: int) -> tuple[Any, str | None]:
    if isinstance(value, Exception):
        return None, reason_of("reward", value)
    by_turn = isinstance(value, list | tuple)
    numbers = [number_of(each) for each in (value if by_turn else [value])]
    if not all(map(math.isfinite, numbers)):
        return None, f"reward returned {value!r}, not a finite number or one for each turn"
    if by_turn and len(numbers) != answers:
        return (
            None,
            f"reward returned {counted(len(numbers), 'number')} for {counted(answers, 'turn')}",
        )
    return (numbers if by_turn else numbers[0]), None
