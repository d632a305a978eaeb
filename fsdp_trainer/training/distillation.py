"""Distillation: the loss of a student that learns from a teacher's probabilities besides the data
(Hinton et al. 2015)."""

from dataclasses import dataclass

from torch import Tensor

from fsdp_trainer.models.head import Scores


@dataclass(frozen=True)
class Distillation:
    """Σ weight · ((1 - share) · cross-entropy + share · T² · divergence) over tokens.

    The head calls it. weights: [tokens] float32, divided already by the whole step's Σ weight.
    temperature: T, at which the divergence was taken; T² keeps its gradient as large as at 1.
    """

    weights: Tensor
    share: float
    temperature: float
    needs_mean = False
    needs_all_tokens = False

    def __call__(self, scores: Scores, tokens: slice) -> Tensor:
        """Return the sum over `tokens`, whose scores these are."""
        assert scores.divergence is not None
        of_teacher = self.share * self.temperature**2 * scores.divergence
        losses = of_teacher - (1 - self.share) * scores.log_probability
        return (losses * self.weights[tokens]).sum()
