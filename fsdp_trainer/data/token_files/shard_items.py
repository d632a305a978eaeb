"""Shards of items, as MDS and LitData write them, which an index.json beside them describes.

A shard begins with the number of its items, the byte of each and the byte after the last. An item
begins with the sizes of those of its values that have no fixed size. All are uint32.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_trainer.data.token_files.token_file import BadTokenFile

INDEX = "index.json"


def read_index(path: Path) -> dict[str, Any]:
    """Return the index.json beside a shard. Raises BadTokenFile, and OSError if there is none."""
    try:
        index = json.loads((path.parent / INDEX).read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        index = None
    if not isinstance(index, dict):
        raise BadTokenFile(f"has an {INDEX} beside it that is no object of JSON")
    return index


def stated(about: Any, name: str, kind: type, of: Any = object) -> Any:
    """Return a value of index.json; a list of it has the types `of`. Raises BadTokenFile."""
    value = about.get(name) if isinstance(about, dict) else None
    parts = value if isinstance(value, list) else []
    if type(value) is not kind or not all(isinstance(part, of) for part in parts):
        raise BadTokenFile(
            f"has {name}: {json.dumps(value)[:60]} in its {INDEX}, where {kind.__name__} is needed"
        )
    return value


def item_edges(content: np.ndarray) -> np.ndarray:
    """Return the byte of each item and that after the last: [items + 1]. Raises BadTokenFile."""
    items = int(content[:4].view("<u4")[0]) if len(content) >= 4 else 0
    first = 8 + 4 * items
    if first > len(content):
        raise BadTokenFile(
            f"has {len(content):,} bytes, and its header lists {items:,} items: it was cut off"
        )
    edges = content[4:first].view("<u4").astype(np.int64)
    wrong = np.flatnonzero(np.diff(edges, prepend=first) < 0)
    if len(wrong):
        raise BadTokenFile(
            f"has item {wrong[0] + 1:,} at byte {edges[wrong[0]]:,}, before the end of what"
            " precedes it: its header is wrong"
        )
    if edges[-1] != len(content):
        raise BadTokenFile(
            f"holds {items:,} items that end at byte {edges[-1]:,} of {len(content):,}: it was cut"
            " off, or its header is wrong"
        )
    return edges


def values_of_items(
    content: np.ndarray, edges: np.ndarray, sizes: list[int | None], number: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the first byte and the number of bytes of one value of each item.

    sizes: bytes of each value of an item; None if its items state them. Raises BadTokenFile.
    """
    header = 4 * sizes.count(None)
    if any(size is not None and not 0 <= size <= len(content) for size in sizes) or np.any(
        np.diff(edges) < header
    ):
        raise BadTokenFile(f"has items that are smaller than {INDEX} says")
    place, varying, values = edges[:-1] + header, 0, []
    for size in sizes:
        bytes_each = np.full_like(place, size or 0)
        if size is None:
            places = (edges[:-1] + 4 * varying)[:, None] + np.arange(4)
            bytes_each = content[places].copy().view("<u4")[:, 0].astype(np.int64)
            varying += 1
        values.append((place, bytes_each))
        place = place + bytes_each
    wrong = np.flatnonzero(place != edges[1:])
    if len(wrong):
        raise BadTokenFile(
            f"has item {wrong[0] + 1:,} at byte {edges[wrong[0]]:,} with values that do not fill"
            " it: its header is wrong"
        )
    return values[number]
