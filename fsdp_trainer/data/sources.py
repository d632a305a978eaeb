"""Files to rows. A row is a dict of columns and knows where it came from; a broken one is named by file and line.

`.json` is one array, or an object with one list; `.jsonl` has an object a line; in `.txt` blank lines separate documents, and a file
without any has one document a line. What a file holds decides, not its name: a `.json` with an object a line is read as that.
"""

import glob
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from fsdp_trainer.data import demo
from fsdp_trainer.errors import Problem, UserError

JSON, TEXT = (".json", ".jsonl", ".ndjson"), (".txt", ".text", ".md")
SHOWN = 5


class RowError(ValueError):
    """A row that cannot be read; the message says why."""


@dataclass
class Row:
    """One record. `error` says why it could not be read."""

    columns: dict[str, Any]
    where: tuple[str, int]
    """File and line, the first line is 1."""
    error: str | None = None


@dataclass
class Problems:
    """Rows that cannot be read: `fail` gathers a few and raises them together, `skip` counts them."""

    on_error: str
    count: int = 0
    first: list[Problem] = field(default_factory=list)

    def add(self, where: tuple[str, int], why: str) -> None:
        """Note a bad row; raises when enough are gathered."""
        self.count += 1
        if len(self.first) < SHOWN:
            self.first.append(Problem(f"{where[0]}:{where[1]}", why))
        if self.count == SHOWN:
            self.raise_if_failing()

    @property
    def will_raise(self) -> bool:
        """There is a problem, and problems are not to be skipped."""
        return self.count > 0 and self.on_error == "fail"

    def raise_if_failing(self) -> None:
        """Raise what was gathered, unless bad rows are to be skipped."""
        if self.will_raise:
            raise UserError("rows of the data cannot be read. Mend them, or leave them out with  data.on_error=skip", self.first)

    def report(self) -> list[str]:
        """Lines for the console."""
        if not self.count:
            return []
        return [f"skipped {self.count:,} rows that cannot be read:"] + [f"    {p.what}  {p.why.splitlines()[0]}" for p in self.first]


def find_files(path: Any, key: str) -> list[str]:
    """Data files of a path: a file, a folder (searched through), a glob, a `demo:` name, or a list of them; in a fixed order."""
    paths = list(path) if isinstance(path, Sequence) and not isinstance(path, str) else [path]
    if not paths or not all(isinstance(p, str) for p in paths):
        raise _bad(key, path, f"a file, folder or glob, or a list of them, is needed. To try the trainer out:  {key}=demo:backwards")
    return [file for p in paths for file in _files_of(p, key)]


def _files_of(path: str, key: str) -> list[str]:
    if path in demo.TASKS:
        return [path]
    if path.startswith("demo:") or "://" in path:
        known = "there is  " + "  ".join(demo.TASKS) if path.startswith("demo:") else "only local files are read: download it first"
        raise _bad(key, path, known)
    path = str(Path(path).expanduser())
    if Path(path).is_dir():
        found = sorted(
            str(p) for p in Path(path).rglob("*") if p.suffix.lower() in JSON + TEXT and p.is_file() and not _hidden(p.relative_to(path))
        )
        why = f"no file in this folder ends in {' '.join(JSON + TEXT)}"
    elif Path(path).is_file():
        found, why = [path], ""
    else:
        found, why = sorted(p for p in glob.glob(path, recursive=True) if Path(p).is_file()), "there is no such file or folder"
    if not found:
        raise _bad(key, path, why)
    for file in found:
        if Path(file).suffix.lower() not in JSON + TEXT:
            raise _bad(key, file, f"this kind of file is not read. Convert it to JSONL or text ({' '.join(JSON + TEXT)})")
    return found


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def content_hash(file: str) -> str:
    """Hash of what a file holds, not of its name: a moved file is the same data."""
    if file in demo.TASKS:
        return hashlib.blake2b(json.dumps(demo.rows(file)).encode(), digest_size=16).hexdigest()
    digest = hashlib.blake2b(Path(file).suffix.lower().encode(), digest_size=16)
    with open(file, "rb") as f:
        while block := f.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def read_rows(file: str) -> Iterator[Row]:
    """The rows of one file, in order; bounded memory but for a JSON array, which is read whole."""
    if file in demo.TASKS:
        return (Row(columns, (file, i)) for i, columns in enumerate(demo.rows(file), start=1))
    if Path(file).suffix.lower() in TEXT:
        return _read_text(file)
    if Path(file).suffix.lower() == ".json" and not _one_object_a_line(file):
        return _read_json(file)
    return _read_jsonl(file)


def _lines(file: str) -> Iterator[tuple[int, str, str | None]]:
    """(number, line, error) of a file; a byte-order mark is left out."""
    with open(file, "rb") as f:
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
        value = json.loads(line)
    except json.JSONDecodeError as e:
        return Row({}, where, f"is not JSON (character {e.pos + 1}: {e.msg})")
    except RecursionError:
        return Row({}, where, "is not JSON that can be read: it is nested too deeply")
    return _object(value, where)


def _object(value: Any, where: tuple[str, int]) -> Row:
    if isinstance(value, dict):
        return Row(value, where)
    return Row({}, where, f"is a JSON {type(value).__name__}, not an object with columns: {str(value)[:60]}")


def _one_object_a_line(file: str) -> bool:
    first_two = list(islice((line for _, line, _ in _lines(file) if line.strip()), 2))
    try:
        return len(first_two) == 2 and isinstance(json.loads(first_two[0]), dict)
    except ValueError:
        return False


def _read_json(file: str) -> Iterator[Row]:
    """Elements of an array, or of the one list in an object, each with the line on which it starts."""
    try:
        text = Path(file).read_text("utf-8-sig")
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
    except RecursionError:
        yield Row({}, (file, 1), "is not JSON that can be read: it is nested too deeply")


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
