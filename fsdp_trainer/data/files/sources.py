"""Sources of data and their files.

Also defines the records that `file_splits.py` reads from them, and the handling of unreadable ones.
"""

import hashlib
import json
import os
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any, TextIO

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.base.safe_text import without_secrets
from fsdp_trainer.config.data_files import (
    SHARD,
    Entry,
    data_files,
    entries,
    is_url,
    kind,
    place,
    stem,
    stray_texts,
    unread_files,
)
from fsdp_trainer.config.schema import Data
from fsdp_trainer.data.files import quickstart_data
from fsdp_trainer.data.files.remote_files import Say, fetch, list_files, nothing
from fsdp_trainer.data.token_files.known_token_files import companion
from fsdp_trainer.errors import Problem, UserError

SHOWN = 5
MOST_SOURCES = 16  # a folder with more files is a single source


class RecordError(ValueError):
    """Raised for a record that cannot be read; the message is the reason."""


@dataclass
class Record:
    """One record. error: reason why it could not be read."""

    columns: Json
    where: tuple[str, int]
    """File and line, from 1; for binary tables, file and row."""
    error: str | None = None


NO_ROWS = "the file holds no rows"


@dataclass
class Problems:
    """Collects rows that cannot be read.

    on_error: `fail` to collect the first few and raise them together, `skip` to count them.
    """

    on_error: str
    count: int = 0
    first: list[Problem] = field(default_factory=list)
    listed: TextIO | None = None
    """File for all problems, as JSON lines."""

    def add(self, where: tuple[str, int], reason: str) -> None:
        self.count += 1
        # a row can hold half a surrogate pair, but no file and no terminal can
        shown = without_secrets(reason.encode(errors="backslashreplace").decode())
        if len(self.first) < SHOWN:
            self.first.append(Problem(f"{where[0]}:{where[1]}", shown))
        if self.listed:
            print(
                json.dumps({"file": where[0], "line": where[1], "why": shown}, ensure_ascii=False),
                file=self.listed,
            )

    @property
    def will_raise(self) -> bool:
        return self.count > 0 and self.on_error == "fail"

    @property
    def is_enough(self) -> bool:
        """True if enough problems were collected to stop reading."""
        return self.will_raise and self.count >= SHOWN

    def raise_if_failing(self) -> None:
        """Raise a UserError with the collected rows, unless bad rows are to be skipped."""
        if self.will_raise:
            fix = "Fix them, or skip them with  data.on_error=skip"
            title = f"rows of the data cannot be read. {fix}"
            if {problem.reason for problem in self.first} == {NO_ROWS}:
                title = "files of the data are empty. Fill them, or leave them out of  data.path"
            raise UserError(title, self.first)


@dataclass
class Source:
    """A source, as in `loss_by_source`: an entry of a list of paths, or files of a single path."""

    name: str
    files: list[str]
    format: str | None = None
    """The format of this source, as in data.format; None for data.format itself."""
    fields: Json | None = None

    def columns(self, data: Data) -> tuple[str, Json | None]:
        return self.format or data.format, self.fields or data.fields


def find_sources(
    path: Any, key: str, cache: Path | None = None, say: Say = nothing, progress: Say = nothing
) -> list[Source]:
    """Return the sources of a path with their data files, in a fixed order.

    path: a file, a folder (searched recursively), a glob, a URL of any of these, a `demo:` name, or
    a list. cache: folder for copies of remote files, which then replace their URLs; None to keep
    the URLs. say, progress: called with messages on downloads.
    """
    paths = [entry.path for entry in entries(path)]
    if not paths:
        raise _bad(
            key,
            path,
            "a file, folder or glob, or a list of them, is needed. To try the trainer out:"
            f"  {key}=demo:backwards",
        )
    files_of: dict[str, list[str]] = {}
    copies: dict[str, str] = {}
    for p in paths:
        if is_url(p) and cache:
            copies |= (of_url := fetch(p, key, cache, say, progress))
            files_of.setdefault(place(p), []).extend(of_url)
        else:
            files_of.setdefault(place(p), []).extend(_files_of(p, key))
    sources = _name_sources(files_of, {place(entry.path): entry for entry in entries(path)}, key)
    return [
        replace(source, files=[copies.get(file, file) for file in source.files])
        for source in sources
    ]


def lines_on_folders(path: Any) -> list[str]:
    """Return lines on the folders of a path: files that are not read, and texts beside other data.

    The latter may be a licence or notes.
    """
    lines = []
    for entry in entries(path):
        for what, files in (
            ("files not read", unread_files(entry.path)),
            ("read as texts, beside other data", stray_texts(entry.path)),
        ):
            more = f" and {len(files) - SHOWN:,} more" * (len(files) > SHOWN)
            if files:
                lines.append(f"{entry.path}: {what}: {', '.join(files[:SHOWN])}{more}")
    return lines


def _name_sources(
    files_of: dict[str, list[str]], given: dict[str, Entry], key: str
) -> list[Source]:
    if len(files_of) > 1 or any(entry.name for entry in given.values()):
        names = [
            given[at].name or name
            for at, name in zip(files_of, _names(list(files_of)), strict=True)
        ]
        if len(set(names)) < len(names):
            raise _bad(
                key,
                names,
                "two sources have one name. Give each entry its own, as in  {path: a.jsonl,"
                " name: code}",
            )
        return [
            Source(name, files, given[at].format, given[at].fields)
            for name, (at, files) in zip(names, files_of.items(), strict=True)
        ]
    ((path, files),) = files_of.items()
    how = given[path].format, given[path].fields
    by_set: dict[str, list[str]] = {}
    for file in files:
        of_set = SHARD.sub("", stem(file))
        by_set.setdefault(
            place(file) if of_set == stem(file) else str(Path(place(file)).parent / of_set), []
        ).append(file)
    if len(by_set) > MOST_SOURCES:
        return [Source(stem(path), files, *how)]
    return [
        Source(name, files, *how)
        for name, files in zip(_names(list(by_set)), by_set.values(), strict=True)
    ]


def _names(paths: list[str]) -> list[str]:
    """Return the shortest end of each absolute path that no other path has.

    It has a suffix only if necessary, and no part of the folder that contains all paths, so that
    the same data in another place has the same names.
    """
    common = os.path.commonpath([Path(path).parent for path in paths])
    ends = [_ends(Path(path).relative_to(common)) for path in paths]
    count = Counter(end for of_one in ends for end in of_one)
    return [next((end for end in of_one if count[end] == 1), of_one[-1]) for of_one in ends]


def _ends(path: Path) -> list[str]:
    """Return possible names of a path, shortest first: d/a.txt → a, d/a, a.txt, d/a.txt."""
    folders = path.parts[:-1]
    ends = [
        "/".join((*folders[i:], name))
        for name in (stem(path), path.name)
        for i in range(len(folders), -1, -1)
    ]
    return list(dict.fromkeys(ends))


def _files_of(path: str, key: str) -> list[str]:
    if path in quickstart_data.TASKS:
        return [path]
    if path.startswith("demo:"):
        raise _bad(key, path, "there is  " + "  ".join(quickstart_data.TASKS))
    if is_url(path):
        return [file.url for file in list_files(path, key)]
    try:
        return data_files(str(Path(path).expanduser()))
    except ValueError as e:
        raise _bad(key, path, str(e)) from None


def content_hash(file: str, stopping: Event | None = None) -> str:
    """Return a hash of a file's content, independent of its name, so that a file can be moved.

    stopping: if another thread sets it, reading stops early.
    """
    if file in quickstart_data.TASKS:
        return hashlib.blake2b(
            json.dumps(quickstart_data.rows(file)).encode(), digest_size=16
        ).hexdigest()
    digest = hashlib.blake2b(repr(kind(file)).encode(), digest_size=16)
    try:
        if index := companion(file):
            digest.update(index.read_bytes())
        with open(file, "rb") as f:
            while (block := f.read(1 << 22)) and not (stopping and stopping.is_set()):
                digest.update(block)
    except OSError as error:
        raise UserError(
            "the data cannot be used", file, f"cannot be read: {error.strerror or error}"
        ) from None
    return digest.hexdigest()


def _bad(key: str, value: Any, reason: str) -> UserError:
    return UserError("the data cannot be used", f"{key}={value}", reason)
