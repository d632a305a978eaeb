"""What is minimised, and what is only watched: sums over tokens of the head's scores."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_trainer.models.head import Scores


@dataclass(frozen=True)
class CrossEntropy:
    """Σ weight · (cross-entropy + z_loss · log_normalizer²). Of one micro-batch; it is the head that calls it.

    weights: [tokens] float32, divided already by the whole step's Σ weight.
    label_smoothing: the share of each target that is spread evenly over the vocabulary (Szegedy et al. 2016, §7).
    z_loss: draws the normalizer's logarithm to 0 (PaLM, Chowdhery et al. 2022, §5).
    """

    weights: Tensor
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    @property
    def needs_mean(self) -> bool:
        return self.label_smoothing > 0

    def __call__(self, scores: Scores, tokens: slice) -> Tensor:
        loss = -scores.log_probability
        if scores.mean_log_probability is not None:
            loss = torch.lerp(loss, -scores.mean_log_probability, self.label_smoothing)
        if self.z_loss:
            loss = loss + self.z_loss * scores.log_normalizer.square()
        return (loss * self.weights[tokens]).sum()


def negative_log_likelihood(scores: Scores, weights: Tensor) -> Tensor:
    """Σ weight · negative log-likelihood over the given tokens (scalar): the loss that is reported, whatever is minimised."""
    return -(scores.log_probability * weights).sum()


def by_source(scores: Scores, weights: Tensor, sources: Tensor, count: int) -> Tensor:
    """[2, count]: of each source Σ weight · negative log-likelihood, and Σ weight."""
    values = torch.stack([-(scores.log_probability * weights), weights])
    return values.new_zeros(2, count).index_add_(1, sources, values)
