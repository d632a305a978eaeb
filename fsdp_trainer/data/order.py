"""The global order of rows: row i of an epoch is a pure function of (data, packing, seed, epoch), on every rank alike."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fsdp_trainer.data.packing import Pieces, best_fit, one_per_row, pieces_of, stream
from fsdp_trainer.data.store import TokenStore


@dataclass
class RowData:
    """A row as training sees it. Position i is trained to predict `labels[i]`, with weight `weights[i]`."""

    tokens: np.ndarray  # [seq_len] int64, zero behind the last document
    labels: np.ndarray  # [seq_len] int64: the next token of the same document, also where that is in another row; -100: none is learnt
    weights: np.ndarray  # [seq_len] float32: 0 where none is learnt
    documents: list[int]
    """Lengths of the documents, in order; what remains of seq_len is padding."""
    sources: list[int]
    """Where each of them comes from: a place in the store's source_names."""


@dataclass
class Rows:
    """Several rows, one below the other: tokens, labels and weights as in RowData."""

    tokens: np.ndarray  # [rows, seq_len] int64
    positions: np.ndarray  # [rows, seq_len] int64; each document's begin at 0
    labels: np.ndarray  # [rows, seq_len] int64
    weights: np.ndarray  # [rows, seq_len] float32
    sources: np.ndarray  # [rows, seq_len] int64: which source a position's document comes from
    documents: list[list[int]]
    """Lengths of each row's documents, in order."""

    @classmethod
    def empty(cls, rows: int, seq_len: int) -> "Rows":
        """Nothing but padding."""
        tokens, positions, sources = np.zeros((3, rows, seq_len), np.int64)
        labels, weights = np.full((rows, seq_len), -100, np.int64), np.zeros((rows, seq_len), np.float32)
        return cls(tokens, positions, labels, weights, sources, [[] for _ in range(rows)])

    def put(self, places: Sequence[int] | np.ndarray, rows: "Rows") -> None:
        """Lay `rows` at these places."""
        for name in ("tokens", "positions", "labels", "weights", "sources"):
            getattr(self, name)[places] = getattr(rows, name)
        for place, documents in zip(places, rows.documents, strict=True):
            self.documents[place] = documents

    def row(self, i: int) -> RowData:
        """The i-th by itself."""
        starts = np.cumsum([0, *self.documents[i]], dtype=np.int64)[:-1]
        return RowData(self.tokens[i], self.labels[i], self.weights[i], self.documents[i], self.sources[i, starts].tolist())


@dataclass
class Epoch:
    """All rows of an epoch, and what each weighs."""

    pieces: Pieces
    documents: np.ndarray  # [pieces] int64: places in `pieces`, row by row
    offsets: np.ndarray  # [rows + 1] int64
    weight: np.ndarray  # [rows] float64
    tokens: np.ndarray  # [rows] int64
    supervised: np.ndarray  # [rows] int64
    squares: np.ndarray  # [rows]: Σ length² of the documents, less what windows leave out


Arranged = tuple[Pieces, np.ndarray, np.ndarray]
"""An epoch's pieces, their places row by row, the offsets of the rows."""


class RowOrder:
    """Rows over all epochs, by one running index. The state of a loader is that index and nothing else."""

    def __init__(
        self,
        store: TokenStore,
        seq_len: int,
        packing: str,
        shuffle: bool,
        seed: int,
        attended: Callable[[np.ndarray], np.ndarray] = np.square,
    ):
        """attended: what attention costs a model, of documents' lengths."""
        self.attended = attended
        self.store, self.seq_len, self.shuffle = store, seq_len, shuffle
        self._key = f"{store.fingerprint}/{packing}/{seq_len}/{seed}"
        lengths = np.asarray(store.lengths)
        self._arrange: Callable[[int], Arranged]
        rows = -(-int(lengths.sum()) // seq_len)
        if packing == "stream":
            self._arrange = self._streamed
        else:
            self._pieces = pieces_of(lengths, seq_len)
            self._packing = one_per_row(self._pieces.lengths) if packing == "none" else best_fit(self._pieces.lengths, seq_len)
            self._arrange = self._shuffled if shuffle else self._in_order
            rows = len(self._packing.offsets) - 1
        self.rows_per_epoch: int = rows
        """The same for every epoch: it depends on the lengths only."""
        self.fill: float = float(lengths.sum() / (self.rows_per_epoch * seq_len))
        """Share of positions that hold a token."""
        self.epoch = lru_cache(maxsize=2)(self._epoch)

    def row(self, index: int) -> list[tuple[int, int, int]]:
        """What is in row `index`, which counts over all epochs: (sample, first token, number of tokens) of each document."""
        *parts, _ = self._documents([index])
        return list(zip(*(part.tolist() for part in parts), strict=True))

    def read(self, index: int) -> RowData:
        """Row `index` by itself."""
        return self.read_rows([index]).row(0)

    def read_rows(self, indices: Sequence[int] | np.ndarray) -> Rows:
        """The rows of these indices, in their order. All of it is done to whole arrays: the step waits for this."""
        rows = Rows.empty(len(indices), self.seq_len)
        if not len(indices):
            return rows
        samples, starts, lengths, counts = self._documents(indices)
        first_documents = np.cumsum(counts) - counts
        before = np.cumsum(lengths) - lengths
        in_row = before - np.repeat(before[first_documents], counts)
        places = ranges(np.repeat(np.arange(len(counts)) * self.seq_len, counts) + in_row, lengths)
        tokens, weights = np.asarray(self.store.tokens), np.asarray(self.store.weights)
        at = ranges(self.store.offsets[samples] + starts, lengths)
        following = at + 1
        ends = (before + lengths - 1)[starts + lengths == self.store.lengths[samples]]  # a document that is cut goes on with its next token
        following[ends] = at[ends]
        learnt = weights[following]
        learnt[ends] = 0
        rows.tokens.reshape(-1)[places] = tokens[at]
        rows.positions.reshape(-1)[places] = ranges(np.zeros_like(lengths), lengths)
        rows.labels.reshape(-1)[places] = np.where(learnt > 0, tokens[following], -100)
        rows.weights.reshape(-1)[places] = learnt
        if len(self.store.source_names) > 1:
            rows.sources.reshape(-1)[places] = np.repeat(self.store.sources[samples], lengths)
        every = lengths.tolist()
        rows.documents = [every[first : first + n] for first, n in zip(first_documents.tolist(), counts.tolist(), strict=True)]
        return rows

    def _documents(self, indices: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Of the documents of these rows, all int64: sample, first token, number of tokens; and how many documents each row has."""
        epochs, places = np.divmod(np.asarray(indices, np.int64), self.rows_per_epoch)
        parts = []
        for of_one in np.split(np.arange(len(epochs)), np.flatnonzero(np.diff(epochs)) + 1):
            plan, rows = self.epoch(int(epochs[of_one[0]])), places[of_one]
            counts = plan.offsets[rows + 1] - plan.offsets[rows]
            at = plan.documents[ranges(plan.offsets[rows], counts)]
            parts.append((plan.pieces.samples[at], plan.pieces.starts[at], plan.pieces.lengths[at], counts))
        samples, starts, lengths, counts = (np.concatenate(every) for every in zip(*parts, strict=True))
        return samples, starts, lengths, counts

    def costs(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """[rows] of what attention costs in each of these rows."""
        epochs, places = np.divmod(np.asarray(indices, np.int64), self.rows_per_epoch)
        return np.array([self.epoch(epoch).squares[i] for epoch, i in zip(epochs.tolist(), places.tolist(), strict=True)])

    def totals(self, start: int, stop: int) -> tuple[float, int, int, int]:
        """(Σ weight, tokens, supervised tokens, Σ of what attention costs) of rows [start, stop), without reading one."""
        weight, tokens, supervised, squares = 0.0, 0, 0, 0
        while start < stop:
            epoch, i = divmod(start, self.rows_per_epoch)
            part = slice(i, min(i + stop - start, self.rows_per_epoch))
            plan = self.epoch(epoch)
            weight += float(plan.weight[part].sum())
            tokens += int(plan.tokens[part].sum())
            supervised += int(plan.supervised[part].sum())
            squares += int(plan.squares[part].sum())
            start += part.stop - part.start
        return weight, tokens, supervised, squares

    def _epoch(self, epoch: int) -> Epoch:
        pieces, documents, offsets = self._arrange(epoch)
        store, starts = self.store, offsets[:-1]
        lengths = pieces.lengths
        # only texts are cut: all their tokens but the first are learnt, also the one behind the cut
        whole = lengths == store.lengths[pieces.samples]
        learnt = np.minimum(pieces.starts + lengths, store.lengths[pieces.samples] - 1) - pieces.starts
        sums = (
            np.add.reduceat(values[documents], starts)
            for values in (
                np.where(whole, store.weight_sums[pieces.samples], learnt),
                lengths,
                np.where(whole, store.supervised[pieces.samples], learnt),
                self.attended(lengths),
            )
        )
        return Epoch(pieces, documents, offsets, *sums)

    def _shuffled(self, epoch: int) -> Arranged:
        """Samples of one length change places, which leaves every row as full as it was; then the rows change places."""
        lengths = self._pieces.lengths
        documents = np.empty_like(self._packing.documents)
        # The i-th longest sample gives its place to the i-th longest in an order that is random among equals.
        place = np.argsort(-lengths[self._packing.documents], kind="stable")
        documents[place] = np.lexsort((self._random("samples", epoch, len(lengths)), -lengths))
        return self._pieces, *_take_rows(documents, self._packing.offsets, self._random_order("rows", epoch, self.rows_per_epoch))

    def _in_order(self, epoch: int) -> Arranged:
        """Samples of a row by index, rows by their first sample."""
        offsets = self._packing.offsets
        row_of = np.repeat(np.arange(self.rows_per_epoch), np.diff(offsets))
        documents = self._packing.documents[np.lexsort((self._packing.documents, row_of))]
        return self._pieces, *_take_rows(documents, offsets, np.argsort(documents[offsets[:-1]], kind="stable"))

    def _streamed(self, epoch: int) -> Arranged:
        """Texts in a new order, which cuts them at other places; then the rows change places, so that a book is not read in one go."""
        n = len(self.store.lengths)
        pieces, offsets = stream(
            self.store.lengths, self._random_order("samples", epoch, n) if self.shuffle else np.arange(n), self.seq_len
        )
        rows = self._random_order("rows", epoch, self.rows_per_epoch) if self.shuffle else np.arange(self.rows_per_epoch)
        return pieces, *_take_rows(np.arange(len(pieces.samples)), offsets, rows)

    def _random_order(self, purpose: str, epoch: int, n: int) -> np.ndarray:
        return np.argsort(self._random(purpose, epoch, n), kind="stable")

    def _random(self, purpose: str, epoch: int, n: int) -> np.ndarray:
        """[n] uint64. Raw bits: numpy promises their stream for every version, but not that of `permutation`."""
        key = hashlib.blake2b(f"{self._key}/{epoch}/{purpose}".encode(), digest_size=16).digest()
        return np.random.Philox(key=int.from_bytes(key, "little")).random_raw(n)


def _take_rows(documents: np.ndarray, offsets: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Documents and offsets with the rows in the order `rows`."""
    sizes = np.diff(offsets)[rows]
    return documents[ranges(offsets[:-1][rows], sizes)], np.concatenate([[0], np.cumsum(sizes)])


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """[Σ counts] int64: the `counts[i]` numbers from `starts[i]` on, for every i."""
    ends = np.cumsum(counts)
    return np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1] if len(ends) else 0)
