"""JSON to rows; lists are read piece by piece, so that they need not fit into memory."""

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

from fsdp_trainer.base.json_files import DEEPEST, TOO_DEEP, is_deeper
from fsdp_trainer.data.files.row_limits import LONGEST, MOST_VALUES, TOO_MANY
from fsdp_trainer.data.files.sources import Record, RecordError
from fsdp_trainer.data.files.turns_and_rows import CHATS, is_turn
from fsdp_trainer.errors import UserError

CHUNK = 1 << 20  # bytes of a list that are read at once
LOST = re.compile("[\udc80-\udcff]")  # decoded form of bytes that are not UTF-8
FEW, SHOWN_MEMBERS = 100, 5
LISTS = (
    "is one object of several lists: {names}. Name one, written to a file of its own:\n"
    "jq -c '.[\"{first}\"][]' {file} > rows.jsonl"
)
OBJECTS = (
    "is one object of objects: {names}. Rows are a list, or one object a line:\n"
    "jq -c '.[]' {file} > rows.jsonl , of pandas  df.to_json('rows.jsonl', orient='records',"
    " lines=True)"
)
SPLIT = (
    "holds the names of columns and the rows apart, as pandas writes them with orient='split':\n"
    "df.to_json('rows.jsonl', orient='records', lines=True)"
)
SEQUENCE = re.compile(r"\n\}\s*\{")
"""Between two objects that are not elements of a list."""
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
    shown = f"is a JSON {type(value).__name__}, not an object with columns: {str(value)[:60]}"
    return Record({}, where, shown + _advice(value))


def _advice(value: Any) -> str:
    if isinstance(value, str):
        return '. Name what it is, as in  {"text": "…"}'
    if not isinstance(value, list):
        return ""
    if value and isinstance(value[0], dict) and not _is_turn(value[0]):
        return ". Write one object per line:  jq -c '.[]'"
    return '. Name what it is, as in  {"messages": […]}'


def _beyond(error: Exception) -> str:
    """Return an error text for JSON that Python cannot read: huge numbers or too deep nesting."""
    return (
        "is not JSON that can be read:"
        f" {'it ' + TOO_DEEP if isinstance(error, RecursionError) else error}"
    )


def are_lines(first: str, second: str, is_jsonl: bool) -> bool | None:
    """Return True if a file holds one object a line, by its first two lines that are not blank.

    None if it does so unless the second line belongs to the first object. is_jsonl: what its name
    says.
    """
    text = first.strip()
    if text.startswith("[") and not (second and first.endswith("\n")):
        return False  # one array, which need not fit into memory
    if has_too_many_values(text):
        return is_jsonl
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError as e:
        return _are_lines_below(text, e, second, is_jsonl)
    except (ValueError, RecursionError):
        return is_jsonl
    if text[end:].lstrip()[:1] in ("{", ",") and isinstance(value, dict):
        return False  # objects one after another
    return bool(second) or (is_jsonl and not _holds_rows(value))


def _holds_rows(value: Any) -> bool:
    if isinstance(value, dict):
        members = _members(value)
        return are_columns(members) or _is_split(members)
    return isinstance(value, list)


def _are_lines_below(
    first: str, error: json.JSONDecodeError, second: str, is_jsonl: bool
) -> bool | None:
    if first.startswith("["):
        return False
    is_in_text = error.msg.startswith("Unterminated string")
    if first.startswith("{") and error.pos >= len(first) - 1 and not is_in_text:
        return None if is_object(second) else False
    return is_jsonl or is_object(second)


def is_object(line: str) -> bool:
    return parse_object(line, ("", 1)).error is None


def _members(columns: dict[str, Any]) -> list["Member"]:
    return [
        Member(name, len(value), value[0] if value else None)
        if isinstance(value, list)
        else Member(name, None, value)
        for name, value in columns.items()
    ]


def begins_with_object(file: BinaryIO) -> bool:
    """Return True if a file begins with a whole object, whatever lines it is on."""
    try:
        return isinstance(JsonText(file).value(), dict)
    except (ValueError, RecursionError):
        return False


def read_values(file: BinaryIO, name: str) -> Iterator[Record]:
    """Yield the rows of a file that has not one object a line, as `_rows_of` finds them.

    file: must be seekable. Raises UserError for objects that hold no rows.
    """
    values = JsonText(file)
    try:
        if values.peek() not in ("[", "{"):
            yield Record({}, (name, 1), "holds neither an array of objects nor an object")
            return
        for value in _rows_of(values, name):
            where = (name, values.line)
            yield (
                Record({}, where, str(value))
                if isinstance(value, RecordError)
                else _record(value, where)
            )
    except json.JSONDecodeError as e:
        line = values.line_of(e.pos)
        yield Record(
            {},
            (name, line),
            f"is not JSON from here on: {_mistake(e)} at column {values.column_of(e.pos)}",
        )
    except (ValueError, RecursionError) as e:
        yield Record({}, (name, values.line_of(values.position)), _beyond(e))


def _rows_of(values: "JsonText", name: str) -> Iterator[Any]:
    """Yield the elements of an array, or of the only list of objects in an object.

    Else a row for each value of an object's lists of values, or objects one after another, whatever
    lines they are on.
    """
    if values.peek() == "[":
        yield from values.elements()
        values.position += 1
        if values.peek():
            text = "something follows the array; rows are one array, or one object a line"
            raise json.JSONDecodeError(text, values.text, values.position)
        return
    members = list[Member]()
    is_one = not SEQUENCE.search(values.text)
    if is_one:
        members = values.survey()
        is_one = not values.peek()
        values.restart()
    if not is_one:
        yield from values.objects()
    elif (member := _only_list(members)) is not None:
        values.go_to(member)
        yield from values.elements()
    elif are_columns(members) and not _is_split(members):
        columns = values.value()
        cells = zip(*columns.values(), strict=True)
        yield from (dict(zip(columns, row, strict=True)) for row in cells)
    else:
        _require_row(members, name)
        yield from values.objects()


def _only_list(members: Sequence["Member"]) -> str | None:
    """Return the name of the only list of an object, if its elements are rows; else None."""
    lists = [member for member in members if member.size is not None]
    if len(lists) != 1 or not (isinstance(lists[0].first, dict) or lists[0].size == 0):
        return None
    is_row = _is_turn(lists[0].first) or lists[0].name == "segments"
    return None if is_row else lists[0].name


def are_columns(members: Sequence["Member"]) -> bool:
    """Return True for an object of columns: all are lists as long, and not only of numbers."""
    sizes = {member.size for member in members}
    firsts = [member.first for member in members]
    is_row = any(map(_is_turn, firsts)) or all(isinstance(first, dict) for first in firsts)
    if len(members) == 1 and members[0].name in CHATS and isinstance(firsts[0], str):
        is_row = True  # a chat of plain texts
    has_texts = any(isinstance(first, str | list) for first in firsts)
    return len(sizes) == 1 and not sizes & {None, 0} and has_texts and not is_row


def _is_split(members: Sequence["Member"]) -> bool:
    """Return True for names of columns and rows apart, as pandas writes them with orient=split."""
    names = {member.name for member in members if member.size is not None}
    return names >= {"columns", "index", "data"}


def _require_row(members: Sequence["Member"], name: str) -> None:
    """Raise UserError for an object that holds several lists or objects of rows, or odd columns."""
    sizes, firsts = {member.size for member in members}, [member.first for member in members]
    shown = members[:SHOWN_MEMBERS]
    if len(members) < 2 or any(map(_is_turn, firsts)):
        return
    longest = max(members, key=lambda member: member.size or 0)
    names = {"names": " ".join(one.name for one in shown), "first": longest.name, "file": name}
    if _is_split(members):
        raise _unusable(name, SPLIT)
    if all(isinstance(first, dict) for first in firsts):
        if None not in sizes:
            raise _unusable(name, LISTS.format(**names))
        if sizes == {None} and set(firsts[0]).intersection(*firsts):
            raise _unusable(name, OBJECTS.format(**names))
    elif None not in sizes and all(isinstance(first, str) for first in firsts):
        lengths = ", ".join(f"{member.name} {member.size:,}" for member in shown)
        raise _unusable(name, f"has columns of different lengths: {lengths}. Make them equal")


def _unusable(name: str, reason: str) -> UserError:
    return UserError("the data cannot be used", f"{name}:1", reason)


def _is_turn(value: Any) -> bool:
    return isinstance(value, dict) and is_turn(value)


class Member(NamedTuple):
    """A value in an object.

    size: number of elements of a list, None for another value. first: the list's first element, or
    the value itself.
    """

    name: str
    size: int | None
    first: Any


class JsonText:
    """A position in a JSON text of which only a piece is in memory."""

    def __init__(self, file: BinaryIO):
        self.file = file
        self.restart()

    def restart(self) -> None:
        self.file.seek(0)
        self.text, self.position = "", 0
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

    def objects(self) -> Iterator[Any]:
        """Yield the values of the file one after another, or a RecordError for each unusable one.

        Commas between them are left out. After a mistake, it goes on with the next line that begins
        with a brace.
        """
        while self.peek():
            self._count()
            try:
                yield self.value()
                self.position += self.peek() == ","
            except json.JSONDecodeError as e:
                place = f"line {self.line_of(e.pos):,}, column {self.column_of(e.pos)}"
                yield RecordError(f"is not JSON: {_mistake(e)} at {place}")
                self._skip_to_object()
            except RecordError as e:
                yield e

    def _skip_to_object(self) -> None:
        """Go to the next line that begins with a brace, or to the end."""
        self.position += 1
        while (place := self.text.find("\n{", self.position)) < 0:
            self.position = max(self.position, len(self.text) - 1)
            if not self._more():
                self.position = len(self.text)
                return
        self.position = place

    def survey(self) -> list[Member]:
        """Return what is in the object that begins here, and go behind it."""
        members = list[Member]()
        for name in self._names():
            size, first = None, None
            if self.peek() == "[":
                size = 0
                for element in self.elements():
                    first, size = (first if size else element), size + 1
                self._expect("]")
            else:
                first = self.value()
                if len(members) >= FEW:  # of a file with an object for each row
                    first = members[0].first
            members.append(Member(name, size, first))
        self._expect("}")
        return members

    def go_to(self, name: str) -> None:
        for each in self._names():
            if each == name:
                return
            self.value()

    def _names(self) -> Iterator[str]:
        """Yield the names in the object that begins here; the caller reads the value of each."""
        self._expect("{")
        while self.peek() != "}":
            name = self.value()
            self._expect(":")
            yield name
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
                before = self.position
                if not self._is_cut(e):
                    raise
                if self._more():
                    continue
                raise json.JSONDecodeError(e.msg, self.text, e.pos - before) from None
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
