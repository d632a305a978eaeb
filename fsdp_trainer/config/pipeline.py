"""Pipeline schedules, and how a model's blocks are divided into stages. No torch."""

import math
from dataclasses import dataclass

from fsdp_trainer.config.dimensions import batch_ranks, dimension_sizes
from fsdp_trainer.config.schema import Sharding, TrainConfig
from fsdp_trainer.errors import Problem


@dataclass(frozen=True)
class StageOrder:
    """The order in which a rank does the forwards and backwards of its stages.

    stages: of a rank. in_v: a rank's second stage lies as far from the last as its first from the
    first. splits: gradients of weights are computed apart from those of activations.
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
    """Return the schedule that is configured."""
    return SCHEDULES[sharding.pipeline_schedule]


def stage_count(sharding: Sharding) -> int:
    """Return the number of stages of all ranks of a pipeline together; 1 without a pipeline."""
    if sharding.pipeline == 1:
        return 1
    return sharding.pipeline * schedule_of(sharding).stages


def stages_of_rank(sharding: Sharding, rank: int) -> list[int]:
    """Return the numbers of a rank's stages, in order. rank: its place in the pipeline."""
    ranks = sharding.pipeline
    if schedule_of(sharding).in_v:
        return [rank, 2 * ranks - 1 - rank]
    return list(range(rank, stage_count(sharding), ranks))


def rank_of_stage(sharding: Sharding, stage: int) -> int:
    """Return the place in the pipeline of the rank that has a stage."""
    ranks = sharding.pipeline
    if schedule_of(sharding).in_v and stage >= ranks:
        return 2 * ranks - 1 - stage
    return stage % ranks


def divide_blocks(costs: list[int], head: int, stages: int) -> list[list[int]]:
    """Return the numbers of the blocks of each stage, at least one each.

    costs: of each block; head: of what the last stage has besides. The costliest stage costs as
    little as can be. Of what is left the first stage has the least: it has the embedding too, and
    more micro-batches on their way than all others.
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
    """Return the blocks of each stage, filled up to `limit` from the last; empty: they do not
    fit."""
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
    """Return how many micro-batches each rank has in a step. ranks: of the run."""
    readers = batch_ranks(dimension_sizes(cfg.sharding, ranks))
    return math.ceil(cfg.batch.rows / (cfg.batch.micro_rows * readers))


def least_micro_batches(sharding: Sharding) -> int:
    """Return the fewest micro-batches of a step with which the schedule works."""
    if sharding.pipeline_schedule == "dualpipev":
        return 2 * sharding.pipeline
    return sharding.pipeline


def in_rounds(sharding: Sharding, count: int) -> int:
    """Return so many micro-batches, or the next larger number that the schedule can take.

    Interleaved does them in rounds of equal size.
    """
    if sharding.pipeline_schedule != "interleaved":
        return count
    while count % max(1, count // sharding.pipeline):
        count += 1
    return count


def pipeline_problem(cfg: TrainConfig, ranks: int) -> Problem | None:
    """Return why a step has too few micro-batches for the pipeline, with what has enough."""
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
    """Return which share of a step a rank waits for others, if all stages take equally long.

    count: of micro-batches. A pipeline of p ranks fills up and empties in the time of p - 1
    micro-batches, 1/v of that with v stages a rank (Narayanan et al. 2021, §2.2).
    """
    waits = idle_micro_batches(sharding)
    return waits / (count + waits)


def idle_micro_batches(sharding: Sharding) -> float:
    """Return for how long a rank waits in a step, in times that a micro-batch takes it.

    Where backward is split, a third of it: forward, and the gradients of activations and of weights
    count as equally long.
    """
    order = schedule_of(sharding)
    return (sharding.pipeline - 1) / order.stages / (3 if order.splits else 1)


def in_flight(sharding: Sharding, rank: int, count: int) -> int:
    """Return how many forwards of a stage a rank holds the activations of, at most.

    rank: its place in the pipeline. count: of micro-batches in a step.
    """
    ranks = sharding.pipeline
    forwards = {
        "1f1b": ranks - rank,
        "gpipe": count,
        # a round of the first stage, and of the second those that other ranks have begun
        "interleaved": count // max(1, count // ranks) + 2 * (ranks - 1 - rank) + 1,
        "zbv": 2 * ranks,
        "dualpipev": 2 * ranks + 1,
    }
    return min(forwards[sharding.pipeline_schedule], count * schedule_of(sharding).stages)
