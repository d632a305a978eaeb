"""The method by which ranks attend to rows that they share. No torch."""

from collections.abc import Iterator
from typing import NamedTuple

from fsdp_trainer.config.schema import Sharding, TrainConfig
from fsdp_trainer.errors import Problem

GATHERED_ATTENTION = ("documents", "mask")
"""Values of model.attention that compute some tokens' queries against whole rows' keys."""


class ContextChoice(NamedTuple):
    """method: a value of sharding.context_method but `auto`. reason: for the choice."""

    method: str
    reason: str

    def __str__(self) -> str:
        return f"by {self.method}: {self.reason}"


def choose_context_method(sharding: Sharding, heads: int) -> ContextChoice:
    """Choose for ranks that have so many query heads of each token.

    `context_problems` says what cannot be.
    """
    if sharding.context_method != "auto":
        return ContextChoice(sharding.context_method, "as asked")
    shared = f"{heads} heads over {sharding.context} ranks"
    if heads % sharding.context == 0:
        return ContextChoice("ulysses", f"{shared} in two messages a block")
    return ContextChoice("gathered", f"{shared} would be uneven")


def attention_layout(cfg: TrainConfig, method: str, compiled: bool) -> str:
    """Return model.attention; in place of `auto` what can compute some tokens' queries alone."""
    attention = cfg.model.attention
    if cfg.sharding.context == 1 or method != "gathered" or attention != "auto":
        return attention
    return "mask" if compiled else "documents"


def context_problems(cfg: TrainConfig, heads: int) -> Iterator[Problem]:
    """Yield why ranks cannot share the rows of a model with so many query heads."""
    sharding, attention = cfg.sharding, cfg.model.attention
    if sharding.context == 1:
        return
    method = choose_context_method(sharding, heads // sharding.tensor).method
    if method == "gathered" and attention not in ("auto", *GATHERED_ATTENTION):
        known = " and ".join(GATHERED_ATTENTION)
        reason = (
            f"is for whole rows; with sharding.context_method=gathered there are {known}.\n"
            "Use  model.attention=auto"
        )
        yield Problem(f"model.attention={attention}", reason)
    shares = sharding.tensor * sharding.context
    if sharding.context_method == "ulysses" and heads % shares:
        of_tensor_rank = max(1, heads // sharding.tensor)
        size = sharding.context
        nearest = max(n for n in range(1, size + 1) if of_tensor_rank % n == 0)
        by_tensor = " × sharding.tensor" if sharding.tensor > 1 else ""
        reason = (
            f"ulysses deals out whole heads: {shares} (sharding.context{by_tensor}) must divide "
            f"num_attention_heads={heads}.\n"
            f"Use  sharding.context_method=gathered  or  sharding.context={nearest}"
        )
        yield Problem(f"sharding.context={size}", reason)
