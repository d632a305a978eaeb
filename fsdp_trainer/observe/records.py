"""metrics.jsonl, samples.jsonl and events.jsonl: append-only, one JSON object a line, written through. A disk that fails stops no run."""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import Any

KEPT_BYTES = 2**26  # of each file in memory, while the disk does not take them
SLOW_SECONDS = 10.0
PAUSES = (0.5, 1.0, 2.0)  # seconds before the last lines are tried again


class Records:
    """The files of a run. Only rank 0 has one. What cannot be written is told, kept, and written in its order as soon as it can be."""

    def __init__(self, run: Path, say: Callable[[str], None] = print):
        self.metrics, self.events, self.samples = (
            run / "metrics.jsonl",
            run / "events.jsonl",
            run / "samples.jsonl",
        )
        self._say, self._lock, self._closed = say, Lock(), False
        self._kept: dict[Path, bytearray] = {}
        self._amid_line: set[Path] = set()  # files that end with a part of what is kept
        self._failing: set[Path] = set()
        self._lost: dict[Path, int] = {}
        self._cut: int | None = None  # what cut_after could not do yet

    def cut_after(self, step: int) -> None:
        """Drop metrics and samples of steps that a resume will do again, and a half line that a crash left. Never two lines for one step."""
        with self._lock:
            self._cut = step
            for file in (
                self.metrics,
                self.samples,
            ):  # what the disk has not taken yet of those steps it need not
                lines = bytes(self._kept.get(file, b"")).splitlines(keepends=True)
                good = [
                    line
                    for line in lines
                    if (told := parse(line.decode(errors="replace"))) and told["step"] <= step
                ]
                self._kept[file] = bytearray(b"".join(good))
                self._amid_line.discard(file)
            self._write(self.metrics)

    def write(self, lines: list[dict[str, Any]]) -> None:
        """Append metrics and make them durable."""
        self._append(self.metrics, "".join(json.dumps(line) + "\n" for line in lines), durable=True)

    def amend(self, step: int, more: dict[str, Any]) -> dict[str, Any] | None:
        """Add to the last line of the metrics, which must be that of `step`. Returns it; None if it is not there."""
        try:
            *before, text = self.metrics.read_text().splitlines(keepends=True)
            line = parse(text)
            if not line or line["step"] != step or self._kept.get(self.metrics):
                return None
            line |= more
            replace(self.metrics, "".join([*before, json.dumps(line) + "\n"]))
        except (OSError, ValueError) as error:
            self._say(f"{self.metrics}: step {step:,} lacks its {', '.join(more)}: {error}")
            return None
        return line

    def samples_of(self, step: int, answers: list[tuple[str, str]]) -> None:
        """Append prompts with what the model said to them."""
        lines = [
            json.dumps({"step": step, "prompt": prompt, "text": text}, ensure_ascii=False) + "\n"
            for prompt, text in answers
        ]
        self._append(self.samples, "".join(lines))

    def event(self, name: str, **details: Any) -> None:
        """Append an event with the time."""
        self._append(
            self.events,
            json.dumps({"event": name, "time": round(time.time(), 3), **details}) + "\n",
        )

    def last_event(self) -> dict[str, Any]:
        """The last whole event; {} if there is none."""
        return next(whole_lines(self.events, newest_first=True), {})

    def last_line(self) -> dict[str, Any]:
        """The last whole line of the metrics; {} if there is none that can be read."""
        try:
            return next(whole_lines(self.metrics, newest_first=True), {})
        except OSError:
            return {}

    def close(self) -> None:
        """Give the disk a few seconds to take what is kept; tell what it did not. A thread that still writes a checkpoint adds nothing any more."""
        self._closed = True
        for pause in (*PAUSES, None):
            with self._lock:
                left = [file for file, kept in self._kept.items() if kept and not self._write(file)]
            if left and pause is None:
                self._say(
                    f"never written: {', '.join(f'{self._kept[file].count(10):,} lines of {file}' for file in left)}"
                )
            elif left and pause is not None:
                time.sleep(pause)
            else:
                return

    def _append(self, file: Path, text: str, durable: bool = False) -> None:
        with self._lock:
            if self._closed:
                return
            kept = self._kept.setdefault(file, bytearray())
            if len(kept) > KEPT_BYTES:
                self._lost[file] = self._lost.get(file, 0) + 1
                return
            kept += text.encode()
            self._write(file, durable)

    def _write(self, file: Path, durable: bool = False) -> bool:
        """Write what is kept of `file`; whether nothing is left. One write a line or more: other processes append too."""
        kept, started = self._kept.setdefault(file, bytearray()), time.monotonic()
        try:
            if self._cut is not None:
                for of_steps in filter(Path.exists, (self.metrics, self.samples)):
                    cut(of_steps, self._cut)
                self._cut = None
            if not kept:
                return True
            descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                size = os.fstat(descriptor).st_size
                if (
                    size
                    and file not in self._amid_line
                    and os.pread(descriptor, 1, size - 1) != b"\n"
                ):
                    os.write(descriptor, b"\n")  # a crash left part of a line
                while kept:
                    count = os.write(descriptor, kept)
                    (self._amid_line.add if kept[count - 1] != 10 else self._amid_line.discard)(
                        file
                    )
                    del kept[:count]
                if durable:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            if file not in self._failing:
                self._say(
                    f"{file} cannot be written: {error}. Its lines are kept until it can be; training goes on"
                )
            self._failing.add(file)
            return not kept
        if file in self._failing:
            self._failing.discard(file)
            lost = (
                f", but for {self._lost.pop(file):,} lines that were too many to keep"
                if file in self._lost
                else ""
            )
            self._say(f"{file} is written again; nothing is missing{lost}")
        if time.monotonic() - started > SLOW_SECONDS:
            self._say(f"{file}: the disk took {time.monotonic() - started:.0f} s for a few lines")
        return True


def whole_lines(file: Path, newest_first: bool = False) -> Iterator[dict[str, Any]]:
    """Of a file that may be missing, or have lines that were cut. Raises OSError."""
    texts = file.read_text(errors="replace").splitlines() if file.exists() else []
    return (line for text in (reversed(texts) if newest_first else texts) if (line := parse(text)))


def cut(file: Path, step: int) -> None:
    """Drop lines of later steps, and what is no line. Raises OSError."""
    lines = file.read_bytes().splitlines(keepends=True)
    good = [
        (line := parse(text.decode(errors="replace"))) is not None and line["step"] <= step
        for text in lines
    ]
    first = good.index(False) if False in good else len(lines)
    if not any(good[first:]):
        os.truncate(file, sum(map(len, lines[:first])))  # which takes no room on a full disk
    else:
        replace(
            file, b"".join(text for text, keep in zip(lines, good, strict=True) if keep).decode()
        )


def replace(file: Path, text: str) -> None:
    """Another content under the same name, at once."""
    partial = file.with_suffix(".partial")
    try:
        partial.write_text(text)
        partial.replace(file)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def parse(text: str) -> dict[str, Any] | None:
    """A line of JSON, None where it was cut."""
    try:
        return json.loads(text) if text.endswith("}\n") or text.endswith("}") else None
    except ValueError:
        return None
