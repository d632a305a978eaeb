"""The reward `exact`: the answer equals the reference."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fsdp_trainer.config.keys import key
from fsdp_trainer.rl.rewards.reward import Attempt, ReferenceReward


@dataclass(frozen=True)
class Exact(ReferenceReward):
    """1 for an answer that equals the reference, else 0."""

    name: ClassVar[str] = "exact"
    ignore_case: bool = key(False, "capitals and small letters are the same")
    ignore_spaces: bool = key(
        True, "runs of white space are one space, and those at both ends do not count"
    )

    def score(self, attempts: Sequence[Attempt]) -> list[float]:
        return [float(self._is_equal(attempt)) for attempt in attempts]

    def _is_equal(self, attempt: Attempt) -> bool:
        expected = self.expected(attempt.row, attempt.reference)
        return expected is not None and self._plain(attempt.answer) == self._plain(expected)

    def _plain(self, text: str) -> str:
        if self.ignore_spaces:
            text = " ".join(text.split())
        return text.casefold() if self.ignore_case else text
