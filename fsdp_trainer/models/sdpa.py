"""Attention kernels used by the layouts: torch's, and our own for softcap and sinks."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fsdp_trainer.base.torch_private import attention_and_logsumexp, attention_gradients

SOFTCAP_QUERIES = 256
"""Number of queries in a chunk of soft-capped attention."""


class Scoring(NamedTuple):
    """Transformation of products q · k to the scores for the softmax.

    scale: a factor; None: 1 / √head_dim. softcap: scores s become softcap · tanh(s / softcap).
    sinks: an extra score for each query, of a key without a value: [heads], or [heads, queries].
    """

    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


PLAIN = Scoring()


def same_width(*parts: Tensor) -> list[Tensor]:
    """Return queries, keys and values padded with zero channels to the same width."""
    width = max(x.shape[-1] for x in parts)
    return [F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in parts]


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scoring: Scoring = PLAIN,
    is_causal: bool = True,
) -> Tensor:
    """Call torch's `scaled_dot_product_attention` on [batch, length, heads, head_dim].

    With softcap or sinks, which torch does not support, our own functions are called.
    is_causal: True: without a mask, a query sees only keys up to its own position.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    causal = is_causal and mask is None
    if scoring.softcap is not None:
        limits = scoring.scale, scoring.softcap
        return SoftcappedAttention.apply(q, k, v, mask, causal, *limits).transpose(1, 2)
    groups = q.shape[1] // k.shape[1]
    if scoring.sinks is not None:
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        scale = scoring.scale or q.shape[-1] ** -0.5
        return SinkAttention.apply(q, k, v, scoring.sinks, mask, causal, scale).transpose(1, 2)
    if groups > 1 and runs_on_gpu(q) and (mask is not None or q.dtype == torch.float32):
        # the only fused kernel for these (memory-efficient) needs as many kv heads as heads; the
        # unfused one would store all scores
        k = k.repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)
        groups = 1
    result = F.scaled_dot_product_attention(
        q,
        k,
        v,
        mask,
        is_causal=causal,
        scale=scoring.scale,
        enable_gqa=groups > 1,
    )
    return result.transpose(1, 2)


def runs_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


class SinkAttention(torch.autograd.Function):
    """Attention with sinks: the softmax has an extra score per query, of a key without a value.

    See Xiao et al. 2023; GPT-OSS trains one sink for each head. The sinks are added to the
    logsumexp that a kernel returns; with the new logsumexp, the kernel's backward returns the right
    gradients of q, k and v.
    q, k, v: [batch, heads, length, head_dim]; sinks: see Scoring; mask: bool.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float,
    ) -> Tensor:
        out, total = attention_and_logsumexp(q, k, v, as_bias(mask, q), causal, scale)
        columns = sinks.unsqueeze(-1) if sinks.ndim == 1 else sinks
        out, total = with_sinks(out, total, columns)
        ctx.save_for_backward(q, k, v, columns, mask, out, total)
        ctx.options = causal, scale, sinks.shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:
        q, k, v, columns, mask, out, total = ctx.saved_tensors
        causal, scale, shape = ctx.options
        bias = as_bias(mask, q)
        gradients = attention_gradients(grad, out, total, q, k, v, bias, causal, scale)
        of_sinks = sink_gradient(grad, out, total, columns).view(shape)
        return *gradients, of_sinks, None, None, None


def with_sinks(out: Tensor, total: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention and logsumexp after adding the sinks to the softmax.

    out: [..., head_dim] and total: [...], attention and logsumexp without sinks; sinks:
    broadcastable to `total`.
    """
    more = torch.logaddexp(total, sinks.float())
    share = (total - more).exp().unsqueeze(-1)
    return (out * share).to(out.dtype), more


def sink_gradient(grad: Tensor, out: Tensor, total: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks.

    grad: gradient of `out`; out, total: as returned by `with_sinks`; sinks: as passed to it.
    """
    gradient = (sinks.float() - total).exp() * (grad.float() * out.float()).sum(-1)
    return -gradient.sum_to_size(sinks.shape).to(sinks.dtype)


def as_bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    if mask is None:
        return None
    zeros = torch.zeros(mask.shape, dtype=q.dtype, device=q.device)
    return zeros.masked_fill(~mask, float("-inf"))


class SoftcappedAttention(torch.autograd.Function):
    """Attention with scores cap · tanh(s / cap) (Gemma 2), in chunks of queries.

    Backward recomputes a chunk's scores, so that [batch, heads, chunk, keys] numbers exist at a
    time, and none of them between forward and backward.
    q: [batch, heads, queries, head_dim]; k, v: [batch, kv heads, keys, head_dim];
    mask: bool, its last two dimensions are [queries, keys].
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float | None,
        cap: float,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, mask)
        ctx.options = causal, scale or q.shape[-1] ** -0.5, cap
        results = []
        for rows, keys, _, _, probability in _softcapped_chunks(q, k, mask, *ctx.options):
            result = probability.to(q.dtype) @ v[:, :, keys]
            results.append(_ungroup(result, rows))
        return torch.cat(results, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:
        """Return the gradients of q, k and v, summed over chunks in float32."""
        q, k, v, mask = ctx.saved_tensors
        _, scale, _ = ctx.options
        grad_q = []
        grad_k = torch.zeros_like(k, dtype=torch.float32)
        grad_v = torch.zeros_like(v, dtype=torch.float32)
        for rows, keys, q_rows, tanh, probability in _softcapped_chunks(q, k, mask, *ctx.options):
            grad_out = _by_kv_head(grad[:, :, rows], k)
            grad_probability = (grad_out @ v[:, :, keys].mT).float()
            mean = (probability * grad_probability).sum(-1, keepdim=True)
            grad_score = probability * (grad_probability - mean)
            grad_score = (grad_score * (1 - tanh * tanh) * scale).to(q.dtype)
            grad_q.append(_ungroup(grad_score @ k[:, :, keys], rows))
            grad_k[:, :, keys] += grad_score.mT @ q_rows
            grad_v[:, :, keys] += probability.to(q.dtype).mT @ grad_out
        return torch.cat(grad_q, 2), grad_k.to(k.dtype), grad_v.to(v.dtype), *[None] * 4


def _softcapped_chunks(
    q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float, cap: float
) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor]]:
    """Yield rows, visible keys, queries, tanh(scores / cap) and probabilities of each chunk.

    queries: as `_by_kv_head` returns them. The last two are float32 [batch, kv heads, heads of a
    kv head · queries, keys].
    """
    for start in range(0, q.shape[2], SOFTCAP_QUERIES):
        rows = slice(start, min(start + SOFTCAP_QUERIES, q.shape[2]))
        keys = slice(0, rows.stop if causal else k.shape[2])
        if mask is None:
            everything = torch.ones(rows.stop - start, keys.stop, dtype=torch.bool, device=q.device)
            hidden = everything.triu(start + 1 if causal else keys.stop)
        else:
            hidden = ~mask[..., rows, :]
        q_rows = _by_kv_head(q[:, :, rows], k)
        products = (q_rows @ k[:, :, keys].mT).float()
        tanh = torch.tanh(products * (scale / cap))
        # the dimension before [queries, keys] counts the heads of a kv head
        scores = (tanh * cap).unflatten(2, (-1, rows.stop - start))
        scores = scores.masked_fill(hidden.unsqueeze(-3), float("-inf")).flatten(2, 3)
        yield rows, keys, q_rows, tanh, torch.softmax(scores, -1)


def _by_kv_head(q: Tensor, k: Tensor) -> Tensor:
    """Return queries as [batch, kv heads, heads of a kv head · queries, head_dim]."""
    return q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)


def _ungroup(x: Tensor, rows: slice) -> Tensor:
    queries = rows.stop - rows.start
    return x.unflatten(2, (-1, queries)).flatten(1, 2)
