"""The reward `number`: the number in the answer equals the number in the reference."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from fsdp_trainer.config.keys import key
from fsdp_trainer.rl.reasoning import said_in
from fsdp_trainer.rl.rewards.reward import Attempt, ReferenceReward
from fsdp_trainer.rl.rewards.written_numbers import NUMERIC, last_value, only_value

BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(?:(\{)|(-?\d[\d.,/]*))")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
BETWEEN_BOXES = re.compile(r"[\s$,;]*(?:and|or|\\text\{\s*(?:and|or)\s*\})?[\s$,;]*", re.IGNORECASE)
"""What is between boxes that are one answer: two solutions, which are no number."""
HASHES = "####"


@dataclass(frozen=True)
class Number(ReferenceReward):
    """1 for an answer whose number equals the reference's, else 0.

    The number of a text is the only one in its last \\boxed{}, else the only one in the first line
    after its last ####, else the last one in the text. Reasoning does not count.
    """

    name: ClassVar[str] = "number"
    tolerance: float = key(
        1e-6, "largest difference that counts as equal; of numbers above 1 their share", minimum=0
    )
    marked: bool = key(
        False, "only a number in \\boxed{} or behind #### counts, none elsewhere in the answer"
    )

    def score(self, attempts: Sequence[Attempt]) -> list[float]:
        return [float(self._is_equal(attempt)) for attempt in attempts]

    def record_problem(self, row: dict[str, Any], reference: str | None) -> str | None:
        problem = super().record_problem(row, reference)
        if problem is None and self._expected_number(row, reference) is None:
            shown = " ".join(str(self.expected(row, reference)).split())[:60]
            return (
                f"has no number in its answer, which the reward {self.title} needs: {shown!r}"
                " (of roots, variables, lists and ranges none is; exact compares texts)"
            )
        return problem

    def _is_equal(self, attempt: Attempt) -> bool:
        expected = self._expected_number(attempt.row, attempt.reference)
        given = find_number(attempt.answer if attempt.said is None else attempt.said, self.marked)
        if expected is None or given is None:
            return False
        allowed = Fraction(self.tolerance) * max(Fraction(1), abs(expected))
        return abs(given - expected) <= allowed

    def _expected_number(self, row: dict[str, Any], reference: str | None) -> Fraction | None:
        text = self.expected(row, reference)
        return None if text is None else find_number(text)


def find_number(text: str, marked: bool = False) -> Fraction | None:
    """Return the number that a text states as its answer, not in reasoning; None if none is.

    marked: accept only a number in \\boxed{} or after ####.
    """
    text = said_in(text)
    boxes = [*boxes_of(text)]
    if boxes:
        return number_in_boxes(text, boxes)
    if HASHES in text:
        behind = text.rpartition(HASHES)[2].strip()
        first, *_ = behind.splitlines() or [""]
        is_heading = not (marked or NUMERIC.search(first))
        return last_value(behind) if is_heading else only_value(first)
    return None if marked else last_value(text)


def number_in_boxes(text: str, boxes: list[tuple[int, int, str | None]]) -> Fraction | None:
    """Return the number in the last box; None if it has none, or is one of several solutions."""
    begin, _, content = boxes[-1]
    number = None if content is None else only_value(content)
    if len(boxes) > 1 and BETWEEN_BOXES.fullmatch(text, boxes[-2][1], begin):
        other = boxes[-2][2]
        return number if other is not None and only_value(other) == number else None
    return number


def boxes_of(text: str) -> Iterator[tuple[int, int, str | None]]:
    """Yield begin, end and content of each \\boxed{}; the content of one that is cut is None."""
    place = 0
    while match := BOX.search(text, place):
        place = match.end()
        if not match[1]:
            yield match.start(), place, match[2]
            continue
        end = end_of_braces(text, place)
        inner = text[place : end - 1] if end else None
        if inner is None or not BOX.search(inner):
            yield match.start(), end or len(text), inner
            place = end or len(text)


def end_of_braces(text: str, place: int) -> int | None:
    """Return the place behind the brace that closes one before a place; None if none does."""
    depth = 1
    for match in BRACE.finditer(text, place):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.end()
    return None
