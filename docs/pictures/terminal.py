"""The picture of a preview: `python docs/pictures/terminal.py` writes preview.svg here.

It makes a few conversations, gives them to `fsdp-trainer preview`, and keeps the parts of its output
that fit on one screen. The picture has the colours of a dark terminal in light and dark mode.
"""

import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 100
COMMAND = "fsdp-trainer preview data.path=chats.jsonl"
KEPT = [("data", "lengths in tokens"), ("row 0", None)]  # from this heading to before that one


def chats() -> list[dict]:
    """Return conversations: two to look at, many short ones, one duplicate, one that is too long."""
    moon = [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": "How far is the moon?"},
        {"role": "assistant", "content": "384,400 km."},
        {"role": "user", "content": "And in light seconds?"},
        {"role": "assistant", "content": "1.28."},
    ]
    lima = question("Quelle est la capitale du Pérou ?", "Lima.<|im_end|>")
    products = [question(f"{n} × {n + 7}?", f"{n * (n + 7)}.") for n in range(11, 211)]
    long = question("Count to 200.", " ".join(map(str, range(200))))
    return [{"messages": turns} for turns in [moon, lima, *products, products[5], long]]


def question(user: str, assistant: str) -> list[dict]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def preview(folder: Path) -> list[str]:
    """Return the lines of the preview, with colours."""
    rows = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in chats())
    (folder / "chats.jsonl").write_text(rows)
    words = ["tokenizer.path=demo:bytes", "data.template=chatml", "batch.seq_len=192"]
    command = [sys.executable, "-m", "fsdp_trainer", *COMMAND.split()[1:], *words]
    command += ["preview.rows=1", "data.workers=1", "data.shuffle=false"]
    colours = {"FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    given = subprocess.run(
        command, cwd=folder, env=os.environ | colours, stdout=subprocess.PIPE, check=True, text=True
    )
    return given.stdout.splitlines()


def plain(line: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", line).strip()


def excerpt(lines: list[str]) -> list[str]:
    """Return the parts named by KEPT."""
    result = []
    for first, end in KEPT:
        start = next(i for i, line in enumerate(lines) if plain(line).startswith(first))
        stop = len(lines)
        if end:
            stop = next(i for i, line in enumerate(lines) if plain(line).startswith(end))
        result += lines[start:stop]
    return [line for i, line in enumerate(result) if plain(line) or plain(result[i - 1])]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        lines = excerpt(preview(Path(folder)))
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for line in lines:
        console.print(Text.from_ansi(line), overflow="ellipsis", no_wrap=True)
    svg = console.export_svg(title=COMMAND)
    svg = re.sub(r"@font-face \{.*?\}\n?", "", svg, flags=re.S)  # fetched from the web
    svg = svg.replace("#4b4e55", "#1a1b1e")  # black on green: contrast 6.6, not 3.2
    Path(__file__).with_name("preview.svg").write_text(svg)
