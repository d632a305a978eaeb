"""The files of a run's data as a checkpoint keeps them, and which of them have changed since."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_FILES = 1000
"""Files whose digests a checkpoint keeps: about 80 KB with their paths."""
DIGEST_CHARACTERS = 12
MAX_LINES = 8
SAME_FILES = (
    "no file has changed: tokenizer, template, an option or the files' order makes other rows "
    "of them"
)


def stored_files(digests: Mapping[str, str]) -> dict[str, Any]:
    """Return what a checkpoint keeps of the digests by path: those of the first MAX_FILES."""
    first = list(digests.items())[:MAX_FILES]
    files = {file: digest[:DIGEST_CHARACTERS] for file, digest in first}
    return {"files": files, "file_count": len(digests)}


def describe_changed_files(stored: Mapping[str, Any], digests: Mapping[str, str]) -> list[str]:
    """Return lines that name the files that are not as in a checkpoint.

    A file with another name and the same content has not changed. No lines where the checkpoint is
    of a version that kept no digests. stored: see `stored_files`.
    """
    if not stored.get("files") or not digests:
        return []
    then: dict[str, str] = stored["files"]
    now = {file: digest[:DIGEST_CHARACTERS] for file, digest in digests.items()}
    lines, new = _compare(then, now)
    not_compared = stored["file_count"] - len(then)
    if not not_compared:  # else files that are not in the list need not be new
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
    """Return lines on files that have changed or are missing, and the files that are new."""
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
    """Return {path then: path now} of files whose names, without folders, are in both once."""
    counts = [Counter(Path(file).name for file in files) for files in (gone, new)]
    by_name = {Path(file).name: file for file in new}
    names = {file: Path(file).name for file in gone}
    return {
        file: by_name[name]
        for file, name in names.items()
        if all(count[name] == 1 for count in counts)
    }
