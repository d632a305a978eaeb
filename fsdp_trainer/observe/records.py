"""metrics.jsonl, samples.jsonl and events.jsonl: one JSON object per line, written immediately.

A failing disk stops no run: lines that cannot be written are kept in memory and written later.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from itertools import compress
from pathlib import Path
from threading import Lock
from typing import Any

from fsdp_trainer.base.counted import counted
from fsdp_trainer.base.json_files import Json
from fsdp_trainer.base.recorded import flat

KEPT_BYTES = 2**26  # unwritten lines of each file that are kept in memory
STANDBY_LINES = 1000
"""Lines kept while another process writes; it can only be ahead by those of a few steps."""
SLOW_SECONDS = 10.0
PAUSES = (0.5, 1.0, 2.0)  # seconds between attempts to write the last lines at the end


class LineFile:
    """A file that lines are appended to, with the lines that are not written yet."""

    def __init__(self, path: Path, say: Callable[[str], None]):
        self.path, self.unwritten = path, bytearray()
        self._say = say
        self._cut: float | None = None  # step to cut the file after, at the next flush that works
        self._mid_line = False  # the file ends in the middle of the first unwritten line
        self._failing = False
        self._dropped = 0

    def add(self, text: str) -> None:
        if len(self.unwritten) > KEPT_BYTES:
            self._dropped += 1
        else:
            self.unwritten += text.encode()

    def keep(self, texts: list[str]) -> None:
        """Add to the unwritten lines, of which only the last STANDBY_LINES are kept."""
        lines = [*bytes(self.unwritten).splitlines(keepends=True), *map(str.encode, texts)]
        self.unwritten = bytearray(b"".join(lines[-STANDBY_LINES:]))

    def drop_unwritten(self, step: float) -> None:
        lines = bytes(self.unwritten).splitlines(keepends=True)
        self.unwritten = bytearray(b"".join(line for line in lines if not not_after(line, step)))

    def cut_after(self, step: float) -> None:
        """Drop lines of later steps, and incomplete ones.

        Unwritten ones are dropped now, those in the file at the next `flush`.
        """
        lines = bytes(self.unwritten).splitlines(keepends=True)
        self.unwritten = bytearray(b"".join(line for line in lines if not_after(line, step)))
        self._cut, self._mid_line = step, False

    def flush(self, durable: bool = False) -> bool:
        """Write the unwritten lines. Returns True if none remain; reports failures with `say`."""
        started = time.monotonic()
        try:
            if self._cut is not None and self.path.exists():
                cut(self.path, self._cut)
            self._cut = None
            if not self.unwritten:
                return True
            self._write(durable)
        except OSError as error:
            if not self._failing:
                consequence = "Its lines are kept until it can be; training continues"
                self._say(f"{self.path} cannot be written: {error}. {consequence}")
            self._failing = True
            return not self.unwritten
        if self._failing:
            dropped = ""
            if self._dropped:
                dropped = f", but for {self._dropped:,} lines that were too many to keep"
            self._say(f"{self.path} is written again; nothing is missing{dropped}")
            self._failing, self._dropped = False, 0
        if (seconds := time.monotonic() - started) > SLOW_SECONDS:
            self._say(f"{self.path}: the disk took {seconds:.0f} s for a few lines")
        return True

    def _write(self, durable: bool) -> None:
        """Append the unwritten lines in one call if possible: other processes append too."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            if size and not self._mid_line and os.pread(descriptor, 1, size - 1) != b"\n":
                os.write(descriptor, b"\n")  # a crash left an incomplete line
            while self.unwritten:
                count = os.write(descriptor, self.unwritten)
                self._mid_line = self.unwritten[count - 1] != ord("\n")
                del self.unwritten[:count]
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Records:
    """The record files of a run. In training only rank 0 has them."""

    def __init__(self, run: Path, say: Callable[[str], None] = print):
        self.metrics = LineFile(run / "metrics.jsonl", say)
        self.events = LineFile(run / "events.jsonl", say)
        self.samples = LineFile(run / "samples.jsonl", say)
        self._say, self._lock, self._closed = say, Lock(), False
        self._stands_by = False

    def stand_by(self) -> None:
        """Leave the files to another process until `take_up`, and keep the lines of metrics."""
        self._stands_by = True

    def take_up(self, step: float) -> None:
        """Begin to write, at the end of `step`.

        Lines of later steps are dropped, as by `cut_after`; kept lines that the file lacks are
        written.
        """
        if self._stands_by:
            self.metrics.drop_unwritten(self.last_line().get("step", 0))
            self._stands_by = False
        self.cut_after(step)

    def cut_after(self, step: float) -> None:
        """Drop metrics and samples after `step`, which a resume repeats, and incomplete lines.

        With math.inf only incomplete lines.
        """
        with self._lock:
            files = ((self.metrics, step), (self.samples, step), (self.events, math.inf))
            for file, last in files:
                file.cut_after(last)
                file.flush()

    def write(self, lines: list[Json]) -> None:
        self._append(self.metrics, *lines, durable=True)

    def amend(self, step: int, more: Json) -> Json | None:
        """Add entries to the last line of the metrics, and return the line.

        Returns None if that is not the line of `step`, or if the file cannot be read or replaced.
        """
        try:
            *before, text = self.metrics.path.read_text().splitlines(keepends=True)
            line = parse(text)
            if not line or line["step"] != step or self.metrics.unwritten:
                return None
            line |= more
            replace(self.metrics.path, "".join([*before, json.dumps(line) + "\n"]))
        except (OSError, ValueError) as error:
            self._say(f"{self.metrics.path}: step {step:,} lacks its {', '.join(more)}: {error}")
            return None
        return line

    def samples_of(self, step: int, answers: list[tuple[str, str]]) -> None:
        lines = ({"step": step, "prompt": prompt, "text": text} for prompt, text in answers)
        self._append(self.samples, *lines, ascii_only=False)

    def answers_of(self, step: int, answers: list[Json]) -> None:
        """Append answers that a step trains on: prompt, text, reward, and turns of several."""
        lines = ({"step": step, **answer} for answer in answers)
        self._append(self.samples, *lines, ascii_only=False)

    def event(self, name: str, **details: Any) -> Json:
        line = {"event": name, "time": round(time.time(), 3), **details}
        self._append(self.events, line)
        return line

    def last_event(self) -> Json:
        return next(whole_lines(self.events.path, newest_first=True), {})

    def last_line(self) -> Json:
        try:
            return next(whole_lines(self.metrics.path, newest_first=True), {})
        except OSError:
            return {}

    def close(self) -> None:
        """Try for a few seconds to write the unwritten lines, and report those that remain.

        From now on nothing is added, not even by a thread that is still writing a checkpoint.
        """
        self._closed = True
        if self._stands_by:
            return
        for pause in (*PAUSES, 0.0):
            with self._lock:
                files = (self.metrics, self.events, self.samples)
                failing = [file for file in files if not file.flush()]
            if not failing:
                return
            time.sleep(pause)
        counts = [(file.unwritten.count(b"\n"), file.path) for file in failing]
        lines = ", ".join(f"{counted(count, 'line')} of {path}" for count, path in counts)
        self._say(f"never written: {lines}")

    def _append(
        self, file: LineFile, *lines: Json, durable: bool = False, ascii_only: bool = True
    ) -> None:
        with self._lock:
            if self._closed:
                return
            if self._stands_by:
                if file is self.metrics:
                    file.keep([json.dumps(line) + "\n" for line in lines])
            else:
                texts = (json.dumps(line, ensure_ascii=ascii_only) + "\n" for line in lines)
                file.add("".join(texts))
                file.flush(durable)


def whole_lines(file: Path, newest_first: bool = False) -> Iterator[Json]:
    texts = file.read_text(errors="replace").split("\n") if file.exists() else []
    return (line for text in texts[:: -1 if newest_first else 1] if (line := parse(text)))


def not_after(text: bytes, step: float) -> bool:
    line = parse(text.decode(errors="replace"))
    return line is not None and line.get("step", 0) <= step


def cut(file: Path, step: float) -> None:
    """Drop the lines of steps after `step` and incomplete lines from a file. Raises OSError."""
    lines = file.read_bytes().splitlines(keepends=True)
    good = [not_after(line, step) for line in lines]
    if all(good):
        return  # another group of ranks may be appending
    first = good.index(False)
    if any(good[first:]):
        replace(file, b"".join(compress(lines, good)).decode())
    else:  # truncating works on a full disk too
        os.truncate(file, sum(map(len, lines[:first])))


def replace(file: Path, text: str) -> None:
    partial = file.with_suffix(".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def parse(text: str) -> Json | None:
    """Return the object in a line of JSON; None if the line is incomplete."""
    try:
        return json.loads(text) if text.rstrip("\n").endswith("}") else None
    except (ValueError, RecursionError):
        return None


def numbers(line: Json) -> Iterator[tuple[str, float]]:
    """Yield (name, value) of the numbers in a line of metrics.jsonl; `b` in `a` is named `a/b`."""
    for name, value in flat(line, "/"):
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value
