"""CSV to rows, with one row in memory at a time."""

import csv
import re
from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, BinaryIO

from fsdp_trainer.base.unpacked import TooLarge
from fsdp_trainer.data.files.row_limits import LONGEST, MOST_VALUES, TOO_LONG, TOO_MANY
from fsdp_trainer.errors import UserError

SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
EXCELS = re.compile(r'\s*"?sep=(.)"?\1*\s*', re.IGNORECASE)
"""The first line that Excel writes and reads: the separator of the others, and of empty cells."""
SAMPLE = 20  # rows below the names that are looked at to find the separator


class _Lines:
    """The lines of a CSV file. number: of the last line, from 1. row: lines of the present row.

    Raises TooLarge.
    """

    def __init__(self, file: BinaryIO, name: str, usual: str):
        """usual: the separator of such files."""
        self._file, self._again = file, deque[str]()
        self._encoding = "utf-8-sig"
        self.delimiter, self.number = usual, 0
        self.begin_row()
        self.delimiter = self._separator(name)
        self.begin_row()

    def begin_row(self) -> None:
        self.row: list[str] = []
        self._size = self._values = 0

    def put_back(self, lines: list[str]) -> None:
        """Give these lines, the last ones, once more."""
        self._again.extendleft(reversed(lines))
        self.number -= len(lines)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._again.popleft() if self._again else self._read()
        if not line:
            raise StopIteration
        self.number += 1
        self.row.append(line)
        self._size += len(line)
        self._values += 1 + line.count(self.delimiter)
        if self._size > LONGEST or self._values > MOST_VALUES:
            raise TooLarge(f"a row {TOO_LONG if self._size > LONGEST else TOO_MANY}")
        return line

    def _read(self) -> str:
        line = self._file.readline(LONGEST + 1)
        # bytes that are not UTF-8 become lone surrogates, which are detected in the row that holds
        # them
        text = line.decode(self._encoding, "surrogateescape")
        self._encoding = "utf-8"
        return text.replace("\r\n", "\n")

    def _separator(self, name: str) -> str:
        """Return the separator of the file, named in its first line or found in its first rows.

        Another one than the usual is only looked for if that one does not occur in the line of
        names. Raises UserError if it is not certain.
        """
        head = [*islice(self, 1)]
        if head and (of_excel := EXCELS.fullmatch(head[0])):
            return of_excel[1]
        while head and not head[-1].strip() and (following := [*islice(self, 1)]):
            head += following
        place = f"{name}:{self.number}"
        sample = [*head[-1:], *islice(self, SAMPLE)]
        self.put_back(head[:-1] + sample)
        return _separator_of(sample, self.delimiter, place) if sample else self.delimiter


def read_csv(
    file: BinaryIO, name: str, delimiter: str
) -> Iterator[tuple[int, dict[str, Any], str | None]]:
    """Yield (line, columns, error) of the rows below a line of column names.

    delimiter: the usual one of such files. Raises UserError for names that cannot be used.
    """
    csv.field_size_limit(2**31 - 1)  # documents are longer than the module's 128 KiB
    lines = _Lines(file, name, delimiter)
    reader = csv.reader(lines, delimiter=lines.delimiter, strict=True)
    names: list[str] | None = None
    while True:
        start = lines.number + 1
        lines.begin_row()
        try:
            values = next(reader)
            error = _not_text("".join(values))
        except StopIteration:
            return
        except csv.Error as e:
            below = lines.row[1:]
            values, error = [], f"is not CSV ({_mistake(e, len(below))})"
            if names and _counts(below[:SAMPLE], lines.delimiter) == {len(names)} != {1}:
                lines.put_back(below)  # a quote is wrong, and these are rows
        if error:
            yield start, {}, error
        elif not values:
            continue
        elif names is None:
            names = _column_names(values, f"{name}:{start}")
        elif len(values) != len(names):
            yield start, {}, _wrong_number(len(values), names, lines.delimiter)
        else:
            yield start, dict(zip(names, values, strict=True)), None


def _separator_of(sample: list[str], usual: str, place: str) -> str:
    """Return the separator of a line of names and some rows. Raises UserError if in doubt."""
    others = [one for one in SEPARATORS if one in sample[0] and one != usual]
    if not others or len(next(csv.reader(sample[:1], delimiter=usual))) > 1:
        return usual
    certain = [one for one in others if _is_table(sample, one)]
    if len(certain) == 1:
        return certain[0]
    named = " or ".join(SEPARATORS[one] for one in certain or others)
    first = f"sep={(certain or others)[0]}"
    reason = (
        f"has no {SEPARATORS[usual]} in the line of names, and it is not certain that {named}"
        f" separate its columns.\nWrite a first line that says so:  {first}  or, for a single"
        f" column,  sep={usual}"
    )
    raise UserError("the data cannot be used", place, reason)


def _is_table(sample: list[str], delimiter: str) -> bool:
    counts = _counts(sample, delimiter, is_cut=len(sample) > SAMPLE)
    return len(counts) == 1 and counts != {1}


def _counts(sample: list[str], delimiter: str, is_cut: bool = False) -> set[int]:
    """Return the numbers of values of some rows. is_cut: the last one may go on below."""
    rows = [row for row in csv.reader(sample, delimiter=delimiter) if row]
    return {len(row) for row in (rows[:-1] if is_cut and len(rows) > 1 else rows)}


def _column_names(values: list[str], where: str) -> list[str]:
    """Return the names of the columns; those without one are numbered, as in pandas.

    Raises UserError for a name that two columns have.
    """
    counts = Counter(value.strip() for value in values if value.strip())
    again = [value for value, count in counts.items() if count > 1]
    if again:
        reason = f"has {again[0]!r} twice among the names of its columns. Rename or remove one"
        raise UserError("the data cannot be used", where, reason)
    return [value if value.strip() else f"Unnamed: {place}" for place, value in enumerate(values)]


def _not_text(text: str) -> str | None:
    if "\0" in text:
        return "holds a NUL byte, as a file does that a crash has cut off, or that is no text"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is not UTF-8. Convert the file:  iconv -f latin1 -t utf-8"
    return None


def _mistake(error: csv.Error, below: int) -> str:
    """Return what is wrong. below: lines that the row takes in after its first."""
    text = str(error)
    if text == "unexpected end of data":
        text = "a quote is not closed"
    if text.startswith("new-line character"):
        return "its lines end in carriage returns. Convert the file:  tr '\\r' '\\n'"
    if "expected after" in text:
        text += ": quotes within a value in quotes are written twice"
    return f"{text}; the row goes on for {below:,} more lines" if below > 1 else text


def _wrong_number(count: int, names: list[str], delimiter: str) -> str:
    values = f"has {count} value{'s' * (count != 1)} for {len(names)} column"
    text = f"{values}{'s' * (len(names) != 1)} ({', '.join(names)})"
    if count < len(names):
        return text
    return f"{text}. A value with {SEPARATORS.get(delimiter, repr(delimiter))} needs quotes"
