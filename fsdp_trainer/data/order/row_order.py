"""The global order of rows, equal on every rank.

Row i of an epoch is a pure function of (data, packing, seed, epoch).
"""

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fsdp_trainer.base.counted import counted
from fsdp_trainer.data.media.media import SampleMedium
from fsdp_trainer.data.order import packing as packing_module
from fsdp_trainer.data.order.packing import Groups, Pieces, best_fit, one_per_row, pieces_of, stream
from fsdp_trainer.data.store.mapped_arrays import MAPPED_FROM, Arrays, MappedArrays
from fsdp_trainer.data.store.stored_values import SampleColumns
from fsdp_trainer.data.store.token_store import TokenStore, ranges
from fsdp_trainer.errors import UserError

NO_COLUMNS = SampleColumns()
PIECES_AT_A_TIME = 1024
"""Number of pieces whose weights are read at a time, to bound the memory."""


@dataclass
class RowData:
    """A row in the form that training uses.

    Position i is trained to predict `labels[i]`, with weight `weights[i]`: the next token, or the
    number of its own token's label.
    """

    tokens: np.ndarray  # [seq_len] int64, zero after the last document
    # [seq_len] int64: the next token of the same document, even if that is in another row; -100 if
    # it is not supervised
    labels: np.ndarray
    weights: np.ndarray  # [seq_len] float32: 0 where no token is supervised
    documents: list[int]
    """Lengths of the documents, in order; the rest of seq_len is padding."""
    sources: list[int]
    """The source of each document, as an index into the store's source_names."""


@dataclass
class Rows:
    """Several rows stacked; tokens, labels and weights as in RowData."""

    tokens: np.ndarray  # [rows, seq_len] int64
    positions: np.ndarray  # [rows, seq_len] int64; start at 0 in each document
    labels: np.ndarray  # [rows, seq_len] int64
    weights: np.ndarray  # [rows, seq_len] float32
    sources: np.ndarray  # [rows, seq_len] int64: source of each position's document
    documents: list[list[int]]
    """Lengths of each row's documents, in order."""
    group_starts: list[list[bool]]
    """True for each document that starts a group of documents that belong together."""
    reference: list[list[float]] | None = None
    """Σ log-probability of each document under the reference model; None if there is none."""
    label_values: list[list[list[float]]] | None = None
    """What a head is to learn of each document; None for a language model."""
    kinds: list[list[int]] | None = None
    """The kind of each document, as in samples.py; None if all are answers."""
    media: list[list[SampleMedium]] | None = None
    """The media of each row's documents, in order; None for data without media."""
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    """Additional values of each position, [rows, seq_len, ...] of any dtype, by name."""

    @classmethod
    def empty(cls, rows: int, seq_len: int) -> "Rows":
        tokens, positions, sources = np.zeros((3, rows, seq_len), np.int64)
        labels = np.full((rows, seq_len), -100, np.int64)
        weights = np.zeros((rows, seq_len), np.float32)
        documents: list[list[int]] = [[] for _ in range(rows)]
        group_starts: list[list[bool]] = [[] for _ in range(rows)]
        return cls(tokens, positions, labels, weights, sources, documents, group_starts)

    def put(self, places: Sequence[int] | np.ndarray, rows: "Rows") -> None:
        for name in ("tokens", "positions", "labels", "weights", "sources"):
            getattr(self, name)[places] = getattr(rows, name)
        for i, place in enumerate(places):
            self.documents[place] = rows.documents[i]
            self.group_starts[place] = rows.group_starts[i]
        for name, column in rows.columns.items():
            empty = np.zeros((*self.weights.shape, *column.shape[2:]), column.dtype)
            self.columns.setdefault(name, empty)[places] = column
        for name in ("reference", "label_values", "kinds", "media"):
            given = getattr(rows, name)
            if given is not None:
                own = getattr(self, name) or [[] for _ in self.documents]
                setattr(self, name, own)
                for place, values in zip(places, given, strict=True):
                    own[place] = values
        if self.kinds is not None:  # other components may have none
            self.kinds = [
                kinds or [0] * len(documents)
                for kinds, documents in zip(self.kinds, self.documents, strict=True)
            ]

    def row(self, i: int) -> RowData:
        starts = np.cumsum([0, *self.documents[i]], dtype=np.int64)[:-1]
        return RowData(
            self.tokens[i],
            self.labels[i],
            self.weights[i],
            self.documents[i],
            self.sources[i, starts].tolist(),
        )


@dataclass
class Epoch:
    """All documents of an epoch, row by row, and the sums over all rows before each row.

    Integers have the smallest unsigned type that holds them.
    """

    samples: np.ndarray  # [documents]
    starts: np.ndarray  # [documents]: index of the first of the sample's tokens in this row
    lengths: np.ndarray  # [documents]
    offsets: np.ndarray  # [rows + 1]: row i holds documents [offsets[i], offsets[i + 1])
    # [rows + 1, 4] float64: weight, tokens, supervised tokens, attention cost (Σ length², minus
    # what windows leave out)
    sums: np.ndarray


class DocumentPieces(NamedTuple):
    """The documents of some rows, each a sample or a piece of one; int64 arrays.

    samples, starts, lengths: [documents], sample, its first token that is in the row, and number of
    tokens. counts: [rows], number of documents.
    """

    samples: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray


Arranged = tuple[Pieces, np.ndarray, np.ndarray]
"""Pieces of an epoch, their indices row by row, and the offsets of the rows."""


class RowOrder:
    """Rows over all epochs, addressed by one running index, which is the only state of a loader.

    The plan of an epoch (which tokens are in which row) is made once per node and mapped from files
    next to the store, by all ranks and by later runs, so that a rank's memory does not grow with
    the data. The plan of the next epoch is made in the background from the middle of this epoch on.
    """

    def __init__(
        self,
        store: TokenStore,
        seq_len: int,
        packing: str,
        shuffle: bool,
        seed: int,
        attention_cost: Callable[[np.ndarray], np.ndarray] = np.square,
        columns: SampleColumns = NO_COLUMNS,
    ):
        """attention_cost: function from document lengths to the attention costs of the model.

        columns: what a second model says about the store's samples, as columns of the rows.
        """
        self.columns = columns
        self.attention_cost = attention_cost
        self.store, self.seq_len, self.packing, self.shuffle = store, seq_len, packing, shuffle
        self._key = f"{store.fingerprint}/{packing}/{seq_len}/{seed}"
        tokens = store.token_count
        rows = -(-tokens // seq_len)
        self.mapped: MappedArrays | None = None
        """None if there is so little data that every rank makes its own plans."""
        if max(len(store.lengths), rows) >= MAPPED_FROM:
            self.mapped = MappedArrays(store.folder / "plans" / self._plan_key())
        self._groups = self._checked_groups()
        if packing != "stream":
            self._packing = self._once("packing", self._pack)
            rows = len(self._packing["offsets"]) - 1
        self.rows_per_epoch: int = rows
        """The number of rows, equal in every epoch since it depends only on the lengths."""
        self.fill: float = tokens / (self.rows_per_epoch * seq_len)
        """Share of positions that hold a token."""
        self._epochs: dict[int, Epoch] = {}
        self._ahead = 0  # the last epoch that was requested

    def with_columns(self, columns: SampleColumns) -> "RowOrder":
        order = copy(self)
        order.columns = columns
        return order

    @property
    def note(self) -> str | None:
        if self.mapped is None or self.mapped.problem is None:
            return None
        return (
            "the order of the rows cannot be stored next to the data, so every rank makes its own"
            f" and keeps it in memory: {self.mapped.problem}"
        )

    def row(self, index: int) -> list[tuple[int, int, int]]:
        """Return (sample, first token, number of tokens) of each document of row `index`.

        The index counts over all epochs.
        """
        *parts, _ = self._documents([index])
        return list(zip(*(part.tolist() for part in parts), strict=True))

    def read(self, index: int) -> RowData:
        return self.read_rows([index]).row(0)

    def read_rows(self, indices: Sequence[int] | np.ndarray) -> Rows:
        """Return the rows with these indices, in the given order.

        All operations are on whole arrays, since the training step waits for this.
        """
        rows = Rows.empty(len(indices), self.seq_len)
        if not len(indices):
            return rows
        documents = samples, starts, lengths, counts = self._documents(indices)
        first_documents = np.cumsum(counts) - counts  # of each row, among all that are read
        first_tokens = np.cumsum(lengths) - lengths  # of each document, likewise
        in_row = first_tokens - np.repeat(first_tokens[first_documents], counts)
        places = ranges(np.repeat(np.arange(len(counts)) * self.seq_len, counts) + in_row, lengths)
        # a document that is cut continues with its next token, which is read with it
        goes_on = starts + lengths < self.store.lengths[samples]
        counts_read = lengths + goes_on
        if self.mapped:
            self.store.fetch(samples, starts, counts_read)
        tokens, weights = self.store.gather(samples, starts, counts_read)
        own = ranges(np.cumsum(counts_read) - counts_read, lengths)
        if self.columns.token_labels is None:
            ends = (first_tokens + lengths - 1)[~goes_on]
            following = own + 1
            following[ends] = own[ends]  # they have no next token
            target_weights, targets = weights[following], tokens[following]
            target_weights[ends] = 0
        else:
            target_weights = weights[own]
            numbers = self._supervised_numbers(target_weights > 0, documents)
            targets = np.zeros_like(own)
            targets[target_weights > 0] = self.columns.token_labels[numbers]
        rows.tokens.reshape(-1)[places] = tokens[own]
        rows.positions.reshape(-1)[places] = ranges(np.zeros_like(lengths), lengths)
        rows.labels.reshape(-1)[places] = np.where(target_weights > 0, targets, -100)
        rows.weights.reshape(-1)[places] = target_weights
        if len(self.store.source_names) > 1:
            rows.sources.reshape(-1)[places] = np.repeat(self.store.sources[samples], lengths)

        def by_row(values: np.ndarray) -> list[list[Any]]:
            return [part.tolist() for part in np.split(values, first_documents[1:])]

        rows.documents = by_row(lengths)
        starts_group = self.store.group_starts
        rows.group_starts = by_row(
            np.ones(len(samples), np.bool_) if starts_group is None else starts_group[samples]
        )
        self._add_values(rows, samples, by_row)
        if self.store.samples_with_media:
            media = [self.store.media(sample) for sample in samples.tolist()]
            firsts_of_rows = [*first_documents.tolist(), len(media)]
            by_rows = [[*chain(*media[a:b])] for a, b in pairwise(firsts_of_rows)]
            rows = replace(rows, media=by_rows)
        if self.columns.of_tokens is not None:
            is_supervised = target_weights > 0
            numbers = self._supervised_numbers(is_supervised, documents)
            for name, values in self.columns.of_tokens(numbers).items():
                column = np.zeros((rows.weights.size, *values.shape[1:]), values.dtype)
                column[places[is_supervised]] = values
                rows.columns[name] = column.reshape(*rows.weights.shape, *values.shape[1:])
        return rows

    def _add_values(
        self, rows: Rows, samples: np.ndarray, by_row: Callable[[np.ndarray], list[list[Any]]]
    ) -> None:
        for name in ("reference", "label_values"):
            values = getattr(self.columns, name)
            if values is not None:
                setattr(rows, name, by_row(values[samples]))
        if self.store.kinds is not None:
            rows.kinds = by_row(self.store.kinds[samples])

    def _supervised_numbers(
        self, is_supervised: np.ndarray, documents: DocumentPieces
    ) -> np.ndarray:
        """Return the index of each supervised token of documents among those of the store.

        is_supervised: for each token of the documents, whether the next one is supervised.
        """
        samples, starts, lengths, _ = documents
        # of the tokens before a piece, the first one predicts nothing and has no weight
        earlier, _ = self._supervised(samples, np.ones_like(starts), starts)
        firsts = self._first_supervised[samples] + earlier
        before = np.cumsum(is_supervised) - is_supervised
        first_tokens = np.cumsum(lengths) - lengths
        numbers = np.repeat(firsts - before[first_tokens], lengths) + before
        return numbers[is_supervised]

    def _supervised(
        self, samples: np.ndarray, starts: np.ndarray, counts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return how many of some tokens of samples are supervised, and the sum of their weights.

        The i-th piece has `counts[i]` tokens of a sample, from number `starts[i]` on. The weights
        are only read for samples of tokens with a mask: in a text all tokens but the first are
        supervised.
        """
        supervised, sums = counts.astype(np.int64), counts.astype(np.float64)
        unmasked = np.asarray(self.store.lengths)[samples] - 1
        masked = (np.asarray(self.store.supervised)[samples] < unmasked) & (counts > 0)
        pieces = np.flatnonzero(masked)
        for first in range(0, len(pieces), PIECES_AT_A_TIME):
            some = pieces[first : first + PIECES_AT_A_TIME]
            _, weights = self.store.gather(samples[some], starts[some], counts[some])
            weights = weights.astype(np.float64)
            begins = np.cumsum(counts[some]) - counts[some]
            supervised[some] = np.add.reduceat(weights > 0, begins, dtype=np.int64)
            sums[some] = np.add.reduceat(weights, begins)
        return supervised, sums

    @cached_property
    def _first_supervised(self) -> np.ndarray:
        """Index of each sample's first supervised token among those of the store: [samples]."""
        supervised = np.asarray(self.store.supervised)
        return np.cumsum(supervised) - supervised

    def attention_costs(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the attention cost of each of these rows: [rows] float64."""
        parts = [
            plan.sums[rows + 1, 3] - plan.sums[rows, 3] for plan, rows in self._by_epoch(indices)
        ]
        return np.concatenate([np.zeros(0), *parts])

    def epoch(self, epoch: int) -> Epoch:
        """Return the plan of an epoch; the two most recently opened plans stay open.

        An lru_cache of the method would be a circle of references, so that an unused order would
        keep the files of its plans open until the garbage collector runs.
        """
        plan = self._epochs.get(epoch)
        if plan is None:
            plan = Epoch(**self._once(f"epoch-{epoch}", lambda: self._plan(epoch)))
            self._epochs[epoch] = plan
            for earlier in list(self._epochs)[:-2]:
                self._epochs.pop(earlier, None)  # another thread may have been faster
        return plan

    def totals(self, start: int, stop: int) -> tuple[float, int, int, int]:
        """Return sums over rows [start, stop), without reading any row.

        The sums are: weight, tokens, supervised tokens, attention cost.
        """
        sums = np.zeros(4)
        for plan, first, end in self._ranges_by_epoch(start, stop):
            sums += plan.sums[end] - plan.sums[first]
        weight, tokens, supervised, attention_cost = sums.tolist()
        return weight, int(tokens), int(supervised), int(attention_cost)

    def documents(self, start: int, stop: int) -> int:
        """Return the number of documents in rows [start, stop), without reading any row."""
        return sum(
            int(plan.offsets[end]) - int(plan.offsets[first])
            for plan, first, end in self._ranges_by_epoch(start, stop)
        )

    def _ranges_by_epoch(self, start: int, stop: int) -> Iterator[tuple[Epoch, int, int]]:
        """Yield the plan of each epoch with rows in [start, stop), and their range in it."""
        while start < stop:
            epoch, first = divmod(start, self.rows_per_epoch)
            end = min(first + stop - start, self.rows_per_epoch)
            yield self.epoch(epoch if self.shuffle else 0), first, end
            start += end - first

    def _by_epoch(self, indices: Sequence[int] | np.ndarray) -> Iterator[tuple[Epoch, np.ndarray]]:
        epochs, rows = np.divmod(np.asarray(indices, np.int64), self.rows_per_epoch)
        if not len(epochs):
            return
        for part in np.split(np.arange(len(epochs)), np.flatnonzero(np.diff(epochs)) + 1):
            epoch = int(epochs[part[0]])
            yield self.epoch(epoch if self.shuffle else 0), rows[part]
            is_second_half = 2 * rows[part[-1]] >= self.rows_per_epoch
            if self.mapped and self.shuffle and epoch >= self._ahead and is_second_half:
                self._ahead = epoch + 1
                threading.Thread(
                    target=self.epoch, args=(self._ahead,), name="next epoch", daemon=True
                ).start()

    def _documents(self, indices: Sequence[int] | np.ndarray) -> DocumentPieces:
        parts = []
        for plan, rows in self._by_epoch(indices):
            first = plan.offsets[rows].astype(np.int64)
            counts = plan.offsets[rows + 1] - first
            at = ranges(first, counts)
            parts.append((plan.samples[at], plan.starts[at], plan.lengths[at], counts))
        return DocumentPieces(
            *(np.concatenate(every).astype(np.int64) for every in zip(*parts, strict=True))
        )

    def _plan_key(self) -> str:
        """Return a hash of everything that decides the plans of this order, including its code."""
        costs = np.asarray(self.attention_cost(np.arange(1, self.seq_len + 1)), np.float64)
        code = b"".join(Path(file).read_bytes() for file in (__file__, packing_module.__file__))
        parts = (self._key.encode(), b"shuffled" if self.shuffle else b"", costs.tobytes(), code)
        return hashlib.blake2b(b"/".join(parts), digest_size=10).hexdigest()

    def _once(self, name: str, make: Callable[[], Arrays]) -> Arrays:
        """Return the arrays of `make`, which only one rank of a node calls for much data."""
        return self.mapped.get(name, make) if self.mapped else make()

    def _pack(self) -> Arrays:
        lengths = self._packed_lengths()
        if self.packing == "none":
            packing = one_per_row(lengths)
        else:
            packing = best_fit(lengths, self.seq_len)
        return {"documents": narrow(packing.documents), "offsets": narrow(packing.offsets)}

    def _plan(self, epoch: int) -> Arrays:
        if self.packing == "stream":
            pieces, documents, offsets = self._streamed(epoch)
        elif self.shuffle:
            pieces, documents, offsets = self._shuffled(epoch)
        else:
            pieces, documents, offsets = self._in_order()
        if self._groups is not None:
            documents, offsets = self._groups.samples(documents, offsets)
        samples, starts, lengths = (
            part[documents] for part in (pieces.samples, pieces.starts, pieces.lengths)
        )
        of_sample = np.asarray(self.store.lengths)[samples]
        supervised = np.asarray(self.store.supervised)[samples]
        weights = np.asarray(self.store.weight_sums)[samples]
        cut = np.flatnonzero(lengths < of_sample)
        # the last token of a piece predicts the one after the cut
        targets = np.minimum(starts + lengths, of_sample - 1)[cut] - starts[cut]
        supervised[cut], weights[cut] = self._supervised(samples[cut], starts[cut] + 1, targets)

        def before(values: np.ndarray) -> np.ndarray:
            return np.cumsum(np.add.reduceat(values, offsets[:-1], dtype=np.float64))

        sums = [
            before(weights),
            before(lengths),
            before(supervised),
            # rounded to integers: sums are exact, and equal rows have equal costs
            before(np.rint(self.attention_cost(lengths))),
        ]
        columns = {"samples": samples, "starts": starts, "lengths": lengths, "offsets": offsets}
        return {name: narrow(column) for name, column in columns.items()} | {
            "sums": np.pad(np.stack(sums, 1), ((1, 0), (0, 0)))
        }

    def _checked_groups(self) -> Groups | None:
        """Return the store's groups; None if every sample is a group by itself.

        Raises UserError if a group cannot be kept in one row.
        """
        if self.store.group_starts is None:
            return None
        starts, lengths = self.store.group_starts, np.asarray(self.store.lengths)
        groups = Groups(**self._once("groups", lambda: vars(Groups.from_starts(starts, lengths))))
        if self.packing == "stream":
            text = "it cuts documents where a row is full, but some of the data must share a row."
            use = "Use  data.packing=best_fit  or  data.packing=none"
            raise UserError("the data cannot be packed", "data.packing=stream", f"{text}\n{use}")
        longest = int(np.argmax(groups.lengths))
        if groups.lengths[longest] > self.seq_len:
            count = int(np.count_nonzero(groups.lengths > self.seq_len))
            text = (
                f"of documents that must share a row, {counted(count, 'group')} would be longer."
                f" The longest,\n{self.store.where(int(groups.firsts[longest]))}, has "
                f"{groups.lengths[longest]:,} tokens in {groups.sizes[longest]:,} documents.\n"
                f"Use  batch.seq_len={groups.lengths[longest]}  or leave them out"
            )
            raise UserError("the data cannot be packed", f"batch.seq_len={self.seq_len}", text)
        return groups

    def _packed_lengths(self) -> np.ndarray:
        """Return the token counts of what packing places as a unit: groups or pieces of samples."""
        return self._pieces().lengths if self._groups is None else self._groups.lengths

    def _pieces(self) -> Pieces:
        return pieces_of(np.asarray(self.store.lengths), self.seq_len)

    def _shuffled(self, epoch: int) -> Arranged:
        """Return an epoch in which samples of equal length swap places, then the rows are shuffled.

        Every row is as full as before.
        """
        packed = self._packing["documents"]
        shortness = narrow(self.seq_len - self._packed_lengths())
        documents = np.empty(len(packed), np.int64)
        # the place of the i-th longest sample goes to the i-th longest of an order that is random
        # among samples of equal length
        order = self._random_order("samples", epoch, len(packed))
        documents[np.argsort(shortness[packed], kind="stable")] = order[
            np.argsort(shortness[order], kind="stable")
        ]
        rows = self._random_order("rows", epoch, self.rows_per_epoch)
        return self._pieces(), *_take_rows(documents, self._packing["offsets"], rows)

    def _in_order(self) -> Arranged:
        """Return an epoch with the samples of a row sorted by index, and rows by first sample."""
        offsets = self._packing["offsets"].astype(np.int64)
        row_of = np.repeat(np.arange(self.rows_per_epoch), np.diff(offsets))
        documents = self._packing["documents"][np.lexsort((self._packing["documents"], row_of))]
        return self._pieces(), *_take_rows(
            documents, offsets, np.argsort(documents[offsets[:-1]], kind="stable")
        )

    def _streamed(self, epoch: int) -> Arranged:
        """Return an epoch of texts in a new order, so that rows cut them at other positions.

        Then the rows are shuffled, so that a book is not read in one go.
        """
        lengths = np.asarray(self.store.lengths)
        order, rows = np.arange(len(lengths)), np.arange(self.rows_per_epoch)
        if self.shuffle:
            order = self._random_order("samples", epoch, len(lengths))
            rows = self._random_order("rows", epoch, self.rows_per_epoch)
        pieces, offsets = stream(lengths, order, self.seq_len)
        return pieces, *_take_rows(np.arange(len(pieces.samples)), offsets, rows)

    def _random_order(self, purpose: str, epoch: int, n: int) -> np.ndarray:
        """Return the numbers below n in an order drawn for this purpose and epoch."""
        drawn = random_bits(f"{self._key}/{epoch}/{purpose}", n)
        # twice as fast as a stable sort, with the same result if no two numbers are equal
        order = np.argsort(drawn)
        return order if np.all(np.diff(drawn[order])) else np.argsort(drawn, kind="stable")


def random_bits(key: str, n: int) -> np.ndarray:
    """Return n random uint64.

    These are raw bits: numpy guarantees the same stream in all versions for them, but not for
    `permutation`.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    return np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(n)


def _take_rows(
    documents: np.ndarray, offsets: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return documents and offsets with the rows in the order `rows`."""
    offsets = offsets.astype(np.int64)
    sizes = np.diff(offsets)[rows]
    return documents[ranges(offsets[:-1][rows], sizes)], np.concatenate([[0], np.cumsum(sizes)])


def narrow(numbers: np.ndarray) -> np.ndarray:
    """Return the numbers in the smallest unsigned type that holds them."""
    return numbers.astype(np.min_scalar_type(int(numbers.max())))
