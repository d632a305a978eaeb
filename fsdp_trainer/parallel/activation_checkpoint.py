"""Activation checkpointing (Chen et al. 2016): backward recomputes results of the forward."""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fsdp_trainer.base.torch_private import RepeatableRecomputation, set_activation_memory_budget
from fsdp_trainer.config.schema import ActivationCheckpoint
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.parallel.activation_offload import Offloader
from fsdp_trainer.parallel.experts import divides_experts, with_known_rows

ATTENTION = (
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_flash_attention_forward",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "torch_attn::_varlen_attn",
)
MATMUL = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::linear",
    "aten::_scaled_mm",
    "aten::_grouped_mm",
    "fsdp_trainer::grouped_linear",
)


def checkpoint_activations(
    model: Decoder,
    cfg: ActivationCheckpoint,
    offloader: Offloader | None = None,
    splits_backward: bool = False,
) -> None:
    """Wrap the forward of every n-th block, also of MTP heads and a tower for images.

    Wrapping the block itself would change names. offloader: moves the results that `selective`
    keeps in blocks for text; None if blocks are compiled. splits_backward: True for a pipeline's
    schedule that computes the gradients of weights separately; both parts of backward recompute a
    block.
    """
    # always set, so that the budget of an earlier model does not remain
    set_activation_memory_budget(cfg.budget if cfg.mode == "budget" else 1.0)
    if cfg.mode not in ("full", "selective"):
        return
    # a block has no randomness, so there is no random state to preserve
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    saved = frozenset(cfg.save) if cfg.mode == "selective" else None
    of_text = [*model.blocks().values()]
    others = [*model.mtp_heads(), *model.image_blocks()]
    for blocks, mover in (of_text, offloader), (others, None):
        of_mode: dict[str, Any] = {}
        if saved is not None:
            of_mode["context_fn"] = partial(selective_contexts, saved, mover, splits_backward)
        for block in blocks[:: cfg.every]:
            recompute_in_backward(block, options | of_mode)


def recompute_in_backward(block: nn.Module, options: dict[str, Any]) -> None:
    def forward(block: nn.Module, *args: Any, **named: Any) -> Any:
        return checkpoint(type(block).forward, block, *args, **options, **named)

    def forward_with_experts(block: nn.Module, *args: Any) -> Any:
        return checkpoint(with_known_rows, block, [], *args, **options)

    # a method, which the compiler traces; it would skip a functools.partial
    block.forward = MethodType(forward_with_experts if divides_experts(block) else forward, block)


def selective_contexts(
    save: frozenset[str], offloader: Offloader | None = None, splits_backward: bool = False
) -> Any:
    forward, recomputation = create_selective_checkpoint_contexts(save_policy(save))
    if splits_backward:
        return forward, RepeatableRecomputation(recomputation)
    if offloader is not None:
        return offloader.moving_results(forward), recomputation
    return forward, recomputation


def save_policy(save: frozenset[str]) -> Callable[..., CheckpointPolicy]:
    """Return a policy for operators: results of kinds in `save` are kept, others recomputed.

    It counts matrix products, separately in forward and in recomputation.
    """
    count = {False: 0, True: 0}

    def decide(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = operator.name().split(".")[0]
        kinds = {"attention"} if name in ATTENTION else set()
        if name in MATMUL:
            count[ctx.is_recompute] += 1
            kinds = {"matmul", "second_matmul"} if count[ctx.is_recompute] % 2 else {"matmul"}
        return CheckpointPolicy.MUST_SAVE if kinds & save else CheckpointPolicy.PREFER_RECOMPUTE

    return decide
