"""Files that exist whole or not at all, and the manifest that proves it."""

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsdp_trainer.config.paths import MANIFEST
from fsdp_trainer.errors import Problem

READ_BYTES = 1 << 24
SHARD = re.compile(r"__(\d+)_\d+\.distcp")


def checksum(path: Path) -> int:
    """CRC-32 of a file: finds every single-bit flip and every burst up to 32 bits. Raises OSError."""
    value, buffer = 0, memoryview(bytearray(min(READ_BYTES, path.stat().st_size)))
    with path.open("rb", 0) as file:
        while count := file.readinto(buffer):
            value = zlib.crc32(buffer[:count], value)
    return value


def describe(folder: Path, names: Iterable[str]) -> dict[str, dict[str, int]]:
    """Size and checksum of files in `folder`, as the manifest lists them."""
    return {
        name: {"bytes": (folder / name).stat().st_size, "crc32": checksum(folder / name)}
        for name in names
    }


def files_below(folder: Path) -> list[str]:
    """Relative names of all files below `folder`."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def manifest_text(manifest: dict[str, Any]) -> str:
    """As it is written, with a checksum of the rest as the last entry."""
    return json.dumps(manifest | {"crc32": zlib.crc32(json.dumps(manifest).encode())}, indent=1)


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Durably. manifest: JSON, with `files` as `describe` gives them."""
    write_durably(path, manifest_text(manifest))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises OSError, and ValueError if a single bit is not as it was written; those of earlier versions had no checksum of themselves."""
    text = (folder / MANIFEST).read_text()
    manifest = json.loads(text)
    if manifest.pop("crc32", None) is not None and manifest_text(manifest) != text:
        raise ValueError("it does not have the checksum it was written with")
    return manifest


def damage(folder: Path, rank: int = 0, ranks: int = 1) -> list[Problem]:
    """What is wrong with a committed folder: missing, shortened or altered files.

    Of the shards a rank looks at those of its own number: the ones that it is about to read if as many ranks wrote them. All else is small,
    and read by all.
    """
    try:
        listed = read_manifest(folder)["files"]
    except FileNotFoundError:
        return [Problem(str(folder / MANIFEST), "is missing")]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        return [Problem(str(folder / MANIFEST), f"cannot be read: {error}")]
    problems = []
    for name, told in sorted(listed.items()):
        path, shard = folder / name, SHARD.fullmatch(name)
        if shard and int(shard[1]) % ranks != rank:
            continue
        try:
            if not path.is_file():
                problems.append(Problem(str(path), "is missing"))
            elif path.stat().st_size != told["bytes"]:
                problems.append(
                    Problem(
                        str(path), f"has {path.stat().st_size:,} bytes instead of {told['bytes']:,}"
                    )
                )
            elif checksum(path) != told["crc32"]:
                problems.append(
                    Problem(str(path), "does not have the checksum it was written with")
                )
        except OSError as error:
            problems.append(Problem(str(path), f"cannot be read: {error.strerror}"))
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
    """Give a finished folder its name, durably. An older folder of that name makes way; killed before it is replaced, `put_back` finds it."""
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
    """The name of a folder while another takes its own."""
    return target.with_name(f".{target.name}.replaced")


def put_back(target: Path) -> None:
    """An older folder that made way for `target` is there again, or if it was replaced, goes for good."""
    if target.exists():
        shutil.rmtree(replaced(target), ignore_errors=True)
    elif replaced(target).exists():
        replaced(target).rename(target)
