"""The reward `number`: the number in the answer equals the number in the reference."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from fsdp_trainer.config.keys import key
from fsdp_trainer.rewards.reward import Attempt, ReferenceReward

BOXED = "\\boxed{"
HASHES = "####"
MINUS = str.maketrans({"\u2212": "-", "\u2013": "-", "\u00a0": " ", "\u202f": " "})
"""Replaces the minus sign and the en dash by a hyphen, and no-break spaces by spaces."""
SEPARATOR = re.compile(r"\{,\}|\\[,!;: ]")
"""Thousands separators of LaTeX: 1{,}000 and 1\\,000."""
FRACTION = re.compile(r"(-?)\s*\\[dt]?frac\s*\{\s*(-?[\d.]+)\s*\}\s*\{\s*(-?[\d.]+)\s*\}")
WHOLE = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
DECIMAL = rf"(?:{WHOLE}(?:\.\d+)?|\.\d+)"
NUMBER = re.compile(
    # 5-3 and 5 - 3 have no sign, x2 has no number, and no match begins inside a number
    rf"(?<!\w)(?<!\d\.)(?:(?<![\d)]\s)-\s?)?\$?({DECIMAL})(?:[eE]([+-]?\d{{1,3}})\b)?"
    rf"(?:\s?/\s?({DECIMAL}))?"
)
LONGEST = 400
"""Maximum length of a number's text in characters; a longer one is ignored."""


@dataclass(frozen=True)
class Number(ReferenceReward):
    """1 for an answer whose number equals the reference's, else 0.

    The number of a text is the last one in its last \\boxed{}, else the last one in the first line
    after its last ####, else the last one in the text.
    """

    name: ClassVar[str] = "number"
    tolerance: float = key(
        1e-6, "largest difference that counts as equal; of numbers above 1 their share", minimum=0
    )
    marked: bool = key(
        False, "only a number in \\boxed{} or behind #### counts, none elsewhere in the answer"
    )

    def score(self, attempts: Sequence[Attempt]) -> list[float]:
        """Return one score per attempt."""
        return [float(self._is_equal(attempt)) for attempt in attempts]

    def record_problem(self, row: dict[str, Any], reference: str | None) -> str | None:
        """Return the reason why answers to a row cannot be scored; None if they can."""
        problem = super().record_problem(row, reference)
        if problem is None and self._expected_number(row, reference) is None:
            shown = " ".join(str(self.expected(row, reference)).split())[:60]
            return f"has no number in its answer, which the reward {self.title} needs: {shown!r}"
        return problem

    def _is_equal(self, attempt: Attempt) -> bool:
        expected = self._expected_number(attempt.row, attempt.reference)
        given = find_number(attempt.answer, self.marked)
        if expected is None or given is None:
            return False
        allowed = Fraction(self.tolerance) * max(Fraction(1), abs(expected))
        return abs(given - expected) <= allowed

    def _expected_number(self, row: dict[str, Any], reference: str | None) -> Fraction | None:
        text = self.expected(row, reference)
        return None if text is None else find_number(text)


def find_number(text: str, marked: bool = False) -> Fraction | None:
    """Return the number that a text states as its answer; None if there is none.

    marked: accept only a number in \\boxed{} or after ####.
    """
    text = text.translate(MINUS)
    boxed = _boxed(text)
    if boxed is not None:
        return _last_number(boxed)
    if HASHES in text:
        behind = text.rpartition(HASHES)[2].strip()
        return _last_number(behind.splitlines()[0] if behind else "")
    return None if marked else _last_number(text)


def _boxed(text: str) -> str | None:
    """Return the content of the last \\boxed{}, nested braces included; None if there is none."""
    start = text.rfind(BOXED)
    if start < 0:
        return None
    depth = 1
    begin = start + len(BOXED)
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place]
    return None


def _last_number(text: str) -> Fraction | None:
    plain = FRACTION.sub(r" \1\2/\3", SEPARATOR.sub("", text)).replace("\\", " ")
    for match in reversed(list(NUMBER.finditer(plain))):
        number = _value(match)
        if number is not None:
            return number
    return None


def _value(match: re.Match[str]) -> Fraction | None:
    """Return the number that NUMBER matched; None if it is too long or divides by 0."""
    if len(match[0]) > LONGEST:
        return None
    number = Fraction(match[1].replace(",", ""))
    if match[2]:
        number *= Fraction(10) ** int(match[2])
    if match[3]:
        divisor = Fraction(match[3].replace(",", ""))
        if not divisor:
            return None
        number /= divisor
    return -number if match[0].startswith("-") else number
