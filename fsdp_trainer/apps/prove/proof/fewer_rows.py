"""The first rows of large data in place of all of it: a proof trains ten steps."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fsdp_trainer.config.data_files import TOKEN_FILES, entries, is_url, kind
from fsdp_trainer.data.files.file_splits import read_records
from fsdp_trainer.data.files.quickstart_data import TASKS
from fsdp_trainer.data.files.remote_files import shown
from fsdp_trainer.data.files.sources import Record, find_sources

LARGE = 32 << 20
"""Bytes of an entry of data.path from which on only its first rows are read."""
ENOUGH, FILES = 4 << 20, 16
"""Bytes of the rows that are read, and the files that they are read from."""


def fewer_rows(path: Any, out: Path) -> tuple[list[str | dict[str, Any]], list[str]]:
    """Return data.path with the first rows of large entries in its place, and sentences on them.

    Both are empty if nothing is large. Entries whose rows cannot be written as JSON stay whole.
    """
    listed: list[str | dict[str, Any]] = []
    sentences: list[str] = []
    for number, entry in enumerate(entries(path)):
        files = [
            file for source in find_sources([asdict(entry)], "data.path") for file in source.files
        ]
        part = out / str(number)
        rows = write_first_rows(files, part) if is_large(files) else 0
        short = {**asdict(entry), "path": str(part)} if rows else asdict(entry)
        listed.append({name: value for name, value in short.items() if value is not None})
        if rows:
            sentences.append(f"{rows:,} rows of {shown(entry.path)}")
    return (listed, sentences) if sentences else ([], [])


def is_large(files: list[str]) -> bool:
    """Return True for files that need not be tokenized whole; remote ones would be copied first."""
    if any(file in TASKS or kind(file)[0] in TOKEN_FILES for file in files):
        return False
    return any(map(is_url, files)) or sum(map(os.path.getsize, files)) > LARGE


def write_first_rows(files: list[str], out: Path) -> int:
    """Write the first rows of files into a folder; return their number, 0 if that is impossible."""
    chosen = files[:: -(-len(files) // FILES)]
    count = 0
    out.mkdir(parents=True)
    for number, file in enumerate(chosen):
        name = Path(file).name.partition(".")[0]
        with open(out / f"{number:02}-{name}.jsonl", "w", encoding="utf-8") as opened:
            try:
                for line in first_lines(read_records(file), ENOUGH // len(chosen)):
                    opened.write(line)
                    count += 1
            except (TypeError, ValueError):  # such as bytes of images, or a row that is broken
                return 0
    return count


def first_lines(rows: Iterator[Record], size: int) -> Iterator[str]:
    """Yield rows as lines of JSON, up to a size. Raises ValueError for one that is broken."""
    for row in rows:
        if row.error:
            raise ValueError(row.error)
        line = json.dumps(row.columns, ensure_ascii=False) + "\n"
        yield line
        size -= len(line.encode())
        if size <= 0:
            return
