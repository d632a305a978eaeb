"""A reference for the output head and its loss, in float64 and by autograd."""

import torch
import torch.nn.functional as F

from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.head import Head

VOCABULARY, WIDTH, TOKENS = 8192, 16, 100  # 1 MiB holds the logits of 32 tokens


def make(chunk_mib=1, dtype=torch.float32, **options):
    """Return a head, hidden states, targets and weights, of which some are 0, as for padding."""
    torch.manual_seed(0)
    head = Head(ModelConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, **options))
    head.weight = torch.nn.Parameter(torch.randn(head.weight.shape).to(dtype))
    head.chunk_mib = chunk_mib
    weights = torch.rand(TOKENS)
    weights[::3] = 0
    return (
        head,
        torch.randn(TOKENS, WIDTH).to(dtype).requires_grad_(),
        torch.randint(VOCABULARY, (TOKENS,)),
        weights,
    )


def textbook(head, hidden, targets, weights, label_smoothing=0.0, z_loss=0.0):
    """Return the loss, each token's negative log-likelihood, and gradients of hidden and weight.

    Computed in float64.
    """
    hidden, weight = (t.detach().double().requires_grad_() for t in (hidden, head.weight))
    logits = hidden @ weight[:VOCABULARY].T
    if head.softcap:
        logits = torch.tanh(logits / head.softcap) * head.softcap
    logits = logits / head.temperature
    nll = F.cross_entropy(logits, targets, reduction="none", label_smoothing=label_smoothing)
    value = (weights * (nll + z_loss * logits.logsumexp(-1).square())).sum()
    value.backward()
    return value, F.cross_entropy(logits, targets, reduction="none"), hidden.grad, weight.grad


def relative(ours, exact):
    """Return the norm of a difference as a share of the exact tensor's."""
    return ((ours.double() - exact).norm() / exact.norm()).item()
