"""Losses of tokens: cross-entropy, alone and with a teacher's probabilities."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_trainer.apps.prove.twins.twin_step import TwinDocument, TwinStep


def learnt_documents(step: TwinStep) -> Iterator[tuple[TwinDocument, Tensor, Tensor]]:
    total = sum(float(one.weights[one.learnt].sum()) for one in step.documents)
    for one in step.documents:
        if one.learnt.any():
            yield one, one.labels[one.learnt], one.weights[one.learnt] / total


def token_losses(step: TwinStep) -> Iterator[Tensor]:
    """Yield each document's part of Σ weight · loss ÷ Σ weight."""
    for document, targets, shares in learnt_documents(step):
        yield (cross_entropies(step, step.logits(document), targets) * shares).sum()


def cross_entropies(step: TwinStep, logits: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each target, with the z-loss of PaLM (Chowdhery et al. 2022, §5)."""
    loss = step.cfg.loss
    smoothing = loss.label_smoothing
    each = F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
    return each + loss.z_loss * logits.logsumexp(-1).square()


def distillation_losses(step: TwinStep) -> Iterator[Tensor]:
    """Yield each document's part of the loss of Hinton et al. 2015, section 2.

    Of a list of the teacher's likeliest tokens all others together are one more event, since the
    student divides the rest as it likes.
    """
    cfg = step.choice
    for document, targets, shares in learnt_documents(step):
        own = step.logits(document)
        with torch.no_grad():
            teacher = step.logits(document, step.second)
        both = min(own.shape[-1], teacher.shape[-1])
        log_q, log_p = (
            (logits[:, :both] / cfg.temperature).log_softmax(-1) for logits in (own, teacher)
        )
        if cfg.top_k is not None:
            log_q, log_p = of_events(log_q, log_p, cfg.top_k)
        ahead, behind = (log_p, log_q) if cfg.divergence == "forward" else (log_q, log_p)
        divergence = (ahead.exp() * (ahead - behind)).sum(-1)
        of_data = F.cross_entropy(own, targets, reduction="none")
        each = cfg.share * cfg.temperature**2 * divergence + (1 - cfg.share) * of_data
        yield (each * shares).sum()


def of_events(log_q: Tensor, log_p: Tensor, listed: int) -> tuple[Tensor, Tensor]:
    """Return both of the likeliest tokens and of all others together, [rows, listed + 1].

    The teacher's are stored in 16 bits, of which the rest is not.
    """
    top = log_p.topk(listed)

    def rest_of(logs: Tensor) -> Tensor:
        return logs.scatter(1, top.indices, -1e4).logsumexp(1, keepdim=True)

    rest = rest_of(log_p)
    stored = top.values.half().float()
    stored = (
        stored - stored.logsumexp(1, keepdim=True) + torch.log1p(-rest.exp().clamp(max=1 - 1e-6))
    )
    joint_q = torch.cat([log_q.gather(1, top.indices), rest_of(log_q)], 1)
    return joint_q, torch.cat([stored, rest], 1)
