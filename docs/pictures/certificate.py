"""The picture of a certificate: `fsdp-trainer prove … | python docs/pictures/certificate.py` writes prove.svg here."""

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 102
COMMAND = "fsdp-trainer prove +recipe=quickstart"
COLOURS = {r"^ok ": "green", r"^DIFFERS|^ +→.*": "red", r"^ {4,}.*": "bright_black"}


def coloured(line: str) -> Text:
    """Return a line with its verdict in colour, and details in grey."""
    text = Text(line)
    for pattern, colour in COLOURS.items():
        text.highlight_regex(pattern, colour)
    return text


if __name__ == "__main__":
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for line in sys.stdin.read().splitlines():
        console.print(coloured(line), overflow="ellipsis", no_wrap=True)
    svg = console.export_svg(title=COMMAND)
    svg = re.sub(r"@font-face \{.*?\}\n?", "", svg, flags=re.S)  # fetched from the web
    Path(__file__).with_name("prove.svg").write_text(svg)
