"""Muon's update in a plan: the ranks that own matrices, and the messages to and from them."""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from fsdp_trainer.config.devices import Device
from fsdp_trainer.optim.muon_owners import rounds_of
from fsdp_trainer.planning.plan.pipeline_stages import RankStages, matrices_of
from fsdp_trainer.planning.plan.planned_model import PlannedModel


class OwnerTraffic(NamedTuple):
    """Bytes that a rank sends in a step of Muon.

    sent: parts of matrices, to their owners; answered: updated parts, from the owners; across: the
    part of both that leaves the node.
    """

    sent: float = 0.0
    answered: float = 0.0
    across: float = 0.0

    def seconds(self, device: Device, efficiency: float) -> float:
        """Return the seconds on the slower of the links. No computation overlaps with them.

        efficiency: share of the links' rate that is reached.
        """
        whole = self.sent + self.answered
        return max(whole / device.link, self.across / device.network) / efficiency


def owner_traffic(stages: RankStages, model: PlannedModel, per_node: int) -> OwnerTraffic:
    """Return the mean traffic of a rank with these stages in an update; 0 without Muon.

    An owner gets the parts of a matrix from the ranks of its own replica, and answers the ranks of
    all replicas.
    """
    ranks = model.layout.stage_ranks
    if not model.optim.spec.has_owners or ranks == 1:
        return OwnerTraffic()
    replicas = model.layout.sizes["replicate"]
    shards = ranks // replicas
    number = getattr(torch, model.optim.ns_dtype).itemsize
    own = sum(map(math.prod, matrices_of(stages, model.whole))) / ranks * number
    sent, answered = own * (shards - 1) / shards, own * (replicas - 1 / shards)
    on_node = min(shards, per_node)
    across = sent * (shards - on_node) / max(1, shards - 1)
    across += answered * (ranks - min(ranks, per_node)) / (ranks - 1)
    return OwnerTraffic(sent, answered, across)


def newton_schulz_flops(stages: RankStages, model: PlannedModel) -> float:
    """Return the operations of an update: in each round those of the busiest owner, summed.

    stages: the stages that contain the owners' matrices.
    """
    if not model.optim.spec.has_owners:
        return 0.0
    shapes = tuple(matrices_of(stages, model.whole))
    return model.optim.ns_steps * _most_in_rounds(shapes, model.layout.stage_ranks)


@lru_cache
def _most_in_rounds(shapes: tuple[tuple[int, int, int], ...], ranks: int) -> float:
    """Return the busiest owner's operations, summed over rounds, for a step of Newton-Schulz."""
    whole, owner = 0.0, 0
    for chosen in rounds_of(list(shapes), ranks):
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
