"""The files of a run's data as recorded in a checkpoint, and changes to them since."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_FILES = 1000
"""Maximum number of digests in a checkpoint: about 80 KB with their paths."""
DIGEST_CHARACTERS = 12
MAX_LINES = 8
SAME_FILES = (
    "no file has changed: tokenizer, template, an option or the files' order makes other rows "
    "of them"
)


def stored_files(digests: Mapping[str, str]) -> dict[str, Any]:
    """Return the part of the digests, by path, that a checkpoint stores: the first MAX_FILES."""
    first = list(digests.items())[:MAX_FILES]
    files = {file: digest[:DIGEST_CHARACTERS] for file, digest in first}
    return {"files": files, "file_count": len(digests)}


def describe_changed_files(stored: Mapping[str, Any], digests: Mapping[str, str]) -> list[str]:
    """Return lines that name the files that differ from a checkpoint's.

    A file with another name and the same content counts as unchanged. Returns no lines for a
    checkpoint of a version that stored no digests. stored: see `stored_files`.
    """
    if not stored.get("files") or not digests:
        return []
    then: dict[str, str] = stored["files"]
    now = {file: digest[:DIGEST_CHARACTERS] for file, digest in digests.items()}
    lines, new = _compare(then, now)
    not_compared = stored["file_count"] - len(then)
    if not not_compared:  # otherwise files that are not in the list need not be new
        lines += [f"{file} is new" for file in new]
    elif stored["file_count"] != len(now):
        lines.append(f"there are {len(now):,} files, there were {stored['file_count']:,}")
    if len(lines) > MAX_LINES:
        lines = [*lines[:MAX_LINES], f"and {len(lines) - MAX_LINES:,} more files"]
    if not_compared:
        lines.append(
            f"{not_compared:,} files were not compared: a checkpoint keeps the digests of the "
            f"first {MAX_FILES:,}"
        )
    return lines or [SAME_FILES]


def _compare(then: Mapping[str, str], now: Mapping[str, str]) -> tuple[list[str], list[str]]:
    gone = {file: digest for file, digest in then.items() if file not in now}
    new = {file: digest for file, digest in now.items() if file not in then}
    renamed = set(gone.values()) & set(new.values())
    gone = {file: digest for file, digest in gone.items() if digest not in renamed}
    new = {file: digest for file, digest in new.items() if digest not in renamed}
    moved = moved_files(gone, new)
    changed = [file for file in now if then.get(file, now[file]) != now[file]]
    lines = [f"{file} has other content" for file in [*changed, *moved.values()]]
    lines += [f"{file} is left out" for file in gone if file not in moved]
    return lines, [file for file in new if file not in moved.values()]


def moved_files(gone: Mapping[str, str], new: Mapping[str, str]) -> dict[str, str]:
    """Return {old path: new path} of files whose base name occurs exactly once in both."""
    counts = [Counter(Path(file).name for file in files) for files in (gone, new)]
    by_name = {Path(file).name: file for file in new}
    names = {file: Path(file).name for file in gone}
    return {
        file: by_name[name]
        for file, name in names.items()
        if all(count[name] == 1 for count in counts)
    }
