"""The files of a data path, known by their names before any is opened.

A mistake is answered before torch is imported.
"""

import glob
import gzip
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from fsdp_trainer.config.schema import FORMATS, key

JSON, TEXT, CSV, ARROW = (
    (".json", ".jsonl", ".ndjson"),
    (".txt", ".text", ".md"),
    (".csv", ".tsv"),
    (".parquet", ".arrow", ".feather"),
)
KINDS, COMPRESSED = JSON + TEXT + CSV + ARROW, (".gz", ".zst")
COMPRESSIONS = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst"}
MAGIC = {b"PAR1": ".parquet", b"ARROW1": ".arrow", b"{": ".jsonl", b"[": ".json"}
# descriptions of data sets by `datasets` and the hub, and files of tokenizers and models: no data
DESCRIPTIONS = (
    "readme.md", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt",
    "config.json", "generation_config.json", "model.safetensors.index.json",
)  # fmt: skip

SHARD = re.compile(r"[-_.]?\d+-of-\d+$")  # train-00000-of-00004 belongs to train
HELD_OUT = ("test", "validation", "valid", "val", "dev", "eval")


@dataclass(frozen=True)
class Entry:
    """One of the paths of a list.

    With a weight or a repeat in any of them the list is a mixture: see data/mixture.py.
    """

    path: str = key(None, "a file, folder, glob or URL")
    name: str | None = key(None, "what the records of a run call it; null: its path tells")
    weight: float | None = key(
        None, "its share of the tokens, next to the others' weights", above=0
    )
    repeat: float | None = key(
        None, "how often an epoch holds it: 2 is twice, 0.5 every other half, 0 never", minimum=0
    )
    format: str | None = key(
        None, "how its rows are read; null: as data.format says", choices=FORMATS
    )
    fields: dict[str, Any] | None = key(
        None, "which of its columns mean what; null: as data.fields says"
    )


def entries(path: Any) -> list[Entry]:
    """The entries of data.path or data.validation, in order; [] for null and for a share."""
    listed = path if isinstance(path, list) else [path] if isinstance(path, str) else []
    return [Entry(**item) if isinstance(item, dict) else Entry(item) for item in listed]


def is_mixture(path: Any) -> bool:
    """Return True if the entries stay separate through training, not packed together."""
    return any(entry.weight is not None or entry.repeat is not None for entry in entries(path))


def is_url(path: str) -> bool:
    """Return True for the address of a remote file: s3://bucket/a.jsonl."""
    return "://" in path


def place(path: str) -> str:
    """A file's place as a path: absolute, or the host and path of a URL."""
    if not is_url(path):
        return os.path.abspath(Path(path).expanduser())
    url = urlsplit(path)
    parts = [url.netloc.rpartition("@")[2], *unquote(url.path).split("/")]
    return "/".join(["", *filter(None, parts)])


def kind(file: str | Path) -> tuple[str, str | None]:
    """(suffix, compression) of a file: of chats.jsonl.gz (".jsonl", ".gz").

    Where the name has no known suffix, the first bytes decide.
    """
    path = Path(place(str(file)) if is_url(str(file)) else file)
    ending = path.suffix.lower()
    by_name = (_suffix(path.name), ending if ending in COMPRESSED else None)
    if by_name[0] in KINDS or not path.is_file():
        return by_name
    return _kind_by_content(path) or by_name


def _suffix(name: str) -> str:
    """The suffix of a name without that of its compression."""
    path = Path(name)
    return (Path(path.stem) if path.suffix.lower() in COMPRESSED else path).suffix.lower()


def _kind_by_content(path: Path) -> tuple[str, str | None] | None:
    """The kind by the first bytes; None if unknown: text without JSON could be anything."""
    with open(path, "rb") as file:
        head = file.read(64)
    compression = _starting(head, COMPRESSIONS)
    if compression == ".gz":
        with gzip.open(path) as file:
            head = file.read(64)
    suffix = _starting(head.removeprefix(b"\xef\xbb\xbf").lstrip(), MAGIC)
    return (suffix, compression) if suffix and compression != ".zst" else None


def _starting(head: bytes, names: dict[bytes, str]) -> str | None:
    """The name of the first bytes that `head` starts with."""
    return next((name for magic, name in names.items() if head.startswith(magic)), None)


def stem(path: str | Path) -> str:
    """The name without the suffixes that tell how to read it."""
    name, (suffix, compression) = Path(place(str(path))).name, kind(path)
    ending = (suffix if suffix in KINDS else "") + (compression or "")
    has_ending = ending and name.lower().endswith(ending) and len(name) > len(ending)
    return name[: -len(ending)] if has_ending else name


def data_files(path: str) -> list[str]:
    """Data files of a file, a folder with all below it, or a glob, sorted.

    Raises ValueError with the reason if there are none, or if they cannot be read together.
    """
    if Path(path).is_dir():
        files = _files_of_folder(path)
    elif Path(path).is_file():
        files = [path]
    else:
        files = _files_of_glob(path)
    for file in files:
        if not os.path.exists(file):
            raise ValueError(
                f"{file} is a link that leads nowhere, or in a circle. Remove it, or name the"
                " files to read"
            )
        if not os.access(file, os.R_OK):
            raise ValueError(f"{file} may not be read by this user:  chmod +r '{file}'")
    return choose_files(files, path)


def _files_of_folder(path: str) -> list[str]:
    """Data files below a folder. Raises ValueError if `datasets` wrote several splits there."""
    splits = Path(path) / "dataset_dict.json"
    try:
        content = json.loads(splits.read_text()) if splits.is_file() else {}
    except ValueError as error:
        raise ValueError(
            f"{splits} is not JSON: {error}. Mend it, or name the files to read"
        ) from None
    names = content.get("splits", []) if isinstance(content, dict) else []
    if len(names) > 1:
        raise ValueError(
            f"holds several splits: {' '.join(names)}. Name the one to read:"
            f"  {Path(path) / names[0]}"
        )
    files = (file for file in _walk(path) if is_data(os.path.relpath(file, path)))
    return sorted(files, key=Path)


def _files_of_glob(path: str) -> list[str]:
    """Data files that a glob matches. Raises ValueError without any."""
    files = []
    for match in sorted(set(_matches(path))):
        if not Path(match).is_dir():
            files.append(match)
        elif is_data(Path(match).name):  # a data set in parts: all.parquet/part-0.parquet
            files += data_files(match)
    if not files and has_magic(path):
        raise ValueError(f"no file matches (looked in {Path.cwd()})")
    if not files:
        raise ValueError("there is no such file or folder")
    return list(dict.fromkeys(files))


def choose_files(files: list[str], path: str) -> list[str]:
    """The files that are read of those at a path: all of them.

    Raises ValueError if they should not be read together, or cannot be.
    """
    if not files:
        raise ValueError(f"no file in this folder ends in {' '.join(KINDS)}")
    if not has_magic(path):
        _check_splits(files)
    if len(files) == 1 and is_url(path):  # its kind is known once it is here
        return files
    for file in files:
        if kind(file)[0] not in KINDS:
            raise ValueError(
                f"{Path(file).name} is no kind of file that is read. Convert it to one of"
                f"  {' '.join(KINDS)}, also with {' or '.join(COMPRESSED)}"
            )
    return files


def has_magic(path: str) -> bool:
    """Return True if a path is a glob; a question mark in a web address does not make it one."""
    if path.startswith(("http://", "https://")):
        path = path.partition("?")[0]
    return glob.has_magic(path)


def _matches(path: str) -> Iterator[str]:
    """The matches of a glob; unlike Python's own, `**` follows a circle of links only once."""
    before, *rest = re.split(r"(?:^|(?<=/))\*\*(?:/|$)", path, maxsplit=1)
    if not rest:
        yield from glob.glob(path)
        return
    for base in glob.glob(before) if before else ["."]:
        for folder in _folders(base):
            for match in _matches(f"{glob.escape(folder)}/{rest[0] or '*'}"):
                yield match.removeprefix("./")


def _walk(folder: str) -> Iterator[str]:
    """Files of a folder and of those within it."""
    return (
        entry.path
        for within in _folders(folder)
        for entry in os.scandir(within)
        if not os.path.isdir(entry.path)
    )


def _folders(folder: str, above: frozenset[str] = frozenset()) -> Iterator[str]:
    """A folder and those within it; a link back to a folder above is not followed."""
    real = os.path.realpath(folder)
    if real in above:
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except NotADirectoryError:
        return
    except PermissionError:
        raise ValueError(
            f"{folder} may not be searched by this user:  chmod +rx '{folder}'"
        ) from None
    yield folder
    for entry in entries:
        if os.path.isdir(entry.path) and not entry.name.startswith("."):
            yield from _folders(entry.path, above | {real})


def _check_splits(files: list[str]) -> None:
    """Raise ValueError for several splits, one of which is not to be trained on.

    The hub names them train-00000-of-00001.parquet and test-00000-of-00001.parquet.
    """
    splits: dict[str, set[str]] = {}
    for file in files:
        if kind(file)[0] not in TEXT:
            splits.setdefault(file.rpartition("/")[0], set()).add(SHARD.sub("", stem(file)))
    for folder, names in splits.items():
        others = sorted(names.intersection(HELD_OUT))
        if "train" in names and others:
            above = folder.rpartition("/")[0]
            siblings = sorted(
                other for other in splits if other.rpartition("/")[0] == above and other != folder
            )
            alike = f"\nLike it: {' '.join(siblings)}" if siblings else ""
            raise ValueError(
                f"holds several splits: train {' '.join(others)}. Name the one to read:"
                f"  '{folder}/train*'{alike}"
            )


def needs_arrow(file: str) -> bool:
    """Return True if pyarrow is needed to read the file."""
    suffix, compression = kind(file)
    return suffix in ARROW or (compression == ".zst" and sys.version_info < (3, 14))


def is_data(path: str) -> bool:
    """Return True if a file of a folder is to be read, by its path from there.

    Hidden files are not, nor those that describe the others.
    """
    parts = path.split("/")
    return (
        _suffix(parts[-1]) in KINDS
        and parts[-1].lower() not in DESCRIPTIONS
        and not any(part.startswith(".") for part in parts)
    )


PACKAGES = {
    "s3": ("s3fs", "remote"), "gs": ("gcsfs", "remote"), "gcs": ("gcsfs", "remote"),
    "https": ("aiohttp", "remote"), "http": ("aiohttp", "remote"), "hf": ("huggingface_hub", "hub"),
}  # fmt: skip
"""The package that reads a kind of URL, and the extra that installs it."""


def why_url_unusable(url: str) -> str | None:
    """The reason why a URL cannot be used, without a network; None if it may be."""
    scheme = url.partition("://")[0]
    if scheme in PACKAGES and importlib.util.find_spec(PACKAGES[scheme][0]) is None:
        package, extra = PACKAGES[scheme]
        return f"to read {scheme}://, {package} is needed:  pip install 'fsdp_trainer[{extra}]'"
    if scheme == "hf" and (len(url.split("/")) < 5 or not url.startswith("hf://datasets/")):
        return (
            "a data set on the hub is named  hf://datasets/ORG/NAME ,"
            " perhaps with a folder or a glob behind it"
        )
    if scheme not in PACKAGES:
        from fsspec.registry import known_implementations

        if scheme not in known_implementations:
            return (
                f"{scheme}:// is not known. Known are  s3:// gs:// https:// hf://datasets/…"
                "  and what else fsspec has a package for"
            )
    if needs_arrow(url) and importlib.util.find_spec("pyarrow") is None:
        return f"to read {stem(url)}, pyarrow is needed:  pip install 'fsdp_trainer[arrow]'"
    return None
