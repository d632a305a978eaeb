"""Rewards: numbers that measure how good answers are. Imports no torch."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar

from fsdp_trainer.base.counted import counted
from fsdp_trainer.base.own_code import place_of
from fsdp_trainer.config.keys import key
from fsdp_trainer.errors import RunFailed, UserError


@dataclass(frozen=True)
class Attempt:
    """One answer to the prompt of a data row.

    prompt: text of the last user turn. answer: text without special tokens. row: columns of the
    data row. reference: the answer in the data row, None if it has none. tokens: number of tokens
    of the answer, None if it was not tokenized. finished: False if the answer was cut at the
    maximum length. messages: all turns before the answer, () if there is only the prompt. tools:
    descriptions of the row's tools in OpenAI's format, None if it has none. said: the answer
    without its reasoning, if it is known from special tokens or from the prompt's end; else None.
    """

    prompt: str
    answer: str
    row: dict[str, Any]
    reference: str | None = None
    tokens: int | None = None
    finished: bool = True
    messages: Sequence[dict[str, Any]] = ()
    tools: list[dict[str, Any]] | None = None
    said: str | None = None

    @property
    def turns(self) -> Sequence[dict[str, Any]]:
        """Return the turns before the answer; always at least one."""
        return self.messages or [{"role": "user", "content": self.prompt}]


@dataclass(frozen=True)
class Reward:
    """A reward with its settings; each field is a key of an entry in objective.rewards."""

    name: ClassVar[str] = ""
    weight: float = key(1.0, "what its score is multiplied by in the sum of all rewards")
    label: str | None = key(None, "what metrics call it: reward/LABEL; null: its name")

    @property
    def title(self) -> str:
        return self.label or self.name

    def score(self, attempts: Sequence[Attempt]) -> list[float]:
        """Return one score per attempt."""
        raise NotImplementedError

    def record_problem(self, row: dict[str, Any], reference: str | None) -> str | None:
        """Return the reason why answers to a row cannot be scored; None if they can."""
        return None

    def wrong_parts(self) -> str | None:
        return None


@dataclass(frozen=True)
class ReferenceReward(Reward):
    """A reward that compares the answer with the row's reference or with one of its columns."""

    field: str | None = key(None, "the column to compare with, in place of the row's own answer")

    def expected(self, row: dict[str, Any], reference: str | None) -> str | None:
        """Return the text to compare the answer with; None if the row has none."""
        if self.field is None:
            return reference
        value = row.get(self.field)
        return None if value is None or isinstance(value, list | dict) else str(value)

    def record_problem(self, row: dict[str, Any], reference: str | None) -> str | None:
        """Return the reason why answers to a row cannot be scored; None if they can."""
        value = row.get(str(self.field))
        if isinstance(value, list | dict):
            kind = "a list" if isinstance(value, list) else "an object"
            return (
                f"has {kind} in {self.field!r}: the reward {self.title} compares with a text or a"
                " number"
            )
        if self.expected(row, reference) is not None:
            return None
        if self.field is None:
            return f"has no answer to compare with, which the reward {self.title} needs"
        columns = " ".join(row) or "none"
        return f"has no {self.field!r}, which the reward {self.title} needs; its columns: {columns}"


@dataclass(frozen=True)
class FunctionReward(Reward):
    """A reward computed by a function of attempts that the user's code registered."""

    function: Callable[..., list[float]] | None = None
    registered_as: str = ""
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def title(self) -> str:
        return self.label or self.registered_as

    def score(self, attempts: Sequence[Attempt]) -> list[float]:
        assert self.function
        try:
            value: Any = self.function(attempts, **dict(self.options))
        except (UserError, RunFailed):
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}{place_of(error)}"
            raise RunFailed(f"the reward {self.title} failed: {reason}") from error
        # the elements of a text, a mapping or a set are no scores in the order of the answers
        if not isinstance(value, Iterable) or isinstance(value, str | Mapping | Set):
            shown = repr(value)[:60]
            reason = f"returned {shown}, not a list with a number for each answer"
            raise RunFailed(f"the reward {self.title} {reason}")
        return list(value)


def score(rewards: Sequence[Reward], attempts: Sequence[Attempt]) -> list[list[float]]:
    """Return, for each reward, the unweighted scores of all attempts.

    Raises RunFailed if a reward does not return exactly one finite number per attempt.
    """
    return [_checked(reward, attempts) for reward in rewards]


def totals(rewards: Sequence[Reward], scores: Sequence[Sequence[float]]) -> list[float]:
    """Return the weighted sum of the scores of each attempt."""
    weights = [reward.weight for reward in rewards]
    return [
        sum(weight * one for weight, one in zip(weights, of_attempt, strict=True))
        for of_attempt in zip(*scores, strict=True)
    ]


def _checked(reward: Reward, attempts: Sequence[Attempt]) -> list[float]:
    if not attempts:
        return []
    scores = reward.score(attempts)
    if len(scores) != len(attempts):
        counts = f"{counted(len(scores), 'score')} for {counted(len(attempts), 'answer')}"
        raise RunFailed(f"the reward {reward.title} returned {counts}")
    return [_number(reward, value) for value in scores]


def number_of(value: Any) -> float:
    """Return a number as a float, NaN for anything else; a text that spells one is none."""
    try:
        return math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        return math.nan


def _number(reward: Reward, value: Any) -> float:
    """Return a score as a float. Raises RunFailed if it is not a finite number."""
    number = number_of(value)
    if not math.isfinite(number):
        raise RunFailed(f"the reward {reward.title} returned {value!r}, not a finite number")
    return number
