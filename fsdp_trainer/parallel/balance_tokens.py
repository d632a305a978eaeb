"""Assignment of a row's tokens to the ranks that divide it, with equal attention cost per rank.

Every rank computes the same assignment. Does not import torch.
"""

from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush

import numpy as np

BALANCED = 1.02
"""Cost of the slowest rank, relative to the mean, at which blocks are not made smaller."""
MAX_BLOCKS = 1024
"""Largest number of blocks per rank. If nothing balances them, the assignment of a row of 131,072
tokens to 8 ranks takes 0.03 s."""


def token_costs(lengths: Sequence[int], row: int, windows: Sequence[int | None]) -> np.ndarray:
    """Return the number of keys that each token sees, as a mean over blocks: [row] float64.

    lengths: lengths of the row's documents. windows: window of each decoder block; None: tokens see
    their whole document.
    """
    visible = np.concatenate([*(np.arange(1, n + 1) for n in lengths), np.ones(row - sum(lengths))])
    costs = [np.minimum(visible, window or row) for window in set(windows)]
    counts = [windows.count(window) for window in set(windows)]
    return np.average(costs, 0, counts)


def deal_tokens(costs: np.ndarray, ranks: int) -> np.ndarray:
    """Return the positions of each rank's tokens, ascending: [ranks, row / ranks] int64.

    All ranks get the same number of tokens. Tokens are assigned in the largest blocks that reach a
    balance of BALANCED, since large blocks need few kernel calls. costs: cost of each token, [row].
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
    """Return the rank of each block; all ranks get the same number of blocks.

    Blocks are assigned in order of falling cost, each to the rank with the least cost so far.
    costs: cost of each block.
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
    """Return the divisors of a number up to MAX_BLOCKS, smallest first."""
    return [n for n in range(1, min(number, MAX_BLOCKS) + 1) if number % n == 0]
