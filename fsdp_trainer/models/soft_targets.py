"""A teacher's token probabilities as soft targets for a student (Hinton et al. 2015).

They are compared with the student's in the head, one chunk of tokens at a time. If ranks divide
the vocabulary, each compares its own columns.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FORWARD, REVERSE = "forward", "reverse"
SMALLEST_LOG = -1e4
"""Logarithm of probability 0: finite, since 0 · inf is not a number."""
LARGEST_LOG = -1e-6
"""Largest log-probability of all tokens outside a list: the list's probability is never 0."""


class Comparison(NamedTuple):
    """Comparison of teacher and student on a chunk of tokens.

    divergence: [rows] float32, KL divergence of teacher and student. teacher_log_probability:
    [rows] float32, of the targets. slopes: [rows, columns] float32, the divergence's derivative
    for the student's logits, for the first columns of this process.
    """

    divergence: Tensor
    teacher_log_probability: Tensor
    slopes: Tensor


@dataclass
class TeacherLogits:
    """Soft targets of a teacher in memory, whose logits are computed with the student's.

    hidden: [tokens, width], the teacher's states after its last norm. teacher: its head, with
    gathered weight. vocabulary: number of first tokens common to both vocabularies, over which both
    distributions are. kl: FORWARD: KL(teacher ‖ student); REVERSE: KL(student ‖ teacher).
    """

    hidden: Tensor
    teacher: Any
    vocabulary: int
    temperature: float = 1.0
    kl: str = FORWARD

    def log_probabilities(
        self, head: Any, log_student: Tensor, targets: Tensor, tokens: slice
    ) -> tuple[Tensor, Tensor]:
        """Return the teacher's log-probabilities of all tokens, and those of the targets.

        The former are [rows, columns] float32 at the temperature, the latter [rows] at temperature
        1. log_student: [rows, columns] float32, the student's at the temperature. tokens: the
        chunk. Collective if ranks divide the vocabulary.
        """
        weight = self.teacher.rows()[: log_student.shape[1]]
        hidden = self.teacher.inputs(self.hidden[tokens])
        logits = capped(F.linear(hidden, weight).float(), self.teacher.softcap)
        own, is_own = local_columns(head, targets, logits.shape[1])
        at_target = at_columns(logits, own, is_own)
        normalizer = joint_logsumexp(head, logits)
        log_probability = head.joint_sum(at_target) - normalizer
        if self.temperature != 1:
            logits.div_(self.temperature)
            normalizer = joint_logsumexp(head, logits)
        return logits.sub_(normalizer[:, None]), log_probability


class TopTokens(NamedTuple):
    """A teacher's most likely tokens at each position, at some temperature.

    tokens: [positions, k] int64; logs: [positions, k] float32, their log-probabilities, largest
    first. rest: [positions] float32, the logarithm of the total probability of all other tokens.
    target: [positions] float32, the log-probability of the target at temperature 1.
    """

    tokens: Tensor
    logs: Tensor
    rest: Tensor
    target: Tensor


@dataclass
class ListedTargets:
    """Soft targets from stored lists of the most likely tokens, without a teacher in memory.

    The remaining probability is distributed over all other tokens in proportion to the student's
    probabilities. This is the distribution nearest to the student's that has the listed
    probabilities, so only the listed tokens and the size of the remainder affect the student. If
    every token is listed, it is the teacher's distribution. Further fields and methods: see
    TeacherLogits.
    """

    top: TopTokens
    vocabulary: int
    temperature: float = 1.0
    kl: str = FORWARD

    def log_probabilities(
        self, head: Any, log_student: Tensor, targets: Tensor, tokens: slice
    ) -> tuple[Tensor, Tensor]:
        ids, logs, rest, target = (part[tokens] for part in self.top)
        place = local_columns(head, ids.long(), log_student.shape[1])
        log_p = log_student.clone()
        reduce_into(log_p, *place, torch.full_like(logs, SMALLEST_LOG, dtype=torch.float32), "amin")
        log_p.add_((rest - joint_logsumexp(head, log_p))[:, None])
        # logs are stored in few bits, so their total probability is computed from the rest
        logs = logs.float()
        together = (-rest.clamp(max=LARGEST_LOG).exp()).log1p()
        reduce_into(log_p, *place, logs + (together - logs.logsumexp(-1))[:, None], "amax")
        return log_p, target.float()


SoftTargets = TeacherLogits | ListedTargets
"""A teacher's probabilities for the supervised tokens of a micro-batch."""


def likeliest(soft: TeacherLogits, count: int, targets: Tensor) -> TopTokens:
    """Return the `count` most likely tokens at all positions, computed in the head's chunks.

    Collective if ranks divide the vocabulary.
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
    reduce_into(
        log_p, *local_columns(head, ids, columns), torch.full_like(logs, SMALLEST_LOG), "amin"
    )
    return TopTokens(ids, logs, joint_logsumexp(head, log_p), target)


def compare(
    soft: SoftTargets, head: Any, product: Tensor, targets: Tensor, tokens: slice
) -> Comparison:
    """Compare a chunk's probabilities with the teacher's.

    Collective if ranks divide the vocabulary.
    head: the student's head. product: [rows, columns], its logits before the softcap; not changed.
    tokens: the chunk's slice of the micro-batch.
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
    """Return Σ p (log p - log q), [rows], and its derivative for log q's logits, q - p.

    log_q, log_p: [rows, columns] float32; both are overwritten.
    """
    p = log_p.exp()
    divergence = head.joint_sum(log_p.sub_(log_q).mul_(p).sum(-1))
    return divergence, log_q.exp_().sub_(p)


def reverse_divergence(head: Any, log_q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ q (log q - log p) and its derivative, q (log q - log p - divergence).

    Shapes and arguments: see forward_divergence.
    """
    q = log_q.exp()
    ratio = log_q.sub_(log_p)
    divergence = head.joint_sum(torch.mul(q, ratio, out=log_p).sum(-1))
    return divergence, ratio.sub_(divergence[:, None]).mul_(q)


COMPARED = {FORWARD: forward_divergence, REVERSE: reverse_divergence}


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Soft-cap float32 logits to ±softcap in place and return them (Gemma 2, §2)."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def joint_logsumexp(head: Any, logits: Tensor) -> Tensor:
    """Return the logsumexp over the columns of all ranks, [rows]."""
    if not logits.shape[1]:  # this rank has only padding
        return head.joint_logsumexp(logits.new_full((len(logits),), -torch.inf))
    largest = logits.amax(-1, keepdim=True)
    total = (logits - largest).exp_().sum(-1)  # torch.logsumexp makes two temporaries of them
    return head.joint_logsumexp(largest[:, 0] + total.log())


def local_columns(head: Any, ids: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Return each token's column on this process, and a mask of tokens that this process has.

    Columns of other tokens are meaningless but valid indices. ids: [rows, ...] int64.
    """
    own = ids - head.first
    return own.clamp(0, max(0, columns - 1)), (own >= 0) & (own < columns)


def reduce_into(values: Tensor, own: Tensor, is_own: Tensor, numbers: Tensor, how: str) -> None:
    """Reduce numbers into columns of `values` in place, by minimum (how: amin) or maximum (amax).

    values: [rows, columns]; own, is_own: [rows, count], from local_columns; numbers: [rows, count].
    """
    if values.shape[1]:
        neutral = torch.inf if how == "amin" else -torch.inf
        values.scatter_reduce_(-1, own, numbers.where(is_own, neutral), how)


def at_columns(values: Tensor, own: Tensor, is_own: Tensor) -> Tensor:
    """Return the value in one column of each row, [rows]; 0 if another process has the column."""
    if not values.shape[1]:
        return values.new_zeros(len(values))
    return torch.where(is_own, values.gather(-1, own[:, None])[:, 0], 0.0)
