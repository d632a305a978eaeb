"""The output head: log-probabilities of given tokens, without ever holding the logits of a whole micro-batch."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_trainer.models.config import ModelConfig

LOGITS_BYTES = 2**27  # of one chunk in float32: the head's peak memory does not grow with vocabulary × tokens


class Scores(NamedTuple):
    """log_probability: [tokens] float32 of each target; log_normalizer: [tokens] float32, logsumexp of its logits."""

    log_probability: Tensor
    log_normalizer: Tensor


class Head(nn.Module):
    """`lm_head`: weight [rows, hidden]; rows behind the vocabulary are padding, which takes no part.

    Must be called exactly once per micro-batch on every rank, supervised tokens or not.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight: Tensor = nn.Parameter(torch.empty(config.embedding_rows, config.hidden_size))
        self.vocab_size, self.softcap = config.vocab_size, config.final_logit_softcapping

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Scores | Tensor:
        """hidden: [tokens, hidden]; targets: [tokens] int64. Without targets, for inference: all logits at once, […, vocabulary]."""
        if targets is None:
            return _capped(F.linear(hidden, self.weight[: self.vocab_size]), self.softcap)
        return Scores(*_ChunkedScores.apply(hidden, self.weight, targets, self.vocab_size, self.softcap))


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


class _ChunkedScores(torch.autograd.Function):
    """Logits are made chunk by chunk, and again in backward; the weight's gradient accumulates over the chunks in float32."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, softcap: float | None) -> tuple[Tensor, Tensor]:
        scores, normalizers = [], []
        used = weight[:vocab_size]
        for h, t in _chunks(used, hidden, targets):
            logits = _capped((h @ used.T).float(), softcap)
            normalizers.append(torch.logsumexp(logits, -1))
            scores.append(logits.gather(-1, t[:, None])[:, 0] - normalizers[-1])
        normalizer = torch.cat(normalizers)
        ctx.save_for_backward(hidden, weight, targets, normalizer)
        ctx.vocab_size, ctx.softcap = vocab_size, softcap
        return torch.cat(scores), normalizer

    @staticmethod
    def backward(ctx, grad_score: Tensor, grad_normalizer: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, weight, targets, normalizer = ctx.saved_tensors
        used = weight[: ctx.vocab_size]
        grad_hidden, grad_weight = [], torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for h, t, z, gs, gz in _chunks(used, hidden, targets, normalizer, grad_score, grad_normalizer):
            logits = _capped((h @ used.T).float(), ctx.softcap)
            # d score = onehot − softmax,  d normalizer = softmax
            grad_logits = torch.exp(logits - z[:, None]) * (gz - gs)[:, None]
            grad_logits.scatter_add_(-1, t[:, None], gs[:, None])
            if ctx.softcap is not None:
                grad_logits *= 1 - (logits / ctx.softcap) ** 2
            grad_logits = grad_logits.to(weight.dtype)
            grad_hidden.append(grad_logits @ used)
            grad_weight[: ctx.vocab_size] += grad_logits.T @ h
        return torch.cat(grad_hidden), grad_weight.to(weight.dtype), None, None, None


def _chunks(weight: Tensor, *tensors: Tensor):
    size = max(1, LOGITS_BYTES // (4 * weight.shape[0]))
    return zip(*(t.split(size) for t in tensors), strict=True)
