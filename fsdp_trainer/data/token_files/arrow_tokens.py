"""Rows of an Arrow file that hold tokens and nothing else, which stay where they lie in it.

`save_to_disk` of `datasets` writes such files.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fsdp_trainer.data.token_files.token_file import MappedTokens

TOKENS, LABELS = "input_ids", "labels"
MASKS = ("attention_mask", "loss_mask")
IGNORED = ("token_type_ids", "special_tokens_mask", "length")
KNOWN = {TOKENS, LABELS, *MASKS, *IGNORED}
"""Columns of a file of tokens; one with others is read as any table."""


Place = tuple[int, int] | None
"""Address and size of a mapped file; None for what is not mapped."""


def mapped_place(source: Any) -> Place:
    import pyarrow

    if not isinstance(source, pyarrow.MemoryMappedFile) or not source.size():
        return None
    source.seek(0)
    place = source.read_buffer(1).address, source.size()
    source.seek(0)
    return place


def rows_of(
    batch: Any, place: Place, values_of: Callable[[Any], Iterator[dict[str, Any] | None]]
) -> Iterator[dict[str, Any] | None]:
    """Yield the rows of a batch; tokens that are all learnt as MappedTokens; None: too large.

    place: of the file that holds the batch, see mapped_place. values_of: yields the other rows.
    """
    columns = _columns(batch) if place else None
    begin = _begin(columns[TOKENS][0], place) if columns and place else None
    if columns is None or begin is None:
        yield from values_of(batch)
        return
    tokens, edges = columns[TOKENS]
    for number in range(batch.num_rows):
        first, stop = int(edges[number]), int(edges[number + 1])
        own = tokens[first:stop]
        if _all_learnt(columns, number, own):
            form = f"datasets', {tokens.dtype.name}"
            mapped = MappedTokens(own, begin + first * tokens.itemsize, form)
            yield dict.fromkeys(batch.schema.names, mapped)
        else:
            yield from values_of(batch.slice(number, 1))


def _columns(batch: Any) -> dict[str, tuple[np.ndarray, np.ndarray]] | None:
    """Return the numbers of each decisive column, and the edges of its rows; None: not tokens."""
    import pyarrow

    if TOKENS not in batch.schema.names or not set(batch.schema.names) <= KNOWN:
        return None
    columns = {}
    for name in {TOKENS, LABELS, *MASKS} & set(batch.schema.names):
        column = batch.column(name)
        is_list = pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type)
        if not is_list or not pyarrow.types.is_integer(column.type.value_type):
            return None
        if column.null_count or column.values.null_count:
            return None
        values = column.values.to_numpy(zero_copy_only=True)
        columns[name] = values, column.offsets.to_numpy(zero_copy_only=True)
    return columns


def _begin(tokens: np.ndarray, place: tuple[int, int]) -> int | None:
    """Return the byte of the file at which an array begins; None if it is a copy."""
    address, size = place
    begin = tokens.__array_interface__["data"][0] - address
    return begin if 0 <= begin <= size - tokens.nbytes else None


def _all_learnt(
    columns: dict[str, tuple[np.ndarray, np.ndarray]], number: int, tokens: np.ndarray
) -> bool:
    """Return True for a row whose labels are its tokens, and whose masks leave nothing out."""
    for name, (values, edges) in columns.items():
        if name == TOKENS:
            continue
        own = values[int(edges[number]) : int(edges[number + 1])]
        expected = tokens if name == LABELS else 1
        if len(own) != len(tokens) or not np.array_equal(own, np.broadcast_to(expected, own.shape)):
            return False
    return len(tokens) > 0
