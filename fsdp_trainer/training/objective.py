"""The objective that is minimised: a function of the head's per-token scores."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fsdp_trainer.config.schema import DISTIL, Loss, ObjectiveChoice
from fsdp_trainer.extensions import OBJECTIVES
from fsdp_trainer.models.head import Objective, Scores
from fsdp_trainer.training.distillation import Distillation


@dataclass(frozen=True)
class CrossEntropy:
    """Σ weight · (cross-entropy + z_loss · logsumexp²) over a micro-batch's tokens.

    The head calls it.

    weights: [tokens] float32, divided already by the whole step's Σ weight.
    label_smoothing: the share of each target spread evenly over the vocabulary (Szegedy et al.
    2016, §7).
    z_loss: draws the softmax's normalizer to 1 (PaLM, Chowdhery et al. 2022, §5).
    """

    weights: Tensor
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    needs_all_tokens = False

    @property
    def needs_mean(self) -> bool:
        """Return whether the head is to compute the mean log-probability over the vocabulary."""
        return self.label_smoothing > 0

    def __call__(self, scores: Scores, tokens: slice) -> Tensor:
        """Return the sum over `tokens`, whose scores these are."""
        loss = -scores.log_probability
        if scores.mean_log_probability is not None:
            loss = torch.lerp(loss, -scores.mean_log_probability, self.label_smoothing)
        if self.z_loss:
            loss = loss + self.z_loss * scores.logsumexp.square()
        return (loss * self.weights[tokens]).sum()


@dataclass(frozen=True)
class Registered:
    """An objective of a user's own: a sum over tokens, which `function` computes.

    function: of scores and weights of some tokens, returns a scalar; see `extensions.register`.
    """

    function: Callable[[Scores, Tensor], Tensor]
    weights: Tensor
    needs_mean = False
    needs_all_tokens = False

    def __call__(self, scores: Scores, tokens: slice) -> Tensor:
        """Return the sum over `tokens`, whose scores these are."""
        return self.function(scores, self.weights[tokens])


def build_objective(choice: ObjectiveChoice, cfg: Loss) -> Callable[[Tensor], Objective]:
    """Return what makes the objective of a micro-batch from its weights."""
    if choice.name in OBJECTIVES:
        return partial(Registered, OBJECTIVES[choice.name])
    if choice.name == DISTIL:
        return partial(Distillation, share=choice.share, temperature=choice.temperature)
    return lambda weights: CrossEntropy(weights, cfg.label_smoothing, cfg.z_loss)


def differs_from_loss(name: str, cfg: Loss) -> bool:
    """Return whether what is minimised is another figure than the reported loss."""
    return name in OBJECTIVES or name == DISTIL or bool(cfg.label_smoothing or cfg.z_loss)


def negative_log_likelihood(scores: Scores, weights: Tensor) -> Tensor:
    """Return Σ weight · negative log-likelihood (scalar): the reported loss, whatever is
    minimised."""
    return -(scores.log_probability * weights).sum()
