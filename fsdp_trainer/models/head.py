"""The output head: log-probabilities of target tokens and the gradient of an objective of them.

Logits are computed for one chunk of tokens at a time, never for a whole micro-batch.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function

from fsdp_trainer.base.distributed import is_one
from fsdp_trainer.base.round_up import round_up
from fsdp_trainer.base.torch_private import graph_is_kept
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.soft_targets import Comparison, SoftTargets, capped, compare

CHUNK_BYTES = {"cpu": 1024, "cuda": 8192}
"""Default bytes of a chunk's logits for each token of the vocabulary: on a GPU 4,096 tokens in 16
bits. Matrix products need many rows to be fast, and each chunk reads and writes the weight's
complete gradient once."""
MOST_TOKENS = {"cpu": 256, "cuda": 4096}
"""Default limit of a chunk's tokens: a CPU rounds the products of each chunk to 16 bits."""
SCRATCH_BYTES = {"cpu": 2**20, "cuda": 2**25}
"""Bytes of the float32 logits of some rows, which operators that are not compiled need: they stay
in the device's cache."""


class Scores(NamedTuple):
    """Scores of each target, [tokens] float32.

    log_probability: log-probability of the target. logsumexp: logsumexp of the token's logits.
    mean_log_probability: mean over the vocabulary; None unless the objective needs it.
    divergence: KL divergence between a teacher's and the student's probabilities.
    teacher_log_probability: teacher's log-probability of the target, a constant. The last two are
    None without a teacher. numbers: [tokens, labels], the scores of a model with labels, None for
    a language model; it predicts no tokens, and its other values are zeros.
    """

    log_probability: Tensor
    logsumexp: Tensor
    mean_log_probability: Tensor | None = None
    divergence: Tensor | None = None
    teacher_log_probability: Tensor | None = None
    numbers: Tensor | None = None


class Objective(Protocol):
    """A function of the scores, to be minimised."""

    @property
    def needs_mean(self) -> bool:
        """True if the objective reads `mean_log_probability`."""

    @property
    def needs_all_tokens(self) -> bool:
        """False for a sum of functions of single tokens' scores; True for others, such as DPO.

        False: the objective is called once per chunk, and logits are computed once. True: it is
        called once with all tokens of the micro-batch, and logits are computed twice, or once if
        all tokens fit in one chunk.
        """

    def __call__(self, scores: Scores, tokens: slice) -> Tensor:
        """Return these tokens' part of the objective, a scalar differentiable in the scores."""


class _Linear(NamedTuple):
    """Objective Σ coefficient · score, which has the gradient of the objective it replaces."""

    coefficients: tuple[Tensor, ...]
    needs_mean: bool
    needs_all_tokens: bool = False

    def __call__(self, scores: Scores, tokens: slice) -> Tensor:
        given = filter(torch.is_tensor, scores)
        products = [s * c[tokens] for s, c in zip(given, self.coefficients, strict=True)]
        return torch.stack(products).sum()


class Head(nn.Module):
    """`lm_head`: weight [rows, hidden]; rows after the vocabulary are padding without a logit.

    Must be called exactly once per micro-batch on every rank, even without supervised tokens.
    chunk_mib: MiB of logits in a chunk; None: CHUNK_BYTES.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight: Tensor = nn.Parameter(torch.empty(config.embedding_rows, config.hidden_size))
        self.vocab_size = config.vocab_size
        self.softcap = config.final_logit_softcapping
        self.columns = config.vocab_size
        """Number of vocabulary columns (logits of a token) that this process computes."""
        self.first = 0
        """Token id of the first of these columns."""
        self.chunk_mib: int | None = None
        self.temperature = 1.0
        """Divisor of the logits for scores; inference does not apply it."""
        self.passes_states = False
        """True if it returns the states without targets: another model's head makes the logits."""
        self.is_compiled = False
        """Compiled operators need no float32 logits in memory."""
        self.score: Callable = score_chunk
        self.differentiate: Callable = differentiate_chunk

    @record_function("loss")
    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        objective: Objective | None = None,
        soft: SoftTargets | None = None,
    ) -> Tensor | tuple[Tensor | None, Scores]:
        """Return the objective's value, a scalar with a gradient, and the scores without gradient.

        hidden: [tokens, hidden]; targets: [tokens] int64. The value is None without an objective.
        soft: a teacher's probabilities for the tokens. Without targets (inference), returns all
        logits, [..., vocabulary].
        """
        if targets is None:
            return hidden if self.passes_states else self.logits(hidden)
        hidden = self.inputs(hidden)
        if self.temperature != 1:
            hidden = hidden / self.temperature
        if objective is None:
            return None, self.scores(hidden, targets, soft=soft)
        if objective.needs_all_tokens and not self.is_one_chunk(hidden, soft):
            return self._all_tokens(hidden, targets, objective, soft)
        value, *scores = FusedLinearLoss.apply(hidden, self.rows(), targets, objective, self, soft)
        return value, Scores(*scores)

    def joint_logsumexp(self, own: Tensor) -> Tensor:
        return own

    def joint_sum(self, own: Tensor) -> Tensor:
        return own

    def joint_columns(self, own: Tensor) -> Tensor:
        """Return the concatenated columns of all processes. own: [rows, count], count is equal."""
        return own

    @property
    def scored_softcap(self) -> float | None:
        """The softcap for logits that are divided by the temperature already.

        Sampling divides capped logits: cap(z) / temperature is z / temperature with this softcap.
        """
        return None if self.softcap is None else self.softcap / self.temperature

    def rows(self) -> Tensor:
        """Return the rows of the weight that this process computes with."""
        return self.weight

    def inputs(self, hidden: Tensor) -> Tensor:
        """Return the states that are multiplied with `rows` for scores, [tokens, columns]."""
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.capped(self.product(hidden))

    def product(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight[: self.vocab_size])

    def capped(self, logits: Tensor) -> Tensor:
        return logits if self.softcap is None else cap_logits(logits, self.softcap)

    def score_logits(
        self, product: Tensor, logits: Tensor, targets: Tensor, with_mean: bool
    ) -> tuple[Scores, Tensor]:
        """Return a chunk's scores and an input of `write_gradient`: see score_chunk."""
        return self.score(product, logits, targets, self.scored_softcap, with_mean)

    def write_gradient(
        self,
        product: Tensor,
        logits: Tensor,
        total: Tensor,
        targets: Tensor,
        derivatives: Sequence[Tensor | None],
    ) -> None:
        """Write the objective's derivative with respect to a chunk's logits into `product`.

        derivatives: see differentiate_chunk.
        """
        rest = targets, None, self.vocab_size
        self.differentiate(product, logits, total, self.scored_softcap, *rest, *derivatives)

    def _all_tokens(
        self, hidden: Tensor, targets: Tensor, objective: Objective, soft: SoftTargets | None
    ) -> tuple[Tensor, Scores]:
        """Pass over the chunks twice: for the scores, then for gradients if any is needed."""
        scores = self.scores(hidden, targets, objective.needs_mean, soft)
        value, derivatives = differentiate_objective(objective, scores, slice(0, len(targets)))
        if not (hidden.requires_grad or self.weight.requires_grad):
            return value, scores
        linear = _Linear(derivatives, objective.needs_mean)
        same_gradient, *_ = FusedLinearLoss.apply(hidden, self.rows(), targets, linear, self, soft)
        return value + (same_gradient - same_gradient.detach()), scores

    @torch.no_grad()
    def scores(
        self,
        hidden: Tensor,
        targets: Tensor,
        with_mean: bool = False,
        soft: SoftTargets | None = None,
    ) -> Scores:
        vocabulary = self.rows()[: self.columns]
        parts = []
        for tokens, product, logits in self.chunks(hidden, vocabulary, soft):
            compared = compare(soft, self, product, targets[tokens], tokens) if soft else None
            scores = self.score_logits(product, logits, targets[tokens], with_mean)[0]
            parts.append(with_teacher(scores, compared))
            compared = None  # free its slopes, which are as large as a chunk's logits
        return _concatenate(parts)

    def chunks(
        self, hidden: Tensor, weight: Tensor, soft: SoftTargets | None = None
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield for each chunk its tokens, the product hidden · weightᵀ, and a float32 buffer.

        The buffer is the product itself if exponentials may replace it, and has fewer rows if not.
        All chunks use the same memory: on a CPU allocation would take longer than the computation.
        """
        device = hidden.device.type
        rows = self.rows_at_once(len(hidden), device, self.itemsize(hidden, soft))
        products = buffer = hidden.new_empty(rows, self.columns)
        if self.needs_scratch(products.dtype):
            buffer = scratch_of(products)
        for start in range(0, max(1, len(hidden)), rows):
            tokens = slice(start, min(start + rows, len(hidden)))
            product = torch.mm(hidden[tokens], weight.T, out=products[: tokens.stop - start])
            yield tokens, product, product if buffer is products else buffer

    def needs_scratch(self, dtype: torch.dtype) -> bool:
        """Return True if logits in this format are read twice, a few rows at a time in float32."""
        return not self.is_compiled and (dtype != torch.float32 or self.softcap is not None)

    def is_one_chunk(self, hidden: Tensor, soft: SoftTargets | None = None) -> bool:
        """Return True if all tokens fit in one chunk. hidden: [tokens, hidden]."""
        itemsize = self.itemsize(hidden, soft)
        return self.rows_at_once(len(hidden), hidden.device.type, itemsize) >= len(hidden)

    @staticmethod
    def itemsize(hidden: Tensor, soft: SoftTargets | None) -> int:
        """Return the bytes of a logit; a comparison with a teacher is made in float32."""
        return hidden.element_size() if soft is None else 4

    def rows_at_once(self, tokens: int, device: str, itemsize: int = 4) -> int:
        """Return the tokens per chunk, for the smallest number of equal chunks within the budget.

        Rounded up to a multiple of 8, which tensor cores prefer. itemsize: bytes of a logit.
        """
        kind = device if device in CHUNK_BYTES else "cuda"
        budget = min(MOST_TOKENS[kind], CHUNK_BYTES[kind] // itemsize)
        if self.chunk_mib:
            budget = max(1, int(self.chunk_mib * 2**20 / (itemsize * self.vocab_size)))
        chunks = max(1, math.ceil(tokens / budget))
        return max(8, round_up(math.ceil(tokens / chunks), 8))

    def compile_chunks(
        self, compiler: Callable[[Callable], Callable] | None = None, **options: Any
    ) -> None:
        """Compile the operations between a chunk's matrix products.

        compiler: None is torch.compile with these options, a graph of which is used for any number
        of rows.
        """

        def compiled(function: Callable) -> Callable:
            graph = torch.compile(function, fullgraph=True, **options)

            def call(*args: Any) -> Any:
                for tensor in filter(torch.is_tensor, args):
                    torch._dynamo.mark_dynamic(tensor, 0)
                return graph(*args)

            return call

        of_function = compiler or compiled
        self.score = of_function(self.score)
        self.differentiate = of_function(self.differentiate)
        self.is_compiled = True


class ScoreHead(Head):
    """`score`: weight [labels, hidden], returns scores per hidden state in place of logits.

    As in transformers' classes, only scores of tokens have a bias.
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.weight = nn.Parameter(torch.empty(config.scores, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(config.scores)) if config.tags else None
        self.columns = config.scores

    @record_function("loss")
    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        objective: Objective | None = None,
        soft: SoftTargets | None = None,
    ) -> Tensor | tuple[Tensor | None, Scores]:
        """Return value and scores as `Head` does; without targets return the scores, [..., labels].

        The values of targets and soft are not used.
        """
        numbers = self.numbers(hidden)
        return numbers if targets is None else scored(numbers.float(), objective)

    def numbers(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)


class StatesHead(ScoreHead):
    """No head: the hidden states are the results, of a model that embeds texts."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        del self.weight
        self.bias = None

    def numbers(self, hidden: Tensor) -> Tensor:
        return hidden


def scored(numbers: Tensor, objective: Objective | None) -> tuple[Tensor | None, Scores]:
    """Return an objective's value and the scores of a model that predicts no tokens.

    numbers: [tokens, labels] float32; the objective gets them with their gradient.
    """
    zeros = torch.zeros_like(numbers[:, 0])
    scores = Scores(zeros, zeros, numbers=numbers.detach())
    if objective is None:
        return None, scores
    return objective(scores._replace(numbers=numbers), slice(0, len(numbers))), scores


class FusedLinearLoss(torch.autograd.Function):
    """An objective's value and the scores, as a function of hidden states and the head's weight.

    Forward also computes the required gradients, so that each chunk's logits are computed only
    once; backward only scales them. The weight's gradient is summed over the chunks in float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        objective: Objective,
        head: Head,
        soft: SoftTargets | None,
    ) -> tuple[Tensor | None, ...]:
        """Return the value and the scores except for the mean. objective: a sum over tokens."""
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        vocabulary = weight[: head.columns]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        add = _Accumulator(weight, head.columns) if needs_weight else None
        value = torch.zeros((), dtype=torch.float32, device=hidden.device)
        parts = []
        for tokens, product, logits in head.chunks(hidden, vocabulary, soft):
            compared = compare(soft, head, product, targets[tokens], tokens) if soft else None
            scores, total = head.score_logits(
                product, logits, targets[tokens], objective.needs_mean
            )
            scores = with_teacher(scores, compared)
            summand, derivatives = differentiate_objective(objective, scores, tokens)
            value += summand
            parts.append(scores)
            if needs_hidden or needs_weight:
                all_derivatives = for_logits(derivatives, compared)
                head.write_gradient(product, logits, total, targets[tokens], all_derivatives)
                del all_derivatives
            compared = None  # free its slopes, which are as large as a chunk's logits
            if grad_hidden is not None:
                torch.mm(product, vocabulary, out=grad_hidden[tokens])
            if add is not None:
                add(product, hidden[tokens])
        ctx.save_for_backward(grad_hidden, None if add is None else add.total)
        ctx.dtype = weight.dtype
        joined = _concatenate(parts)._replace(mean_log_probability=None)
        ctx.mark_non_differentiable(*filter(torch.is_tensor, joined))
        return value, *joined

    @staticmethod
    def backward(ctx: Any, grad_value: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Scale the gradients in place, unless the graph is kept for another backward.

        A copy of the weight's gradient would have vocabulary × width numbers. Pipeline schedules
        that split backward run it twice.
        """
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = scaled(grad_hidden, grad_value, grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = scaled(grad_weight, grad_value, ctx.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def scaled(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return gradient · scale in this format, in the gradient's memory where that is possible."""
    if gradient.is_cuda and gradient.dtype != dtype:  # one kernel; a CPU would make a copy first
        return torch.mul(gradient, scale, out=torch.empty_like(gradient, dtype=dtype))
    if graph_is_kept():
        return torch.mul(gradient, scale).to(dtype)
    return (gradient if is_one(scale) else gradient.mul_(scale)).to(dtype)


def cap_logits(logits: Tensor, softcap: float) -> Tensor:
    return torch.tanh(logits / softcap) * softcap


def scratch_rows(rows: int, columns: int, device: str) -> int:
    """Return the rows of a chunk that are in float32 at once. columns: of this process."""
    budget = SCRATCH_BYTES.get(device, SCRATCH_BYTES["cuda"])
    return min(rows, max(8, budget // (4 * max(1, columns))))


def scratch_of(product: Tensor) -> Tensor:
    """Return a float32 buffer for some rows of a chunk's product."""
    few = scratch_rows(len(product), product.shape[1], product.device.type)
    return torch.empty_like(product[:few], dtype=torch.float32)


def is_in_place(product: Tensor, logits: Tensor, softcap: float | None) -> bool:
    """Return True if exponentials replace a chunk's logits, which are not needed again.

    A compiled kernel does not write them at all, and a soft cap's derivative needs the logits.
    """
    is_compiled = torch.compiler.is_compiling()
    return logits is product and product.dtype == torch.float32 and not (softcap or is_compiled)


def float32_rows(product: Tensor, logits: Tensor, in_place: bool) -> Iterator[tuple[slice, Tensor]]:
    """Yield some rows of a chunk's product after another, and their float32 numbers.

    These may be overwritten. Arguments: see score_chunk and is_in_place.
    """
    if in_place:
        yield slice(None), product
    elif torch.compiler.is_compiling():
        yield slice(None), product.to(torch.float32, copy=True)
    else:
        scratch = scratch_of(product) if logits is product else logits
        for start in range(0, max(1, len(product)), max(1, len(scratch))):
            rows = slice(start, min(start + len(scratch), len(product)))
            yield rows, scratch[: rows.stop - start].copy_(product[rows])


def score_columns(
    product: Tensor,
    logits: Tensor,
    targets: Tensor,
    is_own: Tensor | None,
    softcap: float | None,
    with_mean: bool,
) -> Tensor:
    """Return this process's part of a chunk's scores, [3 or 4, rows] float32.

    The scores of a token are the largest logit, Σ exp(logit - largest), the target's logit or 0,
    and with `with_mean` Σ logit. product, logits: see score_chunk. targets: columns of this
    process. is_own: [rows] bool, True if the target is among them; None: all are.
    """
    parts = []
    for rows, own in float32_rows(product, logits, is_in_place(product, logits, softcap)):
        own = capped(own, softcap)
        at_target = own.gather(-1, targets[rows, None])
        if is_own is not None:
            at_target = torch.where(is_own[rows, None], at_target, 0.0)
        sums = [own.sum(-1, keepdim=True)] if with_mean else []
        largest = own.amax(-1, keepdim=True)
        total = own.sub_(largest).exp_().sum(-1, keepdim=True)
        parts.append(torch.cat([largest, total, at_target, *sums], 1).T)
    return torch.cat(parts, 1)


def score_chunk(
    product: Tensor, logits: Tensor, targets: Tensor, softcap: float | None, with_mean: bool
) -> tuple[Scores, Tensor]:
    """Return a chunk's scores, and `total` of differentiate_chunk.

    product: [rows, vocabulary], logits before the softcap. logits: float32 buffer of any number of
    rows, used a few rows of the product at a time; or the product itself: then, if it is float32,
    exponentials replace it.
    """
    largest, total, at_target, *sums = score_columns(
        product, logits, targets, None, softcap, with_mean
    )
    logsumexp = largest + total.log()
    mean = sums[0] / product.shape[1] - logsumexp if with_mean else None
    return Scores(at_target - logsumexp, logsumexp, mean), torch.stack([largest, total], 1)


def differentiate_objective(
    objective: Objective, scores: Scores, tokens: slice
) -> tuple[Tensor, tuple[Tensor, ...]]:
    own = [None if score is None else score.detach().requires_grad_() for score in scores]
    with torch.enable_grad():
        value = objective(Scores._make(own), tokens)
    leaves = list(filter(torch.is_tensor, own))
    return value.detach(), torch.autograd.grad(value, leaves, materialize_grads=True)


def with_teacher(scores: Scores, compared: Comparison | None) -> Scores:
    """Return a chunk's scores, with the teacher's fields set if there is a teacher."""
    if compared is None:
        return scores
    divergence, log_probability, _ = compared
    return scores._replace(divergence=divergence, teacher_log_probability=log_probability)


def for_logits(
    derivatives: Sequence[Tensor], compared: Comparison | None
) -> tuple[Tensor | None, ...]:
    """Return the last arguments of differentiate_chunk, from the objective's derivatives."""
    if compared is None:
        return (*derivatives, None, None, None)[:5]
    *others, of_divergence, _ = derivatives
    return *(*others, None)[:3], compared.slopes, of_divergence


def differentiate_chunk(
    product: Tensor,
    logits: Tensor,
    total: Tensor,
    softcap: float | None,
    targets: Tensor,
    is_own: Tensor | None,
    vocab_size: int,
    grad_logprob: Tensor,
    grad_logsumexp: Tensor,
    grad_mean: Tensor | None = None,
    slopes: Tensor | None = None,
    of_divergence: Tensor | None = None,
) -> None:
    """Write the objective's derivative with respect to the logits into `product`.

    product, logits: as score_chunk left them; exponentials that are not there are computed again.
    total: [rows, 2], the largest logit, and the sum of exp(logit - largest) over the columns of all
    processes. targets, is_own: see score_columns. vocab_size: number of columns of all processes.
    slopes: see Comparison; of_divergence: [rows], the objective's derivative for the divergence.
    d log_probability = onehot - softmax,  d logsumexp = softmax,
    d mean_log_probability = 1 / vocabulary - softmax
    """
    grad_softmax = grad_logsumexp - grad_logprob
    if grad_mean is not None:
        grad_softmax = grad_softmax - grad_mean
    share = grad_softmax[:, None] / total[:, -1:]
    # in float32, since onehot and softmax nearly cancel for a token of high probability
    at_target = grad_logprob if is_own is None else grad_logprob * is_own
    in_place = is_in_place(product, logits, softcap)
    for rows, own in float32_rows(product, logits, in_place):
        cap_slope = cap_in_place(own, softcap)
        if not in_place:
            own.sub_(total[rows, :1]).exp_()
        own.mul_(share[rows])
        if grad_mean is not None:
            own.add_(grad_mean[rows, None] / vocab_size)
        add_at(own, targets[rows], at_target[rows])
        if cap_slope is not None:
            own.mul_(cap_slope)
        if slopes is not None and of_divergence is not None:
            own[:, : slopes.shape[1]].addcmul_(slopes[rows], of_divergence[rows, None])
        if not in_place:
            product[rows].copy_(own)


def cap_in_place(logits: Tensor, softcap: float | None) -> Tensor | None:
    """Soft-cap float32 logits in place and return the cap's derivative; None without a softcap."""
    if softcap is None:
        return None
    logits.div_(softcap).tanh_()
    slope = 1 - logits.square()
    logits.mul_(softcap)
    return slope


def add_at(values: Tensor, columns: Tensor, numbers: Tensor) -> None:
    """Add to each row of `values` a number in one of its columns, in place."""
    if torch.compiler.is_compiling():  # a compiled scatter would copy the values first
        places = torch.arange(values.shape[1], device=values.device)
        values.add_((places == columns[:, None]) * numbers[:, None])
    else:
        values.scatter_add_(-1, columns[:, None], numbers[:, None])


def _concatenate(parts: list[Scores]) -> Scores:
    columns = [None if part[0] is None else torch.cat(part) for part in zip(*parts, strict=True)]
    return Scores._make(columns)


class _Accumulator:
    """Float32 sum of matrix products of factors in the weight's dtype, shaped as the weight.

    Rows after `columns` are zeros. Only CUDA multiplies 16-bit factors into a float32 result;
    elsewhere the product is first written to a buffer.
    """

    def __init__(self, weight: Tensor, columns: int):
        self.total = torch.empty_like(weight, dtype=torch.float32)
        self.own = self.total[:columns]
        self.total[columns:].zero_()
        self.is_empty = True
        self.buffer = None
        self.options: dict[str, Any] = {}
        if weight.dtype != torch.float32:
            if weight.is_cuda:
                self.options = {"out_dtype": torch.float32}
            else:
                self.buffer = torch.empty_like(self.own, dtype=weight.dtype)

    def __call__(self, slopes: Tensor, hidden: Tensor) -> None:
        """Add slopes.T @ hidden to the total; the first product is written to it."""
        slopes, own = slopes.T, self.own
        if self.buffer is not None:
            product = torch.mm(slopes, hidden, out=self.buffer)
            own = own.copy_(product) if self.is_empty else own.add_(product)
        elif self.is_empty:
            torch.mm(slopes, hidden, out=own, **self.options)
        else:
            torch.addmm(own, slopes, hidden, out=own, **self.options)
        self.is_empty = False
