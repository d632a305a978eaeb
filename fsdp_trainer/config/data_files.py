"""Which files a data path names. Told by their names, before anything is opened: a mistake is answered before torch is imported."""

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
# what describes a data set that `datasets` or the hub has written is not data, nor is a tokenizer or a model beside it
DESCRIPTIONS = (
    "readme.md", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "config.json", "generation_config.json", "model.safetensors.index.json",
)  # fmt: skip

SHARD = re.compile(r"[-_.]?\d+-of-\d+$")  # train-00000-of-00004 belongs to train
HELD_OUT = ("test", "validation", "valid", "val", "dev", "eval")


@dataclass(frozen=True)
class Entry:
    """One of the paths of a list. With a weight or a repeat in any of them the list is a mixture: see data/mixture.py."""

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
    """What data.path or data.validation names, in order; nothing for null and for a share."""
    listed = path if isinstance(path, list) else [path] if isinstance(path, str) else []
    return [Entry(**item) if isinstance(item, dict) else Entry(item) for item in listed]


def is_mixture(path: Any) -> bool:
    """Whether its entries are told apart all through training, rather than packed together."""
    return any(entry.weight is not None or entry.repeat is not None for entry in entries(path))


def is_url(path: str) -> bool:
    """Whether a path lies elsewhere: s3://bucket/a.jsonl."""
    return "://" in path


def place(path: str) -> str:
    """Where a file lies, as a path: absolute, or the host and path of a URL."""
    if not is_url(path):
        return os.path.abspath(Path(path).expanduser())
    parts = urlsplit(path)
    return "/".join(
        ["", *filter(None, [parts.netloc.rpartition("@")[2], *unquote(parts.path).split("/")])]
    )


def kind(file: str | Path) -> tuple[str, str | None]:
    """(suffix, compression) of a file's name: chats.jsonl.gz is (".jsonl", ".gz"). Where it has no known suffix, its first bytes tell."""
    path = Path(place(str(file)) if is_url(str(file)) else file)
    suffix, compression = (
        _suffix(path.name),
        path.suffix.lower() if path.suffix.lower() in COMPRESSED else None,
    )
    return (
        (suffix, compression)
        if suffix in KINDS or not path.is_file()
        else _kind_by_content(path) or (suffix, compression)
    )


def _suffix(name: str) -> str:
    """Of what a compressed file holds."""
    path = Path(name)
    return (Path(path.stem) if path.suffix.lower() in COMPRESSED else path).suffix.lower()


def _kind_by_content(path: Path) -> tuple[str, str | None] | None:
    """Of a file whose name does not tell. Text that is no JSON could be anything."""
    with open(path, "rb") as file:
        head = file.read(64)
    compression = next(
        (name for magic, name in COMPRESSIONS.items() if head.startswith(magic)), None
    )
    if compression == ".gz":
        with gzip.open(path) as file:
            head = file.read(64)
    suffix = next(
        (
            name
            for magic, name in MAGIC.items()
            if head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(magic)
        ),
        None,
    )
    return (suffix, compression) if suffix and compression != ".zst" else None


def stem(path: str | Path) -> str:
    """The name without the suffixes that tell how to read it."""
    name, (suffix, compression) = Path(place(str(path))).name, kind(path)
    ending = (suffix if suffix in KINDS else "") + (compression or "")
    return (
        name[: len(name) - len(ending)]
        if ending and name.lower().endswith(ending) and len(name) > len(ending)
        else name
    )


def data_files(path: str) -> list[str]:
    """Data files of a file, a folder (searched through) or a glob, sorted; ValueError says why there are none."""
    if Path(path).is_dir():
        splits = Path(path) / "dataset_dict.json"
        try:
            told = json.loads(splits.read_text()) if splits.is_file() else {}
        except ValueError as error:
            raise ValueError(
                f"{splits} is not JSON: {error}. Mend it, or name the files to read"
            ) from None
        if isinstance(told, dict) and len(names := told.get("splits", [])) > 1:
            raise ValueError(
                f"holds several splits: {' '.join(names)}. Name the one to read:  {Path(path) / names[0]}"
            )
        found = sorted(
            (file for file in _walk(path) if is_data(os.path.relpath(file, path))), key=Path
        )
    elif Path(path).is_file():
        found = [path]
    else:
        found = []
        for match in sorted(set(_matches(path))):
            if not Path(match).is_dir():
                found.append(match)
            elif is_data(
                Path(match).name
            ):  # a data set that was written in parts: all.parquet/part-0.parquet
                found += data_files(match)
        found = list(dict.fromkeys(found))
        if not found:
            raise ValueError(
                f"no file matches (looked in {Path.cwd()})"
                if has_magic(path)
                else "there is no such file or folder"
            )
    for file in found:
        if not os.path.exists(file):
            raise ValueError(
                f"{file} is a link that leads nowhere, or in a circle. Remove it, or name the files to read"
            )
        if not os.access(file, os.R_OK):
            raise ValueError(f"{file} may not be read by this user:  chmod +r '{file}'")
    return choose_files(found, path)


def choose_files(found: list[str], path: str) -> list[str]:
    """What of the files that a path has led to is read: all of them. ValueError if they should not be read together, or cannot be."""
    if not found:
        raise ValueError(f"no file in this folder ends in {' '.join(KINDS)}")
    if not has_magic(path):
        _check_splits(found)
    for file in (
        found if len(found) > 1 or not is_url(path) else []
    ):  # the only file of a URL may be found out when it is here
        if kind(file)[0] not in KINDS:
            packed = f", also with {' or '.join(COMPRESSED)}"
            raise ValueError(
                f"{Path(file).name} is no kind of file that is read. Convert it to one of  {' '.join(KINDS)}{packed}"
            )
    return found


def has_magic(path: str) -> bool:
    """Whether a path is a glob. In a web address a question mark is none."""
    return glob.has_magic(
        path.partition("?")[0] if path.startswith(("http://", "https://")) else path
    )


def _matches(path: str) -> Iterator[str]:
    """What a glob matches: as Python's own, but `**` goes through a ring of links only once."""
    before, *rest = re.split(r"(?:^|(?<=/))\*\*(?:/|$)", path, maxsplit=1)
    if not rest:
        yield from glob.glob(path)
        return
    for base in glob.glob(before) if before else ["."]:
        for folder in _folders(base):
            yield from (
                match.removeprefix("./")
                for match in _matches(f"{glob.escape(folder)}/{rest[0] or '*'}")
            )


def _walk(folder: str) -> Iterator[str]:
    """Files of a folder and of those within it."""
    return (
        entry.path
        for within in _folders(folder)
        for entry in os.scandir(within)
        if not os.path.isdir(entry.path)
    )


def _folders(folder: str, above: frozenset[str] = frozenset()) -> Iterator[str]:
    """A folder and those within it; a link to a folder that one is in already leads no further."""
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
    """The hub's train-00000-of-00001.parquet beside test-00000-of-00001.parquet: ValueError, for one is not to be trained on."""
    splits: dict[str, set[str]] = {}
    for file in files:
        if kind(file)[0] not in TEXT:
            splits.setdefault(file.rpartition("/")[0], set()).add(SHARD.sub("", stem(file)))
    for folder, names in splits.items():
        if "train" in names and (others := sorted(names.intersection(HELD_OUT))):
            beside = sorted(
                {other for other in splits if other.rpartition("/")[0] == folder.rpartition("/")[0]}
                - {folder}
            )
            several = f"\nLike it: {' '.join(beside)}" if beside else ""
            raise ValueError(
                f"holds several splits: train {' '.join(others)}. Name the one to read:  '{folder}/train*'{several}"
            )


def needs_arrow(file: str) -> bool:
    """Whether reading the file takes pyarrow."""
    suffix, compression = kind(file)
    return suffix in ARROW or (compression == ".zst" and sys.version_info < (3, 14))


def is_data(path: str) -> bool:
    """Whether a file of a folder, named from there, is one to read: no hidden one, and none that describes the others."""
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
"""What reads a kind of URL, and the extra that installs it."""


def why_url_unusable(url: str) -> str | None:
    """Without asking any network."""
    scheme = url.partition("://")[0]
    if scheme in PACKAGES and importlib.util.find_spec(PACKAGES[scheme][0]) is None:
        package, extra = PACKAGES[scheme]
        return f"to read {scheme}://, {package} is needed:  pip install 'fsdp_trainer[{extra}]'"
    if (scheme == "hf" and len(url.split("/")) < 5) or (
        scheme == "hf" and not url.startswith("hf://datasets/")
    ):
        return "a data set on the hub is named  hf://datasets/ORG/NAME , perhaps with a folder or a glob behind it"
    if scheme not in PACKAGES:
        from fsspec.registry import known_implementations

        if scheme not in known_implementations:
            return f"{scheme}:// is not known. Known are  s3:// gs:// https:// hf://datasets/…  and what else fsspec has a package for"
    if needs_arrow(url) and importlib.util.find_spec("pyarrow") is None:
        return f"to read {stem(url)}, pyarrow is needed:  pip install 'fsdp_trainer[arrow]'"
    return None
