"""Muon's update in the arithmetic of a plan: the owners of matrices, and what they are sent."""

import math
from typing import NamedTuple

import numpy as np
import torch

from fsdp_trainer.config.dimensions import dimension_sizes
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.devices import Device
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.optim.owners import rounds_of
from fsdp_trainer.plan.stages import StageShare, matrices_of, stage_ranks
from fsdp_trainer.plan.units import model_parts


class OwnerTraffic(NamedTuple):
    """Bytes that a rank sends in a step: parts of matrices to their owners, and owners' answers.

    across: of both, those that leave its node.
    """

    sent: float = 0.0
    answered: float = 0.0
    across: float = 0.0

    def seconds(self, device: Device, efficiency: float) -> float:
        """Return the seconds on the slower of the links. Nothing is computed meanwhile."""
        whole = self.sent + self.answered
        return max(whole / device.link, self.across / device.network) / efficiency


def owner_traffic(
    share: StageShare, cfg: TrainConfig, config: ModelConfig, world: int, per_node: int
) -> OwnerTraffic:
    """Return what a rank with these stages sends in an update, as a mean; nothing without Muon.

    An owner gets the parts of its own replica's ranks, and answers those of all replicas.
    """
    ranks = stage_ranks(cfg, world)
    if cfg.optim.name != "muon" or ranks == 1:
        return OwnerTraffic()
    replicas = dimension_sizes(cfg.sharding, world)["replicate"]
    shards = ranks // replicas
    number = getattr(torch, cfg.optim.ns_dtype).itemsize
    own = sum(map(math.prod, matrices_of(share, cfg, config))) / ranks * number
    sent, answered = own * (shards - 1) / shards, own * (replicas - 1 / shards)
    on_node = min(shards, per_node)
    across = sent * (shards - on_node) / max(1, shards - 1)
    across += answered * (ranks - min(ranks, per_node)) / (ranks - 1)
    return OwnerTraffic(sent, answered, across)


def newton_schulz_flops(
    share: StageShare, cfg: TrainConfig, config: ModelConfig, world: int
) -> float:
    """Return the operations of a step's owners, in each round those of the one with most.

    share: the stages of which the owners have the matrices.
    """
    if cfg.optim.name != "muon":
        return 0.0
    parts, ranks = model_parts(config, cfg), stage_ranks(cfg, world)
    key = (ranks, *share.of(parts.kind_of))
    if key not in parts.owners_work:
        parts.owners_work[key] = _most_in_rounds(matrices_of(share, cfg, config), ranks)
    return cfg.optim.ns_steps * parts.owners_work[key]


def _most_in_rounds(shapes: list[tuple[int, int, int]], ranks: int) -> float:
    """Return the sum over rounds of the most operations of a rank, for a step of Newton-Schulz."""
    whole, owner = 0.0, 0
    for chosen in rounds_of(shapes, ranks):
        operations = np.zeros(ranks)
        for matrices, rows, columns in (shapes[i] for i in chosen):
            short, long = sorted((rows, columns))
            each = 4.0 * short * short * long + 2.0 * short**3
            every, rest = divmod(matrices, ranks)
            operations += every * each
            operations[(owner + np.arange(rest)) % ranks] += each
            owner = (owner + matrices) % ranks
        whole += operations.max()
    return float(whole)
