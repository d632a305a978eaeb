"""Megatron's indexed data sets: tokens in NAME.bin, where they lie in NAME.idx."""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fsdp_trainer.config.data_files import stem
from fsdp_trainer.data.token_files.token_file import BadTokenFile, TokenFile, mapped_content

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
"""Magic bytes, version, code of the type, numbers of sequences and of document ends."""
TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Types of the tokens by code; 6 and 7 are floating-point numbers."""


def index_of(path: Path) -> Path | None:
    index = path.with_name(f"{stem(path)}.idx")
    return index if index.is_file() else None


def open_megatron_dataset(path: Path, content: np.ndarray, is_mapped: bool) -> TokenFile | None:
    """Return the file; None if there is no index beside it. Raises BadTokenFile."""
    index_file = index_of(path)
    if index_file is None:
        return None
    index = _read_index(index_file)
    sizes = index.lengths * index.dtype.itemsize
    firsts, total = np.cumsum(sizes) - sizes, int(sizes.sum())
    if np.any(index.lengths < 0) or np.any(index.pointers != firsts):
        raise BadTokenFile(f"{index_file} lists sequences that do not follow each other")
    if total != len(content):
        raise BadTokenFile(
            f"has {len(content):,} bytes, and its index needs {total:,}: one of them was cut off"
        )
    # a document is one or several sequences
    if not len(index.ends) or index.ends[0] or index.ends[-1] != len(firsts) or np.any(
        np.diff(index.ends) < 0
    ):  # fmt: skip
        raise BadTokenFile(f"{index_file} does not say where its documents end")
    begins = index.ends[:-1][np.diff(index.ends) > 0]
    if not len(begins):
        raise BadTokenFile(f"{index_file} does not say where its documents end")
    return TokenFile.of_documents(
        "Megatron's", content, is_mapped, index.dtype, firsts[begins],
        np.add.reduceat(sizes, begins),
    )  # fmt: skip


@dataclass(frozen=True)
class Index:
    dtype: np.dtype
    lengths: np.ndarray  # [sequences] int64: tokens
    pointers: np.ndarray  # [sequences] int64: first byte
    ends: np.ndarray  # [documents + 1] int64: first sequence of each document, from 0 on


def _read_index(file: Path) -> Index:
    content = mapped_content(file, None)
    if len(content) < HEADER.size or content[: len(MAGIC)].tobytes() != MAGIC:
        raise BadTokenFile(f"has an index that is not Megatron's: {file}")
    _, version, code, sequences, ends = HEADER.unpack(content[: HEADER.size].tobytes())
    if version != 1 or code not in TYPES:
        known = " ".join(map(str, TYPES))
        raise BadTokenFile(
            f"{file} has version {version} and type {code}; known are version 1 and types {known}"
        )
    expected = HEADER.size + sequences * (4 + 8) + ends * 8
    if len(content) not in (expected, expected + sequences):  # a mode for each sequence may follow
        raise BadTokenFile(
            f"{file} has {len(content):,} bytes instead of {expected:,}: it was cut off"
        )
    after = HEADER.size + 4 * sequences
    lengths = content[HEADER.size : after].view("<i4").astype(np.int64)
    pointers = content[after : after + 8 * sequences].view("<i8").astype(np.int64)
    stops = content[after + 8 * sequences : expected].view("<i8").astype(np.int64)
    return Index(np.dtype(TYPES[code]), lengths, pointers, stops)
