"""Objectives that are a sum over tokens of the head's scores: the loss, and a user's own."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fsdp_trainer.config.methods import ObjectiveChoice
from fsdp_trainer.config.schema import Loss
from fsdp_trainer.extensions import registered_by_user
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
        return self.function(scores, self.weights[tokens])


def token_objective(choice: ObjectiveChoice, cfg: Loss) -> Callable[[Tensor], Objective]:
    if function := registered_by_user(choice):
        return partial(Registered, function)
    return lambda weights: CrossEntropy(weights, cfg.label_smoothing, cfg.z_loss)
