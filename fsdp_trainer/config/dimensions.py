"""The dimensions in which the ranks of a run are arranged. Imports no torch."""

import math

from fsdp_trainer.config.schema import Sharding
from fsdp_trainer.errors import Problem


def dimension_sizes(sharding: Sharding, ranks: int) -> dict[str, int]:
    """Return the size of each dimension by name, outermost first.

    Neighbouring ranks differ in the last dimension. Ranks that differ only in `replicate` hold the
    same part of the model's states; ranks that differ in any other dimension hold different parts.
    Ranks that differ only in `pipeline`, `context` or `tensor` read the same rows. If the sizes do
    not divide the number of ranks, their product is smaller than that.
    """
    readers = max(1, ranks // (sharding.pipeline * sharding.context * sharding.tensor))
    replicas = {"fsdp": 1, "hsdp": sharding.replicas, "ddp": readers}[sharding.strategy]
    return {
        "pipeline": sharding.pipeline,
        "replicate": replicas,
        "shard": max(1, readers // replicas),
        "context": sharding.context,
        "tensor": sharding.tensor,
    }


def expert_sizes(sharding: Sharding, ranks: int) -> dict[str, int]:
    """Return the sizes of the dimensions in which experts are distributed, outermost first.

    Ranks that differ in `expert` hold different experts; ranks that differ only in `eshard` hold
    different parts of the same experts. If the sizes do not divide the number of ranks, their
    product is smaller than that.
    """
    sizes = dimension_sizes(sharding, ranks)
    shards = max(1, fsdp_ranks(sizes) * sizes["tensor"] // sharding.expert)
    outer = {name: sizes[name] for name in ("pipeline", "replicate")}
    return outer | {"eshard": shards, "expert": sharding.expert}


def batch_ranks(sizes: dict[str, int]) -> int:
    """Return the number of groups of ranks that read different rows of a step."""
    return sizes["replicate"] * sizes["shard"]


def fsdp_ranks(sizes: dict[str, int]) -> int:
    """Return the number of ranks over which fully_shard shards each tensor-parallel part."""
    return sizes["shard"] * sizes["context"]


def own_length(sharding: Sharding, seq_len: int) -> int:
    """Return the number of tokens of each row that a rank holds outside of attention."""
    return seq_len // sharding.context


def layout_problem(sharding: Sharding, ranks: int) -> Problem | None:
    """Return the problem if the ranks cannot be arranged as configured, else None."""
    if math.prod(dimension_sizes(sharding, ranks).values()) == ranks:
        return _expert_problem(sharding, ranks)
    rest = ranks
    inner = sharding.context * sharding.tensor
    stage = "ranks" if inner == 1 else "groups of sharding.context × sharding.tensor ranks"
    whats = {"tensor": "ranks", "context": "groups of sharding.tensor ranks", "pipeline": stage}
    for name, what in whats.items():
        size = getattr(sharding, name)
        if rest % size:
            nearest = max(n for n in range(1, size) if rest % n == 0)
            rule = f"must divide the number of {what}, which is {rest}"
            return Problem(f"sharding.{name}={size}", f"{rule}.\nUse  sharding.{name}={nearest}")
        rest //= size
    rule = f"must divide the number of ranks, which is {ranks}"
    if rest < ranks:
        rule = f"must divide the ranks that read different rows, which are {rest} of {ranks}"
    return Problem(f"sharding.replicas={sharding.replicas}", rule)


def _expert_problem(sharding: Sharding, ranks: int) -> Problem | None:
    """Return the problem if experts cannot be divided among the ranks of a replica, else None."""
    size = sharding.expert
    sizes = dimension_sizes(sharding, ranks)
    replica = fsdp_ranks(sizes) * sizes["tensor"]
    if replica % size == 0:
        return None
    nearest = max(n for n in range(1, size) if replica % n == 0)
    rule = f"must divide the ranks of a replica (shard × context × tensor), which are {replica}"
    return Problem(f"sharding.expert={size}", f"{rule}.\nUse  sharding.expert={nearest}")
