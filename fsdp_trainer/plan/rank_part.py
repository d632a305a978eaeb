"""The part of the model and its messages on one rank of a tensor or context group, for a plan."""

import math
from typing import Any, NamedTuple

from torch import Tensor, nn

from fsdp_trainer.config.context_methods import context_method
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.models.config import RankConfig
from fsdp_trainer.models.moe import MixtureOfExperts

FLOAT32 = 4  # bytes of a number


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


class OthersKeys(NamedTuple):
    """Bytes of keys and values in a block in addition to those of the rank's own tokens.

    forward, backward: during these; saved: kept between them.
    """

    forward: int
    backward: int
    saved: int


def others_keys(
    layout: Layout, part: RankConfig, number: int, mode: str, attention: str
) -> OthersKeys:
    """Return the bytes of keys and values that a block gets from ranks that split its rows.

    number: bytes of one number; mode: of recomputation; attention: a key of LAYOUTS.
    """
    config, ranks, own = part.shape, layout.sharding.context, layout.tokens
    heads = config.num_key_value_heads
    of_token = 2 * config.head_dim * number
    if ranks == 1:
        return OthersKeys(0, 0, 0)
    method = context_method(layout.sharding, layout.batch.seq_len, part).method
    if method == "ring":
        # forward: a copy of the own pair, the pair in use and the one arriving, and float32 sums;
        # backward: each with its gradients, where the gradients being added to are in float32
        pair = heads * of_token * own
        sums = config.num_attention_heads * config.head_dim * own * FLOAT32
        return OthersKeys(2 * pair + sums, 4 * pair + 2 * pair // number * FLOAT32 + sums, 0)
    if method == "gathered":
        kept = heads * of_token * own * (ranks - 1)
        # a mask of the later half of a rank's queries, whose keys are nearly all of a long
        # document, and another copy of it in the attention's number format
        mask = own // 2 * layout.batch.seq_len * number
        meanwhile = kept + 2 * mask
        return OthersKeys(meanwhile, meanwhile, kept + mask if mode == "none" else 0)
    kept = (math.lcm(heads, ranks) - heads) * of_token * own
    if attention != "varlen":  # the others copy the result anyway
        return OthersKeys(kept, kept, kept if mode != "full" else 0)
    # attention keeps its result, and the projection after it the one that came back
    more = kept + config.num_attention_heads * config.head_dim * own * number
    return OthersKeys(more, more, {"none": more, "selective": kept}.get(mode, 0))


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
