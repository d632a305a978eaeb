"""The part of the model and its messages on one rank of a tensor or context group, for a plan."""

import math
from typing import Any, NamedTuple

from torch import Tensor, nn

from fsdp_trainer.config.context_methods import context_method
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.models.config import RankConfig
from fsdp_trainer.models.moe import MixtureOfExperts


def part_tokens(block: Any, ranks: int) -> None:
    """Make a block accept and return a part of the tokens, as on one rank of a tensor group.

    Nothing is communicated: gathered tensors have the right sizes, and their values do not matter.
    """
    if ranks == 1:
        return

    def gather(module: nn.Module, args: tuple) -> tuple:
        return (args[0].repeat(1, ranks, 1), *args[1:])

    def scatter(module: nn.Module, args: tuple, out: Tensor) -> Tensor:
        return out[:, : out.shape[1] // ranks].clone()

    readers, writers = [block.self_attn], [block.self_attn.o_proj]
    dense = block.mlp
    if isinstance(dense, MixtureOfExperts):  # each rank sends its own tokens to experts
        dense = getattr(dense, dense.shared) if dense.shared else None
    if dense is not None:
        readers.append(dense)
        writers.append(dense.down_proj)
    for reader in readers:
        reader.register_forward_pre_hook(gather)
    for writer in writers:
        writer.register_forward_hook(scatter)


class KeyExchange(NamedTuple):
    """The messages of a rank to the ranks that split its rows, in one block.

    numbers: how many numbers one message has; forward, backward: number of messages; receivers:
    `each` rank gets its own part, `all` get the same message, or only the `next` rank gets it.
    """

    numbers: int
    forward: float
    backward: float
    receivers: str


def exchanged(layout: Layout, part: RankConfig) -> KeyExchange:
    """Return the messages of a rank to the ranks that split its rows, in one block."""
    config, ranks, own = part.shape, layout.sharding.context, layout.row_tokens
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    both = 2 * keys * config.head_dim * own
    method = context_method(layout.sharding, layout.batch.seq_len, part).method
    if method == "ring":
        return KeyExchange(both, ranks - 1, 2 * (ranks - 1), "next")
    if method == "gathered":
        return KeyExchange(both, ranks - 1, ranks - 1, "all")
    sent = (ranks - 1) / ranks
    numbers = 2 * (heads + math.lcm(keys, ranks)) * config.head_dim * own
    return KeyExchange(numbers, sent, sent, "each")
