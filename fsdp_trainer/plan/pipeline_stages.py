"""The part of the model on one rank of a pipeline, for a plan."""

from typing import NamedTuple, TypeVar

from fsdp_trainer.config.pipeline_schedules import (
    in_flight,
    micro_batches,
    schedule_of,
    stages_of_rank,
)
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.parallel.memory_check import keeps_gathered
from fsdp_trainer.parallel.pipeline import blocks_by_stage
from fsdp_trainer.plan.fsdp_units import FsdpUnit, ModelUnits, model_parts

T = TypeVar("T")


class StageShare(NamedTuple):
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

    def of_blocks(self, config: ModelConfig) -> float:
        """Return the share of the model's blocks that this rank has."""
        return len(self.blocks) / config.num_hidden_layers


def stage_shares(cfg: TrainConfig, config: ModelConfig, world: int) -> list[StageShare]:
    """Return the distinct shares of a pipeline's ranks; without a pipeline, the whole model."""
    sharding = cfg.sharding
    if sharding.pipeline == 1:
        return [StageShare(tuple(range(config.num_hidden_layers)))]
    whole = model_parts(config, cfg)
    parts = blocks_by_stage(whole.model, sharding)
    count = micro_batches(cfg, world)
    shares = []
    for rank in range(sharding.pipeline):
        numbers = stages_of_rank(sharding, rank)
        blocks = tuple(i for number in numbers for i in parts[number])
        waiting = in_flight(sharding, rank, count) - 1
        ends = 0 in numbers, len(parts) - 1 in numbers
        turns = len(numbers) > 1 and numbers[1] == numbers[0] + 1
        shares.append(StageShare(blocks, *ends, waiting, turns))
    return distinct(shares, whole.kind_of)


def stage_ranks(cfg: TrainConfig, world: int) -> int:
    """Return the number of ranks that have the same stages."""
    return world // cfg.sharding.pipeline


def matrices_of(
    share: StageShare, cfg: TrainConfig, config: ModelConfig
) -> list[tuple[int, int, int]]:
    """Return (matrices, rows, columns) of each trained stack of matrices in a rank's stages."""
    parts = model_parts(config, cfg)
    return parts.matrices(share.of(parts.kind_of))


def distinct(shares: list[StageShare], kind_of: list[int]) -> list[StageShare]:
    """Return one of each group of shares that are equal but for the indices of equal blocks."""
    kinds = {
        (tuple(kind_of[i] for i in share.blocks), *share[1:]): share for share in reversed(shares)
    }
    return list(kinds.values())[::-1]


def units_of(share: StageShare, cfg: TrainConfig, config: ModelConfig, group: int) -> ModelUnits:
    """Return the units of a rank's stages.

    A tied embedding is also a unit of the first stage, unless the rank has the last stage as well.
    config: the part of the model on one rank of a tensor group; group: number of ranks over which
    each parameter is sharded.
    """
    parts = model_parts(config, cfg)
    units = parts.units(cfg, group)
    if cfg.sharding.pipeline == 1:
        return units
    blocks = tuple(units.blocks[i] for i in share.blocks)
    if units.tied and share.is_first and share.is_last:
        return ModelUnits(units.first, blocks, units.last, tied=True)
    first = FsdpUnit.of([parts.embedding], cfg, group) if share.is_first else FsdpUnit()
    last = units.last if share.is_last else FsdpUnit()
    return ModelUnits(first, blocks, last, tied=False)


def fetched_units(units: ModelUnits, cfg: TrainConfig) -> ModelUnits:
    """Return the units with the bytes that each micro-batch gathers: 0 if they stay gathered."""
    if not stays_gathered(cfg):
        return units
    first, last, *blocks = (
        unit._replace(gathered=0.0) for unit in (units.first, units.last, *units.blocks)
    )
    return ModelUnits(first, tuple(blocks), last, units.tied)


def stays_gathered(cfg: TrainConfig) -> bool:
    """Return True if weights stay gathered from a step's first micro-batch to its last."""
    return cfg.sharding.pipeline > 1 and keeps_gathered(cfg.sharding)


def reduces_once(cfg: TrainConfig) -> bool:
    """Return True if a step's gradients are reduced only once, after its last micro-batch."""
    return cfg.sharding.accumulate == "unsharded" or schedule_of(cfg.sharding).splits
