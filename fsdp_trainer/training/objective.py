"""The training objective: a function of the head's per-token scores."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fsdp_trainer.config.schema import DISTIL, Loss, ObjectiveChoice
from fsdp_trainer.extensions import OBJECTIVES
from fsdp_trainer.methods.distillation import Distillation
from fsdp_trainer.models.head import Objective, Scores


@dataclass(frozen=True)
class CrossEntropy:
    """Σ weight · (cross-entropy + z_loss · logsumexp²) over a micro-batch's tokens.

    The head calls it.

    weights: [tokens] float32, already divided by the step's Σ weight.
    label_smoothing: share of each target that is spread evenly over the vocabulary (Szegedy et al.
    2016, §7).
    z_loss: coefficient of the term that pulls the softmax's normalizer to 1 (PaLM, Chowdhery et al.
    2022, §5).
    """

    weights: Tensor
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    needs_all_tokens = False

    @property
    def needs_mean(self) -> bool:
        """Return True if the head must compute the mean log-probability over the vocabulary."""
        return self.label_smoothing > 0

    def __call__(self, scores: Scores, tokens: slice) -> Tensor:
        """Return the sum over `tokens`. scores: those of these tokens."""
        loss = -scores.log_probability
        if scores.mean_log_probability is not None:
            loss = torch.lerp(loss, -scores.mean_log_probability, self.label_smoothing)
        if self.z_loss:
            loss = loss + self.z_loss * scores.logsumexp.square()
        return (loss * self.weights[tokens]).sum()


@dataclass(frozen=True)
class Registered:
    """A user-defined objective: a sum over tokens, computed by `function`.

    function: takes the scores and weights of some tokens and returns a scalar; see
    `extensions.register`.
    """

    function: Callable[[Scores, Tensor], Tensor]
    weights: Tensor
    needs_mean = False
    needs_all_tokens = False

    def __call__(self, scores: Scores, tokens: slice) -> Tensor:
        """Return the sum over `tokens`. scores: those of these tokens."""
        return self.function(scores, self.weights[tokens])


def build_objective(choice: ObjectiveChoice, cfg: Loss) -> Callable[[Tensor], Objective]:
    """Return a function that makes the objective of a micro-batch from its weights."""
    if choice.name in OBJECTIVES:
        return partial(Registered, OBJECTIVES[choice.name])
    if choice.name == DISTIL:
        return partial(Distillation, share=choice.share, temperature=choice.temperature)
    return lambda weights: CrossEntropy(weights, cfg.label_smoothing, cfg.z_loss)


def differs_from_loss(name: str, cfg: Loss) -> bool:
    """Return True if the objective is another number than the reported loss."""
    return name in OBJECTIVES or name == DISTIL or bool(cfg.label_smoothing or cfg.z_loss)


def negative_log_likelihood(scores: Scores, weights: Tensor) -> Tensor:
    """Return Σ weight · negative log-likelihood, a scalar: the reported loss for any objective."""
    return -(scores.log_probability * weights).sum()
