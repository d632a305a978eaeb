"""The line that says everything: redrawn in a terminal, one plain line per logging step in a file."""

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

from fsdp_trainer.phases import CHECKPOINT

PEOPLE = {
    "start": "start-up",
    "read": "device",
    "update": "optimizer",
    "samples": "validation",
}  # phases in other words
PEOPLE |= dict.fromkeys(CHECKPOINT, "checkpoint")
REDRAW_SECONDS, TELL_EVERY_SECONDS = 0.2, 5.0  # in a terminal, in a file


class Console:
    """Speaks for the run; only rank 0 has one that is not quiet."""

    def __init__(self, quiet: bool, stream: TextIO | None = None):
        self.quiet, self.stream = quiet, stream or sys.stdout
        self.live = not quiet and self.stream.isatty()
        self._drawn = 0

    def say(self, text: str) -> None:
        """A lasting line."""
        if not self.quiet:
            self._print(self._cleared() + text + "\n")

    def progress(self, text: str, last: bool = False) -> None:
        """The line of a logging step."""
        if self.live and not last:
            self._print("\r" + text + " " * (self._drawn - len(text)))
            self._drawn = len(text)
        else:
            self.say(text)

    def paced(self) -> Callable[[str], None]:
        """As `progress`, for what changes faster than it can be read: a line every now and then."""
        told = time.monotonic()

        def tell(text: str) -> None:
            nonlocal told
            if time.monotonic() - told > (REDRAW_SECONDS if self.live else TELL_EVERY_SECONDS):
                self.progress(text)
                told = time.monotonic()

        return tell

    def _print(self, text: str) -> None:
        with suppress(
            OSError
        ):  # a log file on a full disk, a reader that has gone: training goes on
            print(text, end="", file=self.stream, flush=True)

    def _cleared(self) -> str:
        drawn, self._drawn = self._drawn, 0
        return "\r" + " " * drawn + "\r" if drawn else ""


def progress_line(line: dict[str, Any], total_steps: int, seconds_left: float) -> str:
    """From a line of metrics.jsonl, e.g. ` 1,240/5,000 25%  loss 1.8342  lr 2.7e-05  |g| 0.91  41.2k tok/s  61.30 GiB  2.41 s  eta 2h31m`."""
    loss, norm = (
        ("not finite" if line[k] is None else f"{line[k]:{f}}")
        for k, f in (("loss", ".4f"), ("grad_norm", ".2f"))
    )
    parts = [
        f"{line['step']:>{len(f'{total_steps:,}')},}/{total_steps:,} {100 * line['step'] // max(1, total_steps):3}%",
        f"loss {loss}",
        f"lr {line['lr']:.1e}",
        f"|g| {norm}",
        f"{short(line['tokens_per_second'])} tok/s",
        *(
            [f"MFU {line['mfu_palm']:.1%} (causal {line['mfu_causal']:.1%})"]
            if "mfu_palm" in line
            else []
        ),
        f"{line['memory_gib']:.2f} GiB",
        f"{line['step_seconds']:.2f} s",
        f"eta {duration(seconds_left)}",
        *(
            [f"validation {line['validation_loss']:.4f}"]
            if line.get("validation_loss") is not None
            else []
        ),
    ]
    return "  ".join(parts)


def time_line(seconds: dict[str, float]) -> str:
    """Where a run's time went, by phase, e.g. `time   3m12s: forward 41%, backward 38%, checkpoint 9%, …`; what is below 1% is left out."""
    total = sum(seconds.values())
    by_name: dict[str, float] = defaultdict(float)
    for phase, spent in seconds.items():
        by_name[PEOPLE.get(phase, phase)] += spent
    parts = [
        f"{name} {spent / total:.0%}"
        for name, spent in sorted(by_name.items(), key=lambda part: -part[1])
        if spent >= 0.01 * total
    ]
    return f"time   {duration(total)}: {', '.join(parts)}"


def short(number: float) -> str:
    """41,234 → 41.2k."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{suffix}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """9061 → 2h31m."""
    minutes, s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{s:02}s" if minutes else f"{s}s"


def shortened(text: str, width: int) -> str:
    """At most `width` characters."""
    return text if len(text) <= width else text[: width - 1] + "…"
