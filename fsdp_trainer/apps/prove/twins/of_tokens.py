"""Losses of tokens: cross-entropy, alone and with a teacher's probabilities."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_trainer.apps.prove.twins.twin_step import NoTwin, TwinDocument, TwinStep


def learnt_documents(step: TwinStep) -> Iterator[tuple[TwinDocument, Tensor, Tensor]]:
    total = sum(float(one.weights[one.learnt].sum()) for one in step.documents)
    for one in step.documents:
        if one.learnt.any():
            yield one, one.labels[one.learnt], one.weights[one.learnt] / total


def token_losses(step: TwinStep) -> Iterator[Tensor]:
    """Yield each document's part of Σ weight · loss ÷ Σ weight."""
    loss = step.cfg.loss
    for document, targets, shares in learnt_documents(step):
        logits = step.logits(document)
        each = F.cross_entropy(
            logits, targets, reduction="none", label_smoothing=loss.label_smoothing
        )
        each = each + loss.z_loss * logits.logsumexp(-1).square()
        yield (each * shares).sum()


def distillation_losses(step: TwinStep) -> Iterator[Tensor]:
    """Yield each document's part of the loss of Hinton et al. 2015, section 2. Raises NoTwin."""
    cfg = step.choice
    if cfg.top_k is not None:
        raise NoTwin("transformers with a list of a teacher's tokens", "objective.top_k=null")
    for document, targets, shares in learnt_documents(step):
        own = step.logits(document)
        with torch.no_grad():
            teacher = step.logits(document, step.second)
        both = min(own.shape[-1], teacher.shape[-1])
        log_q, log_p = (
            (logits[:, :both] / cfg.temperature).log_softmax(-1) for logits in (own, teacher)
        )
        ahead, behind = (log_p, log_q) if cfg.divergence == "forward" else (log_q, log_p)
        divergence = (ahead.exp() * (ahead - behind)).sum(-1)
        of_data = F.cross_entropy(own, targets, reduction="none")
        each = cfg.share * cfg.temperature**2 * divergence + (1 - cfg.share) * of_data
        yield (each * shares).sum()
