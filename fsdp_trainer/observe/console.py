"""The console's progress line: redrawn in a terminal, a new line per logging step in a file."""

import os
import re
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.base.phases import CHECKPOINT
from fsdp_trainer.base.safe_text import safe

PLAIN_NAMES = {
    "start": "start-up",
    "read": "device",
    "update": "optimizer",
    "samples": "validation",
    "evaluation": "validation",
}
PLAIN_NAMES |= dict.fromkeys(CHECKPOINT, "checkpoint")
"""Names shown to users for phases that are called differently in the code."""
MOST_METRICS = 8  # shown in the line of an evaluation
TERMINAL_SECONDS, FILE_SECONDS = 0.2, 5.0  # least time between two lines of `paced`


LEFT_OUT_FIRST = (
    *("sources", "mfu", "memory", "seconds", "grad_norm", "margin", "lr", "speed", "eta"),
    "accuracy",
)
"""Parts of a progress line to leave out in a narrow terminal, in this order."""


COLOURS = {
    re.compile(r"(\w+ +)?warning:|spike in step |skipped |stopped by "): 33,  # yellow
    re.compile("done: "): 32,  # green
}
"""Colours of lines in a terminal, as numbers of ANSI, by how the lines begin."""


class Console:
    """The console output of a run. It is quiet on all ranks except rank 0."""

    def __init__(self, quiet: bool, stream: TextIO | None = None):
        self.quiet, self.stream = quiet, stream or sys.stdout
        self.live = not quiet and self.stream.isatty()
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        self._colours = COLOURS if self.live and not plain else {}
        self._drawn = 0
        self._lock = threading.Lock()  # checkpoints are reported by the thread that writes them

    def say(self, text: str) -> None:
        if not self.quiet:
            with self._lock:
                self._print(self._cleared() + self._coloured(safe(text)) + "\n")

    def progress(self, text: str, last: bool = False) -> None:
        """Print the line of a logging step; in a terminal the next one replaces it."""
        if not self.live or last:
            self.say(text)
            return
        with self._lock:
            text = shortened(safe(text), self.width or len(text))
            self._print("\r" + text + " " * (self._drawn - len(text)))
            self._drawn = len(text)

    @property
    def width(self) -> int | None:
        """The most characters that a redrawn line may have; None for no limit.

        One less than the terminal's width: some terminals wrap at the last column.
        """
        if not self.live:
            return None
        try:
            columns = os.get_terminal_size(self.stream.fileno()).columns
        except (OSError, ValueError):  # no descriptor
            return None
        return (columns or 80) - 1

    def paced(self) -> Callable[[str], None]:
        """Return a version of `progress` that skips lines which follow another too quickly."""
        return throttled(self.progress, TERMINAL_SECONDS if self.live else FILE_SECONDS)

    def _print(self, text: str) -> None:
        with suppress(OSError):  # a full disk or a closed pipe must not end training
            print(text, end="", file=self.stream, flush=True)

    def _coloured(self, text: str) -> str:
        number = next((value for start, value in self._colours.items() if start.match(text)), None)
        return text if number is None else f"\033[{number}m{text}\033[0m"

    def _cleared(self) -> str:
        drawn, self._drawn = self._drawn, 0
        return "\r" + " " * drawn + "\r" if drawn else ""


def throttled(act: Callable[[str], None], pause: float) -> Callable[[str], None]:
    """Return a function that calls `act` unless the last call was within `pause` seconds.

    The first call of `act` is `pause` seconds from now at the earliest.
    """
    last = time.monotonic()

    def act_if_due(text: str) -> None:
        nonlocal last
        if time.monotonic() - last > pause:
            act(text)
            last = time.monotonic()

    return act_if_due


def progress_line(
    line: Json, total_steps: int, seconds_left: float, width: int | None = None
) -> str:
    """Return the progress line for a line of metrics.jsonl, of at most `width` characters.

    1,240/5,000 25%  loss 1.8342  lr 2.7e-05  |g| 0.91  41.2k tok/s  61.30 GiB  2.41 s  eta 2h31m
    """
    total, percent = f"{total_steps:,}", 100 * line["step"] // max(1, total_steps)
    parts = {
        "step": f"{line['step']:>{len(total)},}/{total} {percent:3}%",
        "loss": f"loss {_finite(line['loss'], '.4f')}",
        "reward": f"reward {line['reward']:.3f}" if "reward" in line else "",
        "accuracy": _named(line, "reward_accuracy", "accuracy", ".0%"),
        "margin": _named(line, "reward_margin", "margin", ".3f"),
        "lr": f"lr {line['lr']:.1e}",
        "grad_norm": f"|g| {_finite(line['grad_norm'], '.2f')}",
        "speed": f"{short(line['tokens_per_second'])} tok/s",
        "mfu": mfu(line),
        "memory": f"{line['memory_gib']:.2f} GiB",
        "seconds": f"{line['step_seconds']:.2f} s",
        "eta": f"eta {duration(seconds_left)}",
        "sources": by_source(line.get("loss_by_source") or {}),
    }
    parts = {name: text for name, text in parts.items() if text}
    for name in LEFT_OUT_FIRST:
        if width is not None and len("  ".join(parts.values())) > width:
            parts.pop(name, None)
    return "  ".join(parts.values())


def mfu(line: Json) -> str:
    if "mfu_palm" not in line:
        return ""
    return f"MFU {line['mfu_palm']:.1%} (causal {line['mfu_causal']:.1%})"


def by_source(losses: dict[str, float | None]) -> str:
    if len(losses) < 2:
        return ""
    shown = [f"{name} {_finite(loss, '.4f')}" for name, loss in losses.items()]
    return f"({', '.join(shown)})"


def validation_line(
    step: int,
    loss: float | None,
    bits_per_byte: float | None,
    lowest: tuple[int | None, float | None],
    losses: dict[str, float | None],
) -> str:
    """Return the console's line for a validation. lowest: step and value of the lowest loss so far.

    valid  after step 40: loss 1.8342, the lowest so far  0.7213 bits/byte  (maths 1.8312, code …)
    """
    when = f"after step {step:,}" if step else "before the first step"
    best_step, best = lowest
    compared = ""
    if step and best is not None:
        is_best = best_step == step
        compared = ", the lowest so far" if is_best else f", lowest {best:.4f} after {best_step:,}"
    text = f"valid  {when}: loss {_finite(loss, '.4f')}{compared}"
    bits = "" if bits_per_byte is None else f"{bits_per_byte:.4f} bits/byte"
    return "  ".join(filter(None, (text, bits, by_source(losses))))


def tasks_line(step: int, metrics: dict[str, dict[str, float]]) -> str:
    """Return the console's line for an evaluation.

    tasks  after step 40: arc_easy acc 0.2512 ± 0.0089
    """
    parts = []
    for task, values in metrics.items():
        for name, value in without_errors(values).items():
            error = values.get(error_name(name))
            spread = "" if error is None else f" ± {error:.4f}"
            parts.append(f"{task} {name} {value:.4f}{spread}")
    if len(parts) > MOST_METRICS:
        parts[MOST_METRICS:] = [f"and {len(parts) - MOST_METRICS} more in metrics.jsonl"]
    return f"tasks  after step {step:,}: {', '.join(parts)}"


def without_errors(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if "_stderr" not in name}


def error_name(metric: str) -> str:
    name, comma, filters = metric.partition(",")
    return f"{name}_stderr{comma}{filters}"


def _named(line: Json, key: str, name: str, form: str) -> str:
    return f"{name} {_finite(line[key], form)}" if key in line else ""


def _finite(value: float | None, form: str) -> str:
    return "not finite" if value is None else f"{value:{form}}"


def time_line(seconds: dict[str, float]) -> str:
    """Return a line with the share of each phase in a run's time, without those below 1%.

    time   3m12s: forward 41%, backward 38%, log 2%
    """
    total = sum(seconds.values())
    by_name: dict[str, float] = defaultdict(float)
    for phase, spent in seconds.items():
        by_name[PLAIN_NAMES.get(phase, phase)] += spent
    parts = [
        f"{name} {spent / total:.0%}"
        for name, spent in sorted(by_name.items(), key=lambda part: -part[1])
        if spent >= 0.01 * total
    ]
    return f"time   {duration(total)}: {', '.join(parts)}"


def short(number: float) -> str:
    """Format a number in thousands, millions or billions: 41,234 → 41.2k."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{suffix}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    minutes, s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{s:02}s" if minutes else f"{s}s"


def shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
