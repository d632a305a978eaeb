"""MosaicML's MDS: shards of samples, described by the index.json beside them."""

from pathlib import Path
from typing import Any

import numpy as np

from fsdp_trainer.data.token_files.shard_items import (
    item_edges,
    read_index,
    stated,
    values_of_items,
)
from fsdp_trainer.data.token_files.token_file import BadTokenFile, TokenFile, number_type

TOKEN_COLUMNS = ("input_ids", "tokens")
MASKS = ("labels", "attention_mask", "loss_mask")
VALUE_TYPES = {8: "<u1", 9: "<i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}
"""Types of an array whose encoding does not name one, by its first byte."""


def open_mosaic_shard(path: Path, content: np.ndarray, is_mapped: bool) -> TokenFile:
    shard = _described(path)
    names = stated(shard, "column_names", list, of=str)
    encodings = stated(shard, "column_encodings", list, of=str)
    sizes = stated(shard, "column_sizes", list, of=int | None)
    if not len(names) == len(encodings) == len(sizes):
        raise BadTokenFile("has columns without an encoding or a size in its index.json")
    column = next((name for name in TOKEN_COLUMNS if name in names), None)
    masks = [name for name in names if name in MASKS]
    if column is None or masks:
        held = " ".join(names)
        what = f"masks are not read from MDS ({' '.join(masks)})" if masks else "none is tokens"
        raise BadTokenFile(f"has the columns {held}: {what}. Read are {' or '.join(TOKEN_COLUMNS)}")
    encoding = encodings[names.index(column)]
    if encoding != "bytes" and not encoding.startswith("ndarray"):
        raise BadTokenFile(f"has {column} as {encoding}; read are bytes and ndarray")
    whole = stated(shard["raw_data"], "bytes", int)
    if len(content) != whole:
        raise BadTokenFile(f"has {len(content):,} bytes, and index.json says {whole:,}: it was"
                           " cut off")  # fmt: skip
    edges, samples = item_edges(content), stated(shard, "samples", int)
    if samples != len(edges) - 1:
        raise BadTokenFile(f"holds {len(edges) - 1:,} samples, and index.json says {samples:,}")
    begins, bytes_each = values_of_items(content, edges, sizes, names.index(column))
    dtype, header = _number_type(encoding, content, begins, bytes_each)
    return TokenFile.of_documents(
        "MDS", content, is_mapped, dtype, begins + header, bytes_each - header
    )


def _described(path: Path) -> dict[str, Any]:
    try:
        shards = stated(read_index(path), "shards", list, of=dict)
    except OSError:
        raise BadTokenFile("needs the index.json that MDS writes beside it") from None
    for shard in shards:
        parts = [stated(shard, "raw_data", dict), shard.get("zip_data") or {}]
        if path.name in {Path(stated(part, "basename", str)).name for part in parts if part}:
            if shard.get("format") == "mds" and shard.get("version") == 2:
                return shard
            raise BadTokenFile("is a shard of another format than MDS, version 2")
    raise BadTokenFile("is not listed in the index.json beside it")


def _number_type(
    encoding: str, content: np.ndarray, begins: np.ndarray, bytes_each: np.ndarray
) -> tuple[np.dtype, np.ndarray | int]:
    if not len(begins):
        return np.dtype("<i8"), 0
    if encoding == "bytes":
        first = int(begins[0])
        return number_type(content[first : first + int(bytes_each[0])]), 0
    _, _, meant = encoding.partition(":")
    name, _, shape = meant.partition(":")
    header: np.ndarray | int = 0
    if not name:
        codes = np.unique(_bytes_at(content, begins, bytes_each, 0))
        if len(codes) > 1 or int(codes[0]) not in VALUE_TYPES:
            raise BadTokenFile(f"has arrays of the types {codes.tolist()}, no tokens of one type")
        name, header = VALUE_TYPES[int(codes[0])], 1
    if not shape:  # the number of dimensions and the width of each, then the dimensions
        about = _bytes_at(content, begins, bytes_each, header).astype(np.int64)
        if np.any(about >> 2 != 1):
            raise BadTokenFile("has arrays of several dimensions, no lists of tokens")
        header = header + 1 + (1 << (about & 3))
    try:
        return np.dtype(name).newbyteorder("<"), header
    except TypeError:
        raise BadTokenFile(f"has arrays of {name!r}, no tokens") from None


def _bytes_at(
    content: np.ndarray, begins: np.ndarray, bytes_each: np.ndarray, place: np.ndarray | int
) -> np.ndarray:
    """Return one byte of each value. Raises BadTokenFile if a value is too short for it."""
    if np.any(bytes_each <= place):
        raise BadTokenFile("has arrays without a header: its index.json is wrong")
    return content[begins + place]
