"""Experts that ranks divide among them, in the arithmetic of a plan: who holds what, what travels.

Even routing: each rank sends as many rows to every other one, and gets as many. `load` is how many
times that number the busiest rank gets.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fsdp_trainer.config.dimensions import own_length
from fsdp_trainer.config.schema import Sharding, TrainConfig
from fsdp_trainer.models.config import EXPERTS, ModelConfig
from fsdp_trainer.models.moe import MixtureOfExperts
from fsdp_trainer.observe.flops import count_numbers
from fsdp_trainer.parallel.experts import ROWS, SHARED, ExpertRanks, divided
from fsdp_trainer.parallel.memory_check import expert_modules
from fsdp_trainer.rounding import round_up

EXCHANGES = 2
"""All-to-alls of a mixture forward, of rows and of results; as many backward."""
HOST_WAIT = 100e-6
"""Seconds that a device has nothing to do while the host learns how many rows come: a small
all-to-all, a copy to the host and the first launches behind it. Assumed."""


class EvenRanks(ExpertRanks):
    """Ranks of an expert group that do not exist. load: rows of this rank over the even number."""

    def __init__(self, size: int, load: float, rows: int):
        """rows: that this rank sends."""
        super().__init__(None, size)
        self.load, self.rows = load, rows

    def exchange(
        self,
        received: Tensor,
        sent: Tensor,
        come: list[int] | None = None,
        to: list[int] | None = None,
    ) -> None:
        """Do nothing: no number is of interest."""

    def row_numbers(self, counts: Tensor, received: Tensor) -> list[list[int]]:
        """Return even numbers, and so many times as many that come."""
        return [parts(self.rows, self.size), parts(round(self.rows * self.load), self.size)]


def parts(rows: int, count: int) -> list[int]:
    """Return numbers that differ by 1 at most."""
    return [rows // count + (i < rows % count) for i in range(count)]


class OwnExperts:
    """The experts of one rank of a group, without the others."""

    def own(self, parameter: Tensor) -> Tensor:
        """Return a parameter of this rank's experts."""
        return parameter


TRACED = {kind: type(f"Traced{kind.__name__}", (OwnExperts, SHARED[kind]), {}) for kind in SHARED}
"""Traced experts by the class of a block's experts."""


def divide_experts(block: nn.Module, ranks: int, load: float, rows: int) -> None:
    """Have a block compute with a part of its experts, as the ranks of an expert group do.

    rows: that a rank sends. Without communication: what comes is as large.
    """
    if ranks == 1:
        return
    for experts in expert_modules([block]):
        traced: Any = experts
        traced.__class__ = TRACED[traced.__class__]
        traced.expert_ranks = EvenRanks(ranks, load, rows)
        for module in experts.modules():  # matrices, and those of their adapters
            for name, parameter in list(module.named_parameters(recurse=False)):
                own = parameter.detach()[: len(parameter) // ranks].clone()
                setattr(module, name, nn.Parameter(own, parameter.requires_grad))


def separate_parameters(block: nn.Module, sharding: Sharding) -> set[Tensor]:
    """Return the parameters of a block that are on the experts' own mesh."""
    if sharding.expert == 1 and sharding.tensor == 1:
        return set()
    return {p for module in expert_modules([block]) for p in module.parameters()}


def own_numbers(parameter: Tensor, sharding: Sharding, shards: int) -> tuple[int, int]:
    """Return the numbers of experts' weights that a rank gathers, and those with equal shards.

    shards: ranks that hold the same experts.
    """
    own = len(parameter) // sharding.expert
    each = parameter[0].numel()
    if divided(parameter, sharding.expert, shards) == ROWS:
        return own * each, own * each
    return own * each, round_up(own, shards) * each


def mixtures(config: ModelConfig, blocks: tuple[int, ...] | None = None) -> int:
    """Return how many of these blocks have experts; None: of all."""
    numbers = range(config.num_hidden_layers) if blocks is None else blocks
    return sum(config.feed_forwards[i] == EXPERTS for i in numbers)


def routed_numbers(block: nn.Module) -> tuple[int, int]:
    """Return how many numbers of experts and router a token meets, and how many are trained."""
    mixture: Any = getattr(block, "mlp", None)
    if not isinstance(mixture, MixtureOfExperts):
        return 0, 0
    experts, router = count_numbers(mixture.experts), count_numbers(mixture.gate)
    return experts[0] + router[0], experts[1] + router[1]


def rows_of_rank(cfg: TrainConfig, config: ModelConfig) -> int:
    """Return the rows that a rank sends to experts in a mixture and micro-batch."""
    tokens = cfg.batch.micro_rows * own_length(cfg.sharding, cfg.batch.seq_len)
    return tokens // cfg.sharding.tensor * config.num_experts_per_tok


def exchanged_bytes(cfg: TrainConfig, config: ModelConfig) -> float:
    """Return the bytes of the rows of one all-to-all, those to the rank itself included."""
    number = getattr(torch, cfg.precision.param_dtype).itemsize
    return rows_of_rank(cfg, config) * config.hidden_size * number


def busiest_over_mean(cfg: TrainConfig, config: ModelConfig, load: float) -> float:
    """Return by how much longer blocks take where all wait for the rank with the most rows.

    It computes `load` times the experts' products, which are a share of all.
    """
    if cfg.sharding.expert == 1:
        return 1.0
    ends = 2 * config.embedding_rows * config.hidden_size
    blocks = max(1, config.parameters(active=True) - ends)
    of_experts = 3 * config.num_experts_per_tok * config.hidden_size * config.expert_size
    return 1 + (load - 1) * min(1.0, mixtures(config) * of_experts / blocks)
