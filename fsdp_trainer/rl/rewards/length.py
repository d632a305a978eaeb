"""The reward `length`: a penalty for answers that are too short or too long."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fsdp_trainer.config.keys import key
from fsdp_trainer.errors import UserError
from fsdp_trainer.rl.rewards.reward import Attempt, Reward


@dataclass(frozen=True)
class Length(Reward):
    """0 for an answer whose length is in the range, down to -1 outside (DAPO's soft punishment)."""

    name: ClassVar[str] = "length"
    max: int | None = key(None, "a longer answer scores -1; null: none is too long", minimum=1)
    min: int = key(0, "a shorter answer scores -1", minimum=0)
    buffer: int = key(
        0, "from max - buffer to max the score falls from 0 to -1; 0: all at once", minimum=0
    )
    unit: str = key(
        "tokens", "what a length is counted in", choices=("tokens", "words", "characters")
    )

    def wrong_parts(self) -> str | None:
        if self.max is None and not self.min:
            return "has neither max nor min, as in  {name: length, max: 512, buffer: 128}"
        if self.max is not None and self.max - self.buffer < self.min:
            return f"leaves no length: max - buffer is {self.max - self.buffer}, min {self.min}"
        if self.buffer and self.max is None:
            return "buffer  only counts with  max"
        return None

    def score(self, attempts: Sequence[Attempt]) -> list[float]:
        return [self._score(self._length(attempt)) for attempt in attempts]

    def _score(self, length: int) -> float:
        if length < self.min or (self.max is not None and length > self.max):
            return -1.0
        if self.max is None or not self.buffer:
            return 0.0
        return min(0.0, (self.max - self.buffer - length) / self.buffer)

    def _length(self, attempt: Attempt) -> int:
        if self.unit == "tokens":
            if attempt.tokens is None:
                raise UserError("answers cannot be scored", "unit: tokens", NO_TOKENIZER)
            return attempt.tokens
        return len(attempt.answer.split() if self.unit == "words" else attempt.answer)


NO_TOKENIZER = (
    "the reward length counts tokens, and there is no tokenizer.\n"
    "Give  tokenizer.path=…  or  model.init_from=…  , or count  unit: words  or  characters"
)
