"""Pipeline schedules, and the division of a model's blocks into stages. Imports no torch."""

from dataclasses import dataclass

from fsdp_trainer.config.schema import Sharding


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


@dataclass(frozen=True)
class Stages:
    """The stages of a pipeline, and how its schedule keeps its ranks busy.

    ranks: number of ranks of the pipeline; schedule: a key of SCHEDULES. A rank's index is the one
    in the pipeline.
    """

    ranks: int
    schedule: str

    @classmethod
    def of(cls, sharding: Sharding) -> "Stages":
        return cls(sharding.pipeline, sharding.pipeline_schedule)

    @property
    def order(self) -> StageOrder:
        return SCHEDULES[self.schedule]

    @property
    def count(self) -> int:
        """Total number of stages; 1 without a pipeline."""
        return 1 if self.ranks == 1 else self.ranks * self.order.stages

    def of_rank(self, rank: int) -> list[int]:
        if self.order.in_v:
            return [rank, 2 * self.ranks - 1 - rank]
        return list(range(rank, self.count, self.ranks))

    def rank_of(self, stage: int) -> int:
        if self.order.in_v and stage >= self.ranks:
            return 2 * self.ranks - 1 - stage
        return stage % self.ranks

    @property
    def least_micro_batches(self) -> int:
        """Smallest number of micro-batches per step with which the schedule works."""
        return 2 * self.ranks if self.schedule == "dualpipev" else self.ranks

    def in_rounds(self, count: int) -> int:
        """Return `count`, or the next larger number of micro-batches that the schedule supports.

        The interleaved schedule processes them in rounds of equal size.
        """
        if self.schedule != "interleaved":
            return count
        while count % max(1, count // self.ranks):
            count += 1
        return count

    def idle(self, count: int) -> float:
        """Return the fraction of a step in which a rank waits, if all stages take equally long.

        count: number of micro-batches. A pipeline of p ranks fills and drains in the time of p - 1
        micro-batches, and in 1/v of that with v stages per rank (Narayanan et al. 2021, §2.2).
        """
        return self.idle_micro_batches / (count + self.idle_micro_batches)

    @property
    def idle_micro_batches(self) -> float:
        """The time that a rank waits in a step, in units of its time for one micro-batch.

        If backward is split, it is a third of that: forward, gradients of activations and gradients
        of weights count as equally long.
        """
        return (self.ranks - 1) / self.order.stages / (3 if self.order.splits else 1)

    def in_flight(self, rank: int, count: int) -> int:
        """Return the most forwards of a stage whose activations a rank holds at the same time.

        count: number of micro-batches in a step.
        """
        ranks = self.ranks
        forwards = {
            "1f1b": ranks - rank,
            "gpipe": count,
            # a round of the first stage, plus the forwards of the second that other ranks have
            # begun
            "interleaved": count // max(1, count // ranks) + 2 * (ranks - 1 - rank) + 1,
            "zbv": 2 * ranks,
            "dualpipev": 2 * ranks + 1,
        }
        return min(forwards[self.schedule], count * self.order.stages)


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
