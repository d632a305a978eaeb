"""A teacher's probabilities of every token, which a student learns from (Hinton et al. 2015).

They are compared with the student's in the head, one chunk of tokens at a time. Where ranks share
the vocabulary each compares its own columns.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

FORWARD, REVERSE = "forward", "reverse"
SMALLEST_LOG = -1e4
"""Of a probability that is 0: finite, since 0 · inf is not a number."""
LARGEST_LOG = -1e-6
"""Of what is left over beside a list, of which some is always likely."""


class Comparison(NamedTuple):
    """A chunk's divergence of teacher and student, and the teacher's log-probability of the
    targets: [rows] float32 each. slopes: [rows, columns] float32, the derivative of the divergence
    in the student's logits, of the first columns of this process."""

    divergence: Tensor
    teacher_log_probability: Tensor
    slopes: Tensor


class SoftTargets(Protocol):
    """A teacher's probabilities of the supervised tokens of a micro-batch."""

    temperature: float
    kl: str
    """FORWARD: KL(teacher ‖ student); REVERSE: KL(student ‖ teacher)."""
    vocabulary: int
    """Tokens that both know, the first ones: both distributions are over these."""

    def log_probabilities(
        self, head: Any, log_student: Tensor, targets: Tensor, tokens: slice
    ) -> tuple[Tensor, Tensor]:
        """Return [rows, columns] float32, at the temperature, and the targets' at temperature 1.

        log_student: [rows, columns] float32, the student's at the temperature. tokens: the chunk.
        Collective where ranks share the vocabulary.
        """


@dataclass
class TeacherLogits:
    """Soft targets of a teacher in memory, whose logits are made along with the student's.

    hidden: [tokens, width], behind its last norm. teacher: its head, whose weight is gathered.
    """

    hidden: Tensor
    teacher: Any
    vocabulary: int
    temperature: float = 1.0
    kl: str = FORWARD

    def log_probabilities(
        self, head: Any, log_student: Tensor, targets: Tensor, tokens: slice
    ) -> tuple[Tensor, Tensor]:
        """See SoftTargets."""
        weight = self.teacher.rows()[: log_student.shape[1]]
        logits = capped(F.linear(self.hidden[tokens], weight).float(), self.teacher.softcap)
        own, is_own = own_columns(head, targets, logits.shape[1])
        at_target = at_columns(logits, own, is_own)
        normalizer = joint_logsumexp(head, logits)
        log_probability = head.joint_sum(at_target) - normalizer
        if self.temperature != 1:
            logits.div_(self.temperature)
            normalizer = joint_logsumexp(head, logits)
        return logits.sub_(normalizer[:, None]), log_probability


class TopTokens(NamedTuple):
    """A teacher's likeliest tokens of each place, at some temperature, and what is left over.

    tokens: [places, k] int64; logs: [places, k] float32, their log-probabilities, largest first.
    rest: [places] float32, the logarithm of the others' probabilities together. target: [places]
    float32, the log-probability of the target at temperature 1.
    """

    tokens: Tensor
    logs: Tensor
    rest: Tensor
    target: Tensor


@dataclass
class ListedTargets:
    """Soft targets of the likeliest tokens alone, which were stored; there is no teacher.

    What is left over is shared out among all other tokens as the student's own probabilities of
    them are. That is the nearest distribution to the student's with these likeliest tokens, so
    only they, and how much is left over, pull at the student. Where every token is listed it is
    the teacher's own.
    """

    top: TopTokens
    vocabulary: int
    temperature: float = 1.0
    kl: str = FORWARD

    def log_probabilities(
        self, head: Any, log_student: Tensor, targets: Tensor, tokens: slice
    ) -> tuple[Tensor, Tensor]:
        """See SoftTargets."""
        ids, logs, rest, target = (part[tokens] for part in self.top)
        place = own_columns(head, ids.long(), log_student.shape[1])
        log_p = log_student.clone()
        put(log_p, *place, torch.full_like(logs, SMALLEST_LOG, dtype=torch.float32), "amin")
        log_p.add_((rest - joint_logsumexp(head, log_p))[:, None])
        # logs are stored in few bits: what they have together follows from what is left over
        logs = logs.float()
        together = (-rest.clamp(max=LARGEST_LOG).exp()).log1p()
        put(log_p, *place, logs + (together - logs.logsumexp(-1))[:, None], "amax")
        return log_p, target.float()


def likeliest(soft: TeacherLogits, count: int, targets: Tensor) -> TopTokens:
    """Return the `count` likeliest tokens of all places. Collective where ranks share the
    vocabulary.

    Of places whose logits are made at the same time, as in the head.
    """
    head, places = soft.teacher, len(soft.hidden)
    rows = head.rows_at_once(places, soft.hidden.device.type)
    chunks = [slice(start, start + rows) for start in range(0, max(1, places), rows)]
    parts = [_likeliest(soft, count, targets[tokens], tokens) for tokens in chunks]
    return TopTokens(*(torch.cat(part) for part in zip(*parts, strict=True)))


def _likeliest(soft: TeacherLogits, count: int, targets: Tensor, tokens: slice) -> TopTokens:
    head = soft.teacher
    columns = max(0, min(soft.vocabulary - head.first, head.columns))
    like = soft.hidden.new_empty(0, columns)
    log_p, target = soft.log_probabilities(head, like, targets, tokens)
    logs, ids = log_p.topk(min(count, columns))
    logs = F.pad(logs, (0, count - logs.shape[1]), value=-torch.inf)
    ids = F.pad(ids + head.first, (0, count - ids.shape[1]))
    logs, ids = head.joint_columns(logs), head.joint_columns(ids)
    logs, best = logs.topk(count)
    ids = ids.gather(-1, best)
    put(log_p, *own_columns(head, ids, columns), torch.full_like(logs, SMALLEST_LOG), "amin")
    return TopTokens(ids, logs, joint_logsumexp(head, log_p), target)


def compare(
    soft: SoftTargets, head: Any, product: Tensor, targets: Tensor, tokens: slice
) -> Comparison:
    """Compare a chunk's probabilities with the teacher's. Collective where ranks share the
    vocabulary.

    head: the student's. product: [rows, columns], its logits before they are capped; it is left as
    it is. tokens: the chunk's place in the micro-batch.
    """
    columns = max(0, min(soft.vocabulary - head.first, head.columns))
    log_q = product[:, :columns].to(torch.float32, copy=True)
    cap_slope = None
    if head.softcap is not None:
        log_q = capped(log_q, head.softcap)
        cap_slope = 1 - (log_q / head.softcap).square()
    if soft.temperature != 1:
        log_q.div_(soft.temperature)
    log_q.sub_(joint_logsumexp(head, log_q)[:, None])
    log_p, log_probability = soft.log_probabilities(head, log_q, targets, tokens)
    divergence, slopes = COMPARED[soft.kl](head, log_q, log_p)
    if soft.temperature != 1:
        slopes.div_(soft.temperature)
    if cap_slope is not None:
        slopes.mul_(cap_slope)
    return Comparison(divergence, log_probability, slopes)


def forward_divergence(head: Any, log_q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ p (log p - log q), [rows], and its derivative in log q's logits, q - p.

    log_q, log_p: [rows, columns] float32; both are overwritten.
    """
    p = log_p.exp()
    divergence = head.joint_sum(log_p.sub_(log_q).mul_(p).sum(-1))
    return divergence, log_q.exp_().sub_(p)


def reverse_divergence(head: Any, log_q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ q (log q - log p) and its derivative, q (log q - log p - divergence).

    See forward_divergence.
    """
    q = log_q.exp()
    ratio = log_q.sub_(log_p)
    divergence = head.joint_sum(torch.mul(q, ratio, out=log_p).sum(-1))
    return divergence, ratio.sub_(divergence[:, None]).mul_(q)


COMPARED = {FORWARD: forward_divergence, REVERSE: reverse_divergence}


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return float32 logits within ±softcap (Gemma 2, §2), in the same memory."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def joint_logsumexp(head: Any, logits: Tensor) -> Tensor:
    """Return the logsumexp over the columns of all ranks, [rows]."""
    if not logits.shape[1]:  # padding alone
        return head.joint_logsumexp(logits.new_full((len(logits),), -torch.inf))
    largest = logits.amax(-1, keepdim=True)
    total = (logits - largest).exp_().sum(-1)  # torch.logsumexp makes two temporaries of them
    return head.joint_logsumexp(largest[:, 0] + total.log())


def own_columns(head: Any, ids: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Return the columns of tokens on this process, and True where it has them.

    Those of other ranks' tokens are any. ids: [rows, ...] int64.
    """
    own = ids - head.first
    return own.clamp(0, max(0, columns - 1)), (own >= 0) & (own < columns)


def put(values: Tensor, own: Tensor, is_own: Tensor, numbers: Tensor, how: str) -> None:
    """Write the smaller (how: amin) or larger (amax) of a number and what is there, in place.

    values: [rows, columns]; own, is_own: [rows, count], of own_columns; numbers: [rows, count].
    """
    if values.shape[1]:
        neutral = torch.inf if how == "amin" else -torch.inf
        values.scatter_reduce_(-1, own, numbers.where(is_own, neutral), how)


def at_columns(values: Tensor, own: Tensor, is_own: Tensor) -> Tensor:
    """Return the value in one column of each row, [rows]; 0 where the column is not here."""
    if not values.shape[1]:
        return values.new_zeros(len(values))
    return torch.where(is_own, values.gather(-1, own[:, None])[:, 0], 0.0)
