"""MosaicML's MDS: shards of samples, described by the index.json beside them."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_trainer.data.token_files.token_file import BadTokenFile, TokenFile, number_type

TOKEN_COLUMNS = ("input_ids", "tokens")
MASKS = ("labels", "attention_mask", "loss_mask")
VALUE_TYPES = {8: "<u1", 9: "<i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}
"""Types of an array whose encoding does not name one, by its first byte."""


def open_mosaic_shard(path: Path, content: np.ndarray, is_mapped: bool) -> TokenFile:
    """Return the file; raises BadTokenFile."""
    shard = _described(path)
    names, encodings, sizes = (shard[f"column_{what}"] for what in ("names", "encodings", "sizes"))
    column = next((name for name in TOKEN_COLUMNS if name in names), None)
    masks = [name for name in names if name in MASKS]
    if column is None or masks:
        held = " ".join(names)
        what = f"masks are not read from MDS ({' '.join(masks)})" if masks else "none is tokens"
        raise BadTokenFile(f"has the columns {held}: {what}. Read are {' or '.join(TOKEN_COLUMNS)}")
    encoding = encodings[names.index(column)]
    if encoding != "bytes" and not encoding.startswith("ndarray"):
        raise BadTokenFile(f"has {column} as {encoding}; read are bytes and ndarray")
    whole = shard["raw_data"]["bytes"]
    if len(content) != whole:
        raise BadTokenFile(f"has {len(content):,} bytes, and index.json says {whole:,}: it was"
                           " cut off")  # fmt: skip
    samples = int(content[:4].view("<u4")[0])
    offsets = content[4 : 8 + 4 * samples].view("<u4").astype(np.int64)
    begins, bytes_each = _values(content, offsets, names.index(column), sizes)
    dtype, header = _number_type(encoding, content, begins, bytes_each)
    return TokenFile(
        "MDS", content, is_mapped, dtype, begins + header, (bytes_each - header) // dtype.itemsize
    )


def _described(path: Path) -> dict[str, Any]:
    """Return what index.json says about a shard."""
    try:
        shards = json.loads((path.parent / "index.json").read_text(encoding="utf-8"))["shards"]
    except (OSError, ValueError, KeyError, TypeError):
        raise BadTokenFile("needs the index.json that MDS writes beside it") from None
    for shard in shards:
        parts = [shard.get("raw_data"), shard.get("zip_data")]
        if path.name in {Path(part["basename"]).name for part in parts if part}:
            if shard.get("format") == "mds" and shard.get("version") == 2:
                return shard
            raise BadTokenFile("is a shard of another format than MDS, version 2")
    raise BadTokenFile("is not listed in the index.json beside it")


def _values(
    content: np.ndarray, offsets: np.ndarray, column: int, sizes: list[int | None]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the first byte and the number of bytes of a column's value in each sample.

    A sample begins with the size (uint32) of each of its columns without a fixed size.
    """
    firsts, varying = offsets[:-1], 0
    header = 4 * sum(size is None for size in sizes)
    begins, bytes_each = firsts + header, np.zeros_like(firsts)
    for size in sizes[: column + 1]:
        begins = begins + bytes_each
        if size is None:
            places = (firsts + 4 * varying)[:, None] + np.arange(4)
            bytes_each = content[places].copy().view("<u4")[:, 0].astype(np.int64)
            varying += 1
        else:
            bytes_each = np.full_like(firsts, size)
    return begins, bytes_each


def _number_type(
    encoding: str, content: np.ndarray, begins: np.ndarray, bytes_each: np.ndarray
) -> tuple[np.dtype, np.ndarray | int]:
    """Return the type of the tokens, and the bytes before them in each value."""
    if not len(begins):
        return np.dtype("<i8"), 0
    if encoding == "bytes":
        first = int(begins[0])
        return number_type(content[first : first + int(bytes_each[0])]), 0
    _, _, stated = encoding.partition(":")
    name, _, shape = stated.partition(":")
    header: np.ndarray | int = 0
    if not name:
        codes = np.unique(content[begins])
        if len(codes) > 1 or int(codes[0]) not in VALUE_TYPES:
            raise BadTokenFile(f"has arrays of the types {codes.tolist()}, no tokens of one type")
        name, header = VALUE_TYPES[int(codes[0])], 1
    if not shape:  # the number of dimensions and the width of each, then the dimensions
        about = content[begins + header].astype(np.int64)
        if np.any(about >> 2 != 1):
            raise BadTokenFile("has arrays of several dimensions, no lists of tokens")
        header = header + 1 + (1 << (about & 3))
    dtype = np.dtype(name).newbyteorder("<")
    if dtype.kind not in "iu":
        raise BadTokenFile(f"has arrays of {dtype}, no tokens")
    return dtype, header
