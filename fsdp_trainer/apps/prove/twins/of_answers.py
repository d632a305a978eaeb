"""Losses of answers that are judged: kto, and grpo with its variants."""

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from fsdp_trainer.apps.prove.twins.twin_step import TwinDocument, TwinStep

GOOD, BAD, OF_OTHERS = range(3)
"""Kinds of answers in the data for kto; the last are answers to other prompts."""
TINY = 1e-4
"""Beside the deviation of rewards, as in trl."""


def labelled_losses(step: TwinStep) -> Iterator[Tensor]:
    """Yield each answer's part of the mean loss of Ethayarajh et al. 2024, equation 8."""
    cfg = step.choice
    others = [one for one in step.documents if one.kind == OF_OTHERS]
    with torch.no_grad():
        gains = [step.log_probabilities(one).sum() - step.before(one).sum() for one in others]
    baseline = torch.stack(gains).mean().clamp_min(0) if gains else torch.zeros(())
    count = len(step.documents) - len(others)
    for one in step.documents:
        if one.kind == OF_OTHERS:
            continue
        ahead = step.log_probabilities(one).sum() - step.before(one).sum() - baseline
        good, weight = one.kind == GOOD, (cfg.desirable_weight, cfg.undesirable_weight)
        value = torch.sigmoid(cfg.beta * (ahead if good else -ahead))
        yield weight[not good] * (1 - value) / count


def sampled_losses(step: TwinStep) -> Iterator[Tensor]:
    """Yield each answer's part of the loss of Shao et al. 2024, equation 3.

    With the weights of Yu et al. 2025 or Liu et al. 2025, and the ratios of Zheng et al. 2025 or
    MiniMax-M1.
    """
    cfg, used = step.choice, [one for one in step.documents if one.label["reward"] is not None]
    counted = [one for one in used if one.label["finished"] or not cfg.mask_truncated]
    tokens = sum(int(one.learnt.sum()) for one in counted)
    gains = advantages(step, used)
    for one, gain in zip(used, gains, strict=True):
        if all(one is not each for each in counted):
            continue
        length = int(one.learnt.sum())
        own, divisor = step.log_probabilities(one), {
            "dapo": tokens, "grpo": len(used) * length, "dr_grpo": len(used) * cfg.max_new_tokens
        }[cfg.weighting]  # fmt: skip
        loss = surrogate(step, one, own, gain)
        if cfg.kl:
            distance = step.before(one) - own
            loss = loss + cfg.kl * (distance.exp() - distance - 1)
        yield loss.sum() / divisor


def advantages(step: TwinStep, used: list[TwinDocument]) -> list[Tensor]:
    """Return the advantage of each token of an answer over the answers to the same prompt.

    Where turns have rewards, that of a turn is the discounted sum of those from it on, each in
    proportion to all turns of these answers (§4.1.3).
    """
    gains = []
    for one in used:
        group = [each for each in used if each.label["row"] == one.label["row"]]
        has_turns = any(each.label["turn_rewards"] for each in group)
        by_turn = {id(each): rewards_of(each, has_turns) for each in group}
        every = torch.tensor([*chain(*by_turn.values())], dtype=torch.float64)
        scale = 1.0 if step.choice.weighting == "dr_grpo" else float(every.std()) + TINY
        total, lengths = 0.0, [stop - start for start, stop in one.label["own_turns"]]
        of_turns: list[float] = []
        for reward in reversed(by_turn[id(one)]):
            total = (reward - float(every.mean())) / scale + step.choice.discount * total
            of_turns.insert(0, total if len(group) > 1 else 0.0)
        by_length = of_turns if has_turns else of_turns * len(lengths)
        parts = zip(by_length, lengths, strict=True)
        gains.append(torch.cat([torch.full((n,), gain, dtype=torch.float64) for gain, n in parts]))
    return gains


def rewards_of(answer: TwinDocument, has_turns: bool) -> list[float]:
    """Return the rewards of an answer's turns, or its one reward."""
    if not has_turns:
        return [answer.label["reward"]]
    before = [0.0] * (len(answer.label["own_turns"]) - 1)
    return answer.label["turn_rewards"] or [*before, answer.label["reward"]]


def surrogate(step: TwinStep, one: TwinDocument, own: Tensor, gain: Tensor) -> Tensor:
    """Return the loss of each token of an answer, [learnt]. own: their log-probabilities."""
    cfg = step.choice
    at_sampling = own.detach()
    if cfg.updates > 1:
        turns = [slice(*turn) for turn in one.label["own_turns"]]
        sampled = [each for turn in turns for each in one.label["sampled"][turn]]
        at_sampling = torch.tensor(sampled, dtype=torch.float64)
    change = own - at_sampling
    if cfg.surrogate == "gspo" and cfg.updates > 1:
        change = change.detach().mean() + own - own.detach()
    ratio = change.exp().clamp(max=cfg.importance_cap) if cfg.updates > 1 else change.exp()
    if cfg.surrogate == "cispo":
        return -ratio.detach().clamp(max=1 + cfg.clip_high) * gain * own
    clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    return -torch.minimum(ratio * gain, clipped * gain)
