"""Files with nothing but tokens, perhaps after a header.

nanoGPT's `.bin` and OLMo's `.npy` have no header, llm.c's and modded-nanogpt's `.bin` have one.
"""

import math
from io import BytesIO
from pathlib import Path

import numpy as np

from fsdp_trainer.data.token_files.token_file import BadTokenFile, TokenFile, number_type

HEADER_INTS, HEADER_BYTES = 256, 1024
LLM_C: dict[tuple[int, int], np.dtype] = {
    (20240520, 1): np.dtype("<u2"),
    (20240801, 7): np.dtype("<u4"),
}
"""Type of the tokens by (magic number, version), the first two integers of llm.c's header. The
third is the number of tokens."""
NUMPY, WEIGHTS = b"\x93NUMPY", b"PK\x03\x04"
"""First bytes of an array that numpy saved, and of what torch saved."""


def open_flat_tokens(path: Path, content: np.ndarray, is_mapped: bool) -> TokenFile:
    head = content[:8].tobytes()
    if head.startswith(WEIGHTS):
        raise BadTokenFile("holds weights or other objects of torch, no tokens")
    if head.startswith(NUMPY):
        return _numpy_array(content, is_mapped)
    if len(content) >= HEADER_BYTES:
        header = content[:HEADER_BYTES].view("<i4")
        if int(header[0]) in {magic for magic, _ in LLM_C}:
            return _with_header(header, content, is_mapped)
    dtype = number_type(content)
    if len(content) % dtype.itemsize:
        raise BadTokenFile(
            f"has {len(content):,} bytes, no multiple of the {dtype.itemsize} of a token: it was"
            " cut off, or is no file of tokens"
        )
    return TokenFile("tokens without a header", content, is_mapped, dtype)


def _with_header(header: np.ndarray, content: np.ndarray, is_mapped: bool) -> TokenFile:
    magic, version, count = (int(number) for number in header[:3])
    dtype = LLM_C.get((magic, version))
    if dtype is None:
        known = " ".join(f"{number}/{one}" for number, one in LLM_C)
        raise BadTokenFile(f"has llm.c's header {magic}/{version}; known are {known}")
    if HEADER_BYTES + count * dtype.itemsize != len(content):
        held = (len(content) - HEADER_BYTES) // dtype.itemsize
        raise BadTokenFile(
            f"holds {held:,} tokens, and its header says {count:,}: it was cut off, or is still"
            " being written"
        )
    return TokenFile("llm.c's", content, is_mapped, dtype, first=HEADER_BYTES, separator_leads=True)


def _numpy_array(content: np.ndarray, is_mapped: bool) -> TokenFile:
    """Return an array that numpy saved: one dimension, or a document in each row."""
    opened = BytesIO(content[: 1 << 16].tobytes())
    readers = np.lib.format.read_array_header_1_0, np.lib.format.read_array_header_2_0
    try:
        version, _ = np.lib.format.read_magic(opened)
        shape, is_fortran, dtype = readers[version > 1](opened)
    except Exception as error:  # of any kind: Python's own parser reads a header
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadTokenFile(f"has no header that numpy reads: {reason}") from None
    is_list = len(shape) in (1, 2) and min(shape) >= 0 and not is_fortran
    if dtype.kind not in "iu" or not dtype.isnative or not is_list:
        raise BadTokenFile(f"holds an array of {dtype} and shape {shape}, no list of tokens")
    first, count = opened.tell(), math.prod(shape)
    if first + count * dtype.itemsize != len(content):
        raise BadTokenFile(
            f"has {len(content) - first:,} bytes of numbers, and its header says"
            f" {count * dtype.itemsize:,}: it was cut off"
        )
    if len(shape) == 1:
        return TokenFile("numpy's", content, is_mapped, dtype, first=first)
    if not count:
        raise BadTokenFile(f"holds an array of shape {shape}, no tokens")
    begins = first + np.arange(shape[0], dtype=np.int64) * shape[1] * dtype.itemsize
    counts = np.full(shape[0], shape[1], np.int64)
    return TokenFile("numpy's", content, is_mapped, dtype, begins, counts)
