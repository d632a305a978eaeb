"""What one rank of a tensor group has of a model, for the arithmetic of a plan."""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

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
