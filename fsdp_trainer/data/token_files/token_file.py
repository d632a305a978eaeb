"""A file of tokens that another tool has written: where its documents lie, in memory-mapped bytes.

Each format is a module of this folder with a function that opens a file; `known_token_files.py`
lists them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fsdp_trainer.base.unpacked import unpack

LARGEST_DOCUMENT = 1 << 24
"""Tokens of the largest document; a longer one is cut there, as in a file without boundaries."""
BLOCK = 1 << 22  # tokens that are searched for the end of a document at a time
LISTED = 1 << 16  # documents of a block where they are listed


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
    tokens: np.ndarray  # [length] of any integer type
    begin: int | None
    """The byte of the file at which they begin; None if the file is compressed."""
    form: str = ""
    """Whose format the file has, and the type of its tokens."""


@dataclass(frozen=True)
class ListedDocuments:
    """The places of some documents of a file, in its order."""

    numbers: np.ndarray  # [documents] int64 from 1: their own, or those of their first tokens
    begins: np.ndarray  # [documents] int64: byte of the first token
    counts: np.ndarray  # [documents] int64: number of tokens, at most LARGEST_DOCUMENT


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
        for block in self.blocks(start, stop, separator):
            columns = (block.numbers.tolist(), block.begins.tolist(), block.counts.tolist())
            for number, begin, count in zip(*columns, strict=True):
                yield number, self._tokens(begin, count)

    def blocks(
        self, start: int, stop: int | None, separator: int | None
    ) -> Iterator[ListedDocuments]:
        """Yield the documents that begin in [start, stop), many at a time.

        start, stop: as in `edges`. separator: the token between documents, where none are listed.
        """
        stop = len(self) if stop is None else stop
        if self.begins is None:
            yield from self._separated(start, stop, separator)
            return
        assert self.counts is not None
        for first in range(start, stop, LISTED):
            part = slice(first, min(first + LISTED, stop))
            numbers = np.arange(part.start, part.stop, dtype=np.int64) + 1
            whole = ListedDocuments(numbers, self.begins[part], self.counts[part])
            yield _in_pieces(whole, self.dtype.itemsize, number_step=0)

    def _tokens(self, begin: int, count: int) -> MappedTokens:
        end = begin + count * self.dtype.itemsize
        tokens = self.content[begin:end].view(self.dtype)
        form = f"{self.name}, {self.dtype.name}"
        return MappedTokens(tokens, begin if self.is_mapped else None, form)

    def _separated(self, start: int, stop: int, separator: int | None) -> Iterator[ListedDocuments]:
        tokens = self.content[self.first :]
        tokens = tokens[: len(self) * self.dtype.itemsize].view(self.dtype)
        leads = self.separator_leads
        if leads is None:
            leads = len(tokens) > 0 and separator is not None and int(tokens[0]) == separator
        after = 0 if leads else 1  # from a separator to the first token of the next document
        begin = 0 if start == 0 else None  # of the next document; None: behind the next separator
        for places in _places(tokens, separator, max(0, start - after)):
            if begin is None:
                begin, places = int(places[0]) + after, places[1:]
            if begin >= stop:
                return
            begins = np.concatenate([[begin], places + after])
            # a separator that begins the next document also ends this one, so that it is learnt
            is_one = (places > begins[:-1] + bool(leads)) & (begins[:-1] < stop)
            yield self._from_places(begins[:-1][is_one], places[is_one] + 1)
            begin = int(begins[-1])
        if begin is not None and begin < min(stop, len(tokens)):
            yield self._from_places(np.array([begin]), np.array([len(tokens)]))

    def _from_places(self, begins: np.ndarray, ends: np.ndarray) -> ListedDocuments:
        """Return the documents [begins, ends), which are places of tokens."""
        size = self.dtype.itemsize
        whole = ListedDocuments(begins + 1, self.first + begins * size, ends - begins)
        return _in_pieces(whole, size, number_step=LARGEST_DOCUMENT - 1)


def _places(tokens: np.ndarray, token: int | None, start: int) -> Iterator[np.ndarray]:
    """Yield the places of a token from `start` on, many at a time: [places] int64, not empty."""
    if token is None or not 0 <= token <= np.iinfo(tokens.dtype).max:
        return
    for first in range(start, len(tokens), BLOCK):
        places = first + np.flatnonzero(tokens[first : first + BLOCK] == token)
        if len(places):
            yield places


def _in_pieces(documents: ListedDocuments, itemsize: int, number_step: int) -> ListedDocuments:
    """Return documents with those that are too large in pieces. number_step: between pieces.

    A piece begins with the last token of the piece before it, so that every token is predicted.
    """
    if not np.any(documents.counts > LARGEST_DOCUMENT):
        return documents
    step = LARGEST_DOCUMENT - 1
    pieces = np.maximum(1, -(-(documents.counts - 1) // step))
    ends = np.cumsum(pieces)
    place = np.arange(ends[-1]) - np.repeat(ends - pieces, pieces)
    return ListedDocuments(
        np.repeat(documents.numbers, pieces) + place * number_step,
        np.repeat(documents.begins, pieces) + place * step * itemsize,
        np.minimum(np.repeat(documents.counts, pieces) - place * step, LARGEST_DOCUMENT),
    )


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
