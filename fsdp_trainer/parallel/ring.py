"""Ring attention (Liu et al. 2023): keys and values travel around a ring of ranks.

Each rank's queries attend to the keys of one rank at a time, while the next keys are in transit.
A kernel returns the logsumexp of its scores with its result; these are used to merge the results
over all ranks' keys. Backward sends keys and values around again, followed by their gradients.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fsdp_trainer.base.torch_private import (
    attention_and_logsumexp,
    attention_gradients,
    unmasked_attention,
    unmasked_gradients,
)
from fsdp_trainer.models.attention_kernels import merging_kernel
from fsdp_trainer.models.sdpa import PLAIN, Scoring, as_bias, sink_gradient, with_sinks
from fsdp_trainer.parallel.ring_calls import RingCall, block_calls, piece_calls, whole_calls
from fsdp_trainer.parallel.split_rows import ContextRanks, DealtByCost, Gradients

Steps = list[list[RingCall]]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None]


class Ring(DealtByCost):
    """Layout in which each rank's queries attend to the keys of one rank after the other."""

    def prepare(self) -> None:
        parts, rank = self.parts, self.ranks.rank
        kernel = None if self.window else merging_kernel()
        if kernel and all(documents == [self.row] for documents in self.lengths):
            self.steps = block_calls(parts[:, 0], rank, kernel)
        elif self.attention == "mask":
            documents = self.document_numbers(1)
            self.steps = whole_calls(parts, rank, documents, self.window, self.device)
        else:
            rows = (self.lengths, self.row, self.window, self.device)
            self.steps = piece_calls(parts, rank, *rows, bounded=kernel is not None)

    def with_window(self, window: int | None) -> "Ring":
        if window == self.window:
            return self
        windowed = super().with_window(window)
        windowed.prepare()
        return windowed

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring = PLAIN) -> Tensor:
        """See PackedAttention. Sends (ranks - 1) messages."""
        assert scoring.softcap is None, "config/context_methods.py refuses it"
        scale = scoring.scale or q.shape[-1] ** -0.5
        return RingAttention.apply(q, k, v, scoring.sinks, self.steps, scale, self.ranks)


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        steps: Steps,
        scale: float,
        ranks: ContextRanks,
    ) -> Tensor:
        """Return the attention, shaped as q: [rows, part, heads, head_dim].

        k, v: keys and values of this rank's tokens; sinks: [heads]. steps: calls for the keys of
        each rank, this rank first.
        """
        keys = torch.stack([k, v])
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        total = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
        for step, calls in enumerate(steps):
            arriving = send_on(keys, ranks) if step < len(steps) - 1 else None
            for call in calls:
                part, logsumexp = attention_of(call, *inputs_of(call, q, keys), scale)
                merge(out, total, call, part, logsumexp)
            keys = keys if arriving is None else arriving.wait()
        if sinks is not None:
            out, total = with_sinks(out, total, sinks)
        out = out.to(q.dtype)
        ctx.steps, ctx.scale, ctx.ranks = steps, scale, ranks
        ctx.save_for_backward(q, k, v, sinks, out, total)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        """Send keys and values around again, followed by the sums of their gradients."""
        q, k, v, sinks, out, total = ctx.saved_tensors
        keys = torch.stack([k, v])
        last = len(ctx.steps) - 1
        grad_q = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        own = torch.zeros(keys.shape, dtype=torch.float32, device=q.device)
        travelling: Arriving | None = None
        for step, calls in enumerate(ctx.steps):
            arriving = send_on(keys, ctx.ranks) if step < last else None
            grad_keys = own if step == 0 else torch.zeros_like(own)
            for call in calls:
                results = backward_inputs(call, grad, out, total)
                gradients = gradients_of(call, results, inputs_of(call, q, keys), ctx.scale)
                add_gradients(grad_q, grad_keys, call, gradients)
            if travelling is not None:
                grad_keys += travelling.wait()
            if step > 0:
                travelling = send_on(grad_keys.to(keys.dtype), ctx.ranks)
            keys = keys if arriving is None else arriving.wait()
        if travelling is not None:
            own += travelling.wait()
        grad_k, grad_v = own.to(k.dtype).unbind()
        of_sinks = None if sinks is None else sink_gradient(grad, out, total, sinks)
        return grad_q.to(q.dtype), grad_k, grad_v, of_sinks, None, None, None


# --- messages -------------------------------------------------------------------------------------


class Arriving:
    """A message from the previous rank. work: handle of the transfer; None if it is complete."""

    def __init__(self, received: Tensor, work: Any):
        self.received = received
        self.work = work

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.received


def send_on(x: Tensor, ranks: ContextRanks) -> Arriving:
    """Send a tensor to the next rank, asynchronously to the computation. Collective.

    Uses an all-to-all in which each rank sends to only one other rank: NCCL transfers nothing else,
    and the compiler supports it, unlike point-to-point messages.
    """
    x = x.contiguous()
    received = torch.empty_like(x)
    to, source = [0] * ranks.size, [0] * ranks.size
    to[(ranks.rank + 1) % ranks.size] = len(x)
    source[(ranks.rank - 1) % ranks.size] = len(x)
    if torch.compiler.is_compiling():
        dist.all_to_all_single(received, x, source, to, group=ranks.group)
        return Arriving(received, None)
    work = dist.all_to_all_single(received, x, source, to, group=ranks.group, async_op=True)
    return Arriving(received, work)


# --- pieces ---------------------------------------------------------------------------------------


def attention_of(
    call: RingCall, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    if call.kernel is None:
        return attention_and_logsumexp(q, k, v, bias, call.causal, scale)
    return unmasked_attention(q, k, v, call.causal, scale, call.kernel, call.bounds)


def gradients_of(
    call: RingCall, results: tuple[Tensor, Tensor, Tensor], inputs: Inputs, scale: float
) -> tuple[Tensor, ...]:
    q, k, v, bias = inputs
    if call.kernel is None:
        return attention_gradients(*results, q, k, v, bias, call.causal, scale)
    return unmasked_gradients(*results, q, k, v, call.causal, scale, call.kernel, call.bounds)


def pick(x: Tensor, places: Tensor | slice | None) -> Tensor:
    """Return the tokens of each piece, [n, ..., longest, head_dim].

    x: [rows, tokens, ..., head_dim]; places: queries or keys of a RingCall.
    """
    if isinstance(places, slice):
        x = x[:, places]
    elif places is not None:
        x = x.flatten(0, 1).index_select(0, places.flatten()).unflatten(0, places.shape)
    return x.transpose(1, 2)


def inputs_of(call: RingCall, q: Tensor, keys: Tensor) -> Inputs:
    """Return queries, keys and values of a call, [n, heads, longest, head_dim], and its bias.

    Key heads are repeated for kernels that do not support fewer key heads than query heads.
    keys: [2, rows, tokens, kv heads, head_dim].
    """
    k, v = (pick(x, call.keys) for x in keys.unbind())
    if call.kernel is None:
        repeats = q.shape[2] // keys.shape[3]
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    return pick(q, call.queries), k, v, as_bias(call.mask, q)


def merge(out: Tensor, total: Tensor, call: RingCall, part: Tensor, logsumexp: Tensor) -> None:
    """Merge a call's results in place into the results for earlier keys.

    out: [rows, tokens, heads, head_dim] and total: [rows, tokens, heads], the logsumexp so far,
    both float32. part: [n, heads, longest, head_dim]; logsumexp: [n, heads, longest].
    """
    if call.sees is not None:
        # the kernel's results for a query without keys are meaningless
        logsumexp = logsumexp.masked_fill(~call.sees, -torch.inf)
        part = torch.where(call.sees[..., None], part, 0)
    part, logsumexp = part.transpose(1, 2), logsumexp.transpose(1, 2)
    if isinstance(call.queries, slice):
        out, total = out[:, call.queries], total[:, call.queries]
    if call.tokens is None:
        merged, out_merged = merged_results(out, total, part, logsumexp)
        total.copy_(merged)
        out.copy_(out_merged)
        return
    part, logsumexp = part.flatten(0, 1), logsumexp.flatten(0, 1)
    if call.results is not None:
        part, logsumexp = (x.index_select(0, call.results) for x in (part, logsumexp))
    flat, flat_total = out.flatten(0, 1), total.flatten(0, 1)
    before, before_total = (x.index_select(0, call.tokens) for x in (flat, flat_total))
    merged, out_merged = merged_results(before, before_total, part, logsumexp)
    flat_total.index_copy_(0, call.tokens, merged)
    flat.index_copy_(0, call.tokens, out_merged)


def merged_results(
    out: Tensor, total: Tensor, part: Tensor, logsumexp: Tensor
) -> tuple[Tensor, Tensor]:
    merged = torch.logaddexp(total, logsumexp)
    shares = ((x - merged).exp()[..., None] for x in (total, logsumexp))
    of_before, of_part = shares
    return merged, out * of_before + part * of_part


def backward_inputs(
    call: RingCall, grad: Tensor, out: Tensor, total: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient, the merged result and the merged logsumexp for a call's queries."""
    part = pick(grad, call.queries)
    if call.real is not None:
        part = part * call.real.transpose(1, 2)
    logsumexp = pick(total[..., None], call.queries).squeeze(-1)
    return part, pick(out, call.queries), logsumexp.contiguous()


def add_gradients(
    grad_q: Tensor, grad_keys: Tensor, call: RingCall, gradients: tuple[Tensor, ...]
) -> None:
    """Add a call's gradients in place. grad_keys: for keys and values, [2, rows, tokens, ...]."""
    add(grad_q, call.queries, gradients[0])
    for whole, gradient in zip(grad_keys.unbind(), gradients[1:], strict=True):
        if call.kernel is None:
            gradient = gradient.unflatten(1, (whole.shape[2], -1)).sum(2)
        add(whole, call.keys, gradient)


def add(whole: Tensor, places: Tensor | slice | None, part: Tensor) -> None:
    """Add pieces, [n, heads, longest, head_dim], to [rows, tokens, heads, head_dim] in place."""
    part = part.transpose(1, 2).to(whole.dtype)
    if places is None:
        whole += part
    elif isinstance(places, slice):
        whole[:, places] += part
    else:
        whole.flatten(0, 1).index_add_(0, places.flatten(), part.flatten(0, 1))
