"""Tokens of a row dealt to the ranks that share it, so that attention costs all of them the same.

By arithmetic that every rank does alike. No torch.
"""

from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush

import numpy as np

BALANCED = 1.02
"""Cost of the slowest rank over the mean at which blocks are small enough."""
MAX_BLOCKS = 1024
"""Blocks of a rank at most: 0.03 s for a row of 131,072 tokens on 8 ranks that nothing balances."""


def token_costs(lengths: Sequence[int], row: int, windows: Sequence[int | None]) -> np.ndarray:
    """Return how many keys each token of a row sees, as a mean over the blocks: [row] float64.

    lengths: of its documents. windows: of each block; None: tokens see their whole document.
    """
    visible = np.concatenate([*(np.arange(1, n + 1) for n in lengths), np.ones(row - sum(lengths))])
    costs = [np.minimum(visible, window or row) for window in set(windows)]
    counts = [windows.count(window) for window in set(windows)]
    return np.average(costs, 0, counts)


def deal_tokens(costs: np.ndarray, ranks: int) -> np.ndarray:
    """Return the positions of each rank's tokens, in order: [ranks, row / ranks] int64.

    All get as many tokens. They are dealt in blocks, as large as a balance of BALANCED allows:
    large blocks are few kernel calls. costs: of each token, [row].
    """
    part = len(costs) // ranks
    best, lowest = np.zeros(0, np.int64), np.inf
    for blocks in divisors(part):
        of_blocks = costs.reshape(ranks * blocks, -1).sum(1)
        owners = deal_blocks(of_blocks, ranks)
        loads = np.bincount(owners, of_blocks, ranks)
        if loads.max() < lowest:
            best, lowest = owners, loads.max()
        if lowest <= BALANCED * loads.mean():
            break
    size = len(costs) // len(best)
    firsts = np.argsort(best, kind="stable").reshape(ranks, -1) * size
    return (firsts[:, :, None] + np.arange(size)).reshape(ranks, part)


def deal_blocks(costs: np.ndarray, ranks: int) -> np.ndarray:
    """Return the rank of each block: the costliest first, to the rank that has the least so far.

    All get as many blocks. costs: of each block.
    """
    owners = np.zeros(len(costs), np.int64)
    room = [len(costs) // ranks] * ranks
    loads = [(0.0, rank) for rank in range(ranks)]
    heapify(loads)
    for block in np.argsort(-costs, kind="stable").tolist():
        load, rank = heappop(loads)
        owners[block] = rank
        room[rank] -= 1
        if room[rank]:
            heappush(loads, (load + float(costs[block]), rank))
    return owners


@lru_cache
def divisors(number: int) -> list[int]:
    """Return what divides a number, up to MAX_BLOCKS, smallest first."""
    return [n for n in range(1, min(number, MAX_BLOCKS) + 1) if number % n == 0]
