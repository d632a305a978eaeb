"""The losses of a step by the formulas of their papers, one document at a time.

Nothing of the trainer's own objectives is used.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_trainer.config.schema import Loss, ObjectiveChoice
from fsdp_trainer.data.order.row_order import Rows

IGNORED = -100


@dataclass(frozen=True)
class TwinDocument:
    """A document of a row: its tokens, what each predicts, and how much that counts."""

    tokens: Tensor
    labels: Tensor
    weights: Tensor


def documents(rows: Rows) -> Iterator[TwinDocument]:
    """Yield the documents of rows, in order."""
    for row, lengths in enumerate(rows.documents):
        start = 0
        for length in lengths:
            part = slice(start, start + length)
            yield TwinDocument(
                torch.tensor(rows.tokens[row, part]),
                torch.tensor(rows.labels[row, part]),
                torch.tensor(rows.weights[row, part]),
            )
            start += length


# --- sums over tokens -----------------------------------------------------------------------------


def token_losses(model: Any, _reference: Any, rows: Rows, loss: Loss) -> Iterator[Tensor]:
    """Yield each document's part of Σ weight · loss ÷ Σ weight."""
    total = float(rows.weights[rows.labels != IGNORED].sum())
    for document in documents(rows):
        learnt = document.labels != IGNORED
        if not learnt.any():
            continue
        logits = model(document.tokens[None]).logits[0, learnt].float()
        each = F.cross_entropy(
            logits, document.labels[learnt], reduction="none", label_smoothing=loss.label_smoothing
        )
        each = each + loss.z_loss * logits.logsumexp(-1).square()
        yield (each * document.weights[learnt]).sum() / total


# --- pairs ----------------------------------------------------------------------------------------


def pair_losses(model: Any, reference: Any, rows: Rows, cfg: ObjectiveChoice) -> Iterator[Tensor]:
    """Yield each pair's part of the mean over the pairs of a step."""
    every = [*documents(rows)]
    count = len(every) / 2
    for chosen, rejected in zip(every[::2], every[1::2], strict=True):
        if cfg.name == "reward":
            scores = [model(one.tokens[None]).logits[0, 0] for one in (chosen, rejected)]
            centre = cfg.center_weight * (scores[0] + scores[1]) ** 2
            yield (centre - F.logsigmoid(scores[0] - scores[1])) / count
            continue
        own = [log_probability(model, one) for one in (chosen, rejected)]
        base = [torch.zeros(()), torch.zeros(())]
        if reference is not None:
            with torch.no_grad():
                base = [log_probability(reference, one) for one in (chosen, rejected)]
        lengths = [int((one.labels != IGNORED).sum()) for one in (chosen, rejected)]
        of_pair = PAPERS[cfg.name](own, base, lengths, cfg)
        yield (of_pair - cfg.sft_weight * own[0] / lengths[0]) / count


def log_probability(model: Any, document: TwinDocument) -> Tensor:
    """Return Σ log-probability of the tokens that are learnt."""
    learnt = document.labels != IGNORED
    scores = model(document.tokens[None]).logits[0, learnt].double().log_softmax(-1)
    return scores.gather(1, document.labels[learnt][:, None]).sum()


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


Paper = Callable[[list, list, list, ObjectiveChoice], Tensor]
PAPERS: dict[str, Paper] = {"dpo": of_dpo, "ipo": of_ipo, "simpo": of_simpo, "orpo": of_orpo}
