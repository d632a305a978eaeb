"""Tokenized samples on disk: flat memory-mapped columns, renamed into place when complete."""

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from mmap import MADV_RANDOM, MADV_WILLNEED, PAGESIZE, mmap
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_trainer.base.checksum import checksum
from fsdp_trainer.base.json_files import Json
from fsdp_trainer.data.media.kinds import READ
from fsdp_trainer.data.media.media import SampleMedium, media_json
from fsdp_trainer.data.store.linked_tokens import (
    BEGINS,
    TYPES,
    LinkedTokens,
    link_columns,
    type_number,
)
from fsdp_trainer.data.store.mapped_arrays import MAPPED_FROM, MappedArrays
from fsdp_trainer.data.tokens.document_samples import DocumentSamples
from fsdp_trainer.data.tokens.samples import Sample

COLUMNS = {
    "tokens": np.int32, "weights": np.float32, "lengths": np.int64, "weight_sums": np.float64,
    "supervised": np.int64, "sources": np.int32, "files": np.int32,
    "lines": np.int64, "digests": np.uint64,
}  # fmt: skip
PER_TOKEN = ("tokens", "weights")
GROUP_STARTS, KINDS = "group_starts", "kinds"
OPTIONAL: dict[str, tuple[Any, int]] = {
    GROUP_STARTS: (np.bool_, 1), KINDS: (np.uint8, 0), BEGINS: (np.int64, 0), TYPES: (np.uint8, 0),
}  # fmt: skip
"""Columns of [samples] that are only written if some value differs from the usual one.
group_starts: False where a sample shares the row of the sample before it. kinds: kinds of
samples.py. begins, types: see linked_tokens.py. Values: (dtype, usual value)."""
QUESTIONS, MEDIA, LABELS = TEXTS = ("questions", READ.column, "labels")
"""Columns of JSON, one after the other, that some stores have: what the answers to a prompt are
judged by, the media of a sample, if it has any, and what a head is to learn of it."""
SIZES = "_sizes"
"""Suffix of the column with the bytes of each text: [samples] int64."""
AT_ONCE = 1000
"""Samples that are copied together."""
BLOCK = 1 << 24  # bytes copied between two calls of `tick`
CHECKED_BYTES = 256 << 20
"""Size of the largest file whose content is checked at every start, which takes 0.1 s."""
CHECKSUMS, CHECKSUM = "checksums", "crc32"
"""Keys of meta.json: the CRC-32 of each file up to CHECKED_BYTES, and that of all other keys."""


Totals = dict[str, dict[str, int]]
"""Numbers of samples and tokens, by source."""


class Damaged(Exception):
    """Raised for a store that differs from what was written; the message describes the damage."""


class TokenStore:
    """Samples on disk.

    `weights[i]` is the loss weight of `tokens[i]` as a target.

    fingerprint: hash of the samples in order. It depends only on tokens and weights, not on how
    they were made.
    """

    tokens: np.ndarray  # [all tokens] int32
    weights: np.ndarray  # [all tokens] float32
    lengths: np.ndarray  # [samples] int64
    weight_sums: np.ndarray  # [samples] float64
    supervised: np.ndarray  # [samples] int64: tokens with a weight
    sources: np.ndarray  # [samples] int32, indices into source_names
    files: np.ndarray  # [samples] int32, indices into file_names
    lines: np.ndarray  # [samples] int64, from 1; row of a table
    # [samples] uint64: hash of a sample's tokens, weights and question, used to find duplicates
    digests: np.ndarray

    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        source_names: Sequence[str] = ("",),
        files: Sequence[str] = (),
        counts: dict[str, int] | None = None,
        examples: dict[str, list[str]] | None = None,
    ):
        self.folder, self.fingerprint = folder, fingerprint
        self.source_names, self.file_names = list(source_names), list(files)
        self.counts: dict[str, int] = counts or {}
        """Counts of events while it was written: see SampleBuilder.counts."""
        self.examples: dict[str, list[str]] = examples or {}
        """FILE:LINE of the first few rows behind each count."""
        for name, dtype in COLUMNS.items():
            setattr(self, name, _map(folder / f"{name}.bin", dtype))
        self.links: LinkedTokens | None = None
        """The samples whose tokens are in other files; None if there are none."""
        if (types := _map_optional(folder, TYPES)) is not None:
            begins = _map_optional(folder, BEGINS)
            begins = np.zeros(len(types), np.int64) if begins is None else begins
            self.links = LinkedTokens(begins, types, self.files, self.file_names)
        self.group_starts = _map_optional(folder, GROUP_STARTS)
        self.kinds = _map_optional(folder, KINDS)
        self.questions = TextColumn.of(folder, QUESTIONS)
        """None if the samples are not prompts."""
        self.labels = TextColumn.of(folder, LABELS)
        """None if the samples have no labels."""
        self._media = TextColumn.of(folder, MEDIA)
        for column in (self.tokens, self.weights):
            # shuffled samples are scattered over the file, so reading ahead is useless
            if isinstance(column.base, mmap):
                column.base.madvise(MADV_RANDOM)

    @cached_property
    def offsets(self) -> np.ndarray:
        """Index of the first token of each sample, then the total count: [samples + 1] int64.

        A sample whose tokens are in another file counts as none.
        """

        def make() -> dict[str, np.ndarray]:
            lengths = np.asarray(self.lengths)
            if self.links:
                lengths = np.where(self.links.is_linked, 0, lengths)
            return {"offsets": np.concatenate([[0], np.cumsum(lengths)])}

        if len(self) < MAPPED_FROM:
            return make()["offsets"]
        return MappedArrays(self.folder / "plans" / "store").get("offsets", make)["offsets"]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def groups(self) -> int:
        """The number of groups; equals the number of samples if none share a row by constraint."""
        starts = self.group_starts
        return len(self) if starts is None else int(np.count_nonzero(starts))

    @property
    def supervised_tokens(self) -> int:
        return int(np.sum(self.supervised, dtype=np.int64))

    def read(
        self, sample: int, start: int = 0, length: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        if self.links and self.links.is_linked[sample]:
            rest = int(self.lengths[sample]) - start
            return self.links.read(sample, start, rest if length is None else min(length, rest))
        first, end = self.offsets[sample] + start, self.offsets[sample + 1]
        part = slice(first, end if length is None else min(first + length, end))
        return self.tokens[part], self.weights[part]

    def question(self, sample: int) -> Json:
        assert self.questions is not None
        return json.loads(self.questions.text(sample))

    @property
    def may_have_media(self) -> bool:
        return self._media is not None

    def media(self, sample: int) -> list[SampleMedium]:
        text = self._media.text(sample) if self._media else ""
        return [SampleMedium.from_json(each) for each in json.loads(text)] if text else []

    def all_media(self) -> Iterator[SampleMedium]:
        for sample in np.flatnonzero(self._media.sizes) if self._media else ():
            yield from self.media(int(sample))

    @cached_property
    def samples_with_media(self) -> int:
        return int(np.count_nonzero(self._media.sizes)) if self._media else 0

    @property
    def token_count(self) -> int:
        if self.links is None:
            return len(self.tokens)
        return int(np.sum(self.lengths, dtype=np.int64))

    def gather(
        self, samples: np.ndarray, starts: np.ndarray, counts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens, weights) of pieces of samples, one piece after the other: [Σ counts].

        The i-th piece has `counts[i]` tokens of `samples[i]`, from number `starts[i]` on.
        """
        if self.links:
            pieces = zip(samples.tolist(), starts.tolist(), counts.tolist(), strict=True)
            tokens, weights = zip(*(self.read(*piece) for piece in pieces), strict=True)
            return np.concatenate(tokens), np.concatenate(weights)
        places = ranges(self.offsets[samples] + starts, counts)
        return np.asarray(self.tokens)[places], np.asarray(self.weights)[places]

    def fetch(self, samples: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        """Start reading all pieces that `gather` would return, instead of one after the other."""
        if self.links:
            linked = self.links.is_linked[samples]
            pieces = zip(samples[linked].tolist(), starts[linked].tolist(), counts[linked].tolist(),
                         strict=True)  # fmt: skip
            for piece in pieces:
                self.links.fetch(*piece)
            samples, starts, counts = samples[~linked], starts[~linked], counts[~linked]
        firsts = self.offsets[samples] + starts
        for column in (self.tokens, self.weights):
            if isinstance(column.base, mmap):
                begins = firsts * column.itemsize // PAGESIZE * PAGESIZE
                ends = (firsts + counts) * column.itemsize
                for begin, size in zip(begins.tolist(), (ends - begins).tolist(), strict=True):
                    column.base.madvise(MADV_WILLNEED, begin, size)

    def where(self, sample: int) -> str:
        """Return FILE:LINE of the row that a sample was made from."""
        if not self.file_names:
            return f"sample {sample}"
        return f"{self.file_names[self.files[sample]]}:{self.lines[sample]}"

    def number_in_line(self, sample: int) -> tuple[int, int]:
        """Return a sample's number, from 1, among the samples of its line, and their total."""
        place = (self.files[sample], self.lines[sample])
        first, stop = sample, sample + 1
        while first > 0 and (self.files[first - 1], self.lines[first - 1]) == place:
            first -= 1
        while stop < len(self) and (self.files[stop], self.lines[stop]) == place:
            stop += 1
        return sample - first + 1, stop - first


class TextColumn:
    """A column of texts. sizes: [samples] int64, bytes of each; content: all texts, uint8."""

    def __init__(self, sizes: np.ndarray, content: np.ndarray):
        self.sizes, self.content = sizes, content
        self.ends = np.cumsum(sizes)

    @classmethod
    def of(cls, folder: Path, name: str) -> "TextColumn | None":
        if not _has(folder, name + SIZES):
            return None
        sizes = _map(folder / f"{name}{SIZES}.bin", np.int64)
        return cls(sizes, _map(folder / f"{name}.bin", np.uint8))

    def text(self, sample: int) -> str:
        end = int(self.ends[sample])
        return self.content[end - int(self.sizes[sample]) : end].tobytes().decode()


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the `counts[i]` integers from `starts[i]` on, for every i: [Σ counts] int64."""
    ends = np.cumsum(counts)
    return np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1] if len(ends) else 0)


def _map_optional(folder: Path, column: str) -> np.ndarray | None:
    dtype, _ = OPTIONAL[column]
    return _map(folder / f"{column}.bin", dtype) if _has(folder, column) else None


def _map(file: Path, dtype: Any) -> np.ndarray:
    return np.memmap(file, dtype, mode="r") if file.stat().st_size else np.empty(0, dtype)


class StoreWriter:
    def __init__(self, folder: Path, with_media: bool = False):
        """with_media: whether samples may have some."""
        folder.mkdir()
        self._with_media = with_media
        self._files = {name: open(folder / f"{name}.bin", "wb") for name in COLUMNS}  # noqa: SIM115
        self._folder = folder
        self._optional = {column: bytearray() for column in OPTIONAL}
        self.totals: dict[str, dict[str, int]] = {}
        """Samples, tokens, supervised tokens, longest sample; by source (its index as a string)."""

    def write(
        self, samples: list[Sample], source: int = 0, file: int = 0, lines: Sequence[int] | int = 0
    ) -> None:
        """Append samples in order.

        source, file: indices into the lists of names. lines: line numbers in the file, one per
        sample.
        """
        if not samples:
            return
        lengths = np.array([len(s.tokens) for s in samples])
        weights = np.concatenate([s.weights for s in samples])
        stored = [s for s in samples if s.link is None]
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        columns = {
            "tokens": np.concatenate([*(s.tokens for s in stored), np.empty(0, np.int32)]),
            "weights": np.concatenate([*(s.weights for s in stored), np.empty(0, np.float32)]),
            "lengths": lengths,
            "weight_sums": np.add.reduceat(weights.astype(np.float64), starts),
            "supervised": np.add.reduceat(weights > 0, starts, dtype=np.int64),
            "sources": np.full(len(samples), source),
            "files": np.full(len(samples), file),
            "lines": np.broadcast_to(lines, len(samples)),
            "digests": np.array([digest_of(s) for s in samples], np.uint64),
        }
        optional = link_columns([sample.link for sample in samples])
        optional[GROUP_STARTS] = np.array([sample.starts_group for sample in samples])
        optional[KINDS] = np.array([sample.kind for sample in samples])
        self._append(columns, optional, source)
        self._write_texts(QUESTIONS, [s.question for s in samples if s.question is not None])
        self._write_texts(LABELS, [s.label for s in samples if s.label is not None])
        if self._with_media:
            self._write_texts(MEDIA, [media_json(s.media) for s in samples])

    def write_documents(self, samples: DocumentSamples, source: int, file: int) -> None:
        if not len(samples):
            return
        learnt = samples.lengths - 1
        is_linked = samples.begins is not None  # its tokens and weights are not stored
        columns = {
            "tokens": samples.tokens[: 0 if is_linked else None],
            "weights": np.empty(0) if is_linked else samples.weights,
            "lengths": samples.lengths,
            "weight_sums": learnt,
            "supervised": learnt,
            "sources": np.broadcast_to(source, len(learnt)),
            "files": np.broadcast_to(file, len(learnt)),
            "lines": samples.numbers,
            "digests": samples.digests(),
        }
        optional = {name: np.full(len(learnt), usual) for name, (_, usual) in OPTIONAL.items()}
        if samples.begins is not None:
            optional[BEGINS] = samples.begins
            optional[TYPES][:] = type_number(samples.dtype)
        self._append(columns, optional, source)

    def _append(
        self, columns: dict[str, np.ndarray], optional: dict[str, np.ndarray], source: int
    ) -> None:
        for name, dtype in COLUMNS.items():
            # unlike tofile, write raises an error when the disk is full
            self._files[name].write(np.ascontiguousarray(columns[name], dtype).data)
        for name, (dtype, _) in OPTIONAL.items():
            self._optional[name] += optional[name].astype(dtype).tobytes()
        totals = {
            "samples": len(columns["lengths"]),
            "tokens": columns["lengths"].sum(),
            "supervised": columns["supervised"].sum(),
            "longest": columns["lengths"].max(),
        }
        add_totals(self.totals, {str(source): {what: int(n) for what, n in totals.items()}})

    def _write_texts(self, name: str, texts: list[str]) -> None:
        if not texts:
            return
        encoded = [text.encode() for text in texts]
        with open(self._folder / f"{name}.bin", "ab") as file:
            file.writelines(encoded)
        with open(self._folder / f"{name}{SIZES}.bin", "ab") as file:
            file.write(np.array([*map(len, encoded)], np.int64).data)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        starts = self._optional[GROUP_STARTS]
        assert all(starts[:1]), "parts are joined: a group must not begin in another one"
        for column, (dtype, usual) in OPTIONAL.items():
            if np.any(np.frombuffer(self._optional[column], dtype) != usual):
                (self._folder / f"{column}.bin").write_bytes(self._optional[column])


def digest_of(sample: Sample) -> int:
    """Return a hash of a sample's tokens, weights, question, label and media, of 64 bits."""
    content = (
        sample.tokens.astype(np.int32, copy=False).tobytes()
        + sample.weights.astype(np.float32, copy=False).tobytes()
    )
    content += (sample.question or "").encode() + (sample.label or "").encode()
    content += "".join(one.file.digest for one in sample.media).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def group_digests(store: TokenStore) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of the first sample of each group, and a digest of each complete group.

    An answer labelled good or bad counts with its label, without its mismatched one.
    """
    digests = np.asarray(store.digests)  # pairs may share an answer
    firsts = np.arange(len(digests))
    if store.group_starts is not None:
        firsts = np.flatnonzero(store.group_starts)
    if store.kinds is not None and store.labels is None:
        return firsts, digests[firsts] + np.asarray(store.kinds)[firsts].astype(np.uint64)
    if store.group_starts is None:
        return firsts, digests
    places = np.arange(len(digests)) - np.repeat(firsts, np.diff(firsts, append=len(digests)))
    odd = (2 * places + 1).astype(np.uint64)
    return firsts, np.add.reduceat(digests * odd, firsts)


def add_totals(totals: dict[str, dict[str, int]], more: dict[str, dict[str, int]]) -> None:
    """Add `more` to the totals of each source, in place."""
    for source, added in more.items():
        mine = totals.setdefault(source, dict.fromkeys(added, 0))
        for what, n in added.items():
            mine[what] = max(mine[what], n) if what == "longest" else mine[what] + n


def check_columns(folder: Path, totals: dict[str, dict[str, int]]) -> None:
    """Raise Damaged unless the size of every column matches the totals."""
    samples = sum(one["samples"] for one in totals.values())
    tokens = sum(one["tokens"] for one in totals.values()) - _linked_count(folder)
    optional = {name: dtype for name, (dtype, _) in OPTIONAL.items() if _has(folder, name)}
    columns = COLUMNS | optional
    columns |= {name + SIZES: np.int64 for name in TEXTS if _has(folder, name + SIZES)}
    for column, dtype in columns.items():
        file = folder / f"{column}.bin"
        expected = np.dtype(dtype).itemsize * (tokens if column in PER_TOKEN else samples)
        try:
            size = file.stat().st_size
        except OSError as error:
            raise Damaged(str(error)) from None
        if size != expected:
            raise Damaged(f"{file} has {size:,} bytes instead of {expected:,}")


def _linked_count(folder: Path) -> int:
    try:
        types = _map_optional(folder, TYPES)
        lengths = _map(folder / "lengths.bin", np.int64)
        return 0 if types is None else int(lengths[np.asarray(types) > 0].sum())
    except (OSError, ValueError, IndexError) as error:
        raise Damaged(f"{folder}: {error}") from None


def merge(parts: Sequence[Path], into: Path, tick: Callable[[], None]) -> str:
    """Write the columns of all parts, one part after another; return the fingerprint.

    Uses bounded memory. tick: called repeatedly during the copy.
    """
    into.mkdir()
    texts = [name for name in TEXTS if any(_has(part, name + SIZES) for part in parts)]
    for column in (*COLUMNS, *texts, *(name + SIZES for name in texts)):
        with open(into / f"{column}.bin", "wb") as whole:
            for part in parts:
                if column not in COLUMNS and not _has(part, column):
                    continue  # a part without samples
                with open(part / f"{column}.bin", "rb") as piece:
                    while _copy(piece.fileno(), whole.fileno()):
                        tick()
            os.fsync(whole.fileno())
    with open(into / "digests.bin", "rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=10))
    for column in OPTIONAL:
        if any(_has(part, column) for part in parts):
            values = b"".join(_optional(part, column) for part in parts)
            (into / f"{column}.bin").write_bytes(values)
            if column in (GROUP_STARTS, KINDS):
                digest.update(values)
    return digest.hexdigest()


def divide(whole: Path, is_chosen: np.ndarray, into: Mapping[bool, Path]) -> dict[bool, Totals]:
    """Write the samples of a store without groups as two stores; return their totals by source.

    is_chosen: [samples] bool.
    """
    store, totals = TokenStore(whole, ""), {}
    origins, of_origin = np.unique(
        np.stack([store.sources, store.files], 1), axis=0, return_inverse=True
    )
    for chosen, folder in into.items():
        writer = StoreWriter(folder, store.may_have_media)
        for number, (source, file) in enumerate(origins.tolist()):
            places = np.flatnonzero((of_origin == number) & (is_chosen == chosen))
            for some in np.split(places, range(AT_ONCE, len(places), AT_ONCE)):
                lines = np.asarray(store.lines)[some].tolist()
                writer.write([labelled_sample(store, i) for i in some], source, file, lines)
        writer.close()
        totals[chosen] = writer.totals
    return totals


def labelled_sample(store: TokenStore, sample: int) -> Sample:
    label = store.labels.text(sample) if store.labels else None
    return Sample(*store.read(sample), label=label, media=tuple(store.media(sample)))


def share_of_each(store: TokenStore, share: float) -> np.ndarray:
    """Return True for about this share of the samples with each label, [samples] bool.

    They are those with the smallest digests, so that equal samples are on one side. Labels are
    rounded up and down so that the share of all samples is kept too.
    """
    assert store.labels is not None
    labels = [store.labels.text(i) for i in range(len(store))]
    names, numbers, counts = np.unique(labels, return_inverse=True, return_counts=True)
    ends, digests = np.cumsum(counts), np.asarray(store.digests)
    wanted = np.diff(np.rint(ends * share), prepend=0).astype(np.int64)
    ordered = digests[np.lexsort((digests, numbers))]
    last = ordered[(ends - counts + wanted - 1).clip(min=0)] if len(names) else ordered
    return (wanted[numbers] > 0) & (digests <= last[numbers])


def _has(folder: Path, column: str) -> bool:
    return (folder / f"{column}.bin").exists()


def _optional(folder: Path, column: str) -> bytes:
    if _has(folder, column):
        return (folder / f"{column}.bin").read_bytes()
    samples = (folder / "lengths.bin").stat().st_size // np.dtype(COLUMNS["lengths"]).itemsize
    dtype, usual = OPTIONAL[column]
    return np.full(samples, usual, dtype).tobytes()


def _copy(source: int, target: int) -> int:
    """Copy up to BLOCK bytes from one file's position to the other's; return the number copied.

    The kernel copies if it can, and may then let both files share the blocks on disk.
    """
    if hasattr(os, "copy_file_range"):
        try:
            if copied := os.copy_file_range(source, target, BLOCK):
                return copied
        except OSError:  # not supported between these file systems; other errors recur below
            pass
    block = os.read(source, BLOCK)
    rest = memoryview(block)
    while rest:
        rest = rest[os.write(target, rest) :]
    return len(block)


def read_meta(folder: Path) -> Json:
    """Return the description that `write_meta` wrote into a folder of stores.

    Raises Damaged if the description cannot be read, or a file does not match it.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        written = meta.pop(CHECKSUM, None)  # earlier versions have written none
        if written not in (None, _checksum_of(meta)):
            raise ValueError("it does not have the checksum it was written with")
        for store, about in meta["stores"].items():
            check_columns(folder / store, about["totals"])
        check_files(folder, meta.get(CHECKSUMS, {}))
    except OSError as error:
        raise Damaged(str(error)) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(
            f"{folder / 'meta.json'} cannot be read: {type(error).__name__} {error}"
        ) from None
    return meta


def write_meta(folder: Path, meta: Json) -> None:
    """Write the description of a folder of stores; the folder is complete only with this file."""
    meta = meta | {CHECKSUMS: checksums_of(folder, folder.rglob("*.bin"))}
    with open(folder / "meta.json", "w", encoding="utf-8") as file:
        json.dump(meta | {CHECKSUM: _checksum_of(meta)}, file, indent=1, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())


def _checksum_of(meta: Json) -> int:
    return zlib.crc32(json.dumps(meta).encode())


def checksums_of(folder: Path, files: Iterable[Path]) -> dict[str, int]:
    """Return the CRC-32 of files in `folder` by relative name, of those up to CHECKED_BYTES."""
    checked = (file for file in files if file.stat().st_size <= CHECKED_BYTES)
    return {str(file.relative_to(folder)): checksum(file) for file in checked}


def check_files(folder: Path, checksums: dict[str, int]) -> None:
    for name, value in checksums.items():
        if checksum(folder / name) != value:
            raise Damaged(f"{folder / name} does not have the checksum it was written with")
