"""The reported loss of supervised tokens."""

from torch import Tensor

from fsdp_trainer.models.head import Scores


def negative_log_likelihood(scores: Scores, weights: Tensor) -> Tensor:
    """Return Σ weight · negative log-likelihood, a scalar: the reported loss for any objective."""
    return -(scores.log_probability * weights).sum()
