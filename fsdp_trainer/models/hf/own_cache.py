"""transformers' cache of what earlier tokens left, for generation."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

CACHES = ("past_key_values", "cache_params")
"""transformers' names for the cache, in arguments and in outputs."""
SELECTABLE = {"DynamicLayer", "DynamicSlidingWindowLayer"}
"""transformers' kinds of a block's cache from which rows can be selected."""


class OwnCache:
    """The cache of a model of transformers for rows that all end in the same column.

    mask: [rows, columns] int64, 0 for the columns before a shorter row. shift: what is added to the
    positions of tokens after the first ones, [rows, 1]; None: nothing.
    """

    def __init__(self, mask: Tensor, shift: Tensor | None = None):
        self.mask, self.shift = mask, shift
        self.past: Any = None
        self.is_lost = False
        """True: the rows must be computed again from their beginning."""

    def forward(self, base: Any, inputs: dict[str, Tensor], name: str) -> Tensor:
        """Return the states of new tokens, [rows, new tokens, hidden], and keep what they leave.

        name: one of CACHES, by which the base model takes its cache.
        """
        inputs = {**inputs, "attention_mask": self.mask, name: self.past}
        outputs = base(**inputs, use_cache=True)
        self.past = next(past for n in CACHES if (past := getattr(outputs, n, None)) is not None)
        return outputs[0]

    def positions(self, count: int) -> Tensor:
        positions = (self.mask.cumsum(1) - 1).clamp_min(0)[:, -count:]
        return positions if self.shift is None else positions + self.shift

    def grow(self) -> None:
        self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], 1)

    def keep(self, rows: Sequence[int]) -> None:
        index = torch.tensor(rows, device=self.mask.device)
        kinds = {type(layer).__name__ for layer in getattr(self.past, "layers", [None])}
        if kinds <= SELECTABLE:
            self.past.batch_select_indices(index)
        else:
            self.is_lost = True
        self.mask = self.mask[index]
        self.shift = None if self.shift is None else self.shift[index]
