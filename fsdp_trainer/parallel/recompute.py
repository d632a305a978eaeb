"""Activation checkpointing: which results of a block backward keeps, and which it computes again (Chen et al. 2016)."""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch._functorch.config
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fsdp_trainer.config.schema import ActivationCheckpoint
from fsdp_trainer.models.decoder import Decoder

ATTENTION = (
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "torch_attn::_varlen_attn",
)
MATMUL = ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::_scaled_mm")


def checkpoint_activations(model: Decoder, cfg: ActivationCheckpoint) -> None:
    """Wrap every n-th block's forward, not the block: names stay as they are."""
    # read when a block is compiled; 1 is the compiler's own choice, so that no earlier model's is left
    torch._functorch.config.activation_memory_budget = cfg.budget if cfg.mode == "budget" else 1.0
    if cfg.mode not in ("full", "selective"):
        return
    # there is no randomness in a block, so there is no random state to keep
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if cfg.mode == "selective":
        options["context_fn"] = partial(_contexts, frozenset(cfg.save))

    def forward(block: nn.Module, *args: Any) -> Any:
        return checkpoint(type(block).forward, block, *args, **options)

    for i, block in enumerate(model.model.layers.values()):
        if i % cfg.every == 0:
            block.forward = MethodType(
                forward, block
            )  # a method, which the compiler reads like any other; it passes over a partial


def _contexts(save: frozenset[str]) -> Any:
    """The forward's and the recomputation's context of one block in one micro-batch."""
    return create_selective_checkpoint_contexts(_policy(save))


def _policy(save: frozenset[str]) -> Callable[..., CheckpointPolicy]:
    """Decides for each operator. Matrix products are counted, in the same order in forward and in recomputation."""
    count = {False: 0, True: 0}

    def decide(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = operator.name().split(".")[0]
        kept = "attention" in save and name in ATTENTION
        if name in MATMUL:
            count[ctx.is_recompute] += 1
            kept = "matmul" in save or (
                "second_matmul" in save and count[ctx.is_recompute] % 2 == 1
            )
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return decide
