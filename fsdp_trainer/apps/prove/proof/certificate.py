"""A certificate: what was compared, by how much it differs, and what could not be proved here."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Checked:
    """One comparison.

    difference: a number, or of a list of things how many are wrong; limit: the largest that is
    equal but for rounding. detail: what was compared, and where the difference is. advice: what to
    do if it is not ok.
    """

    name: str
    difference: float
    limit: float
    ok: bool
    detail: str
    advice: str = ""


@dataclass(frozen=True)
class NotProved:
    """Something that this machine cannot compare. command: what to type where it can be proved."""

    name: str
    command: str


Findings = Iterable[Checked | NotProved]


@dataclass
class Certificate:
    """All comparisons. about: sentences on what was run, and with what in place of what."""

    checks: list[Checked] = field(default_factory=list)
    not_proved: list[NotProved] = field(default_factory=list)
    about: list[str] = field(default_factory=list)

    def add(self, findings: Findings) -> None:
        for one in findings:
            if isinstance(one, Checked):
                self.checks.append(one)
            else:
                self.not_proved.append(one)

    @property
    def ok(self) -> bool:
        """True if something was compared, and nothing differs."""
        return bool(self.checks) and all(check.ok for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """Return the object of `format=json`, whose details end with the advice if not ok."""
        checks = [
            {
                "name": check.name,
                "difference": check.difference if math.isfinite(check.difference) else None,
                "limit": check.limit,
                "ok": check.ok,
                "detail": check.detail if check.ok else f"{check.detail}. {check.advice}",
            }
            for check in self.checks
        ]
        not_proved = [{"name": one.name, "command": one.command} for one in self.not_proved]
        return {"checks": checks, "not_proved": not_proved, "ok": self.ok}


def raised(error: Exception) -> str:
    """Return what another program raised, in one line."""
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}"


def compared(name: str, difference: float, limit: float, detail: str, advice: str) -> Checked:
    """Return the comparison of numbers; one that is not finite differs."""
    return Checked(name, difference, limit, difference <= limit, detail, advice)


def counted_wrong(name: str, wrong: Sequence[str], right: str, advice: str) -> Checked:
    """Return the comparison of a list of things. wrong: those that differ; right: if none does."""
    shown = "; ".join([*wrong[:3], *([f"and {len(wrong) - 3} more"] if wrong[3:] else [])])
    return Checked(name, len(wrong), 0, not wrong, shown or right, advice)
