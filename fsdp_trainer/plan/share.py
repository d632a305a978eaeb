"""What one rank of a tensor or a context group has, for the arithmetic of a plan."""

import math
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from fsdp_trainer.config.context import choose_context_method
from fsdp_trainer.config.dimensions import own_length
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.models.config import ModelConfig


def share_of_rank(config: ModelConfig, ranks: int) -> ModelConfig:
    """Return a model as large as the part that one of `ranks` ranks of a tensor group computes.

    Of key heads that are fewer than the ranks it counts a whole one as held: at most a share of
    the head more than there is.
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
    )


def part_tokens(block: Any, ranks: int) -> None:
    """Have a block take and return a part of the tokens, as the ranks of a tensor group do.

    Without communication: what is gathered is as large, and its numbers are of no interest.
    """
    if ranks == 1:
        return

    def gather(module: nn.Module, args: tuple) -> tuple:
        return (args[0].repeat(1, ranks, 1), *args[1:])

    def scatter(module: nn.Module, args: tuple, out: Tensor) -> Tensor:
        return out[:, : out.shape[1] // ranks].clone()

    for reader in (block.self_attn, block.mlp):
        reader.register_forward_pre_hook(gather)
    for writer in (block.self_attn.o_proj, block.mlp.down_proj):
        writer.register_forward_hook(scatter)


def others_keys(cfg: TrainConfig, config: ModelConfig) -> int:
    """Return how many numbers of a row's keys and values a block keeps beside those of this rank's
    own tokens, where ranks share rows. config: of a rank of a tensor group."""
    ranks, heads = cfg.sharding.context, config.num_key_value_heads
    own = own_length(cfg.sharding, cfg.batch.seq_len)
    if choose_context_method(cfg.sharding, config.num_attention_heads).method == "gathered":
        return 2 * heads * config.head_dim * (cfg.batch.seq_len - own)
    return 2 * (math.lcm(heads, ranks) - heads) * config.head_dim * own


def exchanged_numbers(cfg: TrainConfig, config: ModelConfig) -> tuple[int, bool]:
    """Return the numbers that a rank has to send to those that share a row, in a block's forward,
    and True if all of them go to everyone. config: of a rank of a tensor group."""
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    own = own_length(cfg.sharding, cfg.batch.seq_len)
    if choose_context_method(cfg.sharding, heads).method == "gathered":
        return 2 * keys * config.head_dim * own, True
    return 2 * (heads + math.lcm(keys, cfg.sharding.context)) * config.head_dim * own, False
