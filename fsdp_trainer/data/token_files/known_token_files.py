"""The formats of token files, and the rows of a file."""

import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_trainer.base.own_code import place_of
from fsdp_trainer.config.data_files import is_url, kind, token_suffixes
from fsdp_trainer.config.parts.own_parts import usable_part
from fsdp_trainer.data.token_files.flat_tokens import open_flat_tokens
from fsdp_trainer.data.token_files.litdata_chunks import open_litdata_chunk
from fsdp_trainer.data.token_files.megatron_dataset import index_of, open_megatron_dataset
from fsdp_trainer.data.token_files.mosaic_shards import open_mosaic_shard
from fsdp_trainer.data.token_files.shard_items import INDEX
from fsdp_trainer.data.token_files.token_file import BadTokenFile, TokenFile, mapped_content

Open = Callable[[Path, np.ndarray, bool], TokenFile | None]
OPENERS: dict[str, tuple[Open, ...]] = {
    ".bin": (open_megatron_dataset, open_litdata_chunk, open_flat_tokens),
    ".npy": (open_flat_tokens,),
    ".mds": (open_mosaic_shard,),
}
"""What opens a file, by suffix; the first that knows the file. See `token_file.py`."""
ROW_COLUMN = "input_ids"


def is_token_file(file: str) -> bool:
    return kind(file)[0] in token_suffixes()


def companion(file: str) -> Path | None:
    """Return the file that describes a token file, or may; None if there is none."""
    path, suffix = Path(file), kind(file)[0]
    if is_url(file) or suffix not in (".bin", ".mds"):
        return None
    index = index_of(path) or path.parent / INDEX
    return index if index.is_file() else None


def open_token_file(file: str) -> TokenFile:
    if is_url(file):
        raise BadTokenFile("is remote, and tokens are mapped from a local disk: copy it first")
    index = companion(file)
    return _opened(file, tuple(os.stat(each).st_mtime_ns for each in (file, index) if each))


@lru_cache(maxsize=64)
def _opened(file: str, changed: tuple[int, ...]) -> TokenFile:
    path, (suffix, compression) = Path(file), kind(file)
    content = mapped_content(path, compression)
    if not len(content):
        raise BadTokenFile("is empty")
    for opens in OPENERS.get(suffix) or [_own(suffix[1:])]:
        opened = opens(path, content, compression is None)
        if opened is not None:
            return opened
    raise BadTokenFile("is of no known format")


def _own(name: str) -> Open:
    """Return what opens files of a suffix of the user's own; it fails as ours do."""

    def opens(path: Path, content: np.ndarray, is_mapped: bool) -> TokenFile | None:
        try:
            opened: TokenFile | None = usable_part("token_file", name)(path, content, is_mapped)
        except BadTokenFile:
            raise
        except Exception as error:
            reason = f"cannot be read: {type(error).__name__}: {error}{place_of(error)}"
            raise BadTokenFile(reason) from None
        return opened

    return opens


def token_edges(file: str, bytes_each: int) -> list[int]:
    """Return where the parts of a token file begin; [0] if it cannot be read."""
    try:
        return open_token_file(file).edges(bytes_each)
    except (ValueError, OSError):  # reading it tells why
        return [0]


def token_rows(
    file: str, start: int, stop: int | None, separator: int | None
) -> Iterator[tuple[int, dict[str, Any], str | None]]:
    """Yield (number, columns, error) of the documents that begin in a part of a token file.

    The number is that of the document, or of its first token if the format lists no documents.
    """
    try:
        opened = open_token_file(file)
    except BadTokenFile as error:
        yield 1, {}, str(error)
        return
    for number, tokens in opened.documents(start, stop, separator):
        yield number, {ROW_COLUMN: tokens}, None
