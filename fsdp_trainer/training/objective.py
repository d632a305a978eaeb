"""What is minimised: a reduction of the head's scores."""

from torch import Tensor

from fsdp_trainer.models.head import Scores


def cross_entropy(scores: Scores, weights: Tensor) -> Tensor:
    """Σ weight · negative log-likelihood over the given tokens (scalar). The caller divides by the whole step's Σ weight."""
    return -(scores.log_probability * weights).sum()
