"""LitData's chunks: items of tokens, described by the index.json beside them."""

import json
import re
from pathlib import Path

import numpy as np

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.data.token_files.shard_items import (
    INDEX,
    item_edges,
    read_index,
    stated,
    values_of_items,
)
from fsdp_trainer.data.token_files.token_file import BadTokenFile, TokenFile, mapped_content

NAME = re.compile(r"chunk-\d+-\d+\.")
TOKEN_KEYS = ("input_ids", "tokens")
TORCH_TYPES = {"11": "<u1", "12": "<i1", "13": "<i2", "14": "<i2", "15": "<i4", "16": "<i4",
               "17": "<i8", "18": "<i8", "20": "<u2"}  # fmt: skip
NUMPY_TYPES = {"0": "<i1", "1": "<i2", "2": "<i4", "3": "<i8", "4": "<u1", "5": "<u2",
               "6": "<u4", "7": "<u8"}  # fmt: skip
"""Types by LitData's numbers, for tensors and for arrays."""
TYPES = {"no_header_tensor": TORCH_TYPES, "no_header_numpy": NUMPY_TYPES}
"""By the format of a value of one dimension, which is stored without a header."""


def chunk_description(path: Path) -> Json | None:
    """Return what the index.json beside a chunk says; None if the file is no chunk of LitData.

    Raises BadTokenFile.
    """
    is_named = NAME.match(path.name)
    if not (path.parent / INDEX).is_file():
        if is_named:
            raise BadTokenFile(f"needs the {INDEX} that LitData writes beside it")
        return None
    try:
        index = read_index(path)
    except BadTokenFile:
        if is_named:
            raise
        return None  # another program's
    if "chunks" not in index and not is_named:
        return None
    chunks = stated(index, "chunks", list, of=dict)
    chunk = next((each for each in chunks if each.get("filename") == path.name), None)
    if chunk is None:
        raise BadTokenFile(f"is not listed in the {INDEX} of LitData beside it")
    return {**stated(index, "config", dict), "chunk": chunk}


def open_litdata_chunk(path: Path, content: np.ndarray, is_mapped: bool) -> TokenFile | None:
    """Return the file; None if it is no chunk of LitData. Raises BadTokenFile."""
    about = chunk_description(path)
    if about is None:
        return None
    if about.get("encryption"):
        raise BadTokenFile("is encrypted")
    if about.get("compression"):
        content, is_mapped = _decompressed(path, about), False
    formats = stated(about, "data_format", list, of=str)
    number = _token_value(about, len(formats))
    name, _, code = formats[number].partition(":")
    if code not in TYPES.get(name, {}):
        raise BadTokenFile(f"has items of {formats[number]}; read are lists of integers")
    edges, items = item_edges(content), stated(about["chunk"], "chunk_size", int)
    if items != len(edges) - 1:
        raise BadTokenFile(
            f"holds {len(edges) - 1:,} items, and {INDEX} says {items:,} items: it was cut off"
        )
    begins, sizes, dtype = edges[:-1], np.diff(edges), np.dtype(TYPES[name][code])
    if about["chunk"].get("dim") is None or len(formats) > 1:
        begins, sizes = values_of_items(content, edges, [None] * len(formats), number)
    elif (tokens := sizes.sum() // dtype.itemsize) != about["chunk"]["dim"]:
        raise BadTokenFile(
            f"holds {tokens:,} tokens, and {INDEX} says {about['chunk']['dim']}: it was cut off"
        )
    return TokenFile.of_documents("LitData's", content, is_mapped, dtype, begins, sizes)


def _token_value(about: Json, values: int) -> int:
    if values == 1:
        return 0
    try:
        names = json.loads(json.loads(about["data_spec"])[1]["context"])
        number = next(names.index(key) for key in TOKEN_KEYS if key in names)
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, StopIteration,
            RecursionError):  # fmt: skip
        names, number = [], values
    others = {str(name) for name in names} - {*TOKEN_KEYS}
    if number >= values or {"labels", "attention_mask", "loss_mask"} & others:
        raise BadTokenFile(
            f"has items of several values ({' '.join(map(str, names)) or 'without names'}); read"
            f" are {' or '.join(TOKEN_KEYS)}, and no masks"
        )
    return number


def _decompressed(path: Path, about: Json) -> np.ndarray:
    by_chunks = about.get("compression_level") in (None, "chunk")
    if not (str(about["compression"]).startswith("zstd") and by_chunks and path.suffix == ".bin"):
        raise BadTokenFile("is compressed in another way than whole chunks by zstd")
    return mapped_content(path, ".zst")
