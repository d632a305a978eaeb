"""Durations as people write them."""

import re

SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}


def parse_duration(text: str) -> float:
    """Seconds in `90s`, `30m`, `1h30m`, `2d` or plain seconds. Raises ValueError."""
    text = text.strip().lower()
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    if not re.fullmatch(r"(\d+(\.\d+)?[dhms])+", text):
        raise ValueError(f"{text!r} is not a duration: write 90s, 30m, 1h30m, 2d or plain seconds")
    return sum(float(number) * SECONDS[unit] for number, unit in re.findall(r"([\d.]+)([dhms])", text))
