"""Which files a data path names. Told by their names, before anything is opened: a mistake is answered before torch is imported."""

import glob
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_trainer.config.schema import FORMATS, key

JSON, TEXT, CSV, ARROW = (".json", ".jsonl", ".ndjson"), (".txt", ".text", ".md"), (".csv", ".tsv"), (".parquet", ".arrow", ".feather")
KINDS, COMPRESSED = JSON + TEXT + CSV + ARROW, (".gz", ".zst")
# what describes a data set that `datasets` or the hub has written is not data
DESCRIPTIONS = ("readme.md", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")

SHARD = re.compile(r"[-_.]?\d+-of-\d+$")  # train-00000-of-00004 belongs to train
HELD_OUT = ("test", "validation", "valid", "val", "dev", "eval")


@dataclass(frozen=True)
class Entry:
    """One of the paths of a list. With a weight or a repeat in any of them the list is a mixture: see data/mixture.py."""

    path: str = key(None, "a file, folder, glob or URL")
    name: str | None = key(None, "what the records of a run call it; null: its path tells")
    weight: float | None = key(None, "its share of the tokens, next to the others' weights", above=0)
    repeat: float | None = key(None, "how often an epoch holds it: 2 is twice, 0.5 every other half, 0 never", minimum=0)
    format: str | None = key(None, "how its rows are read; null: as data.format says", choices=FORMATS)
    fields: dict[str, Any] | None = key(None, "which of its columns mean what; null: as data.fields says")


def entries(path: Any) -> list[Entry]:
    """What data.path or data.validation names, in order; nothing for null and for a share."""
    listed = path if isinstance(path, list) else [path] if isinstance(path, str) else []
    return [Entry(**item) if isinstance(item, dict) else Entry(item) for item in listed]


def is_mixture(path: Any) -> bool:
    """Whether its entries are told apart all through training, rather than packed together."""
    return any(entry.weight is not None or entry.repeat is not None for entry in entries(path))


def kind(file: str | Path) -> tuple[str, str | None]:
    """(suffix, compression) of a file's name: chats.jsonl.gz is (".jsonl", ".gz")."""
    path = Path(file)
    compression = path.suffix.lower() if path.suffix.lower() in COMPRESSED else None
    return Path(path.stem if compression else path.name).suffix.lower(), compression


def stem(path: str | Path) -> str:
    """The name without the suffixes that tell how to read it."""
    name, (suffix, compression) = Path(path).name, kind(path)
    return name[: len(name) - len((suffix if suffix in KINDS else "") + (compression or ""))] or name


def data_files(path: str) -> list[str]:
    """Data files of a file, a folder (searched through) or a glob, sorted; ValueError says why there are none."""
    if Path(path).is_dir():
        splits = Path(path) / "dataset_dict.json"
        told = json.loads(splits.read_text()) if splits.is_file() else {}
        if isinstance(told, dict) and len(names := told.get("splits", [])) > 1:
            raise ValueError(f"holds several splits: {' '.join(names)}. Name the one to read:  {Path(path) / names[0]}")
        found = sorted(str(p) for p in Path(path).rglob("*") if _is_data(p.relative_to(path)) and p.is_file())
        _check_splits(found)
        why = f"no file in this folder ends in {' '.join(KINDS)}"
    elif Path(path).is_file():
        found, why = [path], ""
    else:
        found, why = sorted(p for p in glob.glob(path, recursive=True) if Path(p).is_file()), "there is no such file or folder"
    if not found:
        raise ValueError(why)
    for file in found:
        if not _is_readable(file):
            packed = f", {' '.join(JSON + TEXT + CSV)} also with {' or '.join(COMPRESSED)}"
            raise ValueError(f"{Path(file).name} is no kind of file that is read. Convert it to one of  {' '.join(KINDS)}{packed}")
    return found


def _check_splits(files: list[str]) -> None:
    """The hub's train-00000-of-00001.parquet beside test-00000-of-00001.parquet: ValueError, for one is not to be trained on."""
    splits: dict[Path, set[str]] = {}
    for file in files:
        if kind(file)[0] not in TEXT:
            splits.setdefault(Path(file).parent, set()).add(SHARD.sub("", stem(file)))
    for folder, names in splits.items():
        if "train" in names and (others := sorted(names.intersection(HELD_OUT))):
            raise ValueError(f"holds several splits: train {' '.join(others)}. Name the one to read:  '{folder}/train*'")


def needs_arrow(file: str) -> bool:
    """Whether reading the file takes pyarrow."""
    suffix, compression = kind(file)
    return suffix in ARROW or compression == ".zst"


def _is_readable(file: str | Path) -> bool:
    suffix, compression = kind(file)
    return suffix in KINDS and not (suffix in ARROW and compression)


def _is_data(path: Path) -> bool:
    return _is_readable(path) and path.name.lower() not in DESCRIPTIONS and not any(part.startswith(".") for part in path.parts)
