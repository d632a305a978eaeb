"""Losses that keep the experts of a block evenly loaded, and the load they are computed from."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp_trainer.config.schema import Loss
from fsdp_trainer.models.config import EXPERTS, ModelConfig

LOAD = "expert_load"
LOAD_BALANCING, ROUTER_Z = "load_balancing_loss", "router_z_loss"
"""Names of the auxiliary values of a block."""


class Balancing(NamedTuple):
    """Inputs of the auxiliary losses of one block.

    token_share: [rows, length] float32, 1 / (tokens of the whole step) for each token, 0 for
    padding. load: [experts] float32, each expert's share of the previous step's tokens.
    load_balancing, z_loss: weights of the losses, already divided by the number of blocks.
    """

    token_share: Tensor
    load: Tensor
    load_balancing: float
    z_loss: float


def auxiliary_values(
    experts: Tensor, logits: Tensor, probabilities: Callable[[Tensor], Tensor], given: Balancing
) -> dict[str, Tensor]:
    """Return a block's auxiliary values: the number of tokens of each expert, and the losses.

    experts: [tokens, k] int64; logits: [tokens, experts]; probabilities: function from logits to
    the experts' probabilities. Each loss is a sum over tokens, so that it does not depend on how
    tokens are distributed over ranks and micro-batches.
    """
    share = given.token_share.flatten()
    is_token = (share > 0).long().unsqueeze(-1).expand_as(experts)
    counts = torch.zeros_like(given.load, dtype=torch.int64)
    # integers: their sum does not depend on the order
    counts = counts.index_add(0, experts.flatten(), is_token.flatten())
    auxiliary = {LOAD: counts}
    if given.load_balancing:
        # not share @ …, which writes its result in place: selective checkpointing refuses that
        expected = probabilities(logits).T.mv(share)
        factor = given.load_balancing * len(given.load)
        auxiliary[LOAD_BALANCING] = factor * (expected * given.load).sum()
    if given.z_loss:
        normalizer = logits.float().logsumexp(-1)
        auxiliary[ROUTER_Z] = given.z_loss * (share * normalizer.square()).sum()
    return auxiliary


def new_balance(config: ModelConfig, loss: Loss, device: torch.device) -> "Balance | None":
    if EXPERTS not in config.feed_forwards:
        return None
    balance = Balance(config, loss.load_balancing, loss.router_z_loss, loss.bias_update_speed)
    balance.load = balance.load.to(device)
    return balance


class Balance:
    """The load of each expert over the last complete step, and the balancing settings.

    load: [blocks with experts, experts] float32, each expert's share of the tokens; each block
    sums to the number of experts per token. Uniform before the first step.
    """

    def __init__(
        self, config: ModelConfig, load_balancing: float, z_loss: float, bias_speed: float = 0.0
    ):
        """Start from a uniform load.

        load_balancing, z_loss: weights of the losses, each a mean over the blocks. bias_speed:
        amount by which a step changes the routers' biases.
        """
        self.numbers = [i for i, kind in enumerate(config.feed_forwards) if kind == EXPERTS]
        self.chosen = config.num_experts_per_tok
        self.load_balancing = load_balancing
        self.z_loss = z_loss
        self.bias_speed = bias_speed
        even = self.chosen / config.num_experts
        self.load = torch.full((len(self.numbers), config.num_experts), even)

    @property
    def loss_names(self) -> list[str]:
        weights = {LOAD_BALANCING: self.load_balancing, ROUTER_Z: self.z_loss}
        return [name for name, weight in weights.items() if weight]

    def zeros(self) -> dict[str, Tensor]:
        losses = {name: self.load.new_zeros(()) for name in self.loss_names}
        return {LOAD: torch.zeros_like(self.load, dtype=torch.int64)} | losses

    def of_stage(self, auxiliary: dict[str, Tensor], blocks: list[int]) -> dict[str, Tensor]:
        """Return a stage's auxiliary values in the shapes of all blocks, without a gradient.

        blocks: numbers of the stage's blocks.
        """
        values = self.zeros() | {name: value.detach() for name, value in auxiliary.items()}
        if LOAD in auxiliary:
            own = [self.numbers.index(block) for block in blocks if block in self.numbers]
            load = torch.zeros_like(self.load, dtype=torch.int64)
            load[own[0] : own[-1] + 1] = auxiliary[LOAD]  # a stage's blocks are consecutive
            values[LOAD] = load
        return values

    def of_block(self, number: int, token_share: Tensor) -> Balancing | None:
        """Return the inputs of a block's losses; None for a block without experts."""
        if number not in self.numbers:
            return None
        blocks = len(self.numbers)
        load = self.load[self.numbers.index(number)]
        return Balancing(token_share, load, self.load_balancing / blocks, self.z_loss / blocks)

    def update(self, counts: Tensor, tokens: int) -> None:
        """Set the load from a step's counts [blocks · experts], summed over ranks.

        A block keeps its load if tokens of the step are missing in its counts.
        """
        counts = counts.view_as(self.load)
        complete = counts.sum(-1, keepdim=True) == tokens * self.chosen
        load = (counts / max(tokens, 1)).to(self.load.dtype)
        self.load.copy_(torch.where(complete & (tokens > 0), load, self.load))

    def move_biases(self, blocks: Mapping[str, Any], counts: Tensor, skip: Tensor) -> None:
        """Update the biases of these blocks' routers, see `moe.SigmoidRouter.move_bias`.

        blocks: modules by name; counts: [blocks with experts · experts], the tokens of each expert
        in a step, summed over ranks.
        """
        counts = counts.view_as(self.load)
        for number, of_block in zip(self.numbers, counts, strict=True):
            block = blocks.get(str(number))  # a pipeline stage has only some of the blocks
            if block is not None:
                block.mlp.gate.move_bias(of_block, self.bias_speed, skip)

    def state(self) -> dict[str, Tensor]:
        return {f"balance/{LOAD}": self.load} if self.load_balancing else {}
