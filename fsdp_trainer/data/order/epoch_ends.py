"""The ends of epochs, for steps that end with them. Does not import torch."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class EpochEnds:
    """The rows at which steps end besides: each `length` rows after `start`, an epoch does."""

    start: int
    length: int

    def after(self, row: int) -> int:
        return row + self.length - (row - self.start) % self.length

    def steps(self, rows: int, first: int, last: int) -> int:
        end = min(last, self.after(first))
        epochs, rest = divmod(last - end, self.length)
        parts = ((end - first, 1), (self.length, epochs), (rest, 1))
        return sum(times * math.ceil(part / rows) for part, times in parts)

    def row_after(self, steps: int, rows: int, first: int) -> int:
        end = self.after(first)
        of_epoch = math.ceil(self.length / rows)
        epochs, rest = divmod(steps - math.ceil((end - first) / rows), of_epoch)
        if epochs < 0:
            return first + steps * rows
        return end + epochs * self.length + rest * rows
