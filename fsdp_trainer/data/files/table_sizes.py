"""The memory that the rows of a table will take as values of Python."""

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from fsdp_trainer.base.unpacked import UNPACKED_EACH, UNPACKED_FREELY, check_unpacked


def size_of_rows(batch: Any) -> int:
    return batch.num_rows + sum(map(size_of_values, batch.columns))


def size_of_values(column: Any) -> int:
    """Return about how many bytes a column takes: a byte for each value, and its text or numbers.

    Unlike in the column's own buffers, what a dictionary or a view repeats counts each time.
    """
    import pyarrow
    from pyarrow import types

    if isinstance(column, pyarrow.ExtensionArray):
        column = column.storage
    kind, count = column.type, len(column)
    if types.is_struct(kind):
        return count + sum(map(size_of_values, column.flatten()))
    if types.is_map(kind):
        first, stop = column.offsets[0].as_py(), column.offsets[-1].as_py()
        return count + sum(size_of_values(part[first:stop]) for part in (column.keys, column.items))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return count + size_of_values(column.flatten())
    if types.is_dictionary(kind):
        return count + _size_of_references(column)
    return count + _size_of_texts(column)


def _size_of_texts(column: Any) -> int:
    """Return the size of a column's numbers or texts. Raises ArrowNotImplementedError."""
    import pyarrow
    from pyarrow import types

    kind = column.type
    if types.is_string_view(kind) or types.is_binary_view(kind):
        lengths = np.frombuffer(column.buffers()[1] or b"", "<i4").reshape(-1, 4)[:, 0]
        own = lengths[column.offset : column.offset + len(column)]
        return int(own[np.asarray(column.is_valid())].sum())
    if "view" in str(kind) or types.is_union(kind) or types.is_run_end_encoded(kind):
        raise pyarrow.ArrowNotImplementedError(f"a column of {kind} is not read: cast it")
    return column.nbytes


def _size_of_references(column: Any) -> int:
    from pyarrow import compute, types

    values, kind = column.dictionary, column.dictionary.type
    if types.is_nested(kind) or types.is_dictionary(kind):
        return len(column) * size_of_values(values)
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind)
            or types.is_large_binary(kind)):  # fmt: skip
        return len(column) * 16  # of a number
    return compute.sum(compute.take(compute.binary_length(values), column.indices)).as_py() or 0


LARGEST_CHECKED = 1 << 30
"""Bytes of the largest file whose batches are looked at before they are read."""
RECORDS, DICTIONARY = 3, 2
"""Kinds of Arrow's messages that hold columns: MessageHeader of its format/Message.fbs."""


def check_batches(source: Any, begin: int) -> None:
    """Raise TooLarge if compressed batches of an Arrow file would unpack to too much.

    pyarrow itself makes room for as much as each buffer says. source: a file of pyarrow, which is
    left at its start. begin: the byte of the first message.
    """
    import pyarrow

    if source.size() > LARGEST_CHECKED:
        return
    unpacked = 0
    source.seek(begin)
    try:
        for message in pyarrow.ipc.MessageReader.open_stream(source):
            unpacked += sum(unpacked_sizes(message.metadata.to_pybytes(), message.body))
            check_unpacked(unpacked, source.size())
    except (pyarrow.ArrowException, OSError, struct.error):
        pass  # reading the rows says what is wrong with it
    source.seek(0)


def unpacked_sizes(message: bytes, body: Any) -> Iterator[int]:
    """Yield the size that each compressed buffer of a message says it unpacks to.

    message: a Message of Arrow's format, encoded by FlatBuffers. Raises struct.error.
    """

    def number(form: str, at: int) -> int:
        return struct.unpack_from(form, message, at)[0]

    def field(table: int, index: int) -> int:
        """Return the place of a table's field; 0 if it has none."""
        names = table - number("<i", table)
        offset = number("<H", names + 4 + 2 * index) if 4 + 2 * index < number("<H", names) else 0
        return table + offset if offset else 0

    def inner(place: int) -> int:
        return place + number("<I", place)

    root = inner(0)
    kind, header = field(root, 1), field(root, 2)
    if not (kind and header) or message[kind] not in (RECORDS, DICTIONARY):
        return
    batch = inner(header)
    if message[kind] == DICTIONARY:
        batch = inner(field(batch, 1))
    buffers, is_compressed = field(batch, 2), field(batch, 3)
    if not (buffers and is_compressed):
        return
    listed = inner(buffers)
    for i in range(number("<I", listed)):
        offset, length = struct.unpack_from("<qq", message, listed + 4 + 16 * i)
        if length >= 8:  # -1: not compressed, because it would not have been smaller
            yield max(0, struct.unpack_from("<q", body, offset)[0])


def rows_at_once(about: Any, groups: range, most: int, size: int) -> int:
    """Return how many rows of a Parquet file are unpacked together: at most `most`.

    A dictionary repeats a value in each row without taking space in a file of `size` bytes. about:
    the file's metadata. Raises TooLarge.
    """
    parts = [about.row_group(i) for i in groups]
    check_unpacked(sum(part.num_rows for part in parts), size)
    largest = 1
    for part in parts:
        for column in map(part.column, range(part.num_columns)):
            if "DICTIONARY" in " ".join(column.encodings) and column.physical_type == "BYTE_ARRAY":
                largest = max(largest, column.total_uncompressed_size)
            else:
                check_unpacked(max(column.num_values, column.total_uncompressed_size), size)
    return max(1, min(most, 4 * max(UNPACKED_FREELY, UNPACKED_EACH * size) // largest))
