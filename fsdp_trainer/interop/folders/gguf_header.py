"""The header of a GGUF file: its metadata and its tensors. Does not import torch.

The package gguf makes an object of each value of each list, and believes every count.
"""

import mmap
import struct
from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from fsdp_trainer.base.json_files import Json

MAGIC = b"GGUF"
VERSIONS = (2, 3)
FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""struct's letters of the kinds of values."""
TEXT, LIST = 8, 9
MOST_DIMENSIONS = 4
MOST_NUMBERS = 2**16
"""Numbers of a tensor that is read as a whole."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor. shape: the columns first. offset: of its first byte in the file."""

    file: Path
    name: str
    shape: tuple[int, ...]
    kind: Any
    """A gguf.GGMLQuantizationType."""
    offset: int
    nbytes: int

    @property
    def rows(self) -> int:
        return prod(self.shape[1:])

    @property
    def row_bytes(self) -> int:
        return self.nbytes // self.rows

    def numbers(self) -> tuple[float, ...]:
        """Return the numbers of a small tensor in float32. Raises ValueError for another."""
        count = prod(self.shape)
        if self.kind.name != "F32" or count > MOST_NUMBERS:
            raise ValueError(f"{self.name} is not up to {MOST_NUMBERS:,} numbers in F32")
        with self.file.open("rb") as file:
            file.seek(self.offset)
            return struct.unpack(f"<{count}f", file.read(self.nbytes))


@dataclass(frozen=True)
class GgufHeader:
    """facts: values by name, None for a list that is not read. tensors: by name."""

    facts: Json
    tensors: dict[str, GgufTensor]


class _Cursor:
    """Reads a file from its beginning on, and nothing beyond its end. Raises ValueError."""

    def __init__(self, content: mmap.mmap):
        self._content = content
        self.at = 0

    def skip(self, count: int) -> int:
        """Go `count` bytes on; return where they begin."""
        begin, self.at = self.at, self.at + count
        if self.at > len(self._content):
            raise ValueError(f"ends before the {count:,} bytes that byte {begin:,} announces")
        return begin

    def number(self, form: str) -> Any:
        """Return a number. form: struct's letter of its kind."""
        begin = self.skip(struct.calcsize(f"<{form}"))
        return struct.unpack_from(f"<{form}", self._content, begin)[0]

    def text(self) -> str:
        count = self.number("Q")
        begin = self.skip(count)
        return self._content[begin : begin + count].decode()

    def value(self, kind: int) -> Any:
        if kind == TEXT:
            return self.text()
        if kind == LIST:
            return self.skip_list()
        if kind not in FORMS:
            raise ValueError(f"before byte {self.at:,} is a value of the unknown kind {kind}")
        return self.number(FORMS[kind])

    def skip_list(self) -> None:
        kind, count = self.number("I"), self.number("Q")
        if kind in FORMS:
            self.skip(count * struct.calcsize(f"<{FORMS[kind]}"))
        elif kind == TEXT:
            self._skip_texts(count)
        else:
            raise ValueError(f"before byte {self.at:,} is a list of the unknown kind {kind}")

    def list_of(self) -> list[Any]:
        begin = self.at
        self.skip_list()  # the whole of it is there
        self.at = begin
        kind, count = self.number("I"), self.number("Q")
        return [self.value(kind) for _ in range(count)]

    def _skip_texts(self, count: int) -> None:
        unpack, at = struct.Struct("<Q").unpack_from, self.at
        try:
            for _ in range(count):  # a vocabulary has hundreds of thousands
                at += 8 + unpack(self._content, at)[0]
        except (struct.error, OverflowError):
            raise ValueError(f"ends before the {count:,} texts from byte {self.at:,} on") from None
        self.skip(at - self.at)

    def facts(self, count: int, lists: Collection[str]) -> Json:
        facts: Json = {}
        for _ in range(count):
            name = self.text()
            if name in facts:
                raise ValueError(f"it has {name} twice")
            kind = self.number("I")
            is_read = kind == LIST and name in lists
            facts[name] = self.list_of() if is_read else self.value(kind)
        return facts

    def tensors(self, count: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
        """Return shape, number of the kind, and place among all tensors, by name."""
        tensors: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(count):
            name, dimensions = self.text(), self.number("I")
            if name in tensors:
                raise ValueError(f"it has {name} twice")
            if not 1 <= dimensions <= MOST_DIMENSIONS:
                raise ValueError(f"{name} has {dimensions} dimensions")
            shape = tuple(self.number("Q") for _ in range(dimensions))
            tensors[name] = (shape, self.number("I"), self.number("Q"))
        return tensors


def read_header(file: Path, lists: Collection[str] = ()) -> GgufHeader:
    """Return what a file holds. Raises OSError, and ValueError for a damaged one.

    lists: names of the lists that are read.
    """
    with file.open("rb") as opened:
        size = file.stat().st_size
        if opened.read(len(MAGIC)) != MAGIC:
            raise ValueError("its first bytes are others")
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            cursor = _Cursor(content)
            cursor.skip(len(MAGIC))
            version = cursor.number("I")
            if version not in VERSIONS:
                raise ValueError(f"its version is {version}: read are 2 and 3, little-endian")
            tensors, facts = cursor.number("Q"), cursor.number("Q")
            known = cursor.facts(facts, lists)
            places = cursor.tensors(tensors)
    alignment = known.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment={alignment}")
    start = -(-cursor.at // alignment) * alignment
    return GgufHeader(
        known,
        {name: _placed(file, name, *place, start, size) for name, place in places.items()},
    )


def _placed(
    file: Path, name: str, shape: tuple[int, ...], number: int, place: int, start: int, size: int
) -> GgufTensor:
    """Return a tensor that lies `place` bytes after `start`. Raises ValueError if it cannot."""
    import gguf

    kind = gguf.GGMLQuantizationType(number)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    nbytes = prod(shape) // block * block_bytes
    if shape[0] % block or not nbytes:
        raise ValueError(f"{name} is of {kind.name}, in blocks of {block}, and has {list(shape)}")
    if start + place + nbytes > size:
        raise ValueError(f"ends before {name}: copied or downloaded in part, do it again")
    return GgufTensor(file, name, shape, kind, start + place, nbytes)
