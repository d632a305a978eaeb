"""Printing of the doctor's findings."""

import json
import sys
from dataclasses import asdict

from fsdp_trainer.base.counted import counted
from fsdp_trainer.base.safe_text import safe
from fsdp_trainer.launch.facts import Check

COLOURS = {"ok": "32", "note": "2", "warning": "33", "problem": "31"}
UNHEALTHY = 3  # exit code


class DoctorReport:
    """Prints each finding immediately, under the heading of its section. Only rank 0 prints."""

    def __init__(self, format: str, quiet: bool):
        self.format, self.quiet = format, quiet
        self.counts = dict.fromkeys(COLOURS, 0)
        self.section = ""

    def add(self, section: str, *findings: Check) -> None:
        for finding in findings:
            self.counts[finding.mark] += 1
            self._print(self._line(section, finding))
            self.section = section

    def close(self) -> int:
        problems, warnings = self.counts["problem"], self.counts["warning"]
        if self.format == "text":
            self._print(f"\n{_some(problems, 'problem')}, {_some(warnings, 'warning')}")
        return UNHEALTHY if problems else 0

    def _print(self, text: str) -> None:
        try:
            if not self.quiet:
                print(safe(text), flush=True)
        except BrokenPipeError:  # the reader ended, but the other ranks still wait for this one
            self.quiet = True

    def _line(self, section: str, finding: Check) -> str:
        if self.format == "json":
            fields = asdict(finding)
            del fields["certain"]
            return json.dumps({"section": section, **fields}, ensure_ascii=False)
        mark = f"{finding.mark:8}"
        if sys.stdout.isatty():
            mark = f"\033[{COLOURS[finding.mark]}m{mark}\033[0m"
        first, *rest = finding.text.splitlines() or [""]
        lines = [f"  {mark} {finding.what:22} {first}", *(f"{'':34}{line}" for line in rest)]
        lines += [f"{'':34}→ {finding.advice}"] if finding.advice else []
        return "\n".join([*(["", section] if section != self.section else []), *lines])


def _some(number: int, noun: str) -> str:
    return counted(number, noun) if number else f"no {noun}s"
