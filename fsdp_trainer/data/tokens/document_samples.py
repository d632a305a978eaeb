"""ListedDocuments of a token file to samples, many at a time.

Samples, counts and places are those that `SampleBuilder` makes of one document after the other, but
Python makes no object for a document.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from fsdp_trainer.data.token_files.token_file import ListedDocuments, TokenFile
from fsdp_trainer.data.tokens.samples import (
    CUT_HELPS,
    FITS,
    LOST,
    SPLIT_HELPS,
    SampleBuilder,
    rounded_length,
)

TOKENS_AT_ONCE = 1 << 20
"""Tokens that are held in memory, unless one document has more."""
ONE = np.float32(1).view(np.uint32)
"""The bits of the weight 1."""
Refuse = Callable[[int, str], None]
"""Called with the number of a document that cannot be used, and the reason."""


@dataclass(frozen=True)
class DocumentSamples:
    """Samples that are supervised from their second token to the last."""

    tokens: np.ndarray  # [Σ lengths] int32; of documents as they were read: of the file's type
    lengths: np.ndarray  # [samples] int64
    numbers: np.ndarray  # [samples] int64: as in ListedDocuments
    begins: np.ndarray | None  # [samples] int64: byte of the file; None if it is compressed
    dtype: np.dtype
    """Type of the tokens in the file."""

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def starts(self) -> np.ndarray:
        """Place of the first token of each sample: [samples] int64."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def weights(self) -> np.ndarray:
        """The weight of each token: [Σ lengths] float32."""
        weights = np.ones(len(self.tokens), np.float32)
        weights[self.starts] = 0
        return weights

    def take(self, chosen: np.ndarray) -> "DocumentSamples":
        """Return some of the samples. chosen: [samples] bool."""
        if chosen.all():
            return self
        return replace(
            self,
            tokens=self.tokens[np.repeat(chosen, self.lengths)],
            lengths=self.lengths[chosen],
            numbers=self.numbers[chosen],
            begins=None if self.begins is None else self.begins[chosen],
        )

    def cut(self, size: int) -> "DocumentSamples":
        place = np.arange(len(self.tokens)) - np.repeat(self.starts, self.lengths)
        lengths = np.minimum(self.lengths, size)
        return replace(self, tokens=self.tokens[place < size], lengths=lengths)

    def content_places(self) -> np.ndarray:
        """Return `tokenize_tasks.content_place` of each document: [samples] float64."""
        text = memoryview(self.tokens.astype("<i4").tobytes().hex().encode())
        return np.frombuffer(_hashes(text, 8 * self.lengths), ">u8") / 2**64

    def digests(self) -> np.ndarray:
        """Return the hash of tokens and weights of each sample, as of any: [samples] uint64."""
        starts = self.starts
        # of each sample first the tokens, then the weights
        content = np.full(2 * len(self.tokens), ONE, np.uint32)
        content[np.arange(len(self.tokens)) + np.repeat(starts, self.lengths)] = self.tokens
        content[2 * starts + self.lengths] = 0
        return np.frombuffer(_hashes(content.data.cast("B"), 8 * self.lengths), "<u8")


def _hashes(content: memoryview, sizes: np.ndarray) -> bytes:
    """Return 8 bytes of BLAKE2b of each of consecutive parts. sizes: bytes of each."""
    ends = np.cumsum(sizes).tolist()
    parts = zip([0, *ends], ends, strict=False)
    blake2b = hashlib.blake2b
    return b"".join([blake2b(content[a:b], digest_size=8).digest() for a, b in parts])


def read_documents(file: TokenFile, block: ListedDocuments) -> Iterator[DocumentSamples]:
    """Yield the documents of a block as they are, with bounded memory."""
    ends = np.cumsum(block.counts)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.searchsorted(ends, np.arange(TOKENS_AT_ONCE, total, TOKENS_AT_ONCE), side="right")
    edges = np.unique([0, *cuts, len(ends)]).tolist()
    for first, stop in pairwise(edges):
        part = slice(first, stop)
        counts, begins = block.counts[part], block.begins[part]
        tokens = _tokens(file, begins, counts)
        places = begins if file.is_mapped else None
        yield DocumentSamples(tokens, counts, block.numbers[part], places, file.dtype)


def _tokens(file: TokenFile, begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the tokens of documents, one after the other: [Σ counts]."""
    ends = begins + counts * file.dtype.itemsize
    if np.array_equal(begins[1:], ends[:-1]):
        return file.content[begins[0] : ends[-1]].view(file.dtype)
    parts = zip(begins.tolist(), ends.tolist(), strict=True)
    return np.concatenate([file.content[a:b].view(file.dtype) for a, b in parts])


def learnable(
    documents: DocumentSamples, builder: SampleBuilder, name: str, refuse: Refuse
) -> tuple[DocumentSamples, np.ndarray]:
    """Return the samples of documents, and whether each document is one: [documents] bool.

    Counts in `builder` what is left out or cut. name: of the file.
    """
    lengths, numbers = documents.lengths, documents.numbers
    is_used = ~_unknown(documents, builder, refuse)
    is_long = is_used & (lengths > builder.seq_len)
    too_long = builder.data.too_long if is_long.any() else "split"
    _count_long(lengths[is_long], numbers[is_long], builder, name)
    if too_long == "drop":
        is_used &= ~is_long
    builder.count_all("two_bos", name, numbers[is_used & _begins_twice(documents, builder)])
    builder.count_all("unsupervised", name, numbers[is_used & (lengths < 2)])
    is_used &= lengths >= 2
    samples = documents.take(is_used)
    samples = replace(samples, tokens=samples.tokens.astype(np.int32))
    return samples.cut(builder.seq_len) if too_long == "truncate" else samples, is_used


def _unknown(documents: DocumentSamples, builder: SampleBuilder, refuse: Refuse) -> np.ndarray:
    tokens, is_unknown = documents.tokens, np.zeros(len(documents), np.bool_)
    places = np.flatnonzero((tokens < 0) | (tokens >= builder.tokenizer.vocab_size))
    owners = np.searchsorted(np.cumsum(documents.lengths), places, side="right")
    for owner, first in zip(*np.unique(owners, return_index=True), strict=True):
        is_unknown[owner] = True
        token = int(tokens[places[first]])
        refuse(int(documents.numbers[owner]), builder.unknown_token(token))
    return is_unknown


def _count_long(
    lengths: np.ndarray, numbers: np.ndarray, builder: SampleBuilder, name: str
) -> None:
    key = {"split": "split", "truncate": "truncated", "drop": "too_long"}[builder.data.too_long]
    builder.count_all(key, name, numbers)
    if key == "split":
        return
    for length, n in zip(*np.unique(lengths, return_counts=True), strict=True):
        builder.counts[f"{FITS}{rounded_length(int(length))}"] += int(n)
    remains = builder.seq_len if key == "truncated" else 0
    if len(lengths):
        builder.counts[LOST] += int((lengths - remains).sum())
        for helps in (CUT_HELPS, SPLIT_HELPS):
            builder.counts[helps] += len(lengths)


def _begins_twice(documents: DocumentSamples, builder: SampleBuilder) -> np.ndarray:
    """Return whether each document begins with two bos tokens: [documents] bool."""
    begins_twice = documents.lengths > 1
    starts, bos = documents.starts[begins_twice], builder.tokenizer.bos_id
    begins_twice[begins_twice] = (documents.tokens[starts] == bos) & (
        documents.tokens[starts + 1] == bos
    )
    return begins_twice
