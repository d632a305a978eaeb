"""The figures of metrics.jsonl by line, in memory that does not grow with the number of lines."""

import math
from array import array
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import numpy as np

from fsdp_trainer.observe.records import numbers

ROWS = 2**16  # lines of a run from which only some are kept
PHASES = "phases/"
SPEED = "tokens_per_second"


class RunColumns:
    """Columns of numbers, with a row for each line while there are fewer than `max_rows`.

    Of more lines, those with the smallest and the largest value of any figure in ranges of `width`
    lines have rows, with the first and the last line of each range.
    values: the numbers by name, NaN where a line lacks one. Of phases a row has the sum over its
    line and the lines before it that have no row.
    means: in place of `values`, the means over the same lines; {} if every line has a row.
    counts: the numbers of these lines.
    speeds: all values of SPEED, or a random `max_rows` of them.
    """

    def __init__(self, max_rows: int = ROWS, ends: Sequence[int] = ()):
        """ends: steps; figures of lines up to one of these are not added to those of later ones."""
        self.values: dict[str, np.ndarray] = {}
        self.means: dict[str, np.ndarray] = {}
        self.counts = np.zeros(0, int)
        self.speeds = np.zeros(0)
        self.max_rows, self.width = max_rows, 1
        self._ends, self._room = sorted(set(ends)), max_rows
        self._new: dict[str, array[float]] = {}
        self._new_rows = 0
        self._random, self._order = np.random.default_rng(0), np.zeros(0)

    def add(self, line: dict[str, Any]) -> None:
        """Add a line; entries of an object in it are named `object/key`."""
        row = self._new_rows
        for name, number in numbers(line):
            column = self._new.get(name)
            if column is None:
                column = self._new[name] = array("d")
            if len(column) != row:  # other lines lack the figure, or this one has it twice
                column.extend(repeat(math.nan, row - len(column)))
                del column[row:]
            # of a whole number that is too large, numpy can make no other
            usable = isinstance(number, float) or abs(number) < 1e300
            column.append(number if usable else math.inf)
        self._new_rows += 1
        if len(self.counts) + self._new_rows >= self._room:
            self._take_up()
            self._make_room()

    def finish(self) -> None:
        """Let `values` and all others include the last lines."""
        self._take_up()
        if self.width > 1:
            self._thin()

    def _take_up(self) -> None:
        rows, new_rows = len(self.counts), self._new_rows
        self._sample(np.array(self._new.get(SPEED, ()), float))
        for name in dict.fromkeys([*self.values, *self._new]):
            new = self._new.pop(name, array("d"))
            new.extend(repeat(math.nan, new_rows - len(new)))
            before = self.values.get(name, np.full(rows, np.nan))
            self.values[name] = np.concatenate([before, new])
            if name in self.means:
                self.means[name] = np.concatenate([self.means[name], new])
        self.counts = np.concatenate([self.counts, np.ones(new_rows, int)])
        self._new_rows = 0

    def _sample(self, speeds: np.ndarray) -> None:
        """Add to the sample of speeds: it consists of those that are first in a random order."""
        speeds = speeds[~np.isnan(speeds)]
        self.speeds = np.concatenate([self.speeds, speeds])
        self._order = np.concatenate([self._order, self._random.random(len(speeds))])
        if len(self.speeds) > self.max_rows:
            chosen = np.argpartition(self._order, self.max_rows)[: self.max_rows]
            self.speeds, self._order = self.speeds[chosen], self._order[chosen]

    def _make_room(self) -> None:
        """Thin the rows, and double the ranges until at most a quarter of `max_rows` remain.

        Then there is room for half of `max_rows`, as there are means beside the values.
        """
        lines = int(self.counts.sum())
        self.width = max(2, self.width)
        self._thin()
        while len(self.counts) > self.max_rows // 4 and self.width < lines:
            self.width *= 2
            self._thin()
        # the last line of an attempt always has a row
        self._room = max(self.max_rows // 2, 2 * len(self.counts))

    def _thin(self) -> None:
        """Keep the rows of each range's extremes, and add the others to the next that is kept."""
        rows = self._extremes()
        first = np.concatenate([[0], rows[:-1] + 1])
        for name, values in self.values.items():
            is_sum = name.startswith(PHASES)
            values = values if is_sum else self.means.get(name, values)
            weights = np.isfinite(values) * (1 if is_sum else self.counts)
            sums = np.add.reduceat(np.where(weights > 0, values, 0.0) * weights, first)
            weight = np.add.reduceat(weights, first)
            with np.errstate(invalid="ignore"):
                merged = np.where(weight > 0, sums, np.nan) if is_sum else sums / weight
            if is_sum:
                self.values[name] = merged
            else:
                self.values[name], self.means[name] = self.values[name][rows], merged
        self.counts = np.add.reduceat(self.counts, first)

    def _extremes(self) -> np.ndarray:
        rows, ranges = len(self.counts), (self.counts.cumsum() - 1) // self.width
        ends = np.searchsorted(self.values["step"], self._ends, "right")
        starts = np.union1d(np.flatnonzero(np.diff(ranges, prepend=-1)), ends[ends < rows])
        sizes = np.diff(starts, append=rows)
        ranges = np.repeat(np.arange(len(starts)), sizes)
        keep = np.zeros(rows, bool)
        keep[starts] = keep[starts + sizes - 1] = True
        for name, values in self.values.items():
            if name.startswith(PHASES):
                continue
            for extreme in (np.fmin, np.fmax):
                equal = np.flatnonzero(values == extreme.reduceat(values, starts)[ranges])
                keep[equal[np.diff(ranges[equal], prepend=-1) > 0]] = True
            keep[np.flatnonzero(~np.isnan(values))[-1:]] = True  # the last value of all
        return np.flatnonzero(keep)
