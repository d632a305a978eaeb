"""Preference pairs for tests, and reference formulas of the objectives on them."""

import torch
import torch.nn.functional as F
from folders import copy_rows


def write_pairs(path, count=30):
    """Write pairs of different lengths, whose chosen answers are sums; return the file."""
    return copy_rows(path, "pairs.jsonl", count)


def write_labelled(path, count=30):
    """Answers of many lengths, of which sums are good."""
    return copy_rows(path, "labelled.jsonl", count)


def textbook(name, policy, reference, tokens, beta, smoothing=0.0, gamma=0.0, sft_weight=0.0):
    """Return the loss of one pair by the formula of its paper.

    policy, reference: Σ log-probability of the chosen and of the rejected answer. tokens: number of
    tokens of both.
    """
    (chosen, rejected), (chosen_ref, rejected_ref) = policy, reference
    mean, mean_other = chosen / tokens[0], rejected / tokens[1]
    if name == "dpo":
        logit = beta * ((chosen - chosen_ref) - (rejected - rejected_ref))
    if name == "simpo":
        logit = beta * mean - beta * mean_other - gamma
    if name in ("dpo", "simpo"):
        loss = -(1 - smoothing) * F.logsigmoid(logit) - smoothing * F.logsigmoid(-logit)
    if name == "ipo":
        ahead = (chosen - chosen_ref) / tokens[0] - (rejected - rejected_ref) / tokens[1]
        loss = (ahead - 1 / (2 * beta)) ** 2
    if name == "orpo":
        p, q = mean.exp(), mean_other.exp()
        ratio = torch.log((p / (1 - p)) / (q / (1 - q)))
        loss = -beta * F.logsigmoid(ratio)
    return loss - sft_weight * mean
