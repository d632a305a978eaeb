"""Files of the media of samples, of whatever kind, and whether they have changed."""

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class MediaFile:
    """The local file of one medium.

    size: what decides its tokens, such as width and height. stamp: its bytes and mtime. name: as
    its row has it. lost: keys of `findings.KINDS` for what the model does not perceive of it. The
    last two are not stored.
    """

    path: str
    digest: str
    size: tuple[Any, ...]
    stamp: tuple[int, int]
    name: str = field(default="", compare=False)
    lost: tuple[str, ...] = field(default=(), compare=False)

    @property
    def has_changed(self) -> bool:
        """True for a file that is missing or holds other bytes than it did."""
        try:
            about = os.stat(self.path)
            if (about.st_size, about.st_mtime_ns) == self.stamp:
                return False
            return digest_of(Path(self.path).read_bytes()) != self.digest
        except OSError:
            return True


@dataclass(frozen=True)
class SampleMedium:
    """One medium of a sample. tokens: number of the sample's tokens that stand for it."""

    file: MediaFile
    tokens: int

    def as_json(self) -> list:
        """Return it as a store keeps it."""
        return [self.file.path, self.file.digest, *self.file.size, *self.file.stamp, self.tokens]

    @classmethod
    def from_json(cls, values: list) -> "SampleMedium":
        path, digest, *size, length, mtime, tokens = values
        return cls(MediaFile(path, digest, tuple(size), (length, mtime)), tokens)


def changed_files(files: Iterable[MediaFile]) -> list[str]:
    files = list(files)
    with ThreadPoolExecutor(8) as threads:
        changed = threads.map(lambda file: file.has_changed, files)
        return sorted(file.path for file, has in zip(files, changed, strict=True) if has)


def digest_of(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
