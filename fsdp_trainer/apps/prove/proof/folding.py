"""A planned layout on few ranks: each dimension stays, and those that are too large become 2."""

import math
from dataclasses import replace
from typing import Any

from fsdp_trainer.config.layout import Layout
from fsdp_trainer.config.pipeline_schedules import Stages
from fsdp_trainer.config.schema import Batch, Sharding
from fsdp_trainer.errors import UserError

FOLDED = 2
"""Ranks of a dimension that has more."""
MOST_RANKS = 8
SPLIT = ("pipeline", "context", "tensor", "expert")


def folded(planned: Layout) -> tuple[Sharding, int]:
    """Return the layout's keys and its number of ranks, with at most FOLDED in each dimension."""
    sharding = planned.sharding
    split: dict[str, Any] = {name: min(FOLDED, getattr(sharding, name)) for name in SPLIT}
    readers = {name: min(FOLDED, planned.sizes[name]) for name in ("replicate", "shard")}
    of_expert = readers["shard"] * split["context"] * split["tensor"]
    split["expert"] = math.gcd(split["expert"], of_expert)

    def ranks() -> int:
        rows = split["pipeline"] * split["context"] * split["tensor"]
        return rows * math.prod(readers.values())

    if ranks() > MOST_RANKS and split["expert"] == 1:
        readers["shard"] = 1
    if ranks() > MOST_RANKS:
        readers["replicate"] = 1
    more: dict[str, Any] = {}
    if sharding.strategy == "hsdp":
        more["replicas"] = readers["replicate"]
    if not isinstance(sharding.reshard_after_forward, bool | str):
        more["reshard_after_forward"] = True
    more |= {"quantize": "none", "error_feedback": False, "messages": "ordinary"}
    return replace(sharding, **split, **more), ranks()


def folded_batch(planned: Layout, sharding: Sharding, ranks: int) -> Batch:
    """Return the rows of a step: for each rank one or two micro-batches, or what stages need."""
    batch = planned.batch
    micro = min(FOLDED, batch.micro_rows)
    stages = Stages.of(sharding)
    count = min(FOLDED, planned.micro_batches)
    if sharding.pipeline > 1:
        count = stages.in_rounds(max(count, stages.least_micro_batches))
    readers = Layout(sharding, ranks, batch).batch_ranks
    rows = min(batch.rows, micro * readers * count) if sharding.pipeline == 1 else 0
    return replace(batch, micro_rows=micro, rows=rows or micro * readers * count)


def possible(layout: Layout) -> Layout:
    """Return a layout. Raises UserError if its ranks cannot be arranged so."""
    problem = layout.problem or layout.pipeline_problem
    if problem:
        raise UserError("the planned layout is not possible", [problem])
    return layout
