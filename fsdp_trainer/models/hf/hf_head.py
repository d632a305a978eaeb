"""Output heads in place of transformers' own output layer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.head import Head

COLUMNS = 8
"""The bias is a column of the matrix for scores; the others are zero, since matrix products are
fast for multiples of 8."""


class TransformersHead(Head):
    """A head that without targets is the linear layer that it replaces.

    transformers' forward applies a soft cap itself; so does TransformersDecoder.
    """

    def logits(self, hidden: Tensor) -> Tensor:
        return self.product(hidden)


class BiasedHead(TransformersHead):
    """A head with a bias for each token: the weight of a state that is always 1."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.bias = nn.Parameter(torch.empty(config.embedding_rows))

    def inputs(self, hidden: Tensor) -> Tensor:
        """Return the states, with a 1 as one more column."""
        ones = hidden.new_zeros(len(hidden), COLUMNS)
        ones[:, 0] = 1
        return torch.cat([hidden, ones], 1)

    def rows(self) -> Tensor:
        return torch.cat([self.weight, F.pad(self.bias[:, None], (0, COLUMNS - 1))], 1)

    def product(self, hidden: Tensor) -> Tensor:
        count = self.vocab_size
        return F.linear(hidden, self.weight[:count], self.bias[:count])
