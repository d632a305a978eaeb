"""What is minimised: a reduction of the head's scores."""

import torch
from torch import Tensor

from fsdp_trainer.models.head import Scores


def cross_entropy(scores: Scores, weights: Tensor) -> Tensor:
    """Σ weight · negative log-likelihood over the given tokens (scalar). The caller divides by the whole step's Σ weight."""
    return -(scores.log_probability * weights).sum()


@torch.no_grad()
def by_source(scores: Scores, weights: Tensor, sources: Tensor, count: int) -> Tensor:
    """[2, count]: of each source Σ weight · negative log-likelihood, and Σ weight."""
    values = torch.stack([-(scores.log_probability * weights), weights])
    return values.new_zeros(2, count).index_add_(1, sources, values)
