"""A file of tokens that another tool has written: where its documents lie, in memory-mapped bytes.

Each format is a module of this folder with a function that opens a file; `known_token_files.py`
lists them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fsdp_trainer.base.unpacked import unpack

LARGEST_DOCUMENT = 1 << 24
"""Tokens of the largest document; a longer one is cut there, as in a file without boundaries."""
BLOCK = 1 << 22  # tokens that are searched for the end of a document at a time


class BadTokenFile(ValueError):
    """Raised for a file that cannot be read as tokens; the message is the reason."""


def mapped_content(path: Path, compression: str | None) -> np.ndarray:
    """Return the bytes of a file, mapped: a compressed one is unpacked to disk first.

    Raises OSError, TooLarge and RunFailed.
    """
    file = unpack(open(path, "rb"), compression)  # noqa: SIM115 - mapped below
    is_empty = not file.seek(0, 2)
    return np.empty(0, np.uint8) if is_empty else np.memmap(file, np.uint8, "r")


@dataclass(frozen=True)
class MappedTokens:
    """The tokens of a document, still in its file."""

    tokens: np.ndarray  # [length] of any integer type
    begin: int | None
    """The byte of the file at which they begin; None if the file is compressed."""
    form: str = ""
    """Whose format the file has, and the type of its tokens."""

    def cut(self, start: int, stop: int) -> "MappedTokens":
        """Return the tokens [start, stop) of this document."""
        begin = None if self.begin is None else self.begin + start * self.tokens.itemsize
        return replace(self, tokens=self.tokens[start:stop], begin=begin)


@dataclass(frozen=True)
class TokenFile:
    """An open file. Its documents are listed, or else found by the token that separates them.

    Raises BadTokenFile if its type is none of tokens, or if a listed document lies outside of the
    file or before the end of the document that precedes it.
    """

    name: str
    """Whose format it is."""
    content: np.ndarray  # [bytes] uint8: the mapped file, or what a compressed one holds
    is_mapped: bool
    dtype: np.dtype
    begins: np.ndarray | None = None  # [documents] int64: byte of each document's first token
    counts: np.ndarray | None = None  # [documents] int64: its number of tokens
    first: int = 0
    """The byte of the first token, after the header."""
    separator_leads: bool | None = None
    """True if the separator begins a document, False if it ends one, None: the first token says."""

    def __post_init__(self) -> None:
        if self.dtype.kind not in "iu" or not self.dtype.isnative:
            raise BadTokenFile(f"holds numbers of the type {self.dtype}, no tokens")
        for start in range(0, 0 if self.begins is None else len(self.begins), BLOCK):
            self._check_documents(start)

    @classmethod
    def of_documents(
        cls,
        name: str,
        content: np.ndarray,
        is_mapped: bool,
        dtype: np.dtype,
        begins: np.ndarray,
        sizes: np.ndarray,
    ) -> "TokenFile":
        """Return a file whose documents are listed. sizes: [documents] int64 bytes."""
        wrong = np.flatnonzero(sizes % dtype.itemsize)
        if len(wrong):
            raise BadTokenFile(
                f"has document {wrong[0] + 1:,} with {sizes[wrong[0]]:,} bytes, no multiple of the"
                f" {dtype.itemsize} of a token: its header is wrong"
            )
        return cls(name, content, is_mapped, dtype, begins, sizes // dtype.itemsize)

    def _check_documents(self, start: int) -> None:
        """Raise BadTokenFile for a document of a block that lies where it cannot."""
        assert self.begins is not None
        assert self.counts is not None
        begins, size = self.begins[start : start + BLOCK], len(self.content)
        counts = self.counts[start : start + BLOCK]
        is_wrong = (begins < 0) | (begins > size) | (counts < 0) | (counts > size)
        ends = np.where(is_wrong, 0, begins + counts * self.dtype.itemsize)
        is_wrong |= ends > size
        is_wrong[1:] |= begins[1:] < ends[:-1]
        if start:
            before = self.begins[start - 1] + self.counts[start - 1] * self.dtype.itemsize
            is_wrong[0] |= begins[0] < before
        if is_wrong.any():
            number = int(np.argmax(is_wrong))
            raise BadTokenFile(
                f"has document {start + number + 1:,} with {counts[number]:,} tokens from byte"
                f" {begins[number]:,} of {size:,} on, outside of the file or before the end of"
                " the document before it: its header is wrong"
            )

    def __len__(self) -> int:
        """Return the number of documents, or of tokens if no documents are listed."""
        if self.begins is not None:
            return len(self.begins)
        return (len(self.content) - self.first) // self.dtype.itemsize

    def edges(self, bytes_each: int) -> list[int]:
        """Return the first document, or token, of each part of about `bytes_each`."""
        if self.begins is None:
            return list(range(0, len(self), max(1, bytes_each // self.dtype.itemsize))) or [0]
        assert self.counts is not None
        ends = np.cumsum(self.counts) * self.dtype.itemsize
        cuts = np.searchsorted(
            ends, np.arange(bytes_each, ends[-1] if len(ends) else 0, bytes_each)
        )
        return [0, *(int(cut) + 1 for cut in np.unique(cuts) if cut + 1 < len(ends))]

    def documents(
        self, start: int, stop: int | None, separator: int | None
    ) -> Iterator[tuple[int, MappedTokens]]:
        """Yield (number from 1, tokens) of the documents that begin in [start, stop).

        start, stop: as in `edges`. separator: the token between documents, where none are listed;
        a document's number is then that of its first token.
        """
        stop = len(self) if stop is None else stop
        if self.begins is None:
            yield from self._separated(start, stop, separator)
            return
        assert self.counts is not None
        for number in range(start, stop):
            begin, count = int(self.begins[number]), int(self.counts[number])
            for piece in _pieces(self._tokens(begin, count)):
                yield number + 1, piece

    def _tokens(self, begin: int, count: int) -> MappedTokens:
        end = begin + count * self.dtype.itemsize
        tokens = self.content[begin:end].view(self.dtype)
        form = f"{self.name}, {self.dtype.name}"
        return MappedTokens(tokens, begin if self.is_mapped else None, form)

    def _separated(
        self, start: int, stop: int, separator: int | None
    ) -> Iterator[tuple[int, MappedTokens]]:
        tokens = self.content[self.first :]
        tokens = tokens[: len(self) * self.dtype.itemsize].view(self.dtype)
        leads = self.separator_leads
        if leads is None:
            leads = len(tokens) > 0 and separator is not None and int(tokens[0]) == separator
        after = 0 if leads else 1  # from a separator to the first token of the next document
        places = _places(tokens, separator, max(0, start - after))
        begin = 0 if start == 0 else next(places, len(tokens)) + after
        for place in places if begin < stop else ():
            # a separator that begins the next document also ends this one, so that it is learnt
            if place > begin + bool(leads):
                yield from self._numbered(begin, place + 1)
            begin = place + after
            if begin >= stop:
                return
        if begin < min(stop, len(tokens)):
            yield from self._numbered(begin, len(tokens))

    def _numbered(self, begin: int, end: int) -> Iterator[tuple[int, MappedTokens]]:
        whole = self._tokens(self.first + begin * self.dtype.itemsize, end - begin)
        for i, piece in enumerate(_pieces(whole)):
            yield begin + i * (LARGEST_DOCUMENT - 1) + 1, piece


def _places(tokens: np.ndarray, token: int | None, start: int) -> Iterator[int]:
    """Yield the places of a token from `start` on."""
    if token is None or not 0 <= token <= np.iinfo(tokens.dtype).max:
        return
    for first in range(start, len(tokens), BLOCK):
        yield from (first + np.flatnonzero(tokens[first : first + BLOCK] == token)).tolist()


def _pieces(document: MappedTokens) -> Iterator[MappedTokens]:
    """Yield a document in pieces that are not too large.

    A piece begins with the last token of the piece before it, so that every token is predicted.
    """
    yield document.cut(0, LARGEST_DOCUMENT)
    length, step = len(document.tokens), LARGEST_DOCUMENT - 1
    for start in range(step, length - 1, step):
        yield document.cut(start, start + LARGEST_DOCUMENT)


def number_type(content: np.ndarray) -> np.dtype:
    """Return the type of token numbers without a header, by their first megabyte.

    Tokens are below 2²⁰, so the upper halves of larger types are nearly always 0.
    """
    halves = content[: min(1 << 20, len(content) // 8 * 8)].view("<u2")
    if not len(halves):
        return np.dtype("<u2")
    places = halves.reshape(-1, 4).max(0)
    if not places[2:].any() and places[1] < 16 <= places[0]:
        return np.dtype("<i8")
    return np.dtype("<u4" if max(places[1], places[3]) < 16 <= max(places[0], places[2]) else "<u2")
