"""Tables to rows, from CSV and all Arrow formats, with one batch of rows in memory at a time."""

import csv
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

from fsdp_trainer.base.unpacked import TooLarge, check_unpacked
from fsdp_trainer.data.files.row_limits import LONGEST, MOST_VALUES, TOO_LONG, TOO_MANY
from fsdp_trainer.data.files.table_sizes import check_batches, rows_at_once, size_of_rows
from fsdp_trainer.data.token_files.arrow_tokens import Place, mapped_place, rows_of

Record = tuple[int, dict[str, Any], str | None]
"""(number, columns, error) of a row; the number, from 1, is the line in CSV, else the row."""

BATCH = 256  # rows; few, since the rows of a pretraining set may be books


FIRST_MESSAGE = 8
"""The byte of an Arrow file at which a stream begins."""


class _CsvLines:
    """The lines of a CSV file. size, values: of those of the present row.

    Raises TooLarge.
    """

    def __init__(self, file: BinaryIO, delimiter: str):
        self._file, self._delimiter = file, delimiter.encode()
        self._encoding = "utf-8-sig"
        self.begin_row()

    def begin_row(self) -> None:
        """Count anew."""
        self.size = self.values = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._file.readline(LONGEST + 1)
        if not line:
            raise StopIteration
        self.size += len(line)
        self.values += 1 + line.count(self._delimiter)
        if self.size > LONGEST or self.values > MOST_VALUES:
            raise TooLarge(f"a row {TOO_LONG if self.size > LONGEST else TOO_MANY}")
        # bytes that are not UTF-8 become lone surrogates, which are detected in the row that holds
        # them
        text = line.decode(self._encoding, "surrogateescape")
        self._encoding = "utf-8"
        return text.replace("\r\n", "\n")


def read_csv(file: BinaryIO, delimiter: str) -> Iterator[Record]:
    """Yield the rows below a line of column names; report a broken quote where its row starts."""
    csv.field_size_limit(2**31 - 1)  # documents are longer than the module's 128 KiB
    lines = _CsvLines(file, delimiter)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    names: list[str] | None = None
    while True:
        start = reader.line_num + 1
        lines.begin_row()
        try:
            values = next(reader)
            text = "".join(values)
            text.encode()
            if "\0" in text:
                yield (
                    start,
                    {},
                    "holds a NUL byte, as a file does that a crash has cut off, or that is no text",
                )
                continue
        except StopIteration:
            return
        except UnicodeEncodeError:
            yield start, {}, "is not UTF-8. Convert the file:  iconv -f latin1 -t utf-8"
            continue
        except csv.Error as e:
            yield (
                start,
                {},
                "is not CSV"
                f" ({'a quote is not closed' if str(e) == 'unexpected end of data' else e})",
            )
            continue
        if not values:
            continue
        if names is None:
            names = values
        elif len(values) != len(names):
            yield (
                start,
                {},
                f"has {len(values)} values for {len(names)} columns ({', '.join(names)})",
            )
        else:
            yield start, dict(zip(names, values, strict=True)), None


def read_arrow(
    file: str | BinaryIO, suffix: str, start: int = 0, stop: int | None = None
) -> Iterator[Record]:
    """Yield the rows of a Parquet file, an Arrow file or an Arrow stream.

    `datasets` writes the latter two. start, stop: row groups of Parquet, or batches of an Arrow
    file.
    """
    import pyarrow

    number = 0
    try:
        for batch, place in (
            _parquet(file, start, stop) if suffix == ".parquet" else _arrow(file, start, stop)
        ):
            for first in range(0, batch.num_rows, BATCH):
                for columns in rows_of(batch.slice(first, BATCH), place):
                    number += 1
                    if columns is None:
                        yield number, {}, TOO_LONG
                        continue
                    # every struct of a column has the keys of all structs: keys that a row does not
                    # have are null
                    yield (
                        number,
                        {name: _without_nulls(value) for name, value in columns.items()},
                        None,
                    )
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as e:
        if isinstance(e, OSError) and e.errno:
            raise
        yield number + 1, {}, f"cannot be read from here on: {str(e).splitlines()[0]}"


def records_of_parts(file: str | BinaryIO, suffix: str) -> list[int]:
    """Return the number of rows in each row group or batch that can be read by itself.

    Empty for a stream, and for a file that cannot be read.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        if suffix == ".parquet":
            about = parquet.read_metadata(file)
            return [about.row_group(i).num_rows for i in range(about.num_row_groups)]
        with _opened(file) as source:
            if not _is_arrow_file(source):
                return []
            check_batches(source, FIRST_MESSAGE)
            reader = pyarrow.ipc.open_file(source)
            return [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]
    except (pyarrow.ArrowException, OSError, TooLarge):
        return []


def _parquet(file: str | BinaryIO, start: int, stop: int | None) -> Iterator[tuple[Any, Place]]:
    from pyarrow import parquet

    # without pre_buffer and with a buffer, column chunks are read piecewise, not a whole row group
    # at once
    with parquet.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False) as opened:
        groups, size = range(opened.num_row_groups)[start:stop], _size(file)
        rows, unpacked = rows_at_once(opened.metadata, groups, BATCH, size), 0
        for batch in opened.iter_batches(rows, row_groups=groups):
            unpacked += size_of_rows(batch)
            check_unpacked(unpacked, size)
            yield batch, None


def _arrow(file: str | BinaryIO, start: int, stop: int | None) -> Iterator[tuple[Any, Place]]:
    import pyarrow

    with _opened(file) as source:
        place, size, unpacked = mapped_place(source), source.size(), 0
        is_file = _is_arrow_file(source)
        check_batches(source, FIRST_MESSAGE if is_file else 0)
        if is_file:
            reader = pyarrow.ipc.open_file(source)
            numbers = range(reader.num_record_batches)[start:stop]
            batches = (reader.get_batch(i) for i in numbers)
        else:
            batches = iter(pyarrow.ipc.open_stream(source))
        for batch in batches:
            batch.validate(full=True)  # that all of it lies within its buffers
            unpacked += size_of_rows(batch)
            check_unpacked(unpacked, size)
            yield batch, place


def _size(file: str | BinaryIO) -> int:
    return os.path.getsize(file) if isinstance(file, str) else file.seek(0, os.SEEK_END)


def _opened(file: str | BinaryIO) -> Any:
    import pyarrow

    return pyarrow.memory_map(file) if isinstance(file, str) else pyarrow.PythonFile(file)


def _is_arrow_file(source: Any) -> bool:
    """Return True for an Arrow file, False for a stream."""
    magic = source.read(6)
    source.seek(0)
    return magic == b"ARROW1"


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
