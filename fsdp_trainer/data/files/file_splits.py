"""Units of files, and the rows in them.

A unit can be read by itself, so that many processes can share a file and a stream can resume within
one. Formats: `.json` is one array, an object with one list, or, like `.jsonl`, one object per line.
In `.txt`, blank lines separate documents; a file without blank lines in its first 16 MiB has one
document per line. Tables are read by `tables.py`.
"""

import contextlib
import io
import math
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count
from typing import Any, BinaryIO

from fsdp_trainer.base.unpacked import TooLarge, open_unpacked, unpack
from fsdp_trainer.config.data_files import ARROW, CSV, JSON, TEXT, is_url, kind, token_suffixes
from fsdp_trainer.data.files import quickstart_data
from fsdp_trainer.data.files.csv_rows import read_csv
from fsdp_trainer.data.files.json_values import (
    are_lines,
    begins_with_object,
    parse_object,
    read_values,
)
from fsdp_trainer.data.files.remote_files import open_remote
from fsdp_trainer.data.files.row_limits import LONGEST, MOST_VALUES, TOO_LONG
from fsdp_trainer.data.files.sources import Record
from fsdp_trainer.data.files.tables import read_arrow, records_of_parts
from fsdp_trainer.data.token_files.known_token_files import (
    open_token_file,
    token_edges,
    token_rows,
)
from fsdp_trainer.data.token_files.token_file import ListedDocuments, TokenFile
from fsdp_trainer.errors import RunFailed, UserError

HEAD = 1 << 24  # bytes that are searched for a blank line, which then separates documents
BLANK = re.compile(rb"\n[ \t\r]*\n")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LFS = b"version https://git-lfs"
OTHERS = {
    b"\x1f\x8b": "is packed by gzip. Give it a name that ends in .gz",
    b"\x28\xb5\x2f\xfd": "is packed by zstd. Give it a name that ends in .zst",
    b"PAR1": "is Parquet. Give it a name that ends in .parquet",
    b"ARROW1": "is an Arrow file. Give it a name that ends in .arrow",
    b"PK\3\4": "is a zip archive or a spreadsheet. Unpack it, or save it as CSV",
    b"BZh91AY&SY": "is packed by bzip2. Unpack it:  bunzip2",
    b"\xfd7zXZ": "is packed by xz. Unpack it:  unxz",
    LFS: "is a pointer of Git LFS to the data. Fetch it:  git lfs pull",
}
"""What is wrong with a file of text that begins so."""
WIDE = {b"\xff\xfe\0\0": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
"""Encodings by the mark that their files begin with."""
WIDE_LATIN = {"x0x0": "utf-16le", "0x0x": "utf-16be"}
"""Encodings without a mark, by which of the first bytes are zero."""


@dataclass(frozen=True)
class Unit:
    """Part of a file that can be read by itself.

    start, stop: bytes of uncompressed text, row groups of Parquet, batches of an Arrow file, or
    documents or tokens of a token file; any other file is one unit. A row belongs to the unit in
    which it begins. A document between blank lines belongs to the unit that contains the blank line
    before it.
    """

    file: str
    start: int = 0
    stop: int | None = None
    """None: up to the end of the file."""
    stamp: tuple[int, int] | None = None
    """`stamp` of the file when it was split, so that reading can detect a later change."""
    separator: int | None = None
    """The token between documents, for a token file that does not list them."""

    @cached_property
    def end(self) -> float:
        return math.inf if self.stop is None else self.stop


def stamp(file: str) -> tuple[int, int] | None:
    """Return (bytes, mtime in ns) of a local file, which change with the file; None for others."""
    if file in quickstart_data.TASKS or is_url(file):
        return None
    about = os.stat(file)
    return about.st_size, about.st_mtime_ns


def split_units(
    file: str,
    bytes_each: int,
    mark: tuple[int, int] | None = None,
    separator: int | None = None,
) -> list[Unit]:
    """Return the file as units of about `bytes_each`, in order.

    It is a single unit if it can only be read from the beginning. mark: an earlier stamp that the
    file must still have when it is read. separator: see Unit.
    """
    (suffix, compression), mark = kind(file), mark or stamp(file)
    edges = [0]
    if file not in quickstart_data.TASKS and not compression:
        if suffix in token_suffixes():
            edges = token_edges(file, bytes_each)
        elif suffix in ARROW:
            edges = _edges_of_parts(file, suffix, bytes_each)
        elif suffix in TEXT or _is_json_lines(file, suffix):
            edges = list(range(0, _size(file), bytes_each)) or [0]
    return [
        Unit(file, start, stop, mark, separator)
        for start, stop in zip(edges, [*edges[1:], None], strict=True)
    ]


def _size(file: str) -> int:
    """Return the size of a file; 0 if it can only be read from the beginning."""
    with open_raw(file) as opened, contextlib.suppress(ValueError):
        return opened.seek(0, os.SEEK_END)
    return 0


def _edges_of_parts(file: str, suffix: str, bytes_each: int) -> list[int]:
    """Return the index of the first row group or batch of each unit."""
    rows = records_of_parts(_table(file, None), suffix)
    bytes_a_row = _size(file) / max(1, sum(rows))
    edges, held = [0], 0.0
    for part, n in enumerate(rows):
        if held >= bytes_each:
            edges, held = [*edges, part], 0.0
        held += n * bytes_a_row
    return edges


@lru_cache(maxsize=4096)
def lines_before(unit: Unit) -> int:
    return Lines().before(unit)


class Lines:
    """Counts the lines before many units in order, and reads each byte only once."""

    def __init__(self) -> None:
        self._file, self._at, self._lines = "", 0, 1

    def before(self, unit: Unit) -> int:
        suffix = kind(unit.file)[0]
        numbers_all = suffix in token_suffixes()  # from the first row of the file
        if not unit.start or numbers_all:
            return 0
        if suffix in ARROW:
            return sum(records_of_parts(_table(unit.file, None), suffix)[: unit.start])
        if unit.file != self._file or unit.start <= self._at:  # a file may be named twice
            self._file, self._at, self._lines = unit.file, 0, 1
        with open_raw(unit.file) as file:
            file.seek(self._at)
            while block := file.read(min(unit.start - 1 - self._at, 1 << 22)):
                self._lines, self._at = self._lines + block.count(b"\n"), self._at + len(block)
        return self._lines


def read_records(file: str) -> Iterator[Record]:
    """Yield the rows of one file, in order, with bounded memory."""
    yield from read_unit(Unit(file))


def read_unit(unit: Unit) -> Iterator[Record]:
    """Yield the rows of a unit, in order; `row.where` counts from the unit's own first line.

    Raises UserError if the file changes in the meantime.
    """
    number = 0
    try:
        _check_stamp(unit)
        for row in _records(unit, *kind(unit.file)):
            number = row.where[1]
            yield row
        _check_stamp(unit)
    except (UserError, RunFailed):
        raise
    except Exception as e:
        is_of_content = isinstance(e, TooLarge | EOFError | OSError | zlib.error)
        content = is_of_content and not getattr(e, "errno", None)
        if content and not (is_url(unit.file) and isinstance(e, OSError)):
            yield Record({}, (unit.file, number + 1), f"cannot be read from here on: {e}")
        elif isinstance(e, OSError) or is_url(unit.file):
            # an error of the disk or the network: skipping it would lose rows unnoticed
            raise _lost(
                unit,
                number + 1,
                f"cannot be read from here on: {getattr(e, 'strerror', None) or e}",
            ) from e
        else:
            raise


def token_blocks(unit: Unit) -> Iterator[tuple[TokenFile, ListedDocuments]]:
    """Yield the documents of a unit of a token file, many at a time, each with the file.

    Raises UserError if the file changes in the meantime, BadTokenFile if it cannot be read.
    """
    try:
        _check_stamp(unit)
        file = open_token_file(unit.file)
        for block in file.blocks(unit.start, unit.stop, unit.separator):
            yield file, block
        _check_stamp(unit)
    except OSError as error:
        raise _lost(unit, 1, f"cannot be read: {error.strerror or error}") from error


def _check_stamp(unit: Unit) -> None:
    if unit.stamp and stamp(unit.file) != unit.stamp:
        raise _lost(unit, 1, "was changed while it was read")


def _lost(unit: Unit, line: int, reason: str) -> UserError:
    try:
        place = f"{unit.file}:{lines_before(unit) + line}"
    except OSError:  # the file is gone
        place = f"{unit.file}:{line}"
        if unit.start:
            place = f"{unit.file}, from byte {unit.start:,} on"
    return UserError(
        "the data cannot be used", place, f"{reason}.\nStart again once it can be read completely"
    )


def _records(unit: Unit, suffix: str, compression: str | None) -> Iterator[Record]:
    file = unit.file
    if file in quickstart_data.TASKS:
        yield from (
            Record(columns, (file, i))
            for i, columns in enumerate(quickstart_data.rows(file), start=1)
        )
    elif suffix in (*token_suffixes(), *ARROW, *CSV):
        records = _table_records(unit, suffix, compression)
        yield from (Record(columns, (file, number), error) for number, columns, error in records)
    elif not unit.start and (reason := _no_text(_first_bytes(file, 32))):
        yield Record({}, (file, 1), reason)
    elif suffix in TEXT:
        yield from _read_text(unit)
    elif _is_json_lines(file, suffix):
        yield from _read_jsonl(unit)
    else:
        with unpack(open_raw(file), compression) as opened:
            yield from read_values(opened, file)


def _table_records(
    unit: Unit, suffix: str, compression: str | None
) -> Iterator[tuple[int, dict[str, Any], str | None]]:
    file = unit.file
    if suffix in token_suffixes():
        yield from token_rows(file, unit.start, unit.stop, unit.separator)
    elif suffix in ARROW and not is_url(file) and _first_bytes(file, len(LFS)) == LFS:
        yield 1, {}, OTHERS[LFS]
    elif suffix in ARROW:
        yield from read_arrow(_table(file, compression), file, suffix, unit.start, unit.stop)
    elif reason := _no_text(_first_bytes(file, 32)):
        yield 1, {}, reason
    else:
        with _open(file) as opened:
            yield from read_csv(opened, file, "\t" if suffix == ".tsv" else ",")


def open_raw(file: str) -> BinaryIO:
    return open_remote(file) if is_url(file) else open(file, "rb")


def _open(file: str) -> BinaryIO:
    return open_unpacked(open_raw(file), kind(file)[1])


def _first_bytes(file: str, n: int) -> bytes:
    with _open(file) as opened:
        return opened.read(n)


def _no_text(head: bytes) -> str | None:
    """Return why a file that begins so is no text in UTF-8, and what to do; None if it may be."""
    if known := next((text for mark, text in OTHERS.items() if head.startswith(mark)), None):
        return known
    encoding = next((name for mark, name in WIDE.items() if head.startswith(mark)), None)
    encoding = encoding or WIDE_LATIN.get("".join("x" if byte else "0" for byte in head[:4]))
    return encoding and f"is {encoding.upper()}. Convert the file:  iconv -f {encoding} -t utf-8"


def _table(file: str, compression: str | None) -> str | BinaryIO:
    """Return the file for Arrow; a local one by its name, so that Arrow can map it."""
    return unpack(open_raw(file), compression) if compression or is_url(file) else file


def _is_json_lines(file: str, suffix: str) -> bool:
    return suffix in JSON and _has_lines(file, suffix != ".json", stamp(file))


@lru_cache(maxsize=4096)
def _has_lines(file: str, is_jsonl: bool, mark: tuple[int, int] | None) -> bool:
    try:
        with _open(file) as opened:
            lines = (opened.readline(LONGEST) for _ in count())
            every = (_forgiving(line) for line in lines if line.strip() or not line)
            first, second = next(every).removeprefix(BYTE_ORDER_MARK.decode()), next(every)
            answer = are_lines(first, second, is_jsonl)
        if answer is None:
            with unpack(open_raw(file), kind(file)[1]) as whole:
                return not begins_with_object(whole)
        return answer
    except (ValueError, EOFError, OSError, zlib.error):  # reading its rows tells what is broken
        return is_jsonl


def _forgiving(line: bytes) -> str:
    return line.decode(errors="surrogateescape")


Line = tuple[int, int, str, str | None]
"""(number, place, text, error) of a line.

number: from 1 in the unit. place: position in the file in bytes. text: empty if there is an
error."""


def _lines(file: BinaryIO, unit: Unit) -> Iterator[Line]:
    place = _first_line(file, unit)
    for number in count(1) if place < unit.end else ():
        content, begins = file.readline(LONGEST), place
        if not content:
            return
        place += len(content)
        if len(content) == LONGEST and not content.endswith(b"\n"):
            place += _skip_line(file)
            yield number, begins, "", TOO_LONG
        else:
            text, error = _decoded(content, is_first=begins == 0)
            yield number, begins, text, error


def _skip_line(file: BinaryIO) -> int:
    """Read to the end of the line; return the number of bytes read."""
    size = 0
    while piece := file.readline(LONGEST):
        size += len(piece)
        if piece.endswith(b"\n"):
            break
    return size


def _decoded(content: bytes, is_first: bool) -> tuple[str, str | None]:
    """Return the text of a line, or "" and the reason why it is not text."""
    if b"\0" in content:
        return "", (
            f"holds a NUL byte (byte {content.index(0) + 1}), as a file does that a crash has"
            " cut off, or that is no text"
        )
    if is_first:
        content = content.removeprefix(BYTE_ORDER_MARK)
    try:
        return content.decode(), None
    except UnicodeDecodeError as e:
        return "", (
            f"is not UTF-8: byte {e.start + 1} is 0x{content[e.start]:02x}. Convert the file:"
            "  iconv -f latin1 -t utf-8"
        )


def _first_line(file: BinaryIO, unit: Unit) -> int:
    """Seek to the first line that begins in the unit, or past the unit's end; return the place."""
    if not unit.start:
        return 0
    place = file.seek(unit.start - 1)
    while (piece := file.readline(1 << 20)) and place < unit.end:
        place += len(piece)
        if piece.endswith(b"\n"):
            break
    return place


def _own_lines(unit: Unit) -> Iterator[Line]:
    with _open(unit.file) as file:
        for line in _lines(file, unit):
            _, place, text, error = line
            if place >= unit.end:
                return
            if error or text.strip():
                yield line


def _read_jsonl(unit: Unit) -> Iterator[Record]:
    for number, _, text, error in _own_lines(unit):
        where = unit.file, number
        yield Record({}, where, error) if error else parse_object(text, where)


@lru_cache
def _is_separated(file: str, mark: tuple[int, int] | None) -> bool:
    return bool(BLANK.search(b"\n" + _first_bytes(file, HEAD).removeprefix(BYTE_ORDER_MARK)))


def _read_text(unit: Unit) -> Iterator[Record]:
    """Yield the documents that begin in a unit: separated by blank lines, else one per line."""
    if _is_separated(unit.file, stamp(unit.file)):
        yield from (document.record(unit.file) for document in _paragraphs(unit))
    else:
        for number, _, text, error in _own_lines(unit):
            yield _text_record(text, error, (unit.file, number))


def _text_record(text: str, error: str | None, where: tuple[str, int]) -> Record:
    text = text.replace("\r\n", "\n").rstrip("\n")
    return Record({}, where, error) if error else Record({"text": text}, where)


class _Document:
    """A document that grows by lines. error: the first one among its lines."""

    def __init__(self, number: int, begin: int):
        """number, begin: of its first line, from 1 in the unit and in bytes."""
        self.number, self._begin, self._lines = number, begin, 0
        self.error: str | None = None
        self._text = io.StringIO()  # a list of lines would be much larger than their text

    def add(self, line: Line) -> None:
        """Add a line, whose text is dropped if the document is too long. Raises TooLarge."""
        _, place, text, error = line
        self._lines += 1
        if self._lines > MOST_VALUES:
            raise TooLarge(f"a document has more than {MOST_VALUES:,} lines")
        if place - self._begin > LONGEST:
            error, text = TOO_LONG, ""
        if error and not self.error:
            self.number, self.error = (self.number if error is TOO_LONG else line[0]), error
        self._text.write(text)

    def record(self, file: str) -> Record:
        return _text_record(self._text.getvalue(), self.error, (file, self.number))


def _paragraphs(unit: Unit) -> Iterator[_Document]:
    document: _Document | None = None
    for line, is_blank in _lines_of_paragraphs(unit):
        if is_blank and document:
            yield document
            document = None
        elif not is_blank:
            document = document or _Document(*line[:2])
            document.add(line)
    if document:
        yield document


def _lines_of_paragraphs(unit: Unit) -> Iterator[tuple[Line, bool]]:
    is_own = not unit.start
    with _open(unit.file) as file:
        for line in _lines(file, unit):
            _, place, text, error = line
            is_blank = not error and not text.strip()
            if place >= unit.end and (is_blank or not is_own):
                return
            if is_own:
                yield line, is_blank
            is_own |= is_blank
