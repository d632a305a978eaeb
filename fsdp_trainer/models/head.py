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

from fsdp_trainer.base.round_up import round_up
from fsdp_trainer.base.torch_private import graph_is_kept
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.soft_targets import Comparison, SoftTargets, compare

CHUNK_TOKENS = {"cpu": 256, "cuda": 2048}
"""Default number of tokens in a chunk: matrix products need many rows to be fast, and each chunk
reads and writes the weight's complete gradient once."""


class Scores(NamedTuple):
    """Scores of each target, [tokens] float32.

    log_probability: log-probability of the target. logsumexp: logsumexp of the token's logits.
    mean_log_probability: mean over the vocabulary; None unless the objective needs it.
    divergence: KL divergence between a teacher's and the student's probabilities.
    teacher_log_probability: teacher's log-probability of the target, a constant. The last two are
    None without a teacher. reward: a reward model's score, None for other models; it predicts no
    tokens, and its other values are zeros.
    """

    log_probability: Tensor
    logsumexp: Tensor
    mean_log_probability: Tensor | None = None
    divergence: Tensor | None = None
    teacher_log_probability: Tensor | None = None
    reward: Tensor | None = None


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
    chunk_mib: MiB of float32 logits in a chunk; None: CHUNK_TOKENS tokens.
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
            return self.logits(hidden)
        hidden = self.inputs(hidden)
        if self.temperature != 1:
            hidden = hidden / self.temperature
        if objective is None:
            return None, self.scores(hidden, targets, soft=soft)
        if objective.needs_all_tokens and not self.is_one_chunk(hidden):
            return self._all_tokens(hidden, targets, objective, soft)
        value, *scores = FusedLinearLoss.apply(hidden, self.rows(), targets, objective, self, soft)
        return value, Scores(*scores)

    def joint_logsumexp(self, own: Tensor) -> Tensor:
        """Return the logsumexp over all columns, [rows]. own: over this process's columns."""
        return own

    def joint_sum(self, own: Tensor) -> Tensor:
        """Return the sum over all columns, [rows]. own: over this process's columns."""
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
        """Return all logits, [..., vocabulary]."""
        return self.capped(self.product(hidden))

    def product(self, hidden: Tensor) -> Tensor:
        """Return all logits before the soft cap, [..., vocabulary]."""
        return F.linear(hidden, self.weight[: self.vocab_size])

    def capped(self, logits: Tensor) -> Tensor:
        """Return logits with the soft cap, if there is one."""
        return logits if self.softcap is None else cap_logits(logits, self.softcap)

    def score_logits(
        self, product: Tensor, logits: Tensor, targets: Tensor, with_mean: bool
    ) -> tuple[Scores, Tensor, Tensor | None]:
        """Return a chunk's scores and two inputs of `write_gradient`: see score_chunk."""
        return self.score(product, logits, targets, self.scored_softcap, with_mean)

    def write_gradient(
        self,
        product: Tensor,
        logits: Tensor,
        total: Tensor,
        softcap_grad: Tensor | None,
        targets: Tensor,
        derivatives: Sequence[Tensor],
    ) -> None:
        """Write the objective's derivative with respect to a chunk's logits into `product`."""
        size = self.vocab_size
        self.differentiate(product, logits, total, softcap_grad, targets, None, size, *derivatives)

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
        """Return the scores without a gradient."""
        vocabulary = self.rows()[: self.columns]
        parts = []
        for tokens, product, logits in self.chunks(hidden, vocabulary):
            compared = compare(soft, self, product, targets[tokens], tokens) if soft else None
            scores = self.score_logits(product, logits, targets[tokens], with_mean)[0]
            parts.append(with_teacher(scores, compared))
            compared = None  # free its slopes, which are as large as a chunk's logits
        return _concatenate(parts)

    def chunks(self, hidden: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield for each chunk its tokens, the product hidden · weightᵀ, and a float32 buffer.

        The buffer is the product itself if that is float32. All chunks use the same memory: on
        a CPU allocation would take longer than the computation.
        """
        rows = self.rows_at_once(len(hidden), hidden.device.type)
        products = buffers = hidden.new_empty(rows, self.columns)
        if products.dtype != torch.float32:
            buffers = torch.empty_like(products, dtype=torch.float32)
        for start in range(0, max(1, len(hidden)), rows):
            tokens = slice(start, min(start + rows, len(hidden)))
            count = tokens.stop - start
            product = torch.mm(hidden[tokens], weight.T, out=products[:count])
            yield tokens, product, product if buffers is products else buffers[:count]

    def is_one_chunk(self, hidden: Tensor) -> bool:
        """Return True if all tokens fit in one chunk. hidden: [tokens, hidden]."""
        return self.rows_at_once(len(hidden), hidden.device.type) >= len(hidden)

    def rows_at_once(self, tokens: int, device: str) -> int:
        """Return the tokens per chunk, for the smallest number of equal chunks within the budget.

        Rounded up to a multiple of 8, which tensor cores prefer.
        """
        budget = CHUNK_TOKENS.get(device, CHUNK_TOKENS["cuda"])
        if self.chunk_mib:
            budget = max(1, self.chunk_mib * 2**20 // (4 * self.vocab_size))
        chunks = max(1, math.ceil(tokens / budget))
        return max(8, round_up(math.ceil(tokens / chunks), 8))

    def compile_chunks(self, **options: Any) -> None:
        """Compile the operations between a chunk's matrix products. options: of torch.compile.

        One graph is used for any number of rows.
        """

        def compiled(function: Callable) -> Callable:
            graph = torch.compile(function, fullgraph=True, **options)

            def call(*args: Any) -> Any:
                for tensor in filter(torch.is_tensor, args):
                    torch._dynamo.mark_dynamic(tensor, 0)
                return graph(*args)

            return call

        self.score = compiled(self.score)
        self.differentiate = compiled(self.differentiate)


class ScoreHead(Head):
    """`score`: weight [1, hidden], returns one score per hidden state in place of logits."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.weight = nn.Parameter(torch.empty(1, config.hidden_size))
        self.columns = 1

    @record_function("loss")
    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        objective: Objective | None = None,
        soft: SoftTargets | None = None,
    ) -> Tensor | tuple[Tensor | None, Scores]:
        """Return value and scores as `Head` does; without targets return the scores, [..., 1].

        The values of targets and soft are not used.
        """
        numbers = F.linear(hidden, self.weight)
        if targets is None:
            return numbers
        rewards = numbers[:, 0].float()
        zeros = torch.zeros_like(rewards)
        scores = Scores(zeros, zeros, reward=rewards.detach())
        if objective is None:
            return None, scores
        return objective(scores._replace(reward=rewards), slice(0, len(rewards))), scores


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
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        add = None if grad_weight is None else _Accumulator(grad_weight[: head.columns], weight)
        value = torch.zeros((), dtype=torch.float32, device=hidden.device)
        parts = []
        for tokens, product, logits in head.chunks(hidden, vocabulary):
            compared = compare(soft, head, product, targets[tokens], tokens) if soft else None
            scores, total, softcap_grad = head.score_logits(
                product, logits, targets[tokens], objective.needs_mean
            )
            scores = with_teacher(scores, compared)
            summand, derivatives = differentiate_objective(objective, scores, tokens)
            value += summand
            parts.append(scores)
            if needs_hidden or needs_weight:
                rest = total, softcap_grad, targets[tokens]
                if compared is None:
                    head.write_gradient(product, logits, *rest, derivatives)
                else:
                    *others, of_divergence, _ = derivatives
                    head.write_gradient(product, logits, *rest, others)
                    add_slopes(product, logits, compared.slopes, of_divergence)
            compared = None  # free its slopes, which are as large as a chunk's logits
            if grad_hidden is not None:
                torch.mm(product, vocabulary, out=grad_hidden[tokens])
            if add is not None:
                add(product, hidden[tokens])
        ctx.save_for_backward(grad_hidden, grad_weight)
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
        scale = torch.mul if graph_is_kept() else Tensor.mul_
        if grad_hidden is not None:
            grad_hidden = scale(grad_hidden, grad_value)
        if grad_weight is not None:
            grad_weight = scale(grad_weight, grad_value).to(ctx.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def cap_logits(logits: Tensor, softcap: float) -> Tensor:
    """Return logits soft-capped to ±softcap (Gemma 2, §2)."""
    return torch.tanh(logits / softcap) * softcap


def write_logits(product: Tensor, logits: Tensor, softcap: float | None) -> Tensor | None:
    """Write a chunk's logits, soft-capped if there is a softcap; return the cap's derivative."""
    if logits is not product:
        logits.copy_(product)
    if softcap is None:
        return None
    logits.div_(softcap).tanh_()
    softcap_grad = 1 - logits.square()
    logits.mul_(softcap)
    return softcap_grad


def score_chunk(
    product: Tensor, logits: Tensor, targets: Tensor, softcap: float | None, with_mean: bool
) -> tuple[Scores, Tensor, Tensor | None]:
    """Return a chunk's scores, the sum of its exponentials [rows, 1], and the softcap's derivative.

    product: [rows, vocabulary]. logits: float32 buffer; the exponentials are written to it.
    Divided by their sum they are the softmax.
    """
    softcap_grad = write_logits(product, logits, softcap)
    target_logits = logits.gather(-1, targets[:, None])
    mean = logits.mean(-1) if with_mean else None
    largest = logits.amax(-1, keepdim=True)
    total = logits.sub_(largest).exp_().sum(-1, keepdim=True)
    logsumexp = largest + total.log()
    mean_log_probability = None if mean is None else mean - logsumexp[:, 0]
    scores = Scores((target_logits - logsumexp)[:, 0], logsumexp[:, 0], mean_log_probability)
    return scores, total, softcap_grad


def differentiate_objective(
    objective: Objective, scores: Scores, tokens: slice
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the objective's value on these tokens, and its derivative for each kind of score."""
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


def add_slopes(product: Tensor, logits: Tensor, slopes: Tensor, of_divergence: Tensor) -> None:
    """Add the divergence's part to the objective's derivative with respect to the logits.

    product: holds the derivative, and is overwritten. logits: the derivative in float32. slopes:
    see Comparison. of_divergence: [rows], the objective's derivative for the divergence.
    """
    columns = slopes.shape[1]
    logits[:, :columns].addcmul_(slopes, of_divergence[:, None])
    if logits is not product:
        product.copy_(logits)


def differentiate_chunk(
    product: Tensor,
    logits: Tensor,
    total: Tensor,
    softcap_grad: Tensor | None,
    targets: Tensor,
    is_own: Tensor | None,
    vocab_size: int,
    grad_logprob: Tensor,
    grad_logsumexp: Tensor,
    grad_mean: Tensor | None = None,
) -> None:
    """Write the objective's derivative with respect to the logits into `product`.

    logits: exponentials written by `score_chunk`. is_own: [rows] bool, True if the target is among
    this process's columns; None: all are. vocab_size: number of columns of all processes.
    d log_probability = onehot - softmax,  d logsumexp = softmax,
    d mean_log_probability = 1 / vocabulary - softmax
    """
    grad_softmax = grad_logsumexp - grad_logprob
    if grad_mean is not None:
        grad_softmax = grad_softmax - grad_mean
    logits.mul_(grad_softmax[:, None] / total)
    if grad_mean is not None:
        logits.add_(grad_mean[:, None] / vocab_size)
    # in float32, since onehot and softmax nearly cancel for a token of high probability
    at_target = grad_logprob if is_own is None else grad_logprob * is_own
    if torch.compiler.is_compiling():  # a compiled scatter would copy the logits first
        columns = torch.arange(logits.shape[1], device=logits.device)
        logits.add_((columns == targets[:, None]) * at_target[:, None])
    else:
        logits.scatter_add_(-1, targets[:, None], at_target[:, None])
    if softcap_grad is not None:
        logits.mul_(softcap_grad)
    if logits is not product:
        product.copy_(logits)


def _concatenate(parts: list[Scores]) -> Scores:
    """Concatenate the scores of all chunks."""
    columns = [None if part[0] is None else torch.cat(part) for part in zip(*parts, strict=True)]
    return Scores._make(columns)


class _Accumulator:
    """Float32 sum of matrix products of factors in the weight's dtype.

    Only CUDA multiplies 16-bit factors into a float32 result; elsewhere the product is first
    written to a buffer.
    """

    def __init__(self, total: Tensor, weight: Tensor):
        self.total = total
        self.buffer = None
        self.options: dict[str, Any] = {}
        if weight.dtype != total.dtype:
            if total.is_cuda:
                self.options = {"out_dtype": total.dtype}
            else:
                self.buffer = torch.empty_like(total, dtype=weight.dtype)

    def __call__(self, slopes: Tensor, hidden: Tensor) -> None:
        """Add slopes.T @ hidden to the total, [vocabulary, hidden]."""
        if self.buffer is not None:
            self.total += torch.mm(slopes.T, hidden, out=self.buffer)
        else:
            torch.addmm(self.total, slopes.T, hidden, out=self.total, **self.options)
