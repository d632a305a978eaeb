"""Token files in the formats of other tools, from documents of any source.

A writer gets the documents one after the other, so that the data may be larger than the memory.
"""

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from fsdp_trainer.data.token_files.flat_tokens import HEADER_INTS, LLM_C
from fsdp_trainer.data.token_files.megatron_dataset import HEADER, MAGIC, TYPES

SHARD_TOKENS = 100_000_000
"""Tokens of a shard of llm.c's, as in its FineWeb."""
MEGATRON_SMALL = 65_500
"""Megatron stores tokens in two bytes if there are fewer."""


@dataclass(frozen=True)
class TokenFileWriter(ABC):
    """Writes one part of the data, such as all that is trained on, into a folder."""

    folder: Path
    part: str
    """The name of the part: train, val, or the name of a source."""
    vocabulary: int
    """The number of tokens that the tokenizer has."""
    end: int | None
    """The token that ends a document; None if the tokenizer has none."""

    @abstractmethod
    def write(self, documents: Iterable[np.ndarray]) -> None:
        """Write all documents."""

    @property
    def dtype(self) -> np.dtype:
        """The type of the tokens: the smaller one that holds all."""
        return np.dtype("<u2" if self.vocabulary <= 1 << 16 else "<u4")

    def ended(self, tokens: np.ndarray) -> np.ndarray:
        """Return the tokens of a document with one end token, behind them."""
        inner = self.inner(tokens)
        return inner if self.end is None else np.append(inner, self.end)

    def inner(self, tokens: np.ndarray) -> np.ndarray:
        """Return the tokens of a document without end tokens around them."""
        if self.end is None:
            return tokens
        first = int(len(tokens) > 0 and tokens[0] == self.end)
        last = int(len(tokens) > first and tokens[-1] == self.end)
        return tokens[first : len(tokens) - last]


class NanoGpt(TokenFileWriter):
    """nanoGPT's train.bin and val.bin: two bytes a token, an end token behind each document."""

    def write(self, documents: Iterable[np.ndarray]) -> None:
        with open(self.folder / f"{self.part}.bin", "wb") as file:
            for tokens in documents:
                file.write(self.ended(tokens).astype("<u2").data)


class LlmC(TokenFileWriter):
    """Shards of llm.c and modded-nanogpt: a header, and an end token before each document."""

    def write(self, documents: Iterable[np.ndarray]) -> None:
        shard, room, file = 0, 0, None
        try:
            for tokens in documents:
                front = [] if self.end is None else [self.end]
                rest = np.append(front, self.inner(tokens)).astype(self.dtype)
                while len(rest):
                    if not room:
                        self._finish(file, SHARD_TOKENS)
                        shard, room = shard + 1, SHARD_TOKENS
                        file = self._begin(shard)
                    assert file is not None
                    file.write(rest[:room].data)
                    written = min(room, len(rest))
                    rest, room = rest[written:], room - written
        finally:
            self._finish(file, SHARD_TOKENS - room)

    def _begin(self, shard: int) -> BinaryIO:
        file = open(self.folder / f"tokens_{self.part}_{shard:06}.bin", "wb")  # noqa: SIM115
        file.write(bytes(4 * HEADER_INTS))
        return file

    def _finish(self, file: BinaryIO | None, tokens: int) -> None:
        if file is not None:
            magic, version = next(key for key, dtype in LLM_C.items() if dtype == self.dtype)
            file.seek(0)
            file.write(struct.pack("<3i", magic, version, tokens))
            file.close()


class Megatron(TokenFileWriter):
    """Megatron's NAME.bin and NAME.idx: one sequence for each document."""

    @property
    def dtype(self) -> np.dtype:
        return np.dtype("<u2" if self.vocabulary < MEGATRON_SMALL else "<i4")

    def write(self, documents: Iterable[np.ndarray]) -> None:
        path = self.folder / f"{self.part}_text_document.bin"
        lengths: list[int] = []
        with open(path, "wb") as file:
            for tokens in documents:
                ended = self.ended(tokens)
                lengths.append(len(ended))
                file.write(ended.astype(self.dtype).data)
        code = next(code for code, name in TYPES.items() if np.dtype(name) == self.dtype)
        sizes = np.array(lengths, "<i8")
        pointers = (np.cumsum(sizes) - sizes) * self.dtype.itemsize
        with open(path.with_suffix(".idx"), "wb") as file:
            file.write(HEADER.pack(MAGIC, 1, code, len(sizes), len(sizes) + 1))
            file.write(sizes.astype("<i4").data)
            file.write(pointers.astype("<i8").data)
            file.write(np.arange(len(sizes) + 1, dtype="<i8").data)


class Olmo(TokenFileWriter):
    """OLMo's flat .npy, which has no header of numpy's: an end token behind each document."""

    def write(self, documents: Iterable[np.ndarray]) -> None:
        with open(self.folder / f"{self.part}.npy", "wb") as file:
            for tokens in documents:
                file.write(self.ended(tokens).astype(self.dtype).data)
