"""LitData's chunks: items of tokens, described by the index.json beside them."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_trainer.data.token_files.token_file import BadTokenFile, TokenFile

TOKEN_KEYS = ("input_ids", "tokens")
TORCH_TYPES = {11: "<u1", 12: "<i1", 13: "<i2", 14: "<i2", 15: "<i4", 16: "<i4", 17: "<i8",
               18: "<i8", 20: "<u2"}  # fmt: skip
NUMPY_TYPES = ("<i1", "<i2", "<i4", "<i8", "<u1", "<u2", "<u4", "<u8")
"""Types by LitData's numbers, for tensors and for arrays."""
RAW = ("no_header_tensor", "no_header_numpy")
"""Formats of a value of one dimension, which is stored without a header."""


def chunk_description(path: Path) -> dict[str, Any] | None:
    """Return what LitData's index.json beside a chunk says; None if it does not list the chunk."""
    try:
        index = json.loads((path.parent / "index.json").read_text(encoding="utf-8"))
        chunk = next(each for each in index["chunks"] if each["filename"] == path.name)
        return {**index["config"], "chunk": chunk}
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return None


def open_litdata_chunk(path: Path, content: np.ndarray, is_mapped: bool) -> TokenFile | None:
    """Return the file; None if it is no chunk of LitData. Raises BadTokenFile."""
    about = chunk_description(path)
    if about is None:
        return None
    if about.get("encryption"):
        raise BadTokenFile("is encrypted")
    if about.get("compression"):
        content, is_mapped = _decompressed(content, about), False
    leaf = _token_leaf(about)
    dtype = _number_type(about["data_format"][leaf])
    items = int(content[:4].view("<u4")[0])
    offsets = content[4 : 8 + 4 * items].view("<u4").astype(np.int64)
    if items != about["chunk"]["chunk_size"] or int(offsets[-1]) > len(content):
        raise BadTokenFile(
            f"holds {items:,} items that end at byte {int(offsets[-1]):,} of {len(content):,}, and"
            f" index.json says {about['chunk']['chunk_size']:,} items: it was cut off"
        )
    begins, sizes = offsets[:-1], np.diff(offsets)
    if about["chunk"].get("dim") is None:
        begins, sizes = _values(content, begins, leaf, len(about["data_format"]))
    return TokenFile("LitData's", content, is_mapped, dtype, begins, sizes // dtype.itemsize)


def _values(
    content: np.ndarray, begins: np.ndarray, leaf: int, leaves: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the first byte and the size of one value of each item.

    An item begins with the sizes (uint32) of all its values.
    """
    places = begins[:, None] + np.arange(4 * leaves)
    sizes = content[places].copy().view("<u4").astype(np.int64)
    return begins + 4 * leaves + sizes[:, :leaf].sum(1), sizes[:, leaf]


def _token_leaf(about: dict[str, Any]) -> int:
    """Return the index of the value that holds the tokens."""
    if len(about["data_format"]) == 1:
        return 0
    try:
        names = json.loads(json.loads(about["data_spec"])[1]["context"])
    except (KeyError, ValueError, TypeError, IndexError):
        names = []
    leaf = next((names.index(key) for key in TOKEN_KEYS if key in names), None)
    others = [name for name in names if name not in TOKEN_KEYS]
    if leaf is None or {"labels", "attention_mask", "loss_mask"} & set(others):
        raise BadTokenFile(
            f"has items of several values ({' '.join(map(str, names)) or 'without names'}); read"
            f" are {' or '.join(TOKEN_KEYS)}, and no masks"
        )
    return leaf


def _number_type(data_format: str) -> np.dtype:
    name, _, code = data_format.partition(":")
    types = dict(enumerate(NUMPY_TYPES)) if name == "no_header_numpy" else TORCH_TYPES
    if name not in RAW or int(code) not in types:
        raise BadTokenFile(f"has items of {data_format}; read are lists of integers")
    return np.dtype(types[int(code)])


def _decompressed(content: np.ndarray, about: dict[str, Any]) -> np.ndarray:
    by_chunks = about.get("compression_level") in (None, "chunk")
    if not (str(about["compression"]).startswith("zstd") and by_chunks):
        raise BadTokenFile("is compressed in another way than whole chunks by zstd")
    from io import BytesIO

    from fsdp_trainer.data.files.tables import open_zstd

    return np.frombuffer(open_zstd(BytesIO(content.tobytes())).read(), np.uint8)
