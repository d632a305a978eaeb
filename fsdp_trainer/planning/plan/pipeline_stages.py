"""The part of the model on one rank of a pipeline, for a plan."""

from typing import NamedTuple, TypeVar

from fsdp_trainer.config.layout import Layout
from fsdp_trainer.parallel.pipeline import blocks_by_stage
from fsdp_trainer.planning.plan.fsdp_units import FsdpUnit, ModelParts, ModelUnits
from fsdp_trainer.planning.plan.planned_model import PlannedModel

T = TypeVar("T")


class RankStages(NamedTuple):
    """The stages of a rank: their blocks, and if the first or the last stage is among them.

    waiting: maximum number of forwards that wait for their backward when another one begins;
    turns: True if the rank's two stages are adjacent, so that nothing is sent between them.
    """

    blocks: tuple[int, ...]
    is_first: bool = True
    is_last: bool = True
    waiting: int = 0
    turns: bool = False

    def of(self, blocks: list[T]) -> list[T]:
        """Select the entries of this rank's blocks from a list with an entry for each block."""
        return [blocks[i] for i in self.blocks]


def stages_of_all(whole: ModelParts, layout: Layout) -> list[RankStages]:
    stages = layout.stages
    if stages.ranks == 1:
        return [RankStages(tuple(range(len(whole.kind_of))))]
    parts = blocks_by_stage(whole.model, stages.count)
    by_rank = []
    for rank in range(stages.ranks):
        numbers = stages.of_rank(rank)
        blocks = tuple(i for number in numbers for i in parts[number])
        waiting = stages.in_flight(rank, layout.micro_batches) - 1
        ends = 0 in numbers, len(parts) - 1 in numbers
        turns = len(numbers) > 1 and numbers[1] == numbers[0] + 1
        by_rank.append(RankStages(blocks, *ends, waiting, turns))
    return by_rank


def classes_of_stages(whole: ModelParts, layout: Layout) -> list[int]:
    """Return for each rank of a pipeline the number of its class: ranks with equal blocks and ends.

    Classes are numbered in the order of their first ranks.
    """
    parts = [
        (tuple(whole.kind_of[i] for i in stages.blocks), stages.is_first, stages.is_last)
        for stages in stages_of_all(whole, layout)
    ]
    numbers = {part: i for i, part in enumerate(dict.fromkeys(parts))}
    return [numbers[part] for part in parts]


def matrices_of(stages: RankStages, whole: ModelParts) -> list[tuple[int, int, int]]:
    return whole.matrices(stages.of(whole.kind_of))


def distinct(by_rank: list[RankStages], kind_of: list[int]) -> list[RankStages]:
    kinds = {
        (tuple(kind_of[i] for i in stages.blocks), *stages[1:]): stages
        for stages in reversed(by_rank)
    }
    return list(kinds.values())[::-1]


def units_of(stages: RankStages, model: PlannedModel) -> ModelUnits:
    """Return the units of a rank's stages.

    A tied embedding is also a unit of the first stage, unless the rank has the last stage as well.
    """
    layout, sizes, group = model.layout, model.sizes, model.layout.fsdp_ranks
    units = model.own.units(sizes, layout.sharding, group)
    if layout.sharding.pipeline == 1:
        return units
    blocks = tuple(units.blocks[i] for i in stages.blocks)
    if units.tied and stages.is_first and stages.is_last:
        return ModelUnits(units.first, blocks, units.last, tied=True)
    first = FsdpUnit.of([model.own.embedding], sizes, group) if stages.is_first else FsdpUnit()
    last = units.last if stages.is_last else FsdpUnit()
    return ModelUnits(first, blocks, last, tied=False)
