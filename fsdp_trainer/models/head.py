"""The output head: log-probabilities of given tokens and the gradient of a sum over them, without the logits of a whole micro-batch."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_trainer.models.config import ModelConfig

CHUNK_MIB = {"cpu": 32, "cuda": 1024}
"""Default size of a chunk of logits in float32: on a CPU what its caches hold, on a GPU enough rows for full matrix products."""


class Scores(NamedTuple):
    """Of each target, [tokens] float32.

    log_normalizer: logsumexp of its logits; mean_log_probability: over the whole vocabulary, None where nobody asked for it.
    """

    log_probability: Tensor
    log_normalizer: Tensor
    mean_log_probability: Tensor | None = None


class Objective(Protocol):
    """What is minimised: a sum over tokens, to which a token adds by its own scores alone. So a chunk's gradient needs no other chunk."""

    @property
    def needs_mean(self) -> bool:
        """Whether it looks at `mean_log_probability`."""

    def __call__(self, scores: Scores, tokens: slice) -> Tensor:
        """Scalar: what these tokens add. Must be differentiable in the scores."""


class Head(nn.Module):
    """`lm_head`: weight [rows, hidden]; rows behind the vocabulary are padding, which takes no part.

    Must be called exactly once per micro-batch on every rank, supervised tokens or not. chunk_mib: see CHUNK_MIB.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight: Tensor = nn.Parameter(torch.empty(config.embedding_rows, config.hidden_size))
        self.vocab_size, self.softcap = config.vocab_size, config.final_logit_softcapping
        self.chunk_mib: int | None = None
        self.score: Callable = _score
        self.differentiate: Callable = _differentiate

    def forward(
        self, hidden: Tensor, targets: Tensor | None = None, objective: Objective | None = None
    ) -> Tensor | Scores | tuple[Tensor, Scores]:
        """hidden: [tokens, hidden]; targets: [tokens] int64. The scores have no gradient; the objective's value, a scalar, has.

        Without targets, for inference: all logits at once, […, vocabulary].
        """
        if targets is None:
            return _capped(F.linear(hidden, self.weight[: self.vocab_size]), self.softcap)
        if objective is None:
            return self.scores(hidden, targets)
        value, *scores = _Minimise.apply(hidden, self.weight, targets, objective, self)
        return value, Scores(*scores)

    @torch.no_grad()
    def scores(self, hidden: Tensor, targets: Tensor) -> Scores:
        """Without what an objective would need."""
        found = [
            self.score(logits, exact, targets[tokens], self.softcap, False)[0]
            for tokens, logits, exact in self.chunks(hidden, self.weight[: self.vocab_size])
        ]
        return Scores(torch.cat([s.log_probability for s in found]), torch.cat([s.log_normalizer for s in found]))

    def chunks(self, hidden: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Of each chunk: its tokens, its logits as the matrix product gives them, and room for as many in float32 (the same, if they are).

        All chunks use the same memory: to allocate it anew costs a CPU more than to compute what is in it.
        """
        rows = self.rows_at_once(len(hidden), hidden.device.type)
        logits = hidden.new_empty(rows, self.vocab_size)
        exact = logits if logits.dtype == torch.float32 else torch.empty_like(logits, dtype=torch.float32)
        for start in range(0, len(hidden), rows):
            tokens = slice(start, min(start + rows, len(hidden)))
            count = tokens.stop - start
            yield tokens, torch.mm(hidden[tokens], weight.T, out=logits[:count]), exact[:count]

    def rows_at_once(self, tokens: int, device: str) -> int:
        """How many tokens are a chunk: as few chunks as the budget allows, of equal size; a multiple of 8, as tensor cores like it."""
        mib = self.chunk_mib or CHUNK_MIB.get(device, CHUNK_MIB["cuda"])
        most = max(1, mib * 2**20 // (4 * self.vocab_size))
        count = max(1, math.ceil(tokens / most))
        return max(8, math.ceil(tokens / count / 8) * 8)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


class _Minimise(torch.autograd.Function):
    """The objective's value and the scores. The gradients are made with them, so that logits are made once; backward only scales.

    The weight's gradient accumulates over the chunks in float32.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, objective: Objective, head: Head) -> tuple[Tensor, Tensor, Tensor]:
        used = weight[: head.vocab_size]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        add = _Accumulator(grad_weight[: head.vocab_size], weight.dtype)
        value, found = hidden.new_zeros((), dtype=torch.float32), []
        for tokens, logits, exact in head.chunks(hidden, used):
            scores, exponentials, total, slope = head.score(logits, exact, targets[tokens], head.softcap, objective.needs_mean)
            part, derivatives = _derivatives(objective, scores, tokens)
            grad_logits = head.differentiate(logits, exponentials, total, slope, targets[tokens], *derivatives)
            torch.mm(grad_logits, used, out=grad_hidden[tokens])
            add(grad_logits, hidden[tokens])
            value += part
            found.append(scores)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtype = weight.dtype
        scored = torch.cat([s.log_probability for s in found]), torch.cat([s.log_normalizer for s in found])
        ctx.mark_non_differentiable(*scored)
        return value, *scored

    @staticmethod
    def backward(ctx, grad_value: Tensor, *_) -> tuple[Tensor, Tensor, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden.mul_(grad_value), grad_weight.mul_(grad_value).to(ctx.dtype), None, None, None


def _score(
    logits: Tensor, exact: Tensor, targets: Tensor, softcap: float | None, with_mean: bool
) -> tuple[Scores, Tensor, Tensor, Tensor | None]:
    """logits, exact: [rows, vocabulary], the second to be written to. Also what `_differentiate` needs.

    exponentials [rows, vocabulary] and their total [rows, 1], the quotient of which is the softmax; the derivative of the soft limit.
    """
    if logits.dtype != torch.float32:
        logits = exact.copy_(logits)
    slope = None
    if softcap is not None:
        limited = logits.div_(softcap).tanh_()
        slope = 1 - limited.square()
        logits = limited.mul_(softcap)
    of_target = logits.gather(-1, targets[:, None])
    mean = logits.mean(-1) if with_mean else None
    largest = logits.amax(-1, keepdim=True)
    exponentials = logits.sub_(largest).exp_()
    total = exponentials.sum(-1, keepdim=True)
    normalizer = largest + total.log()
    scores = Scores((of_target - normalizer)[:, 0], normalizer[:, 0], None if mean is None else mean - normalizer[:, 0])
    return scores, exponentials, total, slope


def _derivatives(objective: Objective, scores: Scores, tokens: slice) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The objective's value on a chunk, and its derivative in each kind of score."""
    leaves = [score.detach().requires_grad_() for score in scores if score is not None]
    with torch.enable_grad():
        value = objective(Scores(*leaves), tokens)
    return value.detach(), torch.autograd.grad(value, leaves, materialize_grads=True)


def _differentiate(
    logits: Tensor,
    exponentials: Tensor,
    total: Tensor,
    slope: Tensor | None,
    targets: Tensor,
    by_probability: Tensor,
    by_normalizer: Tensor,
    by_mean: Tensor | None = None,
) -> Tensor:
    """[rows, vocabulary]: the objective's derivative in the logits, in their place and number format.

    d log_probability = onehot − softmax,  d log_normalizer = softmax,  d mean_log_probability = 1 / vocabulary − softmax
    """
    of_softmax = by_normalizer - by_probability
    if by_mean is not None:
        of_softmax = of_softmax - by_mean
    gradient = exponentials.mul_(of_softmax[:, None] / total)
    if by_mean is not None:
        gradient.add_(by_mean[:, None] / logits.shape[-1])
    gradient.scatter_add_(-1, targets[:, None], by_probability[:, None])  # before it is rounded: it nearly cancels for what is known
    if slope is not None:
        gradient.mul_(slope)
    return gradient if logits.dtype == torch.float32 else logits.copy_(gradient)


class _Accumulator:
    """Adds products of two factors in `dtype` up in float32. Products in float32 of lower factors are only known to CUDA."""

    def __init__(self, total: Tensor, dtype: torch.dtype):
        self.total, self.dtype = total, dtype
        self.room = None if dtype == total.dtype or total.is_cuda else torch.empty_like(total, dtype=dtype)

    def __call__(self, left: Tensor, right: Tensor) -> None:
        """total [vocabulary, hidden] += left.T @ right."""
        if self.room is not None:
            self.total += torch.mm(left.T, right, out=self.room)
        elif self.dtype == self.total.dtype:
            self.total.addmm_(left.T, right)
        else:
            torch.addmm(self.total, left.T, right, out_dtype=self.total.dtype, out=self.total)
