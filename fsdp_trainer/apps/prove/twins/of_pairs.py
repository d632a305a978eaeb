"""Losses of pairs by the formulas of their papers: dpo, ipo, simpo, orpo and reward."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_trainer.apps.prove.twins.twin_step import TwinStep
from fsdp_trainer.config.schema import ObjectiveChoice

Paper = Callable[[list, list, list, ObjectiveChoice], Tensor]


def pair_losses(step: TwinStep, paper: Paper) -> Iterator[Tensor]:
    """Yield each pair's part of the mean over the pairs of a step."""
    cfg, every = step.choice, step.documents
    count = len(every) / 2
    for pair in zip(every[::2], every[1::2], strict=True):
        own = [step.log_probabilities(one).sum() for one in pair]
        base = [step.before(one).sum() for one in pair]
        lengths = [int(one.learnt.sum()) for one in pair]
        loss = paper(own, base, lengths, cfg)
        yield (loss - cfg.sft_weight * own[0] / lengths[0]) / count


def reward_losses(step: TwinStep) -> Iterator[Tensor]:
    """Yield each pair's part of the mean loss of a reward model (Ouyang et al. 2022, equation 1).

    Scores are drawn to 0 as in Eisenstein et al. 2023.
    """
    every = step.documents
    for pair in zip(every[::2], every[1::2], strict=True):
        chosen, rejected = (step.output(one).logits[0, 0] for one in pair)
        centre = step.choice.center_weight * (chosen + rejected) ** 2
        yield (centre - F.logsigmoid(chosen - rejected)) / (len(every) / 2)


def of_dpo(own: list, base: list, lengths: list, cfg: ObjectiveChoice) -> Tensor:
    """Rafailov et al. 2023, equation 7; smoothed as in trl."""
    gain = cfg.beta * ((own[0] - base[0]) - (own[1] - base[1]))
    share = cfg.label_smoothing
    return -(1 - share) * F.logsigmoid(gain) - share * F.logsigmoid(-gain)


def of_ipo(own: list, base: list, lengths: list, cfg: ObjectiveChoice) -> Tensor:
    """Azar et al. 2023, equation 17, with means over tokens as in trl."""
    gain = (own[0] - base[0]) / lengths[0] - (own[1] - base[1]) / lengths[1]
    return (gain - 1 / (2 * cfg.beta)) ** 2


def of_simpo(own: list, base: list, lengths: list, cfg: ObjectiveChoice) -> Tensor:
    """Meng et al. 2024, equation 6."""
    gain = cfg.beta * (own[0] / lengths[0] - own[1] / lengths[1]) - cfg.gamma
    share = cfg.label_smoothing
    return -(1 - share) * F.logsigmoid(gain) - share * F.logsigmoid(-gain)


def of_orpo(own: list, base: list, lengths: list, cfg: ObjectiveChoice) -> Tensor:
    """Hong et al. 2024, equation 7, without its first term."""
    means = [own[i] / lengths[i] for i in (0, 1)]
    odds = [mean - torch.log1p(-mean.exp()) for mean in means]
    return -cfg.beta * F.logsigmoid(odds[0] - odds[1])
