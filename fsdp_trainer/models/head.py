"""The output head: log-probabilities of given tokens, without ever holding the logits of a whole micro-batch."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LOGITS_BYTES = 2**27  # of one chunk in float32: the head's peak memory does not grow with vocabulary × tokens


class Scores(NamedTuple):
    """log_probability: [tokens] float32 of each target; log_normalizer: [tokens] float32, logsumexp of its logits."""

    log_probability: Tensor
    log_normalizer: Tensor


class Head(nn.Module):
    """`lm_head`: weight [vocabulary, hidden]. Must be called exactly once per micro-batch on every rank, supervised tokens or not."""

    def __init__(self, vocab_size: int, hidden_size: int):
        super().__init__()
        self.weight: Tensor = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Scores | Tensor:
        """hidden: [tokens, hidden]; targets: [tokens] int64. Without targets, for inference: all logits at once, […, vocabulary]."""
        if targets is None:
            return F.linear(hidden, self.weight)
        return Scores(*_ChunkedScores.apply(hidden, self.weight, targets))


class _ChunkedScores(torch.autograd.Function):
    """Logits are made chunk by chunk, and again in backward; the weight's gradient accumulates over the chunks in float32."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        scores, normalizers = [], []
        for h, t in _chunks(weight, hidden, targets):
            logits = (h @ weight.T).float()
            normalizers.append(torch.logsumexp(logits, -1))
            scores.append(logits.gather(-1, t[:, None])[:, 0] - normalizers[-1])
        normalizer = torch.cat(normalizers)
        ctx.save_for_backward(hidden, weight, targets, normalizer)
        return torch.cat(scores), normalizer

    @staticmethod
    def backward(ctx, grad_score: Tensor, grad_normalizer: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, targets, normalizer = ctx.saved_tensors
        grad_hidden, grad_weight = [], torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for h, t, z, gs, gz in _chunks(weight, hidden, targets, normalizer, grad_score, grad_normalizer):
            # d score = onehot − softmax,  d normalizer = softmax
            grad_logits = torch.exp((h @ weight.T).float() - z[:, None]) * (gz - gs)[:, None]
            grad_logits.scatter_add_(-1, t[:, None], gs[:, None])
            grad_logits = grad_logits.to(weight.dtype)
            grad_hidden.append(grad_logits @ weight)
            grad_weight += grad_logits.T @ h
        return torch.cat(grad_hidden), grad_weight.to(weight.dtype), None


def _chunks(weight: Tensor, *tensors: Tensor):
    size = max(1, LOGITS_BYTES // (4 * weight.shape[0]))
    return zip(*(t.split(size) for t in tensors), strict=True)
