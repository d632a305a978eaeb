"""Text of data in any format, in short pieces, on which a new tokenizer is trained.

Only the held-out text stays in memory. The pieces depend only on the data, the configuration and
the seed.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

from fsdp_trainer.config.schema import Data
from fsdp_trainer.data.files.file_splits import Unit, lines_before, read_unit, split_units
from fsdp_trainer.data.files.sources import Problems, Record, RecordError, Source
from fsdp_trainer.data.records.conversations import (
    Conversation,
    Document,
    Readable,
    Reader,
    Segments,
)
from fsdp_trainer.data.records.messages import Message
from fsdp_trainer.data.store.tokenize_tasks import content_place, first_reader
from fsdp_trainer.data.tokens.records_to_samples import choose_reader, read_texts
from fsdp_trainer.errors import UserError

UNIT_BYTES = 4 << 20
"""Bytes that are read in one go. Units are shuffled, so a limit on the text cuts off no file."""
LONGEST = 1 << 14  # largest number of characters in a piece
MEASURED_BYTES = 8 << 20
"""Largest size of the held-out text of all sources together."""


@dataclass
class HeldOut:
    """Text to measure on. texts: of each source, by name. room: bytes that may still be added."""

    texts: dict[str, list[str]] = field(default_factory=dict)
    room: int = MEASURED_BYTES

    @property
    def bytes(self) -> int:
        return sum(len(text.encode()) for texts in self.texts.values() for text in texts)

    def add(self, name: str, text: str) -> None:
        size = len(text.encode())
        if size <= self.room:
            self.room -= size
            self.texts.setdefault(name, []).append(text)


@dataclass(frozen=True)
class CorpusPart:
    """Sources that are read together.

    weight: its share of the bytes, relative to other parts' weights; None: its rows are read
    `repeat` times.
    """

    sources: list[Source]
    weight: float | None = None
    repeat: float = 1.0


class Corpus:
    """The text of some data. share: share of its rows that is held out, chosen by their content."""

    def __init__(self, data: Data, share: float, seed: int):
        # these settings only matter for training
        self.data = replace(data, too_long="drop", packing="best_fit")
        self.share = share
        self.seed = seed
        self.held_out = HeldOut()
        self.rows = 0
        self.bytes = 0
        """Size of the text that was yielded, in UTF-8."""
        self.problems = Problems(data.on_error)

    def pieces(self, parts: list[CorpusPart], most_bytes: int) -> Iterator[str]:
        """Yield pieces of all texts that are not held out, up to about `most_bytes` bytes."""
        pieces: Iterator[str] = chain.from_iterable(map(self._repeated, parts))
        if parts[0].weight is not None:
            pieces = mixed([WeightedPart(self._pieces, part) for part in parts])
        for piece in pieces:
            yield piece
            self.bytes += len(piece.encode())
            if self.bytes >= most_bytes:
                return

    def read_held_out(self, sources: list[Source]) -> None:
        for name, text, _ in self._texts(CorpusPart(sources)):
            self.held_out.add(name, text)
            if self.held_out.room <= 0:
                return

    def _repeated(self, part: CorpusPart) -> Iterator[str]:
        passes = int(part.repeat)
        for _ in range(passes):
            yield from self._pieces(part)
        if part.repeat > passes:
            yield from self._pieces(part, part.repeat - passes)

    def _pieces(self, part: CorpusPart, fraction: float = 1.0) -> Iterator[str]:
        """Yield the pieces of a pass over a part, or over a fraction of its rows."""
        last = self.share + (1 - self.share) * fraction
        for name, text, place in self._texts(part):
            if place < self.share:
                self.held_out.add(name, text)
            elif place < last:
                yield from cut(text)

    def _texts(self, part: CorpusPart) -> Iterator[tuple[str, str, float]]:
        """Yield (source, text, place of its row in [0, 1)) of a part, in shuffled units."""
        units = [
            (source, unit)
            for source in part.sources
            for file in source.files
            for unit in split_units(file, UNIT_BYTES)
        ]
        random.Random(self.seed).shuffle(units)
        for source, unit in units:
            for place, texts in self._records(source, unit):
                for text in texts:
                    yield source.name, text, place
            self.problems.raise_if_failing()

    def _records(self, source: Source, unit: Unit) -> Iterator[tuple[float, list[str]]]:
        format, fields = source.columns(self.data)
        reader: Reader | None = None
        if unit.start:
            items = tuple((fields or {}).items())
            first = first_reader(unit.file, unit.stamp, format, items)
            reader = first.again() if first else None

        def choose(row: Record) -> Reader:
            return reader or choose_reader(self.data, row.columns, unit.file, format, fields)

        def refuse(row: Record, reason: str) -> None:
            number = row.where[1] + (lines_before(unit) if unit.start else 0)
            self.problems.add((unit.file, number), reason)

        for _, _, row in read_texts(read_unit(unit), choose, place_and_texts, refuse):
            self.rows += 1
            if not self.problems.will_raise:
                yield row
            elif self.problems.is_enough:
                return


def place_and_texts(row: Readable) -> tuple[float, list[str]]:
    """Return a row's place in [0, 1), by which it is held out, and its texts.

    Raises RecordError for a row with half a character, UserError for one that has no text.
    """
    texts = [text for text in texts_of(row) if text]
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError:
        raise RecordError("holds half a character") from None
    return content_place(row), texts


def texts_of(row: Readable) -> list[str]:
    if isinstance(row, Document):
        return [row.text]
    if isinstance(row, Segments):
        return ["".join(row.texts)]
    if isinstance(row, Conversation):
        return [text for message in row.messages for text in said(message)]
    reason = "holds tokens, and a tokenizer learns from text. Name the text that they were made of"
    raise UserError("the data cannot be used", f"{row.where[0]}:{row.where[1]}", reason)


def said(message: Message) -> Iterator[str]:
    yield message.get("reasoning_content") or ""
    yield message.get("content") or ""
    for call in message.get("tool_calls") or []:
        yield json.dumps(call.get("function", call), ensure_ascii=False)


def cut(text: str) -> Iterator[str]:
    """Yield a text in pieces of at most LONGEST characters, cut before a word if possible."""
    start = 0
    while len(text) - start > LONGEST:
        window = text[start : start + LONGEST]
        end = max(window.rfind(" "), window.rfind("\n")) if start + LONGEST < len(text) else -1
        stop = start + (end if end > 0 else LONGEST)
        yield text[start:stop]
        start = stop
    yield text[start:]


class WeightedPart:
    """A part that is read again from the start when it ends. read: yields the pieces of a pass."""

    def __init__(self, read: Callable[[CorpusPart], Iterator[str]], part: CorpusPart):
        self._read = read
        self._part = part
        self._pieces = read(part)
        self._begun_at = 0
        self.weight = part.weight or 1.0
        self.bytes = 0
        self.is_read = False
        """True once it has been read to its end."""
        self.is_empty = False

    def next(self) -> str | None:
        piece = next(self._pieces, None)
        if piece is not None:
            self.bytes += len(piece.encode())
            return piece
        self.is_read = True
        self.is_empty = self.bytes == self._begun_at
        self._begun_at = self.bytes
        self._pieces = self._read(self._part)
        return None


def mixed(parts: list[WeightedPart]) -> Iterator[str]:
    while not all(part.is_read for part in parts):
        waiting = [part for part in parts if not part.is_empty]
        part = min(waiting, key=lambda one: one.bytes / one.weight)
        piece = part.next()
        if piece is not None:
            yield piece
