"""The method of attention for rows that several ranks split. Imports no torch."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from fsdp_trainer.config.schema import Model, Sharding
from fsdp_trainer.errors import Problem

OWN_QUERIES_ATTENTION = ("documents", "mask")
"""Values of model.attention that can compute only some tokens' queries, which gathered and ring
need."""
RING_ROW = 32_768
"""Tokens per row from which on `auto` prefers ring to gathered. The masks of gathered take S² / N
bytes on each of N ranks, which is 256 MiB on 4."""


class ContextChoice(NamedTuple):
    """The chosen method, a value of sharding.context_method except `auto`, and the reason."""

    method: str
    reason: str

    def __str__(self) -> str:
        return f"by {self.method}: {self.reason}"


def context_method(sharding: Sharding, row: int, part: Any) -> ContextChoice:
    """Choose the method for rows of `row` tokens. `context_problems` reports impossible settings.

    part: what a rank of a tensor group computes of the model (`RankConfig`).
    """
    heads = part.shape.num_attention_heads
    if sharding.context_method != "auto":
        return ContextChoice(sharding.context_method, "as requested")
    divided = f"{heads} heads over {sharding.context} ranks"
    if heads % sharding.context == 0:
        return ContextChoice("ulysses", f"{divided} in two messages a block")
    uneven = f"{divided} would be uneven"
    if row < RING_ROW:
        return ContextChoice("gathered", f"{uneven}, and rows are shorter than {RING_ROW:,} tokens")
    if part.shape.attn_logit_softcapping is not None:
        return ContextChoice("gathered", f"{uneven}, and scores have a soft limit")
    return ContextChoice("ring", f"{uneven}, and whole rows of {row:,} tokens take much memory")


def attention_layout(model: Model, context: int, method: str, compiled: bool) -> str:
    """Return model.attention, with `auto` replaced if only some tokens' queries are computed.

    context: number of ranks that split rows.
    """
    if context == 1 or method == "ulysses" or model.attention != "auto":
        return model.attention
    return "mask" if compiled else "documents"


def context_problems(sharding: Sharding, row: int, model: Model, config: Any) -> Iterator[Problem]:
    """Yield the problems that keep ranks from splitting a model's rows of `row` tokens.

    config: of the complete model (`ModelConfig`).
    """
    attention, heads = model.attention, config.num_attention_heads
    if sharding.context == 1:
        return
    part = config.on_tensor_rank(sharding.tensor)
    method = context_method(sharding, row, part).method
    if method != "ulysses" and attention not in ("auto", *OWN_QUERIES_ATTENTION):
        known = " and ".join(OWN_QUERIES_ATTENTION)
        reason = (
            f"is for whole rows; with sharding.context_method={method} there are {known}.\n"
            "Use  model.attention=auto"
        )
        yield Problem(f"model.attention={attention}", reason)
    if method == "ring":
        yield from ring_problems(model, config)
    ranks = sharding.tensor * sharding.context
    if sharding.context_method == "ulysses" and heads % ranks:
        of_tensor_rank = max(1, part.shape.num_attention_heads)
        size = sharding.context
        nearest = max(n for n in range(1, size + 1) if of_tensor_rank % n == 0)
        by_tensor = " × sharding.tensor" if sharding.tensor > 1 else ""
        reason = (
            f"ulysses deals out whole heads: {ranks} (sharding.context{by_tensor}) must divide "
            f"num_attention_heads={heads}.\n"
            f"Use  sharding.context_method=gathered  or  sharding.context={nearest}"
        )
        yield Problem(f"sharding.context={size}", reason)


def ring_problems(model: Model, config: Any) -> Iterator[Problem]:
    """Yield the problems that keep ring from merging a model's attention over ranks' keys."""
    if config.attn_logit_softcapping is not None:
        reason = (
            "ring merges results by sums that kernels return, and none with a soft limit on scores "
            f"(attn_logit_softcapping={config.attn_logit_softcapping}) returns them.\n"
            "Use  sharding.context_method=gathered"
        )
        yield Problem("sharding.context_method=ring", reason)
    if not config.is_causal:
        reason = "ring is causal.\nUse  sharding.context_method=gathered"
        yield Problem("sharding.context_method=ring", reason)
    if model.attention_kernel == "math":
        reason = (
            "ring merges results by sums that kernels return, and unfused attention returns none.\n"
            "Use  model.attention_kernel=auto"
        )
        yield Problem("model.attention_kernel=math", reason)
