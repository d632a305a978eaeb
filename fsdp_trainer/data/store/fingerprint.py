"""Fingerprints of components: hashes of everything that decides their tokens.

These are file contents, tokenizer, template, options and the version of the code.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from threading import Event
from typing import Any

from fsdp_trainer.data.files.sources import content_hash
from fsdp_trainer.data.token_files.known_token_files import companion

HASHES = "hashes.json"
POLL_SECONDS = 0.2
# a file that was changed just now may change again within one tick of its file system's clock
SETTLED_SECONDS = 2.0
TOKENS_VERSION = 3
"""Must be increased with every code change that alters the tokens or weights of a row, or the files
that hold them; a test compares them for a fixed corpus."""
LIBRARIES = ("tokenizers", "jinja2")
"""Packages whose versions affect the tokens too."""


@dataclass(frozen=True)
class Content:
    """The digest of a file, and the file's `units.stamp` when it was computed."""

    digest: str
    stamp: tuple[int, int] | None


def contents(
    files: Iterable[str], root: Path, tick: Callable[[], None] = lambda: None
) -> dict[str, Content]:
    """Return the digest and stamp of each file.

    A file whose size, times and inode have not changed since its last hash is not read again.
    """
    known = _read_hashes(root)
    marks = {file: _marks(file) for file in dict.fromkeys(files)}
    digests = {
        file: known[file][-1]
        for file, mark in marks.items()
        if mark and known.get(file, [None])[:-1] == mark
    }
    settled, stopping = (time.time() - SETTLED_SECONDS) * 1e9, Event()
    with ThreadPoolExecutor(8) as threads:
        hashed = {
            file: threads.submit(content_hash, file, stopping)
            for file in marks
            if file not in digests
        }
        try:
            while wait(hashed.values(), POLL_SECONDS).not_done:
                tick()
        finally:  # do not wait for the end of a large file after a stop
            stopping.set()
            threads.shutdown(cancel_futures=True)
    digests |= {file: one.result() for file, one in hashed.items()}
    new = {}
    for file in hashed:
        mark = marks[file]
        if mark and mark[2] < settled:
            new[file] = [*mark, digests[file]]
    if new:
        _write_hashes(root, _read_hashes(root) | new)
    return {
        file: Content(digests[file], (mark[0], mark[1]) if mark else None)
        for file, mark in marks.items()
    }


def _marks(file: str) -> list[Any] | None:
    """Return a file's size in bytes, mtime, ctime, inode and path; None if it is not a local file.

    `cp -p` and rsync can set mtime; nothing can set ctime.
    """
    try:
        about = os.stat(file)
        index = companion(file)
        described = [index.stat().st_mtime_ns, index.stat().st_ctime_ns] if index else []
    except OSError:  # not a local file
        return None
    times = [about.st_mtime_ns, about.st_ctime_ns]
    return [about.st_size, *times, about.st_ino, os.path.abspath(file), *described]


def _read_hashes(root: Path) -> dict[str, list[Any]]:
    try:
        hashes = json.loads((root / HASHES).read_text(encoding="utf-8"))
        return {file: entry for file, entry in hashes.items() if isinstance(entry, list)}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}


def _write_hashes(root: Path, hashes: dict[str, list[Any]]) -> None:
    aside = root / f".{HASHES}.{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(hashes), encoding="utf-8")
        os.replace(aside, root / HASHES)
    except OSError:  # not saved: the hashes are computed again
        with suppress(OSError):
            aside.unlink()


def fingerprint(parts: Any) -> str:
    made_by = [TOKENS_VERSION, [version(library) for library in LIBRARIES]]
    described = json.dumps([made_by, parts], sort_keys=True, default=str)
    return hashlib.blake2b(described.encode(), digest_size=10).hexdigest()
