"""The reward `regex`: the answer matches a regular expression."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fsdp_trainer.config.keys import key
from fsdp_trainer.rl.rewards.reward import Attempt, ReferenceReward


@dataclass(frozen=True)
class Regex(ReferenceReward):
    """1 for an answer in which a regular expression is found, else 0."""

    name: ClassVar[str] = "regex"
    pattern: str | None = key(
        None, "Python's regular expression; (?s) in front: a dot is also a new line"
    )
    whole: bool = key(False, "it must fit the whole answer, not a part of it")
    capture: bool = key(
        False, "what its first group captures, the last time, must be the reference"
    )

    def score(self, attempts: Sequence[Attempt]) -> list[float]:
        return [float(self._fits(attempt)) for attempt in attempts]

    def record_problem(self, row: dict[str, Any], reference: str | None) -> str | None:
        return super().record_problem(row, reference) if self.capture else None

    def wrong_parts(self) -> str | None:
        if self.pattern is None:
            return "lacks a pattern, as in  {name: regex, pattern: '<answer>.*</answer>'}"
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            return f"pattern: {self.pattern}  is no regular expression: {error}"
        if self.capture and not groups:
            return "capture: true  needs a group in the pattern, as in  'answer: (\\w+)'"
        if self.field and not self.capture:
            return "field  only counts with  capture: true"
        return None

    def _fits(self, attempt: Attempt) -> bool:
        match = self._match(attempt.answer)
        if match is None or not self.capture:
            return match is not None
        expected = self.expected(attempt.row, attempt.reference)
        captured = match[1]
        return None not in (expected, captured) and str(expected).split() == captured.split()

    def _match(self, answer: str) -> re.Match[str] | None:
        """Return a match of the pattern: the last one if its captured text is compared."""
        expression = re.compile(str(self.pattern))
        if self.whole:
            return expression.fullmatch(answer.strip())
        if not self.capture:
            return expression.search(answer)
        return next(reversed(list(expression.finditer(answer))), None)
