"""How much memory the rows of a table take as values of Python, before they are made."""

from typing import Any

from fsdp_trainer.base.unpacked import UNPACKED_EACH, UNPACKED_FREELY, check_unpacked


def size_of_rows(batch: Any) -> int:
    """Return about how many bytes the rows of a batch take. Raises ArrowException."""
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
    if "view" in str(kind) or types.is_union(kind) or types.is_run_end_encoded(kind):
        raise pyarrow.ArrowNotImplementedError(f"a column of {kind} is not read: cast it")
    return count + column.nbytes


def _size_of_references(column: Any) -> int:
    """Return the size of a dictionary's values, each as often as the column has it."""
    from pyarrow import compute, types

    values, kind = column.dictionary, column.dictionary.type
    if types.is_nested(kind) or types.is_dictionary(kind):
        return len(column) * size_of_values(values)
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind)
            or types.is_large_binary(kind)):  # fmt: skip
        return len(column) * 16  # of a number
    return compute.sum(compute.take(compute.binary_length(values), column.indices)).as_py() or 0


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
