"""JSON to rows; lists are read piece by piece, so that they need not fit into memory."""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from fsdp_trainer.base.json_files import DEEPEST, TOO_DEEP, is_deeper
from fsdp_trainer.data.files.row_limits import LONGEST, MOST_VALUES, TOO_MANY
from fsdp_trainer.data.files.sources import Record, RecordError
from fsdp_trainer.data.records.record_formats import is_turn

CHUNK = 1 << 20  # bytes of a list that are read at once
LOST = re.compile("[\udc80-\udcff]")  # decoded form of bytes that are not UTF-8
SPACE = re.compile(r"[ \t\r\n]*")


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    columns = dict(pairs)
    if len(columns) < len(pairs):
        names = [name for name, _ in pairs]
        raise RecordError(
            f"has {next(name for name in names if names.count(name) > 1)!r} twice in one object"
        )
    return columns


# NaN and Infinity, which Python writes but JSON does not allow, are read as null: pandas writes
# them for missing values
DECODER = json.JSONDecoder(object_pairs_hook=_without_twins, parse_constant=lambda _: None)


def has_too_many_values(text: str) -> bool:
    """Return True for JSON whose values would fill memory, although its text does not."""
    if len(text) <= MOST_VALUES:
        return False
    return sum(map(text.count, (",", "[", "{"))) > MOST_VALUES


def is_too_deep(value: Any, text: str) -> bool:
    """Return True if more lists and objects are within each other than are read.

    text: the JSON of the value.
    """
    return text.count("[") + text.count("{") > DEEPEST and is_deeper(value, DEEPEST)


def parse_object(text: str, where: tuple[str, int]) -> Record:
    """Return a line of JSON as a row, with an error if it cannot be used."""
    try:
        if has_too_many_values(text):
            return Record({}, where, TOO_MANY)
        # without its end of line, which would be taken for a forbidden character of a cut text
        value = DECODER.decode(text.rstrip("\r\n"))
        return Record({}, where, TOO_DEEP) if is_too_deep(value, text) else _record(value, where)
    except RecordError as e:
        return Record({}, where, str(e))
    except json.JSONDecodeError as e:
        return Record({}, where, f"is not JSON: {_mistake(e)} at character {e.pos + 1}")
    except (ValueError, RecursionError) as e:
        return Record({}, where, _beyond(e))


def _mistake(error: json.JSONDecodeError) -> str:
    """Return Python's description of a mistake without the "at" that some of them end with."""
    return error.msg.removesuffix(" at")


def _record(value: Any, where: tuple[str, int]) -> Record:
    if isinstance(value, dict):
        return Record(value, where)
    return Record(
        {},
        where,
        f"is a JSON {type(value).__name__}, not an object with columns: {str(value)[:60]}",
    )


def _beyond(error: Exception) -> str:
    """Return an error text for JSON that Python cannot read: huge numbers or too deep nesting."""
    return (
        "is not JSON that can be read:"
        f" {'it ' + TOO_DEEP if isinstance(error, RecursionError) else error}"
    )


def read_list(file: BinaryIO, name: str) -> Iterator[Record]:
    """Yield the elements of the file's array, or of the only list in its object, as rows.

    file: must be seekable.
    """
    values = _Values(file)
    try:
        opening = values.peek()
        if opening == "{" and [is_list for _, is_list in values.members()].count(True) == 1:
            if _is_one_conversation(file):
                yield _record(_Values(file).value(), (name, 1))
                return
            values = _list_of_object(file)
        elif opening != "[":
            yield Record(
                {},
                (name, 1),
                "holds neither an array of objects nor an object with exactly one list",
            )
            return
        for value in values.elements():
            where = (name, values.line)
            yield (
                Record({}, where, str(value))
                if isinstance(value, RecordError)
                else _record(value, where)
            )
        values.position += 1
        if opening == "[" and values.peek():
            raise json.JSONDecodeError("something follows the array", values.text, values.position)
    except json.JSONDecodeError as e:
        line = values.line_of(e.pos)
        yield Record(
            {},
            (name, line),
            f"is not JSON from here on: {_mistake(e)} at column {values.column_of(e.pos)}",
        )
    except (ValueError, RecursionError) as e:
        yield Record({}, (name, values.line_of(values.position)), _beyond(e))


def _list_of_object(file: BinaryIO) -> "_Values":
    """Return a position at the start of the only list in the file's object."""
    file.seek(0)
    values = _Values(file)
    next(key for key, is_list in values.members() if is_list)
    return values


def _is_one_conversation(file: BinaryIO) -> bool:
    """Return True if the list in the file's object holds turns, not rows; rewind the file."""
    first = next(_list_of_object(file).elements(), None)
    file.seek(0)
    return isinstance(first, dict) and is_turn(first)


class _Values:
    """A position in a JSON text of which only a piece is in memory."""

    def __init__(self, file: BinaryIO):
        self.file, self.text, self.position = file, "", 0
        self.line = 1
        """Line of the element that `elements` yielded last, from 1."""
        # position up to which `line` is counted; characters of that line before `text`
        self._counted = self._column = 0
        # bytes that are not UTF-8 become lone surrogates, which are detected in the element that
        # holds them
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape").decode

    def line_of(self, position: int) -> int:
        return self.line + self.text.count("\n", self._counted, position)

    def column_of(self, position: int) -> int:
        begin = self.text.rfind("\n", 0, position)
        return position - begin if begin >= 0 else self._column + position + 1

    def _count(self) -> None:
        self.line, self._counted = self.line_of(self.position), self.position

    def _more(self) -> bool:
        """Read the next piece, at least as long as the unparsed rest, so that retries stay few.

        Return False at the end of the file.
        """
        self._count()
        self._column = self.column_of(self.position) - 1
        rest = len(self.text) - self.position
        if rest > LONGEST:
            raise json.JSONDecodeError(
                f"more than {LONGEST >> 20} MiB in one value", self.text, self.position
            )
        if rest > MOST_VALUES and has_too_many_values(self.text[self.position :]):
            raise json.JSONDecodeError(f"one value {TOO_MANY}", self.text, self.position)
        block = self.file.read(max(CHUNK, rest))
        self.text = self.text[self.position :] + self._decode(block, not block)
        self.position = self._counted = 0
        return bool(block)

    def peek(self) -> str:
        """Return the next character that is not white space; "" at the end."""
        while True:
            space = SPACE.match(self.text, self.position)
            assert space is not None, "SPACE also matches no characters"
            self.position = space.end()
            if self.position < len(self.text) or not self._more():
                return self.text[self.position : self.position + 1]

    def elements(self) -> Iterator[Any]:
        """Yield the values of the list that begins here, or a RecordError for an unusable one.

        Ends at the closing bracket.
        """
        self._expect("[")
        while self.peek() != "]":
            self._count()
            try:
                yield self.value()
            except RecordError as e:
                yield e
            if self.peek() != "]":
                self._expect(",")

    def members(self) -> Iterator[tuple[str, bool]]:
        """Yield (key, True if its value is a list) for the object that begins here.

        While a key is yielded, the position is at its value.
        """
        self._expect("{")
        while self.peek() != "}":
            key = self.value()
            self._expect(":")
            is_list = self.peek() == "["
            yield key, is_list
            if is_list:
                for _ in self.elements():
                    pass
                self._expect("]")
            else:
                self.value()
            if self.peek() != "}":
                self._expect(",")

    def _expect(self, character: str) -> None:
        if self.peek() != character:
            raise json.JSONDecodeError(f"Expecting {character}", self.text, self.position)
        self.position += 1

    def value(self) -> Any:
        """Return the value that begins here; RecordError if it is complete and cannot be used."""
        self.peek()
        while True:
            try:
                value, end = self._parse()
            except json.JSONDecodeError as e:
                if self._is_cut(e) and self._more():
                    continue
                raise
            if end < len(self.text) or not self._more():  # otherwise a number may continue
                break
        text, self.position = self.text[self.position : end], end
        if isinstance(value, RecordError):
            raise value
        if not text.isascii() and LOST.search(text):
            raise RecordError("is not UTF-8. Convert the file:  iconv -f latin1 -t utf-8")
        if is_too_deep(value, text):
            raise RecordError(TOO_DEEP)
        return value

    def _parse(self) -> tuple[Any, int]:
        """Return the next value, or a RecordError instead, and the position of its end."""
        try:
            return DECODER.raw_decode(self.text, self.position)
        except RecordError as error:  # raised before the end was known
            return error, json.JSONDecoder().raw_decode(self.text, self.position)[1]

    def _is_cut(self, error: json.JSONDecodeError) -> bool:
        """Return True if the error may be caused by the end of the piece in memory."""
        return error.msg.startswith("Unterminated string") or error.pos + len("-Infinity") >= len(
            self.text.rstrip()
        )
