"""Files and folders that appear only when they are complete, and the manifest to verify them by."""

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsdp_trainer.base.checksum import checksum
from fsdp_trainer.base.folders import is_inside
from fsdp_trainer.config.paths import (
    MANIFEST,
    checkpoint_folders,
    committed_checkpoints,
    find_checkpoint,
)
from fsdp_trainer.errors import Problem, UserError

SHARD = re.compile(r"__(\d+)_\d+\.distcp")


def describe(folder: Path, names: Iterable[str]) -> dict[str, dict[str, int]]:
    return {
        name: {"bytes": (folder / name).stat().st_size, "crc32": checksum(folder / name)}
        for name in names
    }


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def manifest_text(manifest: dict[str, Any]) -> str:
    """Return the text of a manifest, whose last entry is a checksum of all other entries.

    manifest: JSON, with `files` as `describe` returns them.
    """
    return json.dumps(manifest | {"crc32": zlib.crc32(json.dumps(manifest).encode())}, indent=1)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a folder.

    Raises OSError, and ValueError if any bit has changed since it was written; that cannot be
    checked in manifests of earlier versions, which have no checksum of themselves.
    """
    text = (folder / MANIFEST).read_text()
    try:
        manifest = json.loads(text)
    except RecursionError:
        raise ValueError("lists and objects are too deep within each other") from None
    if not isinstance(manifest, dict):
        raise ValueError("it is not a JSON object")
    if manifest.pop("crc32", None) is not None and manifest_text(manifest) != text:
        raise ValueError("it does not have the checksum it was written with")
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(map(_is_described, files, files.values())):
        raise ValueError("it does not have size and checksum of each file")
    return manifest


def _is_described(name: str, entry: Any) -> bool:
    is_entry = isinstance(entry, dict) and {"bytes", "crc32"} <= entry.keys()
    return is_entry and is_inside(name) and all(type(value) is int for value in entry.values())


def named_checkpoint(source: str) -> Path:
    """Return the checkpoint that `source` names, even if it has lost its manifest.

    Raises UserError if there is none.
    """
    path = Path(source).expanduser()
    checkpoint = find_checkpoint(path)
    if checkpoint is None and path in checkpoint_folders(path.parent.parent):
        checkpoint = path
    if checkpoint is None:
        none = "is neither a checkpoint nor a run with a committed one"
        raise UserError("there is no checkpoint", f"source={source}", none)
    return checkpoint


def damage(folder: Path, rank: int = 0, ranks: int = 1) -> list[Problem]:
    """Return a Problem for each missing, shortened or altered file of a committed folder.

    A rank checks the shards whose number, modulo `ranks`, is its own: those that it is about to
    read if as many ranks wrote them. All other files are small, and every rank checks them.
    """
    try:
        files = read_manifest(folder)["files"]
    except FileNotFoundError:
        return [Problem(str(folder / MANIFEST), "is missing")]
    except (OSError, ValueError) as error:
        return [Problem(str(folder / MANIFEST), f"cannot be read: {error}")]
    problems = []
    for name, entry in sorted(files.items()):
        shard = SHARD.fullmatch(name)
        if not shard or int(shard[1]) % ranks == rank:
            fault = fault_of(folder / name, entry)
            problems += [Problem(str(folder / name), fault)] if fault else []
    return problems


def require_undamaged(checkpoint: Path) -> None:
    """Raise UserError if a checkpoint is damaged.

    It names the damaged files, and the newest undamaged checkpoint of the run.
    """
    problems = damage(checkpoint)
    if problems:
        problems[-1].reason += f"\n{newest_undamaged(checkpoint)}"
        raise UserError(f"the checkpoint {checkpoint} is damaged", problems)


def newest_undamaged(damaged: Path) -> str:
    others = [path for path in committed_checkpoints(damaged.parent.parent) if path != damaged]
    whole = next((path for path in reversed(others) if not damage(path)), None)
    if whole is None:
        return "No other checkpoint of this run is intact"
    return f"The newest whole one is  source={whole}"


def fault_of(path: Path, entry: dict[str, int]) -> str:
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            return f"has {size:,} bytes instead of {entry['bytes']:,}"
        if checksum(path) != entry["crc32"]:
            return "does not have the checksum it was written with"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return ""


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_durably(path: Path, text: str) -> None:
    """Write a small file so that it survives a power cut."""
    path.write_text(text)
    sync(path)


def sync(path: Path) -> None:
    """Flush a file's content, or the names in a folder, so that they survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unfinished(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


@contextmanager
def complete_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `target` when the block succeeds.

    It is deleted when the block raises.
    """
    partial = unfinished(target)
    make_empty(partial)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    commit(partial, target)


def make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def commit(partial: Path, target: Path) -> None:
    """Rename a finished folder to `target`, durably.

    An older folder of that name is renamed first. If this process is killed before the new one has
    the name, a later `put_back` restores the old one.
    """
    for path in [*partial.rglob("*"), partial]:
        sync(path)
    if target.exists():
        target.rename(replaced(target))
    try:
        partial.rename(target)
        sync(target.parent)
    finally:
        put_back(target)


def replaced(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def put_back(target: Path) -> None:
    """Rename an older folder to `target` again, or delete it if `target` has been replaced."""
    if target.exists():
        shutil.rmtree(replaced(target), ignore_errors=True)
    elif replaced(target).exists():
        replaced(target).rename(target)
