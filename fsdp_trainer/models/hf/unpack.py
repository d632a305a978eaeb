"""Packed rows for a model that cannot keep documents of one row apart."""

import numpy as np
import torch
from torch import Tensor

from fsdp_trainer.base.distributed import to_device
from fsdp_trainer.models.attention import PackedAttention


class OneDocumentRows:
    """The documents of packed rows, each in a row of its own and padded at its end.

    tokens, positions: [documents, length of the longest] int64.
    """

    def __init__(self, tokens: Tensor, layout: PackedAttention):
        self.shape = tokens.shape
        _, length = tokens.shape
        firsts = [
            number * length + np.cumsum([0, *documents])[:-1]
            for number, documents in enumerate(layout.lengths)
        ]
        begin = np.concatenate(firsts).astype(np.int64)
        size = np.concatenate([np.array(each, np.int64) for each in layout.lengths])
        column = np.arange(size.max())
        is_token = column < size[:, None]
        places = begin[:, None] + np.minimum(column, size[:, None] - 1)
        self.is_token = to_device(is_token, tokens.device)
        self.places = to_device(places, tokens.device)
        self.held = to_device(np.flatnonzero(is_token.ravel()), tokens.device)
        self.targets = to_device(places[is_token], tokens.device)
        self.tokens = tokens.flatten()[self.places]
        self.positions = torch.arange(len(column), device=tokens.device).expand_as(self.tokens)

    def spread(self, values: Tensor) -> Tensor:
        """Return values of the tokens of packed rows, shaped as `tokens`; 0 for padding."""
        return values.flatten()[self.places] * self.is_token

    def gathered(self, positions: Tensor) -> Tensor:
        """Return positions with several axes, [axes, documents, length of the longest]."""
        return positions.flatten(1)[:, self.places]

    def unpacked(self, states: Tensor) -> Tensor:
        """Return [documents, length of the longest, hidden] of packed rows' states."""
        flat = states.flatten(0, 1).index_select(0, self.places.flatten())
        return flat.view(*self.places.shape, -1)

    def packed(self, states: Tensor) -> Tensor:
        """Return the states of packed rows, [rows, length, hidden]; zeros for padding.

        states: of the documents, [documents, length of the longest, hidden].
        """
        rows, length = self.shape
        flat = states.flatten(0, 1).index_select(0, self.held)
        packed = flat.new_zeros(rows * length, flat.shape[-1])
        return packed.index_copy(0, self.targets, flat).view(rows, length, -1)
