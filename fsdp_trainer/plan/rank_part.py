"""The part of the model and its messages on one rank of a tensor or context group, for a plan."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from fsdp_trainer.config.context_methods import context_method
from fsdp_trainer.config.dimensions import own_length
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.moe import MixtureOfExperts

FLOAT32 = 4  # bytes of a number


def share_of_rank(config: ModelConfig, ranks: int) -> ModelConfig:
    """Return a model as large as the part that one of `ranks` ranks of a tensor group computes.

    If there are fewer key heads than ranks, each rank is counted with a full key head, although it
    holds only a share of it.
    """
    if ranks == 1:
        return config
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // ranks,
        num_key_value_heads=max(1, config.num_key_value_heads // ranks),
        intermediate_size=config.intermediate_size // ranks,
        vocab_size=-(-config.embedding_rows // ranks),
        vocab_multiple=1,
        shared_expert_intermediate_size=config.shared_size // ranks,
        n_shared_experts=0,
        # experts are not split: each rank has its own tokens
        moe_intermediate_size=config.expert_size if config.num_experts else None,
    )


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


def others_keys(cfg: TrainConfig, config: ModelConfig, number: int) -> OthersKeys:
    """Return the bytes of keys and values that a block gets from ranks that share its rows.

    config: the part of the model on one rank of a tensor group; number: bytes of one number.
    """
    ranks, heads = cfg.sharding.context, config.num_key_value_heads
    own = own_length(cfg.sharding, cfg.batch.seq_len) * cfg.batch.micro_rows
    of_token = 2 * config.head_dim * number
    if ranks == 1:
        return OthersKeys(0, 0, 0)
    method = context_method(cfg, config).method
    if method == "ring":
        # forward: a copy of the own pair, the pair in use and the one arriving, and float32 sums;
        # backward: each with its gradients, where the gradients being added to are in float32
        pair = heads * of_token * own
        sums = config.num_attention_heads * config.head_dim * own * FLOAT32
        return OthersKeys(2 * pair + sums, 4 * pair + 2 * pair // number * FLOAT32 + sums, 0)
    if method == "gathered":
        more = heads * of_token * own * (ranks - 1)
    else:
        more = (math.lcm(heads, ranks) - heads) * of_token * own
    return OthersKeys(more, more, more)


class KeyExchange(NamedTuple):
    """The messages of a rank to the ranks that share its rows, in one block.

    numbers: how many numbers one message has; forward, backward: number of messages; receivers:
    `each` rank gets its own part, `all` get the same message, or only the `next` rank gets it.
    """

    numbers: int
    forward: float
    backward: float
    receivers: str


def exchanged(cfg: TrainConfig, config: ModelConfig) -> KeyExchange:
    """Return the messages of a rank to the ranks that share its rows, in one block.

    config: the part of the model on one rank of a tensor group.
    """
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    ranks, own = cfg.sharding.context, own_length(cfg.sharding, cfg.batch.seq_len)
    both = 2 * keys * config.head_dim * own
    method = context_method(cfg, config).method
    if method == "ring":
        return KeyExchange(both, ranks - 1, 2 * (ranks - 1), "next")
    if method == "gathered":
        return KeyExchange(both, ranks - 1, ranks - 1, "all")
    sent = (ranks - 1) / ranks
    numbers = 2 * (heads + math.lcm(keys, ranks)) * config.head_dim * own
    return KeyExchange(numbers, sent, sent, "each")
