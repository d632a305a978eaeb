"""Files to rows. A row is a dict of columns and knows where it came from; a broken one is named by file and line.

`.json` is one array, or an object with one list; `.jsonl` has an object a line; in `.txt` blank lines separate documents, and a file
without any has one document a line; tables are in `tables.py`. A `.json` with an object a line is read as `.jsonl`.
"""

import gzip
import hashlib
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BufferedIOBase
from itertools import islice
from pathlib import Path
from typing import Any

from fsdp_trainer.config.data_files import ARROW, CSV, SHARD, TEXT, data_files, entries, kind, stem
from fsdp_trainer.data import demo
from fsdp_trainer.data.tables import Record, open_zstd, read_arrow, read_csv
from fsdp_trainer.errors import Problem, UserError

SHOWN = 5
MOST_SOURCES = 16  # a folder of more files than these is one source


class RowError(ValueError):
    """A row that cannot be read; the message says why."""


@dataclass
class Row:
    """One record. `error` says why it could not be read."""

    columns: dict[str, Any]
    where: tuple[str, int]
    """File and line; in a table that is no text, file and row. The first is 1."""
    error: str | None = None


@dataclass
class Problems:
    """Rows that cannot be read: `fail` gathers a few, to raise them together, `skip` counts them."""

    on_error: str
    count: int = 0
    first: list[Problem] = field(default_factory=list)

    def add(self, where: tuple[str, int], why: str) -> None:
        """Note a bad row."""
        self.count += 1
        if len(self.first) < SHOWN:
            shown = why.encode(errors="backslashreplace").decode()  # half a character can be in a row, but in no file and no terminal
            self.first.append(Problem(f"{where[0]}:{where[1]}", shown))

    @property
    def will_raise(self) -> bool:
        """There is a problem, and problems are not to be skipped."""
        return self.count > 0 and self.on_error == "fail"

    @property
    def is_enough(self) -> bool:
        """No further ones need be looked for."""
        return self.will_raise and self.count >= SHOWN

    def raise_if_failing(self) -> None:
        """Raise what was gathered, unless bad rows are to be skipped."""
        if self.will_raise:
            raise UserError("rows of the data cannot be read. Mend them, or leave them out with  data.on_error=skip", self.first)

    def report(self) -> list[str]:
        """Lines for the console."""
        if not self.count:
            return []
        return [f"skipped {self.count:,} rows that cannot be read:"] + [f"    {p.what}  {p.why.splitlines()[0]}" for p in self.first]


@dataclass
class Source:
    """What `loss_by_source` tells apart: an entry of a list of paths, or a file of the only one."""

    name: str
    files: list[str]
    format: str | None = None
    """As data.format, for this source; null: as that says."""
    fields: dict[str, Any] | None = None


def find_sources(path: Any, key: str) -> list[Source]:
    """Data files of a path: a file, a folder (searched through), a glob, a `demo:` name, or a list of them; in a fixed order."""
    paths = [entry.path for entry in entries(path)]
    if not paths:
        raise _bad(key, path, f"a file, folder or glob, or a list of them, is needed. To try the trainer out:  {key}=demo:backwards")
    found: dict[str, list[str]] = {}
    for p in paths:
        found.setdefault(os.path.abspath(Path(p).expanduser()), []).extend(_files_of(p, key))
    given = {os.path.abspath(Path(entry.path).expanduser()): entry for entry in entries(path)}
    if len(found) > 1 or any(entry.name for entry in given.values()):
        names = [given[place].name or name for place, name in zip(found, _names(list(found)), strict=True)]
        if len(set(names)) < len(names):
            raise _bad(key, names, "two sources have one name. Give each entry its own, as in  {path: a.jsonl, name: code}")
        return [Source(name, files, given[at].format, given[at].fields) for name, (at, files) in zip(names, found.items(), strict=True)]
    ((path, files),) = found.items()
    how = given[path].format, given[path].fields
    by_set: dict[str, list[str]] = {}
    for file in files:
        of_set = SHARD.sub("", stem(file))
        by_set.setdefault(os.path.abspath(file if of_set == stem(file) else Path(file).parent / of_set), []).append(file)
    if len(by_set) > MOST_SOURCES:
        return [Source(stem(path), files, *how)]
    return [Source(name, files, *how) for name, files in zip(_names(list(by_set)), by_set.values(), strict=True)]


def _names(paths: list[str]) -> list[str]:
    """The shortest end of each absolute path that tells it from the others, with its suffix only where it takes that.

    Nothing of where the folder lies that holds them all: the same data elsewhere is the same data.
    """
    shared = os.path.commonpath([Path(path).parent for path in paths])
    ends = [_ends(Path(path).relative_to(shared)) for path in paths]
    count = Counter(end for of_one in ends for end in of_one)
    return [next((end for end in of_one if count[end] == 1), of_one[-1]) for of_one in ends]


def _ends(path: Path) -> list[str]:
    """d/a.txt → a, d/a, a.txt, d/a.txt"""
    folders = path.parts[:-1]
    ends = ["/".join((*folders[i:], name)) for name in (stem(path), path.name) for i in range(len(folders), -1, -1)]
    return list(dict.fromkeys(ends))


def _files_of(path: str, key: str) -> list[str]:
    if path in demo.TASKS:
        return [path]
    if path.startswith("demo:") or "://" in path:
        known = "there is  " + "  ".join(demo.TASKS) if path.startswith("demo:") else "only local files are read: download it first"
        raise _bad(key, path, known)
    try:
        return data_files(str(Path(path).expanduser()))
    except ValueError as e:
        raise _bad(key, path, str(e)) from None


def content_hash(file: str) -> str:
    """Hash of what a file holds, not of its name: a moved file is the same data."""
    if file in demo.TASKS:
        return hashlib.blake2b(json.dumps(demo.rows(file)).encode(), digest_size=16).hexdigest()
    digest = hashlib.blake2b(repr(kind(file)).encode(), digest_size=16)
    with open(file, "rb") as f:
        while block := f.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def read_rows(file: str) -> Iterator[Row]:
    """The rows of one file, in order; bounded memory but for a JSON array, which is read whole."""
    number = 0
    try:
        for row in _rows(file, kind(file)[0]):
            number = row.where[1]
            yield row
    except (EOFError, OSError, zlib.error) as e:
        yield Row({}, (file, number + 1), f"cannot be read from here on: {e}")


def _rows(file: str, suffix: str) -> Iterator[Row]:
    if file in demo.TASKS:
        yield from (Row(columns, (file, i)) for i, columns in enumerate(demo.rows(file), start=1))
    elif suffix in TEXT:
        yield from _read_text(file)
    elif suffix in CSV + ARROW:
        yield from (Row(columns, (file, number), error) for number, columns, error in _records(file, suffix))
    elif suffix == ".json" and not _one_object_a_line(file):
        yield from _read_json(file)
    else:
        yield from _read_jsonl(file)


def _records(file: str, suffix: str) -> Iterator[Record]:
    if suffix in ARROW:
        yield from read_arrow(file, suffix)
    else:
        with _open(file) as opened:
            yield from read_csv(opened, "\t" if suffix == ".tsv" else ",")


def _open(file: str) -> BufferedIOBase:
    """The bytes of a file, decompressed."""
    compression = kind(file)[1]
    if compression == ".zst":
        return open_zstd(file)
    return gzip.open(file) if compression == ".gz" else open(file, "rb")


def _lines(file: str) -> Iterator[tuple[int, str, str | None]]:
    """(number, line, error) of a file; a byte-order mark is left out."""
    with _open(file) as f:
        for number, line in enumerate(f, start=1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").replace("\r\n", "\n"), None
            except UnicodeDecodeError as e:
                yield number, "", f"is not UTF-8: byte {e.start + 1} is 0x{line[e.start]:02x}. Convert the file:  iconv -f latin1 -t utf-8"


def _read_jsonl(file: str) -> Iterator[Row]:
    for number, line, error in _lines(file):
        if error or line.strip():
            yield _row(line, (file, number), error)


def _row(line: str, where: tuple[str, int], error: str | None) -> Row:
    if error:
        return Row({}, where, error)
    try:
        return _object(json.loads(line), where)
    except json.JSONDecodeError as e:
        return Row({}, where, f"is not JSON (character {e.pos + 1}: {e.msg})")
    except (ValueError, RecursionError) as e:
        return _beyond(e, where)


def _beyond(error: Exception, where: tuple[str, int]) -> Row:
    """JSON that Python does not read: a number of thousands of digits, or lists within lists."""
    why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    return Row({}, where, f"is not JSON that can be read: {why}")


def _object(value: Any, where: tuple[str, int]) -> Row:
    if isinstance(value, dict):
        return Row(value, where)
    return Row({}, where, f"is a JSON {type(value).__name__}, not an object with columns: {str(value)[:60]}")


def _one_object_a_line(file: str) -> bool:
    first_two = list(islice((line for _, line, _ in _lines(file) if line.strip()), 2))
    try:
        return len(first_two) == 2 and isinstance(json.loads(first_two[0]), dict)
    except (ValueError, RecursionError):
        return False


def _read_json(file: str) -> Iterator[Row]:
    """Elements of an array, or of the one list in an object, each with the line on which it starts."""
    try:
        with _open(file) as f:
            text = f.read().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        yield next(Row({}, (file, number), error) for number, _, error in _lines(file) if error)
        return
    decoder = json.JSONDecoder()
    try:
        start = _start_of_list(text, decoder)
        if start is None:
            yield Row({}, (file, 1), "holds neither an array of objects nor an object with exactly one list")
            return
        line, counted, position = 1, 0, _skip(text, start + 1)
        while text[position : position + 1] != "]":
            line, counted = line + text.count("\n", counted, position), position
            value, position = decoder.raw_decode(text, position)
            yield _object(value, (file, line))
            position = _skip(text, position)
            if text[position : position + 1] == ",":
                position = _skip(text, position + 1)
            elif text[position : position + 1] != "]":
                raise json.JSONDecodeError("expected , or ] after an element", text, position)
    except json.JSONDecodeError as e:
        yield Row({}, (file, e.lineno), f"is not JSON from here on (column {e.colno}: {e.msg})")
    except (ValueError, RecursionError) as e:
        yield _beyond(e, (file, 1))


def _skip(text: str, position: int) -> int:
    return re.compile(r"\s*").match(text, position).end()  # type: ignore[union-attr]


def _start_of_list(text: str, decoder: json.JSONDecoder) -> int | None:
    """Position of the array: the file's, or the only list among the values of its object."""
    position = _skip(text, 0)
    if text[position : position + 1] != "{":
        return position if text[position : position + 1] == "[" else None
    found = []
    while text[position : position + 1] in ("{", ","):
        _, position = decoder.raw_decode(text, _skip(text, position + 1))
        position = _skip(text, _skip(text, position) + 1)  # past the colon
        if text[position : position + 1] == "[":
            found.append(position)
        _, position = decoder.raw_decode(text, position)
        position = _skip(text, position)
    return found[0] if len(found) == 1 else None


def _read_text(file: str) -> Iterator[Row]:
    separated = any(not error and not line.strip() for _, line, error in _lines(file))
    document: list[str] = []
    start = 1
    for number, line, error in _lines(file):
        if error:
            yield Row({}, (file, number), error)
        elif line.strip():
            start = start if document else number
            document.append(line)
        if document and (not separated or not line.strip()):
            yield Row({"text": "".join(document).rstrip("\n")}, (file, start))
            document = []
    if document:
        yield Row({"text": "".join(document).rstrip("\n")}, (file, start))


def _bad(key: str, value: Any, why: str) -> UserError:
    return UserError("the data cannot be used", [Problem(f"{key}={value}", why)])
