"""Words that are typed, or stand in a recipe, and what is said about each: answers.txt."""

import re
from pathlib import Path

TEXT = Path(__file__).with_suffix(".txt").read_text()
PARTS = [part.strip().splitlines() for part in TEXT.split("\n\n")[1:]]
ANSWERS = {
    title: dict(re.split("  → *", line, maxsplit=1) for line in lines) for title, *lines in PARTS
}
""""[title of a part]": {what is typed: a part of what is said}."""
