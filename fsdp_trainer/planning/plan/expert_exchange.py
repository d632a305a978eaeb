"""Expert parallelism in a plan: the experts that each rank holds, and the rows that it exchanges.

With even routing each rank sends the same number of rows to every other one, and receives as many.
`load` is the number of rows that the busiest rank receives, divided by this number.
"""

from typing import Any

from torch import Tensor, nn

from fsdp_trainer.base.round_up import round_up
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.config.schema import Sharding
from fsdp_trainer.models.config import EXPERTS, ModelConfig
from fsdp_trainer.parallel.experts import ROWS, SHARDED, ExpertRanks, divided
from fsdp_trainer.parallel.memory_check import expert_modules

EXCHANGES = 2
"""All-to-alls of a mixture in forward: rows, and results. Backward has as many."""
HOST_WAIT = 100e-6
"""Seconds for which a device is idle until the host knows how many rows will arrive.

The time of a small all-to-all, a copy to the host and the first launches after it. Assumed.
"""


class EvenRanks(ExpertRanks):
    """Stand-in for an expert group whose other ranks do not exist."""

    def __init__(self, size: int, load: float, rows: int):
        """Set the size of the group.

        load: rows that this rank receives, divided by the number with even routing; rows: number
        of rows that it sends.
        """
        super().__init__(None, size)
        self.load, self.rows = load, rows

    def exchange(
        self,
        received: Tensor,
        sent: Tensor,
        come: list[int] | None = None,
        to: list[int] | None = None,
    ) -> None:
        """Do nothing: the values of tensors do not matter."""

    def row_numbers(self, counts: Tensor, received: Tensor) -> list[list[int]]:
        return [
            even_parts(self.rows, self.size),
            even_parts(round(self.rows * self.load), self.size),
        ]


def even_parts(rows: int, count: int) -> list[int]:
    """Divide `rows` into `count` numbers that differ by at most 1."""
    return [rows // count + (i < rows % count) for i in range(count)]


class LocalExperts:
    """Experts whose parameters contain only those of one rank."""

    def local(self, parameter: Tensor) -> Tensor:
        return parameter


TRACED = {
    kind: type(f"Traced{kind.__name__}", (LocalExperts, SHARDED[kind]), {}) for kind in SHARDED
}
"""The class with which experts are traced, by the class of a block's experts."""


def divide_experts(block: nn.Module, ranks: int, load: float, rows: int) -> None:
    """Make a block compute with a part of its experts, as one of `ranks` ranks of an expert group.

    rows: number of rows that a rank sends. Nothing is communicated: only sizes matter for a trace.
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
    """Return the parameters of a block that are sharded on the separate mesh of experts."""
    if sharding.expert == 1 and sharding.tensor == 1:
        return set()
    return {p for module in expert_modules([block]) for p in module.parameters()}


def own_numbers(parameter: Tensor, sharding: Sharding, shards: int) -> tuple[int, int]:
    """Return the size of the experts' parameter that a rank gathers, and the same with padding.

    Padding makes the shards of all ranks equal. shards: number of ranks that hold the same experts.
    """
    own = len(parameter) // sharding.expert
    each = parameter[0].numel()
    if divided(parameter, sharding.expert, shards) == ROWS:
        return own * each, own * each
    return own * each, round_up(own, shards) * each


def mixtures(config: ModelConfig, blocks: tuple[int, ...] | None = None) -> int:
    numbers = range(config.num_hidden_layers) if blocks is None else blocks
    return sum(config.feed_forwards[i] == EXPERTS for i in numbers)


def exchanged_bytes(layout: Layout, config: ModelConfig, number: int) -> float:
    """Return the bytes of one all-to-all of rows, including those that stay on the rank.

    number: bytes of one number.
    """
    rows = layout.tokens // layout.sharding.tensor * config.num_experts_per_tok
    return rows * config.hidden_size * number
