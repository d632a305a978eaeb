"""Choice of the attention implementation, for training and for a teacher that runs alone."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from fsdp_trainer.config.context_methods import attention_layout
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.models.attention_choice import AttentionChoice, choose
from fsdp_trainer.models.attention_kernels import describe_device, set_kernel_priority
from fsdp_trainer.models.config import ModelConfig


def choose_attention(
    cfg: TrainConfig,
    configs: Sequence[ModelConfig],
    device: torch.device,
    compiled: bool,
    method: str,
) -> AttentionChoice:
    """Choose and set this process's attention implementation. Raises UserError if none fits.

    configs: architecture of the model, then that of a teacher that reads the same rows. method: how
    ranks that split rows compute attention.
    """
    # the choice must fit a head size that some kernel may not support, if there is one
    sizes = [config.head_dim for config in configs]
    context = replace(
        describe_device(device),
        dtype=cfg.precision.param_dtype,
        head_dim=next((size for size in sizes if size % 8 or not 16 <= size <= 256), sizes[0]),
        softcap=any(config.attn_logit_softcapping is not None for config in configs),
        sinks=any(config.family_spec.sinks for config in configs),
        compiled=compiled,
        selective=cfg.activation_checkpoint.mode == "selective",
        deterministic=cfg.train.deterministic,
        ring=cfg.sharding.context > 1 and method == "ring",
    )
    ranks = cfg.sharding.context
    layout = attention_layout(cfg.model, ranks, method, compiled)
    choice = choose(layout, cfg.model.attention_kernel, context)
    dtype = getattr(torch, cfg.precision.param_dtype)
    for config in reversed(configs):  # the last call wins: it must be the student's
        set_kernel_priority(
            choice, config, dtype, device, required=cfg.model.attention_kernel != "auto"
        )
    return choice
