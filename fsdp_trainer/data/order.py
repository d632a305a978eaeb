"""The global order of rows: row i of an epoch is a pure function of (data, packing, seed, epoch), on every rank alike."""

import hashlib
from collections.abc import Callable
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
        epoch, i = divmod(index, self.rows_per_epoch)
        plan = self.epoch(epoch)
        at = plan.documents[plan.offsets[i] : plan.offsets[i + 1]]
        parts = (plan.pieces.samples[at], plan.pieces.starts[at], plan.pieces.lengths[at])
        return list(zip(*(part.tolist() for part in parts), strict=True))

    def read(self, index: int) -> RowData:
        """The tokens of row `index`."""
        row = RowData(np.zeros(self.seq_len, np.int64), np.full(self.seq_len, -100), np.zeros(self.seq_len, np.float32), [], [])
        begin = 0
        for sample, start, length in self.row(index):
            tokens, weights = self.store.read(sample, start, length + 1)  # a document that is cut here goes on with its next token
            row.tokens[begin : begin + length] = tokens[:length]
            end = begin + len(tokens) - 1
            row.labels[begin:end] = np.where(weights[1:] > 0, tokens[1:], -100)
            row.weights[begin:end] = weights[1:]
            row.documents.append(length)
            row.sources.append(int(self.store.sources[sample]))
            begin += length
        return row

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
    taken = np.concatenate([[0], np.cumsum(sizes)])
    return documents[np.repeat(offsets[:-1][rows] - taken[:-1], sizes) + np.arange(len(documents))], taken
