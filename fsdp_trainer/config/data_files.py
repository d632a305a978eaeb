"""The files of a data path, and their kinds, mostly by name, before they are read.

Mistakes are reported before torch is imported.
"""

import glob
import gzip
import importlib.util
import json
import os
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from fsdp_trainer.config.keys import key
from fsdp_trainer.config.parts.own_parts import BUILT_IN, own_names
from fsdp_trainer.config.schema import FORMATS

JSON, TEXT, CSV, ARROW = (
    (".json", ".jsonl", ".ndjson"),
    (".txt", ".text", ".md"),
    (".csv", ".tsv"),
    (".parquet", ".arrow", ".feather"),
)
TOKEN_FILES = (".bin", ".npy", ".mds")
"""Files of tokens that another tool has written: see data/token_files."""
TOKEN_FORMS = tuple(BUILT_IN["token_form"])
"""Formats in which `prepare out=` writes token files."""
COMPRESSED = (".gz", ".zst", ".zstd")
COMPRESSIONS = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst"}
MAGIC = {b"PAR1": ".parquet", b"ARROW1": ".arrow", b"{": ".jsonl", b"[": ".json"}
# no data: descriptions of data sets by `datasets` and the hub, files of tokenizers and models
DESCRIPTIONS = (
    "readme.md", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt",
    "config.json", "generation_config.json", "model.safetensors.index.json", "index.json",
)  # fmt: skip

BESIDE_DATA = (
    ".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".jinja", ".model", ".idx",
    ".safetensors", ".py", ".sh", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".log", ".rst", ".html",
)  # fmt: skip
"""Suffixes of files that lie beside data and that nobody takes for data."""
NAMES_BESIDE_DATA = ("readme", "license", "licence", "notice", "makefile", "_success")
SHARD = re.compile(r"[-_.]?\d+-of-\d+$")  # train-00000-of-00004 belongs to train
HELD_OUT = ("test", "validation", "valid", "val", "dev", "eval")
PART = re.compile(r"(?:.*_)?(train|val)_(?:\d+|text_document)")
"""Names of llm.c's and Megatron's files: fineweb_train_000001, val_text_document."""


@dataclass(frozen=True)
class Entry:
    """One path in a list of data paths.

    If any entry has a weight or a repeat, the list is a mixture: see data/order/mixture.py.
    """

    path: str = key(None, "a file, folder, glob or URL")
    name: str | None = key(None, "its name in the records of a run; null: taken from its path")
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
    """Return the entries of data.path or data.validation, in order; [] for null and for a share."""
    listed = path if isinstance(path, list) else [path] if isinstance(path, str) else []
    return [Entry(**item) if isinstance(item, dict) else Entry(item) for item in listed]


def is_mixture(path: Any) -> bool:
    """Return True if the entries are a mixture, which are never packed into the same row."""
    return any(entry.weight is not None or entry.repeat is not None for entry in entries(path))


def is_url(path: str) -> bool:
    """Return True for the address of a remote file, e.g. s3://bucket/a.jsonl."""
    return "://" in path


def place(path: str) -> str:
    """Return a file's location as a path: absolute, or made of the host and path of a URL."""
    if not is_url(path):
        return os.path.abspath(Path(path).expanduser())
    url = urlsplit(path)
    parts = [url.netloc.rpartition("@")[2], *unquote(url.path).split("/")]
    return "/".join(["", *filter(None, parts)])


def token_suffixes() -> tuple[str, ...]:
    """Return the suffixes of files of tokens, also of those that the user's own parts read."""
    return (*TOKEN_FILES, *(f".{name}" for name in own_names("token_file")))


def suffixes() -> tuple[str, ...]:
    return (*JSON, *TEXT, *CSV, *ARROW, *token_suffixes())


def kind(file: str | Path) -> tuple[str, str | None]:
    """Return (suffix, compression) of a file: (".jsonl", ".gz") for chats.jsonl.gz.

    If the name has no known suffix, the first bytes decide.
    """
    path = Path(place(str(file)) if is_url(str(file)) else file)
    ending = path.suffix.lower()
    by_name = (_suffix(path.name), ending.removesuffix("d") if ending in COMPRESSED else None)
    if by_name[0] in suffixes() or not path.is_file():
        return by_name
    return _kind_by_content(path) or by_name


def _suffix(name: str) -> str:
    path = Path(name)
    return (Path(path.stem) if path.suffix.lower() in COMPRESSED else path).suffix.lower()


def _kind_by_content(path: Path) -> tuple[str, str | None] | None:
    """Return the kind of a file by its first bytes; None if unknown, as for any plain text."""
    with open(path, "rb") as file:
        head = file.read(64)
    compression = _starting(head, COMPRESSIONS)
    if compression == ".gz":
        with gzip.open(path) as file, suppress(EOFError, OSError, zlib.error):
            head = file.read(64)  # reading its rows tells what is broken
    suffix = _starting(head.removeprefix(b"\xef\xbb\xbf").lstrip(), MAGIC)
    return (suffix, compression) if suffix and compression != ".zst" else None


def _starting(head: bytes, names: dict[bytes, str]) -> str | None:
    return next((name for magic, name in names.items() if head.startswith(magic)), None)


def stem(path: str | Path) -> str:
    name, (suffix, compression) = Path(place(str(path))).name, kind(path)
    ending = (suffix if suffix in suffixes() else "") + (compression or "")
    ending += "d" if name.endswith(".zstd") else ""
    has_ending = ending and name.lower().endswith(ending) and len(name) > len(ending)
    return name[: -len(ending)] if has_ending else name


def data_files(path: str) -> list[str]:
    """Return the data files for a path: a file, a folder with all its subfolders, or a glob.

    They are sorted. Raises ValueError with the reason if there are none, or if they cannot be read
    together.
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
                f"{file} is a broken or circular link. Remove it, or name the files to read"
            )
        if not os.access(file, os.R_OK):
            raise ValueError(f"{file} may not be read by this user:  chmod +r '{file}'")
    return check_data_files(files, path)


def _files_of_folder(path: str) -> list[str]:
    """Return the data files in a folder and its subfolders.

    Raises ValueError if `datasets` wrote several splits there.
    """
    splits = Path(path) / "dataset_dict.json"
    try:
        content = json.loads(splits.read_text()) if splits.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{splits} is not JSON: {error}. Fix it, or name the files to read"
        ) from None
    listed = content.get("splits") if isinstance(content, dict) else None
    names = [str(name) for name in listed] if isinstance(listed, list) else []
    if len(names) > 1:
        raise ValueError(
            f"holds several splits: {' '.join(names)}. Name the one to read:"
            f"  {Path(path) / names[0]}"
        )
    files = (file for file in _walk(path) if is_data(os.path.relpath(file, path)))
    return sorted(files, key=Path)


def _files_of_glob(path: str) -> list[str]:
    """Return the data files that match a glob. Raises ValueError if there are none."""
    files = []
    for match in _data_matches(path):
        if not Path(match).is_dir():
            files.append(match)
        elif is_data(Path(match).name):  # a data set in parts: all.parquet/part-0.parquet
            files += data_files(match)
    if not files and has_magic(path):
        raise ValueError(f"no file matches (looked in {Path.cwd()})")
    if not files and Path(f"{path}.idx").is_file():  # Megatron names a data set without the suffix
        return data_files(f"{path}.bin")
    if not files:
        raise ValueError("there is no such file or folder")
    return list(dict.fromkeys(files))


def _data_matches(path: str) -> list[str]:
    matches = sorted(set(_matches(path)))
    if not has_magic(path):
        return matches
    return [m for m in matches if not (m.endswith(".idx") or Path(m).name == "index.json")]


def check_data_files(files: list[str], path: str) -> list[str]:
    """Return `files` unchanged if they can be read together as the data of `path`.

    Raises ValueError if they cannot, or should not because they are several splits.
    """
    if not files:
        raise ValueError(f"no file in this folder ends in {' '.join(suffixes())}")
    if not has_magic(path):
        _check_splits(files)
    if len(files) == 1 and is_url(path):  # its kind is known only after the download
        return files
    for file in files:
        if kind(file)[0] not in suffixes():
            raise ValueError(
                f"{Path(file).name} has an unknown file type. Convert it to one of"
                f"  {' '.join(suffixes())}, also with {' or '.join(COMPRESSED)}"
            )
    return files


def has_magic(path: str) -> bool:
    """Return True if a path is a glob; a question mark in a web address does not make it one."""
    if path.startswith(("http://", "https://")):
        path = path.partition("?")[0]
    return glob.has_magic(path)


def _matches(path: str) -> Iterator[str]:
    """Yield the matches of a glob. Unlike in Python's glob, `**` follows a loop of links once."""
    before, *rest = re.split(r"(?:^|(?<=/))\*\*(?:/|$)", path, maxsplit=1)
    if not rest:
        yield from glob.glob(path)
        return
    for base in glob.glob(before) if before else ["."]:
        for folder in _folders(base):
            for match in _matches(f"{glob.escape(folder)}/{rest[0] or '*'}"):
                yield match.removeprefix("./")


def _walk(folder: str) -> Iterator[str]:
    return (
        entry.path
        for within in _folders(folder)
        for entry in os.scandir(within)
        if not os.path.isdir(entry.path)
    )


def _folders(folder: str, above: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield a folder and its subfolders. A link back to an enclosing folder is not followed.

    above: real paths of the enclosing folders. Raises ValueError for a folder without permission.
    """
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
    """Raise ValueError if a folder holds a train split and others that must not be trained on.

    The hub names their files train-00000-of-00001.parquet and test-00000-of-00001.parquet.
    """
    splits: dict[str, set[str]] = {}
    for file in files:
        if kind(file)[0] not in TEXT:
            part = PART.fullmatch(stem(file))
            name = part[1] if part else SHARD.sub("", stem(file))
            splits.setdefault(file.rpartition("/")[0], set()).add(name)
    for folder, names in splits.items():
        others = sorted(names.intersection(HELD_OUT))
        if "train" in names and others:
            above = folder.rpartition("/")[0]
            siblings = sorted(
                other for other in splits if other.rpartition("/")[0] == above and other != folder
            )
            train = "train*" if any(stem(file).startswith("train") for file in files) else "*train*"
            alike = f"\nLike it: {' '.join(siblings)}" if siblings else ""
            raise ValueError(
                f"holds several splits: train {' '.join(others)}. Name the one to read:"
                f"  '{folder}/{train}'{alike}"
            )


def needs_arrow(file: str) -> bool:
    suffix, compression = kind(file)
    return suffix in ARROW or (compression == ".zst" and sys.version_info < (3, 14))


def is_data(path: str) -> bool:
    """Return True if a file is data, by its path relative to the data folder.

    Hidden files and descriptions of other files are not.
    """
    parts = path.split("/")
    return (
        _suffix(parts[-1]) in suffixes()
        and parts[-1].lower() not in DESCRIPTIONS
        and not any(part.startswith(".") for part in parts)
    )


def unread_files(path: str) -> list[str]:
    """Return the files in a folder that might be data but are not read, relative to it."""
    folder = str(Path(path).expanduser())
    if is_url(path) or not os.path.isdir(folder):
        return []
    files = (os.path.relpath(file, folder) for file in _walk(folder))
    return sorted(file for file in files if not is_data(file) and _may_be_data(file))


def stray_texts(path: str) -> list[str]:
    folder = str(Path(path).expanduser())
    if is_url(path) or not os.path.isdir(folder):
        return []
    files = [file for file in _walk(folder) if is_data(os.path.relpath(file, folder))]
    texts = sorted(os.path.relpath(file, folder) for file in files if kind(file)[0] in TEXT)
    return texts if len(texts) < len(files) else []


def _may_be_data(path: str) -> bool:
    name = Path(path).name.lower()
    is_hidden = any(part.startswith(".") for part in path.split("/"))
    is_known = name in DESCRIPTIONS or Path(name).suffix in BESIDE_DATA
    return not (is_hidden or is_known or Path(name).stem in NAMES_BESIDE_DATA)


PACKAGES = {
    "s3": ("s3fs", "remote"), "gs": ("gcsfs", "remote"), "gcs": ("gcsfs", "remote"),
    "https": ("aiohttp", "remote"), "http": ("aiohttp", "remote"), "hf": ("huggingface_hub", "hub"),
}  # fmt: skip
"""By scheme of a URL, the package that reads it and the extra that installs this package."""


def why_url_unusable(url: str) -> str | None:
    """Return the reason why a URL cannot be used, as far as known without a network, or None."""
    scheme = url.partition("://")[0]
    if scheme in PACKAGES and importlib.util.find_spec(PACKAGES[scheme][0]) is None:
        package, extra = PACKAGES[scheme]
        return f"for {scheme}://, {package} is needed:  pip install 'fsdp_trainer[{extra}]'"
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
