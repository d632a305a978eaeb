"""Packing: which samples share a row and where they are cut, from the lengths alone."""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np


@dataclass
class Packing:
    """Samples by row: row r holds the samples `documents[offsets[r]:offsets[r + 1]]`."""

    documents: np.ndarray  # [samples] int64: sample ids, row by row
    offsets: np.ndarray  # [rows + 1] int64


@dataclass
class Pieces:
    """Stretches of samples: piece i is `lengths[i]` tokens of `samples[i]`, from `starts[i]` on."""

    samples: np.ndarray  # [pieces] int64
    starts: np.ndarray  # [pieces] int64
    lengths: np.ndarray  # [pieces] int64


def pieces_of(lengths: np.ndarray, capacity: int) -> Pieces:
    """Cut samples that are longer than a row into full rows and a rest; keep the others."""
    counts = -(-lengths // capacity)
    samples = np.repeat(np.arange(len(lengths)), counts)
    starts = (np.arange(len(samples)) - np.repeat(np.cumsum(counts) - counts, counts)) * capacity
    return Pieces(samples, starts, np.minimum(lengths[samples] - starts, capacity))


@dataclass
class Groups:
    """Runs of consecutive samples that packing must keep in one row."""

    firsts: np.ndarray  # [groups] int64: first sample of each group
    sizes: np.ndarray  # [groups] int64: number of samples
    lengths: np.ndarray  # [groups] int64: number of tokens

    @classmethod
    def from_starts(cls, starts: np.ndarray, lengths: np.ndarray) -> "Groups":
        """starts: [samples] bool, True for a group's first sample. lengths: [samples] tokens."""
        firsts = np.flatnonzero(starts)
        sizes = np.diff(firsts, append=len(starts))
        return cls(firsts, sizes, np.add.reduceat(lengths, firsts))

    def samples(self, groups: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Convert rows of groups, as in Packing, to rows of samples in the same order."""
        sizes = self.sizes[groups]
        ends = np.concatenate([[0], np.cumsum(sizes)])
        samples = np.repeat(self.firsts[groups] - ends[:-1], sizes) + np.arange(ends[-1])
        return samples, ends[offsets]


def stream(lengths: np.ndarray, order: np.ndarray, capacity: int) -> tuple[Pieces, np.ndarray]:
    """Return the samples in the given order, cut where a row is full, and the rows' offsets."""
    ends = np.cumsum(lengths[order])
    begins = ends - lengths[order]
    rows = np.arange(0, ends[-1], capacity)
    cuts = np.sort(np.concatenate([begins, rows]), kind="stable")  # two ascending runs
    cuts = cuts[np.diff(cuts, prepend=-1) > 0]
    place = np.searchsorted(begins, cuts, side="right") - 1
    offsets = np.append(np.searchsorted(cuts, rows), len(cuts))
    return Pieces(order[place], cuts - begins[place], np.diff(cuts, append=ends[-1])), offsets


def one_per_row(lengths: np.ndarray) -> Packing:
    return Packing(np.arange(len(lengths)), np.arange(len(lengths) + 1))


def best_fit(lengths: np.ndarray, capacity: int) -> Packing:
    """Pack by best-fit decreasing: the longest sample first, each into the fullest row with room.

    Samples of equal length are placed together, by index: a row with `free` room takes `free //
    length` of them before another row gets any, as if they were placed one by one. So the time
    grows with the number of different lengths, not of samples.
    """
    assert len(lengths) == 0 or 0 < lengths.min() <= lengths.max() <= capacity
    by_length = np.argsort((capacity - lengths).astype(np.min_scalar_type(capacity)), kind="stable")
    counts = np.bincount(lengths)
    different = np.flatnonzero(counts)[::-1]
    row_of = np.empty(len(lengths), np.int64)  # row of the i-th longest sample
    room, rows, placed = Room(), 0, 0
    for length, count in zip(different.tolist(), counts[different].tolist(), strict=True):
        end = placed + count
        while placed < end:
            free = room.tightest(length) or capacity
            each = free // length
            wanted = -(-(end - placed) // each)
            used = room.take(free, wanted)
            if used is None:
                used = np.arange(rows, rows + wanted)
                rows += wanted
            n = min(end - placed, len(used) * each)
            row_of[placed : placed + n] = np.repeat(used, each)[:n]
            placed += n
            filled, rest = divmod(n, each)
            room.add(free - each * length, used[:filled])
            room.add(free - rest * length, used[filled:])
    offsets = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=rows))])
    return Packing(by_length[np.argsort(row_of, kind="stable")], offsets)


class Room:
    """Rows with free room, grouped by the number of free tokens."""

    def __init__(self) -> None:
        self._rows: dict[int, list[np.ndarray]] = {}
        self._sizes: list[int] = []  # the keys, ascending

    def tightest(self, length: int) -> int | None:
        """Return the smallest room that `length` fits into; None if there is none."""
        i = bisect_left(self._sizes, length)
        return self._sizes[i] if i < len(self._sizes) else None

    def add(self, free: int, rows: np.ndarray) -> None:
        if len(rows) and free:
            if free not in self._rows:
                insort(self._sizes, free)
            self._rows.setdefault(free, []).append(rows)

    def take(self, free: int, wanted: int) -> np.ndarray | None:
        if free not in self._rows:
            return None
        self._sizes.remove(free)
        rows = np.concatenate(self._rows.pop(free))
        self.add(free, rows[wanted:])
        return rows[:wanted]
