"""Tables of all Arrow formats to rows, with one batch of rows in memory at a time."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any, BinaryIO

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.base.unpacked import TooLarge, check_unpacked
from fsdp_trainer.data.files.row_limits import LONGEST, TOO_LONG
from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.files.table_sizes import check_batches, rows_at_once, size_of_rows
from fsdp_trainer.data.token_files.arrow_tokens import Place, mapped_place, rows_of
from fsdp_trainer.errors import UserError

Record = tuple[int, dict[str, Any], str | None]
"""(number from 1, columns, error) of a row."""

BATCH = 256  # rows; few, since the rows of a pretraining set may be books


FIRST_MESSAGE = 8
"""The byte of an Arrow file at which a stream begins."""


def read_arrow(
    file: str | BinaryIO, name: str, suffix: str, start: int = 0, stop: int | None = None
) -> Iterator[Record]:
    """Yield the rows of a Parquet file, an Arrow file or an Arrow stream.

    `datasets` writes the latter two. start, stop: row groups of Parquet, or batches of an Arrow
    file. Raises UserError for a column that the file called `name` has twice.
    """
    import pyarrow

    number = 0
    try:
        for batch, place in (
            _parquet(file, start, stop) if suffix == ".parquet" else _arrow(file, start, stop)
        ):
            if not number and (twice := _named_twice(list(batch.schema))):
                reason = f"has the column {twice!r} twice. Rename or remove one"
                raise UserError("the data cannot be used", name, reason)
            for first in range(0, batch.num_rows, BATCH):
                for columns in rows_of(batch.slice(first, BATCH), place, _values_of):
                    number += 1
                    yield number, *_row(columns)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as e:
        if isinstance(e, OSError) and e.errno:
            raise
        yield number + 1, {}, f"cannot be read from here on: {str(e).splitlines()[0]}"


def _row(columns: Json | None) -> tuple[Json, str | None]:
    if columns is None:
        return {}, TOO_LONG
    # every struct of a column has the keys of all structs: keys that a row does not have are null
    try:
        return {name: _without_nulls(value) for name, value in columns.items()}, None
    except RecordError as error:
        return {}, str(error)


def _named_twice(fields: list[Any]) -> str | None:
    """Return a name that two columns have, or two fields of a struct; None if there is none."""
    counts = Counter(field.name for field in fields)
    again = [name for name, count in counts.items() if count > 1]
    inner = (
        _named_twice([field.type.field(i) for i in range(field.type.num_fields)])
        for field in fields
    )
    return again[0] if again else next(filter(None, inner), None)


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


def label_names(file: str) -> dict[str, list[str]]:
    """Return the names of the numbers in a table's columns of labels, as `datasets` writes them.

    Empty for files without such columns, and for those that are no tables.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        if file.endswith(".parquet"):
            schema = parquet.read_schema(file)
        elif file.endswith(".arrow"):
            with _opened(file) as source:
                opened = (
                    pyarrow.ipc.open_file if _is_arrow_file(source) else pyarrow.ipc.open_stream
                )
                schema = opened(source).schema
        else:
            return {}
        about = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = about["info"]["features"]
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError):
        return {}
    inner = {name: feature.get("feature", feature) for name, feature in features.items()}
    return {name: one["names"] for name, one in inner.items() if one.get("_type") == "ClassLabel"}


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


def _values_of(batch: Any) -> Iterator[Json | None]:
    """Yield the rows of a batch; None for one that is too large to be held."""
    if batch.num_rows > 1 and size_of_rows(batch) > LONGEST:
        for number in range(batch.num_rows):
            yield from _values_of(batch.slice(number, 1))
    elif batch.num_rows == 1 and size_of_rows(batch) > LONGEST:
        yield None
    else:
        yield from batch.to_pylist()


def _size(file: str | BinaryIO) -> int:
    return os.path.getsize(file) if isinstance(file, str) else file.seek(0, os.SEEK_END)


def _opened(file: str | BinaryIO) -> Any:
    import pyarrow

    return pyarrow.memory_map(file) if isinstance(file, str) else pyarrow.PythonFile(file)


def _is_arrow_file(source: Any) -> bool:
    magic = source.read(6)
    source.seek(0)
    return magic == b"ARROW1"


def _without_nulls(value: Any) -> Any:
    """Return a value without the nulls of structs, with objects for maps, and text for UTF-8."""
    if isinstance(value, dict):
        return {
            name: inner if name == FILE else _without_nulls(inner)
            for name, inner in value.items()
            if inner is not None
        }
    if isinstance(value, list):
        if value and isinstance(value[0], tuple):
            return _object(value)
        return [_without_nulls(inner) for inner in value]
    return _text(value) if isinstance(value, bytes) else value


FILE = "bytes"
"""The key of a struct that holds a file, such as an image."""


def _object(pairs: list[tuple[Any, Any]]) -> Json:
    """Return a value of Arrow's type map, which pyarrow gives as pairs, as an object.

    Raises RecordError for a key that is there twice.
    """
    content = {str(_text(key)): _without_nulls(value) for key, value in pairs}
    if len(content) < len(pairs):
        names = [str(_text(key)) for key, _ in pairs]
        raise RecordError(f"has {max(names, key=names.count)!r} twice in one map")
    return content


def _text(value: Any) -> Any:
    """Return the text of bytes that are UTF-8, as Spark and others store it; others unchanged."""
    try:
        return value.decode() if isinstance(value, bytes) and b"\0" not in value else value
    except UnicodeDecodeError:
        return value
