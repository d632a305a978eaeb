"""metrics.jsonl, samples.jsonl and events.jsonl: append-only, one JSON object a line, written through."""

import json
import os
import time
from pathlib import Path
from typing import Any


class Records:
    """The files of a run. Only rank 0 has one."""

    def __init__(self, run: Path):
        self.metrics, self.events, self.samples = run / "metrics.jsonl", run / "events.jsonl", run / "samples.jsonl"

    def cut_after(self, step: int) -> None:
        """Drop metrics and samples of steps that a resume will do again, and a half line that a crash left. Never two lines for one step."""
        for file in filter(Path.exists, (self.metrics, self.samples)):
            with file.open() as lines:
                kept = [text for text in lines if (line := parse(text)) and line["step"] <= step]
            partial = file.with_suffix(".partial")
            partial.write_text("".join(kept))
            partial.replace(file)

    def write(self, lines: list[dict[str, Any]]) -> None:
        """Append metrics and make them durable."""
        with self.metrics.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())

    def samples_of(self, step: int, answers: list[tuple[str, str]]) -> None:
        """Append prompts with what the model said to them."""
        with self.samples.open("a") as file:
            file.writelines(
                json.dumps({"step": step, "prompt": prompt, "text": text}, ensure_ascii=False) + "\n" for prompt, text in answers
            )

    def event(self, name: str, **details: Any) -> None:
        """Append an event with the time."""
        text = json.dumps({"event": name, "time": round(time.time(), 3), **details}) + "\n"
        with self.events.open("ab+", buffering=0) as file:  # one write a line: a thread may write too
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                text = text if file.read(1) == b"\n" else "\n" + text  # a crash left part of a line
            file.write(text.encode())

    def last_event(self) -> dict[str, Any]:
        """The last whole event; {} if there is none."""
        lines = self.events.read_text().splitlines() if self.events.exists() else []
        return next((line for text in reversed(lines) if (line := parse(text))), {})


def parse(text: str) -> dict[str, Any] | None:
    """A line of JSON, None where it was cut."""
    try:
        return json.loads(text) if text.endswith("}\n") or text.endswith("}") else None
    except ValueError:
        return None
