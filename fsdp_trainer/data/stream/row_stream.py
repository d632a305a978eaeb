"""Rows of data that is not stored: read, tokenized and packed on the fly.

There are as many streams as a step has rows; stream s provides row s of every step. The content of
a stream depends on the data, the seed and batch.rows, not on the process that reads it: in every
epoch the units of the files are shuffled and dealt to the streams in turn, endlessly. So a run can
be resumed with any number of ranks, from one cursor per stream.
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

from fsdp_trainer.base.counted import counted
from fsdp_trainer.config.data_files import is_url, kind
from fsdp_trainer.config.parts.own_parts import identity_of
from fsdp_trainer.config.schema import Batch, Data
from fsdp_trainer.data.files import quickstart_data
from fsdp_trainer.data.files.file_changes import stored_files
from fsdp_trainer.data.files.file_splits import Unit, lines_before, open_raw, read_unit, split_units
from fsdp_trainer.data.files.remote_files import list_files, shown
from fsdp_trainer.data.files.sources import Problems, Record, Source, content_hash, find_sources
from fsdp_trainer.data.order.packing import best_fit, one_per_row, pieces_of
from fsdp_trainer.data.order.row_order import RowData, Rows, random_bits
from fsdp_trainer.data.records.conversations import Reader
from fsdp_trainer.data.store.findings import Finding, list_findings
from fsdp_trainer.data.store.token_store import digest_of
from fsdp_trainer.data.templates.chat_template import Template
from fsdp_trainer.data.tokens.records_to_samples import (
    TokenizeOptions,
    choose_reader,
    read_texts,
    tokenize_in_chunks,
)
from fsdp_trainer.data.tokens.samples import EXAMPLES, Rendered, Sample
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer
from fsdp_trainer.errors import UserError

VERSION = 1  # increase it when the meaning of a cursor or the rows of a window change
WINDOW = 32  # rows' worth of samples that are packed together
CHUNK_TEXTS, CHUNK_CHARACTERS = 64, 1 << 18  # limits for one call of the tokenizer
UNIT_BYTES = 1 << 12, 1 << 22  # minimum and maximum, unless MAX_UNITS requires larger units
MAX_UNITS = 100_000  # each process has a list of them: units of very large data are larger
UNITS_PER_STREAM = 8  # in an epoch, if the files can be split
MAX_BARREN_UNITS = 64  # consecutive units without a sample, after which the data counts as empty
INSPECTED_SAMPLES = 64  # samples that are read in advance to describe the data
AT_ONCE = 16  # files that are inspected concurrently, since they may be remote
LONGEST_PAUSE = 60.0  # maximum seconds before a file that cannot be reached is tried again
PERMANENT_ERRORS = FileNotFoundError, PermissionError, ImportError
ENDS = 1 << 16  # bytes at the beginning and end of a file that identify it

Cursor = tuple[int, int, int, int]
"""Position of a stream: (finished units, finished rows of the next unit, finished samples of the
next row, rest). With packing=stream the rest is the number of tokens already used of the next
sample, otherwise the number of rows already returned of the window that begins there."""

START: Cursor = (0, 0, 0, 0)
Place = tuple[int, int, int]
"""A cursor without its rest."""
FilePlace = tuple[str, int, int]
"""Position of a document: file, start of its unit in bytes, and line counted from there."""
Piece = tuple["StreamSample", int, int]
"""Tokens [start, start + length) of a sample."""


@dataclass
class StreamedRow(RowData):
    """A row without its padding: tokens and labels are [length] int32, weights [length] float32.

    where: of each document. cursor: position of its stream after the row. skipped: unreadable rows
    of the data before it.
    """

    where: list[FilePlace]
    cursor: Cursor
    skipped: list[str]

    @property
    def places(self) -> list[str]:
        """FILE:LINE of each document; reads the file to count the lines before its unit."""
        return [place_of(where) for where in self.where]


def place_of(where: FilePlace) -> str:
    """Return FILE:LINE; reads the file to count the lines before the unit."""
    file, start, line = where
    return f"{named(file)}:{line + lines_before(Unit(file, start))}"


def named(file: str) -> str:
    """Return a file name that may be shown: without the secrets of a URL."""
    return shown(file) if is_url(file) else file


@dataclass
class StreamSample:
    """A sample, and the position of its stream before it."""

    tokens: np.ndarray
    weights: np.ndarray
    source: int
    where: FilePlace
    place: Place

    @property
    def after(self) -> Place:
        return (*self.place[:2], self.place[2] + 1)


@dataclass
class StreamedData:
    """Streamed data, equal on every rank; it is also sent to other processes.

    units: (source, unit) of all files.
    parts: number of streams that read each unit, if there are fewer units than streams; part p uses
        every parts-th row from row p on.
    lengths: token counts of the first samples.
    findings: findings about the data of these samples.
    inspected: digests of these samples, as in a store.
    start: running index of its first row; earlier rows came from other data.
    digests: hashes of the files' sizes and ends, by path.
    """

    options: TokenizeOptions
    streams: int
    sources: list[Source]
    units: list[tuple[int, Unit]]
    parts: int
    digests: dict[str, str]
    fingerprint: str = ""
    report: list[str] = field(default_factory=list)
    lengths: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    findings: list[Finding] = field(default_factory=list)
    inspected: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))
    start: int = 0
    components: tuple = ()
    """Always empty, since streams are not mixed."""

    @property
    def source_names(self) -> list[str]:
        return [source.name for source in self.sources]

    @property
    def seq_len(self) -> int:
        return self.options.seq_len

    def first_rows(self, count: int) -> Iterator[StreamedRow]:
        """Yield the first rows of training, in order."""
        streams = [self.stream(number) for number in range(min(count, self.streams))]
        yield from islice((next(stream) for stream in cycle(streams)), count)

    def padded(self, rows: Sequence[StreamedRow]) -> Rows:
        padded = Rows.empty(len(rows), self.seq_len)
        for i, row in enumerate(rows):
            n = len(row.tokens)
            padded.tokens[i, :n], padded.labels[i, :n] = row.tokens, row.labels
            padded.weights[i, :n] = row.weights
            padded.positions[i, :n] = np.concatenate([np.arange(n) for n in row.documents])
            padded.sources[i, :n] = np.repeat(row.sources, row.documents)
            padded.documents[i] = row.documents
            padded.group_starts[i] = [True] * len(row.documents)
        return padded

    def reads(self, file: str) -> bool:
        return _digest(_identity(file)) in self.digests.values()

    @property
    def key(self) -> str:
        return self.fingerprint

    def started_at(self, row: int, starts: Sequence[tuple[int, int]]) -> "StreamedData":
        return replace(self, start=row)

    def state(self, index: int) -> dict[str, Any]:
        """Return a segment of the run, as in Mixture; the positions are in the cursors instead."""
        segment = {"key": self.key, "start": self.start, "rows_per_epoch": 0, "sources": []}
        return segment | stored_files(self.digests)

    def stream(
        self, number: int, cursor: Sequence[int] = START, opens: Callable[[str], Any] | None = None
    ) -> "StreamIterator":
        """Return the rows of a stream from a cursor on.

        opens: called with the name of each file before it is read. If given, network errors are
        retried.
        """
        return StreamIterator(self, number, cursor, opens)

    def reader(self, row: Record, source: int, unused: dict[str, None]) -> Reader:
        """Return a reader for a unit that begins with this row; it adds columns to `unused`.

        Raises UserError if the columns fit no supported format.
        """
        data = self.options.data
        format, fields = self.sources[source].columns(data)
        reader = choose_reader(data, row.columns, row.where[0], format, fields)
        reader.unused = unused
        return reader


class StreamIterator:
    """Endless iterator over the rows of one stream. UserError for data that cannot be used."""

    def __init__(
        self,
        data: StreamedData,
        number: int,
        cursor: Sequence[int],
        opens: Callable[[str], Any] | None,
    ):
        self.data, self.number, self.opens = data, number, opens
        self._skipped: list[str] = []
        self.unused: dict[str, None] = {}
        """Columns of the rows read so far that are not used."""
        self._builder = data.options.builder()
        turn, row, sample, rest = cursor
        self.samples = self._samples(turn, row, sample)
        if data.options.data.packing == "stream":
            self._rows = self._cut_rows(rest)
        else:
            self._rows = self._window_rows((turn, row, sample), rest)

    def __iter__(self) -> Iterator[StreamedRow]:
        return self

    def __next__(self) -> StreamedRow:
        return next(self._rows)

    def _cut_rows(self, offset: int) -> Iterator[StreamedRow]:
        """Yield rows of concatenated texts, cut where a row is full.

        offset: number of tokens of the first text that were in earlier rows.
        """
        pieces: list[Piece] = []
        room = self.data.seq_len
        for sample in self.samples:
            start, offset, length = offset, 0, len(sample.tokens)
            while start < length:
                n = min(room, length - start)
                pieces.append((sample, start, n))
                start, room = start + n, room - n
                if not room:
                    cursor = (*sample.place, start) if start < length else (*sample.after, 0)
                    yield self._row(pieces, cursor)
                    pieces, room = [], self.data.seq_len

    def _window_rows(self, begin: Place, emitted: int) -> Iterator[StreamedRow]:
        """Yield rows from one window of samples at a time, packed like a small epoch.

        First windows differ in size between streams, so that their windows do not end
        simultaneously. begin: position of the first window. emitted: number of its rows that were
        already returned.
        """
        pending, tokens = list[StreamSample](), 0
        while True:
            rows = WINDOW if any(begin) else 1 + self.number % WINDOW
            while tokens < rows * self.data.seq_len:
                pending.append(next(self.samples))
                tokens += len(pending[-1].tokens)
            count, packed = self._pack(pending)
            window, pending = pending[:count], pending[count:]
            after = (*window[-1].after, 0)
            for i, pieces in list(enumerate(packed, 1))[emitted:]:
                row = [(window[k], start, n) for k, start, n in pieces]
                yield self._row(row, (*begin, i) if i < len(packed) else after)
            begin, emitted, tokens = after[:3], 0, sum(len(s.tokens) for s in pending)

    def _pack(self, samples: list[StreamSample]) -> tuple[int, list[list[tuple[int, int, int]]]]:
        """Pack samples into rows.

        Returns the number of samples that give the fullest rows (all, or a few less), and for each
        row the (sample, start, length) of its pieces.
        """
        seq_len, data = self.data.seq_len, self.data.options.data
        lengths = np.array([len(sample.tokens) for sample in samples], np.int64)
        sums = np.cumsum(lengths)
        counts = [len(samples)]
        if data.packing != "none":
            enough = sums[-1] - 2 * seq_len
            counts = [n for n in range(len(samples), 0, -1) if sums[n - 1] > enough][:8]
        packings = []
        for n in counts:
            parts = pieces_of(lengths[:n], seq_len).lengths
            packed = one_per_row(parts) if data.packing == "none" else best_fit(parts, seq_len)
            packings.append((sums[n - 1] / (len(packed.offsets) - 1), n, packed))
        _, n, packing = max(packings, key=lambda candidate: candidate[0])
        rows = [np.sort(row).tolist() for row in np.split(packing.documents, packing.offsets[1:-1])]
        rows.sort()
        if data.shuffle:
            seed = f"{self.data.fingerprint}/{self.number}/{samples[0].place}"
            order = np.argsort(random_bits(seed, len(rows)), kind="stable")
            rows = [rows[i] for i in order]
        pieces = pieces_of(lengths[:n], seq_len)
        columns = np.stack([pieces.samples, pieces.starts, pieces.lengths], 1).tolist()
        return n, [[tuple(columns[i]) for i in row] for row in rows]

    def _row(self, pieces: list[Piece], cursor: Cursor) -> StreamedRow:
        tokens, labels, weights = [], [], []
        for sample, start, n in pieces:
            # a document that is cut here continues with its next token
            following = slice(start + 1, start + n + 1)
            targets, target_weights = np.zeros(n, np.int32), np.zeros(n, np.float32)
            count = len(sample.tokens[following])
            targets[:count] = sample.tokens[following]
            target_weights[:count] = sample.weights[following]
            tokens.append(sample.tokens[start : start + n])
            labels.append(np.where(target_weights > 0, targets, -100))
            weights.append(target_weights)
        skipped, self._skipped = self._skipped, []
        return StreamedRow(
            np.concatenate(tokens),
            np.concatenate(labels),
            np.concatenate(weights),
            documents=[n for _, _, n in pieces],
            sources=[sample.source for sample, _, _ in pieces],
            where=[sample.where for sample, _, _ in pieces],
            cursor=cursor,
            skipped=skipped,
        )

    def _samples(self, turn: int, rows: int, sample: int) -> Iterator[StreamSample]:
        barren = 0
        while barren < MAX_BARREN_UNITS:
            barren += 1
            for one in self._samples_of_unit(turn, rows, sample):
                barren = 0
                yield one
            turn, rows, sample = turn + 1, 0, 0
        lines = [finding.text for finding in self.findings()]
        reason = "\n".join([f"nothing to learn in {barren:,} units in a row", *lines])
        path = self.data.options.data.path
        raise UserError("the data cannot be used", f"data.path={path}", reason)

    def findings(self, samples: int = 0, tokens: int = 0) -> list[Finding]:
        """Return findings about the data read so far. samples, tokens: number of each it gave."""
        counts = self._builder.counts | Counter(unreadable=len(self._skipped))
        examples = {"unreadable": self._skipped[:EXAMPLES]}
        return list_findings(counts, examples, samples, tokens, self.data.seq_len)

    def _samples_of_unit(self, turn: int, rows: int, sample: int) -> Iterator[StreamSample]:
        """Yield the samples of the unit that is dealt in this turn.

        rows, sample: number of rows to skip, and of samples to skip in the row after them. Network
        errors are retried without limit, since the caller that waits for the row decides how long
        to wait.
        """
        source, unit, part = unit_at(self.data, turn * self.data.streams + self.number)
        first, pause = (rows, sample), 1.0
        while True:
            if self.opens:
                self.opens(named(unit.file))
            try:
                for one in self._tokenized(turn, source, unit, part, first):
                    first, pause = one.after[1:], 1.0
                    yield one
                return
            except UserError as error:
                cause = error.__cause__
                is_network = is_url(unit.file) and cause and not isinstance(cause, PERMANENT_ERRORS)
                if not (self.opens and is_network):
                    raise
                text = str(cause).splitlines()[0]
                self.opens(f"{named(unit.file)}, tried again in {pause:.0f} s ({text})")
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    def _tokenized(
        self, turn: int, source: int, unit: Unit, part: int, first: tuple[int, int]
    ) -> Iterator[StreamSample]:
        texts = self._texts(source, unit, part, first)
        for chunk in tokenize_in_chunks(texts, self._builder, CHUNK_TEXTS, CHUNK_CHARACTERS):
            for (row, n, line), samples in chunk:
                where, place = (unit.file, unit.start, line), (turn, row, n)
                for one in samples:  # at most one per text
                    yield StreamSample(one.tokens, one.weights, source, where, place)

    def _texts(
        self, source: int, unit: Unit, part: int, first: tuple[int, int]
    ) -> Iterator[tuple[tuple[int, int, int], Rendered]]:
        def choose(row: Record) -> Reader:
            return replace(self.data.reader(row, source, self.unused), note=self._builder.count)

        def refuse(row: Record, reason: str) -> None:
            where = named(unit.file), row.where[1] + lines_before(unit)
            problems = Problems(self.data.options.data.on_error)
            problems.add(where, reason)
            problems.raise_if_failing()
            self._skipped.append(f"{where[0]}:{where[1]}  {reason.splitlines()[0]}")

        rows = islice(read_unit(unit), part, None, self.data.parts)
        for number, row, texts in read_texts(rows, choose, self._builder.render, refuse, first[0]):
            for n, text in enumerate(texts):
                if (number, n) >= first:
                    yield (number, n, row.where[1]), text


def unit_at(data: StreamedData, place: int) -> tuple[int, Unit, int]:
    """Return (source, unit, part) at an index of the endless sequence of epochs."""
    n = len(data.units) * data.parts
    epoch, i = divmod(place, n)
    if data.options.data.shuffle:
        i = int(_order(data.fingerprint, epoch, n)[i])
    unit, part = divmod(i, data.parts)
    return *data.units[unit], part


@lru_cache(maxsize=4)
def _order(fingerprint: str, epoch: int, n: int) -> np.ndarray:
    return np.argsort(random_bits(f"{fingerprint}/{epoch}", n), kind="stable")


def stream_data(
    data: Data, batch: Batch, seed: int, tokenizer: TextTokenizer, template: Template
) -> StreamedData:
    """Return the streams over `data`, after listing and inspecting its files. Raises UserError."""
    sources = find_sources(data.path, "data.path")
    streams = batch.rows
    files = [file for source in sources for file in source.files]
    options = TokenizeOptions(data, batch.seq_len, 0.0, tokenizer, template)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        identities = dict(zip(files, pool.map(_identity, files), strict=True))
        size = sum(size for size, _ in identities.values())
        wanted = size // (UNITS_PER_STREAM * streams)
        each = max(UNIT_BYTES[0], min(UNIT_BYTES[1], wanted), size // MAX_UNITS)
        split = pool.map(partial(split_units, bytes_each=each, separator=options.separator), files)
        units_of = dict(zip(files, split, strict=True))
    units = [
        (i, unit)
        for i, source in enumerate(sources)
        for file in source.files
        for unit in units_of[file]
    ]
    digests = {named(file): _digest(identity) for file, identity in identities.items()}
    parts = -(-streams // len(units))
    streamed = StreamedData(options, streams, sources, units, parts, digests)
    inspected = _inspect(streamed, size)
    format = identity_of("format", data.format)
    keys = [format, data.fields, data.loss_on, data.too_long, data.packing, data.shuffle]
    numbers = [VERSION, batch.seq_len, streams, seed, each, parts]
    content = [
        [source.name if len(sources) > 1 else "", [identities[file] for file in source.files]]
        for source in sources
    ]
    tokens = inspected.pop("tokens")
    decisive = [numbers, keys, content, tokenizer.fingerprint, template.decides, tokens]
    decisive += options.separator_of(files)
    text = json.dumps(decisive, sort_keys=True)
    fingerprint = hashlib.blake2b(text.encode(), digest_size=10).hexdigest()
    return replace(streamed, fingerprint=fingerprint, **inspected)


def _inspect(streamed: StreamedData, size: int) -> dict[str, Any]:
    """Return what the first samples show, by name of a field, and `tokens`.

    tokens: a hash of the samples' tokens and weights, which must be equal when a run is resumed.
    """
    _require_a_step(streamed)
    stream, digest = streamed.stream(0), hashlib.blake2b(digest_size=16)
    samples = [*islice(stream.samples, INSPECTED_SAMPLES)]
    for sample in samples:
        digest.update(sample.tokens.astype(np.int32).tobytes())
        digest.update(sample.weights.astype(np.float32).tobytes())
    lengths = [len(sample.tokens) for sample in samples]
    tokens = sum(lengths)
    supervised = sum(np.count_nonzero(sample.weights) for sample in samples)
    files = sum(len(source.files) for source in streamed.sources)
    findings = stream.findings(len(samples), tokens)
    report = [
        f"streamed: {counted(files, 'file')} of {size / 2**20:,.1f} MiB in"
        f" {counted(len(streamed.units), 'unit')}, by {counted(streamed.streams, 'stream')}",
        f"the first {counted(len(samples), 'sample')}: {tokens:,} tokens,"
        f" {100 * supervised / tokens:.1f}% supervised, longest {max(lengths):,}",
    ]
    report += [one.text for one in findings if not one.is_warning]
    if stream.unused:
        report.append(f"columns not used: {', '.join(stream.unused)}")
    if streamed.parts > 1:
        report.append(
            f"warning: each file is read {streamed.parts:,} times, for there are fewer that"
            " can be read apart than rows in a step"
        )
    return {
        "lengths": np.minimum(lengths, streamed.seq_len),
        "findings": findings,
        "inspected": np.array(
            [digest_of(Sample(one.tokens, one.weights)) for one in samples], np.uint64
        ),
        "report": report,
        "tokens": digest.hexdigest(),
    }


def _digest(identity: tuple[int, str]) -> str:
    return hashlib.blake2b(repr(identity).encode(), digest_size=8).hexdigest()


def _require_a_step(streamed: StreamedData) -> None:
    rows = (row for _, unit in streamed.units for row in read_unit(unit) if not row.error)
    count = sum(1 for _ in islice(rows, streamed.streams))
    if count < streamed.streams:
        reason = (
            f"has {count:,} rows, fewer than a step: batch.rows={streamed.streams}.\nUse"
            "  data.streaming=false , which is right for little data"
        )
        path = streamed.options.data.path
        raise UserError("the data cannot be streamed", f"data.path={path}", reason)


def _identity(file: str) -> tuple[int, str]:
    """Return a file's size in bytes and a hash of its kind and both its ends.

    Both are the same wherever the file is stored.
    """
    if file in quickstart_data.TASKS:
        return 0, content_hash(file)
    digest = hashlib.blake2b(repr(kind(file)).encode(), digest_size=16)
    try:
        with open_raw(file) as opened:
            digest.update(opened.read(ENDS))
            try:
                size = opened.seek(0, os.SEEK_END)
                opened.seek(max(0, size - ENDS))
                digest.update(opened.read(ENDS))
            except ValueError:  # a web server that only serves files from the beginning
                size = sum(remote.size or 0 for remote in list_files(file, "data.path"))
    except OSError as error:
        reason = f"cannot be read: {error}"
        raise UserError("the data cannot be used", file, reason) from None
    return size, digest.hexdigest()
