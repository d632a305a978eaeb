"""The output head: log-probabilities of given tokens and the gradient of a sum over them, without the logits of a whole micro-batch."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function

from fsdp_trainer.models.config import ModelConfig

CHUNK_TOKENS = {"cpu": 256, "cuda": 2048}
"""Of a chunk, by default. A matrix product needs many rows to be fast, and each chunk passes over the weight's whole gradient once."""


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

    Must be called exactly once per micro-batch on every rank, supervised tokens or not. chunk_mib: MiB of logits in float32; None: CHUNK_TOKENS.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight: Tensor = nn.Parameter(torch.empty(config.embedding_rows, config.hidden_size))
        self.vocab_size, self.softcap = config.vocab_size, config.final_logit_softcapping
        self.chunk_mib: int | None = None
        self.score: Callable = _score
        self.differentiate: Callable = _differentiate

    @record_function("loss")
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
        return _joined(
            [
                self.score(product, logits, targets[tokens], self.softcap, False)[0]
                for tokens, product, logits in self.chunks(hidden, self.weight[: self.vocab_size])
            ]
        )

    def chunks(self, hidden: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Of each chunk: its tokens, the product hidden · weight, and room for it in float32, which is the same tensor if it is float32 already.

        All chunks use the same memory: to allocate it anew costs a CPU more than to compute what is in it.
        """
        rows = self.rows_at_once(len(hidden), hidden.device.type)
        room = hidden.new_empty(rows, self.vocab_size)
        room32 = (
            room if room.dtype == torch.float32 else torch.empty_like(room, dtype=torch.float32)
        )
        for start in range(0, len(hidden), rows):
            tokens = slice(start, min(start + rows, len(hidden)))
            count = tokens.stop - start
            product = torch.mm(hidden[tokens], weight.T, out=room[:count])
            yield tokens, product, product if room32 is room else room32[:count]

    def rows_at_once(self, tokens: int, device: str) -> int:
        """How many tokens are a chunk: as few chunks as the budget allows, of equal size; a multiple of 8, as tensor cores like it."""
        most = CHUNK_TOKENS.get(device, CHUNK_TOKENS["cuda"])
        if self.chunk_mib:
            most = max(1, self.chunk_mib * 2**20 // (4 * self.vocab_size))
        count = max(1, math.ceil(tokens / most))
        return max(8, math.ceil(tokens / count / 8) * 8)

    def compile_chunks(self, **options: Any) -> None:
        """Fuse what is done to a chunk between its matrix products. One graph for every number of rows. options: torch.compile's."""
        score, differentiate = (
            torch.compile(f, fullgraph=True, **options) for f in (_score, _differentiate)
        )

        def any_rows(function: Callable) -> Callable:
            def call(product: Tensor, logits: Tensor, *args: Any) -> Any:
                for tensor in (product, logits, *args):
                    if isinstance(tensor, Tensor):
                        torch._dynamo.mark_dynamic(tensor, 0)
                return function(product, logits, *args)

            return call

        self.score, self.differentiate = any_rows(score), any_rows(differentiate)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def _joined(scores: list[Scores]) -> Scores:
    return Scores(
        torch.cat([s.log_probability for s in scores]),
        torch.cat([s.log_normalizer for s in scores]),
    )


class _Minimise(torch.autograd.Function):
    """The objective's value and the scores. The gradients are made with them, so that logits are made once; backward only scales.

    The weight's gradient accumulates over the chunks in float32.
    """

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, targets: Tensor, objective: Objective, head: Head
    ) -> tuple[Tensor, Tensor, Tensor]:
        used = weight[: head.vocab_size]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        add = _Accumulator(grad_weight[: head.vocab_size], weight.dtype)
        value, found = grad_weight.new_zeros(()), []
        for tokens, product, logits in head.chunks(hidden, used):
            scores, total, slope = head.score(
                product, logits, targets[tokens], head.softcap, objective.needs_mean
            )
            part, derivatives = _derivatives(objective, scores, tokens)
            head.differentiate(product, logits, total, slope, targets[tokens], *derivatives)
            torch.mm(product, used, out=grad_hidden[tokens])
            add(product, hidden[tokens])
            value += part
            found.append(scores)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtype = weight.dtype
        log_probability, log_normalizer, _ = _joined(found)
        ctx.mark_non_differentiable(log_probability, log_normalizer)
        return value, log_probability, log_normalizer

    @staticmethod
    def backward(ctx, grad_value: Tensor, *_) -> tuple[Tensor, Tensor, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            grad_hidden.mul_(grad_value),
            grad_weight.mul_(grad_value).to(ctx.dtype),
            None,
            None,
            None,
        )


def _score(
    product: Tensor, logits: Tensor, targets: Tensor, softcap: float | None, with_mean: bool
) -> tuple[Scores, Tensor, Tensor | None]:
    """product: [rows, vocabulary]; logits: float32, written to: exponentials, which divided by the `total` [rows, 1] are the softmax.

    Returns the scores, that total, and the derivative of the soft limit.
    """
    if logits is not product:
        logits.copy_(product)
    slope = None
    if softcap is not None:
        logits.div_(softcap).tanh_()
        slope = 1 - logits.square()
        logits.mul_(softcap)
    of_target = logits.gather(-1, targets[:, None])
    mean = logits.mean(-1) if with_mean else None
    largest = logits.amax(-1, keepdim=True)
    total = logits.sub_(largest).exp_().sum(-1, keepdim=True)
    normalizer = largest + total.log()
    return (
        Scores(
            (of_target - normalizer)[:, 0],
            normalizer[:, 0],
            None if mean is None else mean - normalizer[:, 0],
        ),
        total,
        slope,
    )


def _derivatives(
    objective: Objective, scores: Scores, tokens: slice
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The objective's value on a chunk, and its derivative in each kind of score."""
    leaves = [score.detach().requires_grad_() for score in scores if score is not None]
    with torch.enable_grad():
        value = objective(Scores(*leaves), tokens)
    return value.detach(), torch.autograd.grad(value, leaves, materialize_grads=True)


def _differentiate(
    product: Tensor,
    logits: Tensor,
    total: Tensor,
    slope: Tensor | None,
    targets: Tensor,
    by_probability: Tensor,
    by_normalizer: Tensor,
    by_mean: Tensor | None = None,
) -> None:
    """Writes into `product` the objective's derivative in the logits. logits: the exponentials that `_score` left there.

    d log_probability = onehot − softmax,  d log_normalizer = softmax,  d mean_log_probability = 1 / vocabulary − softmax
    """
    of_softmax = by_normalizer - by_probability
    if by_mean is not None:
        of_softmax = of_softmax - by_mean
    logits.mul_(of_softmax[:, None] / total)
    if by_mean is not None:
        logits.add_(by_mean[:, None] / logits.shape[-1])
    logits.scatter_add_(
        -1, targets[:, None], by_probability[:, None]
    )  # before it is rounded: for a token that is known it nearly cancels
    if slope is not None:
        logits.mul_(slope)
    if logits is not product:
        product.copy_(logits)


class _Accumulator:
    """Adds products of two factors in `dtype` up in float32. Only CUDA has products of lower factors in float32."""

    def __init__(self, total: Tensor, dtype: torch.dtype):
        self.total, self.dtype = total, dtype
        self.room = (
            None if dtype == total.dtype or total.is_cuda else torch.empty_like(total, dtype=dtype)
        )

    def __call__(self, left: Tensor, right: Tensor) -> None:
        """total [vocabulary, hidden] += left.T @ right."""
        if self.room is not None:
            self.total += torch.mm(left.T, right, out=self.room)
        elif self.dtype == self.total.dtype:
            torch.addmm(self.total, left.T, right, out=self.total)
        else:
            torch.addmm(self.total, left.T, right, out_dtype=self.total.dtype, out=self.total)
