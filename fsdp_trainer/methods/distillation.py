"""The loss of a student trained on data and on a teacher's probabilities (Hinton et al. 2015)."""

from dataclasses import dataclass

from torch import Tensor

from fsdp_trainer.models.head import Scores


@dataclass(frozen=True)
class Distillation:
    """Σ weight · ((1 - share) · cross-entropy + share · T² · divergence) over tokens.

    The head calls it. weights: [tokens] float32, already divided by the step's Σ weight.
    temperature: T, with which the divergence was computed; T² keeps its gradient as large as for
    T = 1.
    """

    weights: Tensor
    share: float
    temperature: float
    needs_mean = False
    needs_all_tokens = False

    def __call__(self, scores: Scores, tokens: slice) -> Tensor:
        """Return the sum over `tokens`. scores: those of these tokens."""
        assert scores.divergence is not None
        of_teacher = self.share * self.temperature**2 * scores.divergence
        losses = of_teacher - (1 - self.share) * scores.log_probability
        return (losses * self.weights[tokens]).sum()
