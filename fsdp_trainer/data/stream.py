"""Rows of data that is not stored: read, tokenised and packed on the fly.

There are as many streams as a step has rows; stream s gives row s of every step. Its content
depends on the data, the seed and batch.rows, not on the reader: the units of the files, in a new
order every epoch, are dealt to the streams like cards, without end. So any world continues any run,
from a cursor of each stream.
"""

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import cycle, islice
from typing import Any

import numpy as np

from fsdp_trainer.config.data_files import is_url, kind
from fsdp_trainer.config.schema import Batch, Data
from fsdp_trainer.data import demo
from fsdp_trainer.data.conversations import Reader
from fsdp_trainer.data.file_changes import stored_files
from fsdp_trainer.data.findings import Finding, told
from fsdp_trainer.data.order import random_bits
from fsdp_trainer.data.packing import Packing, best_fit, one_per_row, pieces_of
from fsdp_trainer.data.remote import list_files, shown
from fsdp_trainer.data.samples import EXAMPLES, Rendered, SampleBuilder
from fsdp_trainer.data.sources import Problems, Row, RowError, Source, content_hash, find_sources
from fsdp_trainer.data.templates import Template
from fsdp_trainer.data.tokenise import How, next_texts, reader_for
from fsdp_trainer.data.tokenizer import TextTokenizer
from fsdp_trainer.data.units import Unit, lines_before, open_raw, read_unit, split_units
from fsdp_trainer.errors import Problem, UserError

VERSION = 1  # raise it when a cursor means another place, or a window other rows
WINDOW = 32  # rows' worth of samples that are packed together
CHUNK_TEXTS, CHUNK_CHARACTERS = 64, 1 << 18  # at most, of a call of the tokenizer
UNIT_BYTES = 1 << 12, 1 << 22
UNITS = 100_000  # of very large data the units are larger: each process has a list of them
UNITS_A_STREAM = 8  # in an epoch, where files can be cut
BARREN = 64  # units in a row without a sample: there are none
LOOKED_AT = 64  # samples
AT_ONCE = 16  # files that are looked at, which may lie elsewhere
LONGEST_PAUSE = 60.0  # seconds until a file that cannot be reached is tried again
FOR_GOOD = FileNotFoundError, PermissionError, ImportError
ENDS = 1 << 16  # bytes at either end of a file by which it is known

Cursor = tuple[int, int, int, int]
"""Where a stream stands: how many units it has left behind, of the next one how many rows, of the next one how many samples; and behind those,
how many tokens of the next one (packing=stream), or how many rows of the window that begins there."""

START: Cursor = (0, 0, 0, 0)


@dataclass
class StreamedRow:
    """A row without its padding."""

    tokens: np.ndarray  # [length] int32
    # [length] int32: the next token of the same document, also where that is in another row; -100:
    # none is learnt
    labels: np.ndarray
    weights: np.ndarray  # [length] float32: 0 where none is learnt
    documents: list[int]
    sources: list[int]
    where: list[tuple[str, int, int]]
    """Of each document: the file, where its unit begins, and the line, counted from there."""
    cursor: Cursor
    """Where its stream stands behind it."""
    skipped: list[str]
    """Rows of the data that could not be read on the way to it, and were left out."""

    @property
    def places(self) -> list[str]:
        """FILE:LINE of each document. Counts the lines before."""
        return [place_of(where) for where in self.where]


def place_of(where: tuple[str, int, int]) -> str:
    """FILE:LINE of a place as StreamedRow has it."""
    file, start, line = where
    return f"{named(file)}:{line + lines_before(Unit(file, start))}"


def named(file: str) -> str:
    """A file as people may see it: without the secrets of a URL."""
    return shown(file) if is_url(file) else file


@dataclass
class Taken:
    """A sample, and where its stream stands before it."""

    tokens: np.ndarray
    weights: np.ndarray
    source: int
    where: tuple[str, int, int]
    place: tuple[int, int, int]

    @property
    def after(self) -> tuple[int, int, int]:
        return (*self.place[:2], self.place[2] + 1)


@dataclass
class StreamedData:
    """All there is to know about a data set that is streamed; the same on every rank.

    It travels to other processes.
    """

    how: How
    streams: int
    sources: list[Source]
    units: list[tuple[int, Unit]]
    """Source and unit."""
    parts: int
    """Each unit counts as so many, of which each has every so manieth row: where there are fewer units than streams."""
    fingerprint: str
    report: list[str]
    lengths: np.ndarray
    """Of some samples: what to expect."""
    findings: list[Finding]
    """On the way to them."""
    start: int = 0
    """The running index of its first row: what came before was other data's."""
    digests: dict[str, str] = field(default_factory=dict)
    """Hashes of the files' sizes and ends, by path."""
    components: tuple = ()
    """None that are mixed."""

    @property
    def source_names(self) -> list[str]:
        """The names of the sources, as a store has them."""
        return [source.name for source in self.sources]

    @property
    def seq_len(self) -> int:
        """Tokens of a row, as a RowOrder has it."""
        return self.how.seq_len

    def first_rows(self, count: int) -> Iterator["StreamedRow"]:
        """The first rows of training, in order."""
        streams = [self.stream(number) for number in range(min(count, self.streams))]
        yield from islice((next(stream) for stream in cycle(streams)), count)

    @property
    def key(self) -> str:
        """The fingerprint, as a Mixture has it."""
        return self.fingerprint

    def totals(self, start: int, stop: int) -> tuple[float, int, int, int]:
        """Zeros: the content of rows is known when they are read."""
        return 0.0, 0, 0, 0

    def attention_cost_share(self, cost: Callable[[np.ndarray], np.ndarray]) -> float:
        """Return what attention costs in the samples looked at, as a share of that of whole rows.

        cost: of documents' lengths.
        """
        return cost(self.lengths).sum() / (self.lengths.sum() * self.seq_len)

    def started_at(self, row: int, starts: Sequence[tuple[int, int]]) -> "StreamedData":
        """Return this data with `row` as the running index of its first row."""
        return replace(self, start=row)

    def state(self, index: int) -> dict[str, Any]:
        """A segment of the run, as a Mixture has it; the cursors hold the positions."""
        segment = {"key": self.key, "start": self.start, "rows_per_epoch": 0, "sources": []}
        return segment | stored_files(self.digests)

    def stream(
        self, number: int, cursor: Sequence[int] = START, opens: Callable[[str], Any] | None = None
    ) -> "Stream":
        """The rows of a stream from a cursor on.

        opens: called with each file before it is read; it waits while the network fails.
        """
        return Stream(self, number, cursor, opens)

    def reader(self, row: Row, source: int, unused: dict[str, None]) -> Reader:
        """Return the reader of a unit that begins with this row; it adds columns to `unused`.

        UserError if its columns are of no format that is read.
        """
        of, data = self.sources[source], self.how.data
        format, fields = of.format or data.format, of.fields or data.fields
        reader = reader_for(data, row.columns, row.where[0], format, fields)
        reader.unused = unused
        return reader


class Stream:
    """An endless iterator over the rows of one stream. UserError for data that cannot be used."""

    def __init__(
        self,
        data: StreamedData,
        number: int,
        cursor: Sequence[int],
        opens: Callable[[str], Any] | None,
    ):
        self.of, self.number, self.opens = data, number, opens
        self._skipped: list[str] = []
        self.unused: dict[str, None] = {}
        """Columns of the rows read so far that are not used."""
        self._builder = SampleBuilder(
            data.how.data, data.how.seq_len, data.how.tokenizer, data.how.template
        )
        *place, more = cursor
        self.samples = self._samples(*place)
        self._rows = (self._cut if data.how.data.packing == "stream" else self._windows)(
            (place[0], place[1], place[2]), more
        )

    def __iter__(self) -> Iterator[StreamedRow]:
        return self

    def __next__(self) -> StreamedRow:
        return next(self._rows)

    def _cut(self, begin: tuple[int, int, int], offset: int) -> Iterator[StreamedRow]:
        """Texts one after another, cut where a row is full."""
        pieces: list[tuple[Taken, int, int]] = []
        room = self.of.how.seq_len
        for taken in self.samples:
            start, offset, length = offset, 0, len(taken.tokens)
            while start < length:
                n = min(room, length - start)
                pieces.append((taken, start, n))
                start, room = start + n, room - n
                if not room:
                    yield self._row(
                        pieces, (*taken.place, start) if start < length else (*taken.after, 0)
                    )
                    pieces, room = [], self.of.how.seq_len

    def _windows(self, begin: tuple[int, int, int], emitted: int) -> Iterator[StreamedRow]:
        """Some rows' worth of samples packed together, as a small epoch of its own.

        Those of different streams do not end at once.
        """
        held, tokens = list[Taken](), 0
        while True:
            worth = WINDOW if any(begin) else 1 + self.number % WINDOW
            while tokens < worth * self.of.how.seq_len:
                held.append(next(self.samples))
                tokens += len(held[-1].tokens)
            taken, packed = self._pack(held)
            window, held = held[:taken], held[taken:]
            after = (*window[-1].after, 0)
            for i, pieces in list(enumerate(packed, 1))[emitted:]:
                yield self._row(
                    [(window[k], start, n) for k, start, n in pieces],
                    (*begin, i) if i < len(packed) else after,
                )
            begin, emitted, tokens = after[:3], 0, sum(len(s.tokens) for s in held)

    def _pack(self, held: list[Taken]) -> tuple[int, list[list[tuple[int, int, int]]]]:
        """Pack samples into rows.

        Returns the number of samples that make the fullest rows: all, or a few less; and for each
        row the (sample, start, length) of its pieces.
        """
        seq_len, none = self.of.how.seq_len, self.of.how.data.packing == "none"
        lengths = np.array([len(s.tokens) for s in held], np.int64)
        sums = np.cumsum(lengths)
        tried = (
            [len(held)]
            if none
            else [n for n in range(len(held), 0, -1) if sums[n - 1] > sums[-1] - 2 * seq_len][:8]
        )

        def packed(n: int) -> Packing:
            pieces = pieces_of(lengths[:n], seq_len).lengths
            return one_per_row(pieces) if none else best_fit(pieces, seq_len)

        n, packing = max(
            ((n, packed(n)) for n in tried),
            key=lambda found: sums[found[0] - 1] / (len(found[1].offsets) - 1),
        )
        pieces = pieces_of(lengths[:n], seq_len)
        rows = [np.sort(row).tolist() for row in np.split(packing.documents, packing.offsets[1:-1])]
        rows.sort()
        if self.of.how.data.shuffle:
            order = np.argsort(
                random_bits(f"{self.of.fingerprint}/{self.number}/{held[0].place}", len(rows)),
                kind="stable",
            )
            rows = [rows[i] for i in order]
        columns = np.stack([pieces.samples, pieces.starts, pieces.lengths], 1).tolist()
        return n, [[tuple(columns[i]) for i in row] for row in rows]

    def _row(self, pieces: list[tuple[Taken, int, int]], cursor: Cursor) -> StreamedRow:
        tokens, labels, weights = [], [], []
        for taken, start, n in pieces:
            learnt, following = np.zeros(n, np.float32), np.zeros(n, np.int32)
            there = slice(
                start + 1, start + n + 1
            )  # a document that is cut here goes on with its next token
            learnt[: len(taken.weights[there])], following[: len(taken.tokens[there])] = (
                taken.weights[there],
                taken.tokens[there],
            )
            tokens.append(taken.tokens[start : start + n])
            labels.append(np.where(learnt > 0, following, -100))
            weights.append(learnt)
        taken_of, skipped, self._skipped = [taken for taken, _, _ in pieces], self._skipped, []
        return StreamedRow(
            np.concatenate(tokens), np.concatenate(labels), np.concatenate(weights),
            [n for _, _, n in pieces], [taken.source for taken in taken_of], [taken.where for taken in taken_of], cursor, skipped,
        )  # fmt: skip

    def _samples(self, turn: int, rows: int, sample: int) -> Iterator[Taken]:
        """Samples from a position on, without end."""
        barren = 0
        while barren < BARREN:
            barren += 1
            for taken in self._samples_of_unit(turn, rows, sample):
                barren = 0
                yield taken
            turn, rows, sample = turn + 1, 0, 0
        reason = "\n".join(
            [
                f"nothing to learn in {barren:,} units in a row",
                *(finding.text for finding in self.findings()),
            ]
        )
        raise UserError(
            "the data cannot be used", [Problem(f"data.path={self.of.how.data.path}", reason)]
        )

    def findings(self, samples: int = 0, tokens: int = 0) -> list[Finding]:
        """Findings on the way to so many samples of so many tokens."""
        counts = self._builder.counts | Counter(unreadable=len(self._skipped))
        return told(
            counts, {"unreadable": self._skipped[:EXAMPLES]}, samples, tokens, self.of.seq_len
        )

    def _samples_of_unit(self, turn: int, before: int, sample: int) -> Iterator[Taken]:
        """The samples of the unit that is dealt in this turn.

        Without its first rows, and without the first samples of the row after. If the network
        fails, it is tried again and again: the one who waits for the row decides how long.
        """
        source, unit, part = dealt(self.of, turn * self.of.streams + self.number)
        first, pause = (before, sample), 1.0
        while True:
            if self.opens:
                self.opens(named(unit.file))
            try:
                for taken in self._tokenised(turn, source, unit, part, first):
                    first, pause = taken.after[1:], 1.0
                    yield taken
                return
            except UserError as error:
                if (
                    not self.opens
                    or not is_url(unit.file)
                    or not error.__cause__
                    or isinstance(error.__cause__, FOR_GOOD)
                ):
                    raise
                self.opens(
                    f"{named(unit.file)}, tried again in {pause:.0f} s"
                    f" ({str(error.__cause__).splitlines()[0]})"
                )
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    def _tokenised(
        self, turn: int, source: int, unit: Unit, part: int, first: tuple[int, int]
    ) -> Iterator[Taken]:
        texts = self._texts(source, unit, part, first)
        while chunk := next_texts(texts, CHUNK_TEXTS, CHUNK_CHARACTERS):
            for (row, n, line, _), made in zip(
                chunk, self._builder.tokenize([text for *_, text in chunk]), strict=True
            ):
                for one in made:  # at most one of each text
                    yield Taken(
                        one.tokens,
                        one.weights,
                        source,
                        (unit.file, unit.start, line),
                        (turn, row, n),
                    )

    def _texts(
        self, source: int, unit: Unit, part: int, first: tuple[int, int]
    ) -> Iterator[tuple[int, int, int, Rendered]]:
        """(row, which of its texts, line, text), from `first` on."""
        reader: Reader | None = None
        for number, row in enumerate(islice(read_unit(unit), part, None, self.of.parts)):
            try:
                if row.error:
                    raise RowError(row.error)
                # of the unit's first row, also if it goes on in the midst
                reader = reader or self.of.reader(row, source, self.unused)
                if number < first[0]:
                    continue
                texts = self._builder.render(reader.read(row))
            except (RowError, RecursionError) as e:
                if number >= first[0]:
                    where = named(unit.file), row.where[1] + lines_before(unit)
                    reason = str(e) if isinstance(e, RowError) else "is nested too deeply"
                    problems = Problems(self.of.how.data.on_error)
                    problems.add(where, reason)
                    problems.raise_if_failing()
                    self._skipped.append(f"{where[0]}:{where[1]}  {reason.splitlines()[0]}")
                continue
            yield from (
                (number, n, row.where[1], text)
                for n, text in enumerate(texts)
                if (number, n) >= first
            )


def dealt(data: StreamedData, place: int) -> tuple[int, Unit, int]:
    """(source, unit, part) of a place in the endless deal: all of an epoch, then all of the next."""
    n = len(data.units) * data.parts
    epoch, i = divmod(place, n)
    if data.how.data.shuffle:
        i = int(_order(data.fingerprint, epoch, n)[i])
    unit, part = divmod(i, data.parts)
    return *data.units[unit], part


@lru_cache(maxsize=4)
def _order(fingerprint: str, epoch: int, n: int) -> np.ndarray:
    return np.argsort(random_bits(f"{fingerprint}/{epoch}", n), kind="stable")


def stream_data(
    data: Data, batch: Batch, seed: int, tokenizer: TextTokenizer, template: Template
) -> StreamedData:
    """The streams over `data`; its files are listed, not read. Raises UserError."""
    sources = find_sources(data.path, "data.path")
    streams = batch.rows
    files = [file for source in sources for file in source.files]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        known = dict(zip(files, pool.map(_identity, files), strict=True))
    size = sum(size for size, _ in known.values())
    each = max(UNIT_BYTES[0], min(UNIT_BYTES[1], size // (UNITS_A_STREAM * streams)), size // UNITS)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        cut = dict(zip(files, pool.map(partial(split_units, bytes_each=each), files), strict=True))
    units = [
        (i, unit) for i, source in enumerate(sources) for file in source.files for unit in cut[file]
    ]
    parts = -(-streams // len(units))
    streamed = StreamedData(
        How(data, batch.seq_len, 0.0, tokenizer, template),
        streams,
        sources,
        units,
        parts,
        "",
        [],
        np.empty(0, np.int64),
        [],
    )
    streamed.digests = {
        named(file): hashlib.blake2b(repr(identity).encode(), digest_size=8).hexdigest()
        for file, identity in known.items()
    }
    streamed.report, seen = _look(streamed, size)
    options = [data.format, data.fields, data.loss_on, data.too_long, data.packing, data.shuffle]
    numbers = [VERSION, batch.seq_len, streams, seed, each, parts]
    content = [
        [source.name if len(sources) > 1 else "", [known[file] for file in source.files]]
        for source in sources
    ]
    decides = [numbers, options, content, tokenizer.fingerprint, template.decides, seen]
    streamed.fingerprint = hashlib.blake2b(
        json.dumps(decides, sort_keys=True).encode(), digest_size=10
    ).hexdigest()
    return streamed


def _look(streamed: StreamedData, size: int) -> tuple[list[str], str]:
    """The first rows: lines about them for people, and a hash of their tokens, which are what a resume must meet again."""
    data = streamed.how.data
    counted = sum(
        1
        for _ in islice(
            (row for _, unit in streamed.units for row in read_unit(unit) if not row.error),
            streamed.streams,
        )
    )
    if counted < streamed.streams:
        reason = (
            f"has {counted:,} rows, fewer than a step: batch.rows={streamed.streams}.\nUse"
            "  data.streaming=false , which is right for little data"
        )
        raise UserError("the data cannot be streamed", [Problem(f"data.path={data.path}", reason)])
    stream, digest = streamed.stream(0), hashlib.blake2b(digest_size=16)
    samples = [*islice(stream.samples, LOOKED_AT)]
    for sample in samples:
        digest.update(
            sample.tokens.astype(np.int32).tobytes() + sample.weights.astype(np.float32).tobytes()
        )
    lengths = [len(sample.tokens) for sample in samples]
    streamed.lengths = np.minimum(lengths, streamed.how.seq_len)
    tokens, learnt = sum(lengths), sum(np.count_nonzero(sample.weights) for sample in samples)
    files = sum(len(source.files) for source in streamed.sources)
    streamed.findings = stream.findings(len(samples), tokens)
    report = [
        f"streamed: {files:,} file{'s' * (files != 1)} of {size / 2**20:,.1f} MiB in"
        f" {len(streamed.units):,} units, by {streamed.streams:,} streams",
        f"the first {len(samples):,} samples: {tokens:,} tokens, {100 * learnt / tokens:.1f}%"
        f" learnt, longest {max(lengths):,}",
        *(
            (f"warning: {one.text}. {one.fix}".rstrip(". ") if one.is_warning else one.text)
            for one in streamed.findings
        ),
    ]
    if stream.unused:
        report.append(f"columns not used: {', '.join(stream.unused)}")
    if streamed.parts > 1:
        report.append(
            f"warning: each file is read {streamed.parts:,} times, for there are fewer that"
            " can be read apart than rows in a step"
        )
    return report, digest.hexdigest()


def _identity(file: str) -> tuple[int, str]:
    """Bytes of a file, and a hash by which it is known wherever it lies: of its kind and both its ends."""
    if file in demo.TASKS:
        return 0, content_hash(file)
    digest = hashlib.blake2b(repr(kind(file)).encode(), digest_size=16)
    try:
        with open_raw(file) as opened:
            digest.update(opened.read(ENDS))
            try:
                size = opened.seek(0, os.SEEK_END)
                opened.seek(max(0, size - ENDS))
                digest.update(opened.read(ENDS))
            except ValueError:  # a web server that gives files only from their beginning on
                size = sum(found.size or 0 for found in list_files(file, "data.path"))
    except OSError as error:
        raise UserError(
            "the data cannot be used", [Problem(file, f"cannot be read: {error}")]
        ) from None
    return size, digest.hexdigest()
