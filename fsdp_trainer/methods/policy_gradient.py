"""The policy gradient objective for sampled answers.

It uses the probability of each token, and the advantage of its answer over the other answers to the
same prompt.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdp_trainer.config.schema import PROMPTED, ObjectiveChoice
from fsdp_trainer.models.decoder import MicroBatch
from fsdp_trainer.models.head import Scores
from fsdp_trainer.observe.step_log import finite_or_none
from fsdp_trainer.training.metrics import MicroBatchResult

ADVANTAGE, SAMPLED, REFERENCE = "advantage", "sampled", "reference"
"""Names in MicroBatch.columns: a token's advantage, its log-probability at sampling, and its
log-probability under the reference."""
TINY = 1e-4
"""Added to the standard deviation of rewards before dividing by it, as in trl."""


@dataclass(frozen=True)
class PolicyGradient:
    """Σ weight · loss of a micro-batch's tokens (Shao et al. 2024, eq. 3; Yu et al. 2025, §3).

    The head calls it. weights: [tokens] float32, already divided by the step's Σ weight. columns:
    see ADVANTAGE. on_server: True if the sampler is a server, whose numerics differ.
    """

    weights: Tensor
    columns: dict[str, Tensor]
    cfg: ObjectiveChoice
    on_server: bool = False
    needs_mean = False
    needs_all_tokens = False

    def __call__(self, scores: Scores, tokens: slice) -> Tensor:
        """Return the sum over `tokens`. scores: those of these tokens."""
        log_probability, advantage = scores.log_probability, self.columns[ADVANTAGE][tokens]
        ratio = self.ratio(scores, tokens)
        clipped = ratio.clamp(1 - self.cfg.clip_low, 1 + self.cfg.clip_high)
        loss = -torch.minimum(ratio * advantage, clipped * advantage)
        if self.on_server and self.cfg.updates == 1:
            loss = loss * self.importance(scores, tokens)
        if self.cfg.kl:
            distance = self.columns[REFERENCE][tokens] - log_probability
            loss = loss + self.cfg.kl * (distance.exp() - distance - 1)
        return (loss * self.weights[tokens]).sum()

    def ratio(self, scores: Scores, tokens: slice) -> Tensor:
        """Return the ratio of each token's probability now to its probability at sampling.

        With a single update per set of answers the model has not changed since sampling: the ratio
        is 1, and only its derivative matters.
        """
        if self.cfg.updates == 1:
            return (scores.log_probability - scores.log_probability.detach()).exp()
        change = scores.log_probability - self.columns[SAMPLED][tokens]
        return change.exp().clamp(max=self.cfg.importance_cap)

    def importance(self, scores: Scores, tokens: slice) -> Tensor:
        """Return truncated importance weights of tokens (Yao et al. 2025).

        They correct for the other numerics of the sampler.
        """
        difference = scores.log_probability.detach() - self.columns[SAMPLED][tokens]
        return difference.exp().clamp(max=self.cfg.importance_cap)


def token_weight(cfg: ObjectiveChoice, tokens: int) -> float:
    """Return the weight of each token of an answer, before division by `step_weight`.

    tokens: length of the answer.
    """
    by_answer = {"dapo": 1.0, "grpo": 1.0 / tokens, "dr_grpo": 1.0 / cfg.max_new_tokens}
    return by_answer[cfg.weighting]


def step_weight(cfg: ObjectiveChoice, tokens: int, answers: int) -> float:
    """Return the divisor of the weights of a step's tokens. tokens: number of supervised tokens."""
    return float(tokens if cfg.weighting == "dapo" else answers)


def advantages(cfg: ObjectiveChoice, rewards: np.ndarray) -> np.ndarray:
    """Return the advantage of each answer over those to the same prompt, [prompts, samples].

    rewards: [prompts, samples] float64. The difference from the mean is divided by the standard
    deviation, except for Dr. GRPO (Liu et al. 2025).
    """
    centred = rewards - rewards.mean(1, keepdims=True)
    if cfg.weighting == "dr_grpo":
        return centred
    return centred / (rewards.std(1, ddof=1, keepdims=True) + TINY)


class RolloutFigures:
    """Metrics of a step's answers, as means over their tokens.

    Sums: number of tokens, Σ -log-probability (an estimate of the entropy), number of tokens whose
    gradient is stopped by clipping, Σ estimates of the KL divergence between sampling and training,
    Σ |difference of log-probabilities| between sampling and training, and Σ estimates of the KL
    divergence between the model and its reference.
    """

    keys = ("entropy", "clip_share", "sampler_kl", "sampler_difference", "kl")
    size = 1 + len(keys)

    def __init__(self, cfg: ObjectiveChoice):
        self.cfg = cfg

    def part(self, result: MicroBatchResult) -> Tensor:
        """Return [size] float64."""
        scores, batch = result.scores, result.batch
        columns = columns_of(batch)
        mask = batch.weights > 0
        objective = PolicyGradient(batch.weights, columns, self.cfg)
        every = slice(0, len(batch.targets))
        ratio = objective.ratio(scores, every)
        gain = columns[ADVANTAGE]
        is_clipped = ((ratio > 1 + self.cfg.clip_high) & (gain > 0)) | (
            (ratio < 1 - self.cfg.clip_low) & (gain < 0)
        )
        change = scores.log_probability - columns[SAMPLED]
        distance = columns[REFERENCE] - scores.log_probability
        values = [
            torch.ones_like(change),
            -scores.log_probability,
            is_clipped,
            change.exp() - change - 1,
            change.abs(),
            distance.exp() - distance - 1,
        ]
        return torch.stack([(value.double() * mask).sum() for value in values])

    def written(self, sums: list[float]) -> dict[str, Any]:
        """Return the means, with `kl` only if there is a reference."""
        count, *totals = sums
        keys = self.keys if self.cfg.kl else self.keys[:-1]
        pairs = zip(keys, totals, strict=False)
        return {key: finite_or_none(total / count) for key, total in pairs} if count else {}


def columns_of(batch: MicroBatch) -> dict[str, Tensor]:
    """Return the columns of a micro-batch, zeros if missing (no tokens or no reference)."""
    given = batch.columns or {}
    zeros = torch.zeros_like(batch.weights)
    return {name: given.get(name, zeros) for name in (ADVANTAGE, SAMPLED, REFERENCE)}


def rollout_figures(cfg: ObjectiveChoice) -> RolloutFigures | None:
    """Return the metrics of an objective's sampled answers; None if it samples none."""
    return RolloutFigures(cfg) if cfg.name in PROMPTED else None
