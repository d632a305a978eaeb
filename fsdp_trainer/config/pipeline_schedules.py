"""Pipeline schedules, and the division of a model's blocks into stages. Imports no torch."""

import math
from dataclasses import dataclass

from fsdp_trainer.config.dimensions import batch_ranks, dimension_sizes
from fsdp_trainer.config.schema import Sharding, TrainConfig
from fsdp_trainer.errors import Problem


@dataclass(frozen=True)
class StageOrder:
    """The order in which a rank computes the forwards and backwards of its stages.

    stages: number of stages per rank. in_v: whether a rank's second stage is as far from the last
    stage as its first stage is from the first one. splits: whether gradients of weights are
    computed separately from those of activations.
    """

    stages: int = 1
    in_v: bool = False
    splits: bool = False


SCHEDULES = {
    "1f1b": StageOrder(),
    "gpipe": StageOrder(),
    "interleaved": StageOrder(stages=2),
    "zbv": StageOrder(stages=2, in_v=True, splits=True),
    "dualpipev": StageOrder(stages=2, in_v=True, splits=True),
}
"""The order of stages by sharding.pipeline_schedule."""


def schedule_of(sharding: Sharding) -> StageOrder:
    """Return the configured schedule."""
    return SCHEDULES[sharding.pipeline_schedule]


def stage_count(sharding: Sharding) -> int:
    """Return the total number of stages of a pipeline; 1 without a pipeline."""
    if sharding.pipeline == 1:
        return 1
    return sharding.pipeline * schedule_of(sharding).stages


def stages_of_rank(sharding: Sharding, rank: int) -> list[int]:
    """Return the indices of a rank's stages, in order. rank: its index in the pipeline."""
    ranks = sharding.pipeline
    if schedule_of(sharding).in_v:
        return [rank, 2 * ranks - 1 - rank]
    return list(range(rank, stage_count(sharding), ranks))


def rank_of_stage(sharding: Sharding, stage: int) -> int:
    """Return the index in the pipeline of the rank that has a stage."""
    ranks = sharding.pipeline
    if schedule_of(sharding).in_v and stage >= ranks:
        return 2 * ranks - 1 - stage
    return stage % ranks


def divide_blocks(costs: list[int], head: int, stages: int) -> list[list[int]]:
    """Return the indices of each stage's blocks, at least one per stage.

    costs: cost of each block. head: cost of the last stage's head. The most expensive stage is as
    cheap as possible. Among such divisions, stages are filled from the last, so that the first
    stage has the least: it also has the embedding, and the most micro-batches in flight.
    """
    low, high = max(max(costs), costs[-1] + head), sum(costs) + head
    while low < high:
        limit = (low + high) // 2
        if pack(costs, head, stages, limit):
            high = limit
        else:
            low = limit + 1
    return pack(costs, head, stages, low)


def pack(costs: list[int], head: int, stages: int, limit: int) -> list[list[int]]:
    """Return the blocks of each stage, filled up to cost `limit` from the last stage.

    Returns [] if they do not fit.
    """
    parts: list[list[int]] = []
    rest = list(range(len(costs)))
    for stage in reversed(range(stages)):
        room = limit - (head if stage == stages - 1 else 0)
        part: list[int] = []
        while len(rest) > stage and costs[rest[-1]] <= room:
            room -= costs[rest[-1]]
            part.insert(0, rest.pop())
        if not part:
            return []
        parts.insert(0, part)
    return [] if rest else parts


def micro_batches(cfg: TrainConfig, ranks: int) -> int:
    """Return the number of micro-batches of each rank in a step. ranks: number in the run."""
    readers = batch_ranks(dimension_sizes(cfg.sharding, ranks))
    return math.ceil(cfg.batch.rows / (cfg.batch.micro_rows * readers))


def least_micro_batches(sharding: Sharding) -> int:
    """Return the smallest number of micro-batches per step with which the schedule works."""
    if sharding.pipeline_schedule == "dualpipev":
        return 2 * sharding.pipeline
    return sharding.pipeline


def in_rounds(sharding: Sharding, count: int) -> int:
    """Return `count`, or the next larger number of micro-batches that the schedule supports.

    The interleaved schedule processes them in rounds of equal size.
    """
    if sharding.pipeline_schedule != "interleaved":
        return count
    while count % max(1, count // sharding.pipeline):
        count += 1
    return count


def pipeline_problem(cfg: TrainConfig, ranks: int) -> Problem | None:
    """Return the problem if a step has too few micro-batches for the pipeline, else None."""
    sharding, batch = cfg.sharding, cfg.batch
    if sharding.pipeline == 1:
        return None
    count, minimum = micro_batches(cfg, ranks), least_micro_batches(sharding)
    if count >= minimum:
        return None
    readers = batch_ranks(dimension_sizes(sharding, ranks))
    reason = (
        f"and sharding.pipeline_schedule={sharding.pipeline_schedule} keep all ranks busy from "
        f"{minimum} micro-batches a step on; {batch.rows} rows over {readers} readers of "
        f"{batch.micro_rows} (batch.micro_rows) are {count}.\n"
        f"Use  batch.rows={minimum * batch.micro_rows * readers}"
    )
    smaller = batch.rows // (minimum * readers)
    if smaller:
        reason += f"  or  batch.micro_rows={smaller}"
    return Problem(f"sharding.pipeline={sharding.pipeline}", reason)


def idle_share(sharding: Sharding, count: int) -> float:
    """Return the share of a step in which a rank waits, if all stages take equally long.

    count: number of micro-batches. A pipeline of p ranks fills and drains in the time of p - 1
    micro-batches, and in 1/v of that with v stages per rank (Narayanan et al. 2021, §2.2).
    """
    waits = idle_micro_batches(sharding)
    return waits / (count + waits)


def idle_micro_batches(sharding: Sharding) -> float:
    """Return the time that a rank waits in a step, in units of its time for one micro-batch.

    If backward is split, it is a third of that: forward, gradients of activations and gradients of
    weights count as equally long.
    """
    order = schedule_of(sharding)
    return (sharding.pipeline - 1) / order.stages / (3 if order.splits else 1)


def in_flight(sharding: Sharding, rank: int, count: int) -> int:
    """Return the most forwards of a stage whose activations a rank holds at the same time.

    rank: its index in the pipeline. count: number of micro-batches in a step.
    """
    ranks = sharding.pipeline
    forwards = {
        "1f1b": ranks - rank,
        "gpipe": count,
        # a round of the first stage, plus the forwards of the second that other ranks have begun
        "interleaved": count // max(1, count // ranks) + 2 * (ranks - 1 - rank) + 1,
        "zbv": 2 * ranks,
        "dualpipev": 2 * ranks + 1,
    }
    return min(forwards[sharding.pipeline_schedule], count * schedule_of(sharding).stages)
