"""Files that exist whole or not at all, and the manifest that proves it."""

import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsdp_trainer.config.paths import MANIFEST
from fsdp_trainer.errors import Problem

READ_BYTES = 1 << 24


def checksum(path: Path) -> int:
    """CRC-32 of a file: finds every single-bit flip and every burst up to 32 bits, at the speed of the disk."""
    value = 0
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            value = zlib.crc32(piece, value)
    return value


def describe(folder: Path, names: Iterable[str]) -> dict[str, dict[str, int]]:
    """Size and checksum of files in `folder`, as the manifest lists them."""
    return {name: {"bytes": (folder / name).stat().st_size, "crc32": checksum(folder / name)} for name in names}


def files_below(folder: Path) -> list[str]:
    """Relative names of all files below `folder`."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises OSError or ValueError."""
    return json.loads((folder / MANIFEST).read_text())


def damage(folder: Path, part: int = 0, parts: int = 1) -> list[Problem]:
    """What is wrong with a committed folder: missing, shortened or altered files. Looks at every `parts`-th file from `part`."""
    try:
        listed = read_manifest(folder)["files"]
    except (OSError, ValueError, KeyError) as error:
        return [Problem(str(folder / MANIFEST), f"cannot be read: {error}")]
    problems = []
    for name, told in sorted(listed.items())[part::parts]:
        path = folder / name
        if not path.is_file():
            problems.append(Problem(str(path), "is missing"))
        elif path.stat().st_size != told["bytes"]:
            problems.append(Problem(str(path), f"has {path.stat().st_size:,} bytes instead of {told['bytes']:,}"))
        elif checksum(path) != told["crc32"]:
            problems.append(Problem(str(path), "does not have the checksum it was written with"))
    return problems


def write_durably(path: Path, text: str) -> None:
    """Write a small file so that it survives a power cut."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Make what a file holds, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unfinished(target: Path) -> Path:
    """The name of a file or folder while it is not whole."""
    return target.with_name(f".{target.name}.partial")


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its name when the block ends well and disappears when it does not."""
    partial = unfinished(target)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    commit(partial, target)


def commit(partial: Path, target: Path) -> None:
    """Give a finished folder its name, durably. An older folder of that name makes way."""
    for path in [*partial.rglob("*"), partial]:
        sync(path)
    if target.exists():
        shutil.rmtree(target)
    partial.rename(target)
    sync(target.parent)
