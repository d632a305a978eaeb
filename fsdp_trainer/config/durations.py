"""Parsing of durations and ranges of steps."""

import re

SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}


def parse_duration(text: str) -> float:
    """Return the seconds in `90s`, `30m`, `1h30m`, `2d` or plain seconds. Raises ValueError."""
    text = text.strip().lower()
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    if not re.fullmatch(r"(\d+(\.\d+)?[dhms])+", text):
        raise ValueError(f"{text!r} is not a duration: write 90s, 30m, 1h30m, 2d or plain seconds")
    return sum(
        float(number) * SECONDS[unit] for number, unit in re.findall(r"([\d.]+)([dhms])", text)
    )


def parse_steps(text: str) -> tuple[int, int]:
    """Return the first and last step of `10..12` (or `10-12`), or of `10`. Raises ValueError."""
    match = re.fullmatch(r"(\d+)(?:(?:-|\.\.)(\d+))?", text.strip())
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(
            f"{text!r} is neither a step nor a range of steps: write 10 or 10..12; the first"
            " step is 1"
        )
    return first, last
