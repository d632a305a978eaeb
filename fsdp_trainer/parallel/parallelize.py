"""From a decoder on the meta device to this rank's share of it, in one visible list."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from fsdp_trainer.config.schema import NEEDS_NCCL, Precision, Sharding, TrainConfig
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.parallel.compile import compile_blocks
from fsdp_trainer.parallel.convert import convert_linears
from fsdp_trainer.parallel.fit import keeps_gathered
from fsdp_trainer.parallel.recompute import checkpoint_activations


def parallelize(
    model: Decoder, mesh: DeviceMesh, cfg: TrainConfig, compiled: bool = False
) -> Decoder:
    """Shard a meta-device model; its parameters come out as DTensors without storage. The order matters."""
    model.to(getattr(torch, cfg.precision.master_dtype))
    convert_linears(model, cfg.precision)
    checkpoint_activations(model, cfg.activation_checkpoint)
    if compiled:
        compile_blocks(
            model, cfg.compile
        )  # inside fully_shard, so that its hooks stay out of the graph
    shard(model, mesh, cfg.sharding, cfg.precision)
    return model


def shard(model: Decoder, mesh: DeviceMesh, cfg: Sharding, precision: Precision) -> None:
    """One unit per `blocks_per_unit` blocks, the embedding, and [norm, head]; the root keeps nothing of its own.

    [norm, head] stay gathered after forward, since backward begins with them. Tied weights must be in one unit.
    """
    dtypes = {
        f"{kind}_dtype": getattr(torch, getattr(precision, f"{kind}_dtype"))
        for kind in ("param", "reduce")
    }
    # inputs are in param_dtype as the embedding is; what is not, a family's rotations or the weights of tokens, is in float32 for a reason
    policy = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)
    options: dict = {"mesh": mesh, "mp_policy": policy}
    if cfg.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    reshard = not keeps_gathered(cfg)

    blocks = list(model.model.layers.values())
    units = [
        blocks[i : i + cfg.blocks_per_unit] for i in range(0, len(blocks), cfg.blocks_per_unit)
    ]
    ends: list[nn.Module] = [model.model.norm, model.lm_head]
    if model.config.tie_word_embeddings:
        fully_shard([model.model.embed_tokens, *ends], reshard_after_forward=False, **options)
    else:
        embedding = fully_shard(model.model.embed_tokens, reshard_after_forward=reshard, **options)
        embedding.set_unshard_in_backward(
            False
        )  # its gradient is made of tokens and the stream's alone: no second all-gather
        fully_shard(ends, reshard_after_forward=False, **options)
    for unit in units:
        fully_shard(unit if len(unit) > 1 else unit[0], reshard_after_forward=reshard, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    register_fsdp_forward_method(
        model, "next_logits"
    )  # samples in training begin as a forward does: after the optimizer's last write

    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(
            1.0
        )  # the loss is divided by the step's global weight already
        module.set_force_sum_reduction_for_comms(
            True
        )  # gloo has no pre-multiplied sum; NCCL's symmetric reduction is a sum
    choose_communication(model, cfg, mesh.device_type)
    prefetch([unit[0] for unit in units], cfg.prefetch)


def choose_communication(model: Decoder, cfg: Sharding, device_type: str) -> None:
    """What torch's newer releases add to FSDP2's collectives. Collective. Raises UserError for what cannot work here."""
    if cfg.messages != "ordinary" and device_type != "cuda":
        raise UserError(
            "there is no NCCL",
            [
                Problem(
                    f"sharding.messages={cfg.messages}",
                    f"{NEEDS_NCCL}.\nUse  sharding.messages=ordinary",
                )
            ],
        )
    root: Any = model
    if cfg.separate_reduce_scatter:
        root.set_separate_reduce_scatter_group(True)
    if cfg.reduce_scatter_buffers > 1:
        root.set_reduce_scatter_max_input_buffers(cfg.reduce_scatter_buffers)
    try:
        for module in fsdp_modules(model):
            if cfg.messages == "symmetric":
                module.set_symm_mem_for_comm()
            elif cfg.messages == "registered":
                module.set_allocate_memory_from_process_group_for_comm(True)
    except RuntimeError as error:  # a torch or a driver without it
        why = f"{error}\nUse  sharding.messages=ordinary"
        raise UserError(
            "these GPUs cannot communicate like that",
            [Problem(f"sharding.messages={cfg.messages}", why)],
        ) from None


def prefetch(units: list, ahead: int) -> None:
    """Gather `ahead` units before they are needed, in forward and, in reverse order, in backward."""
    if ahead:
        for i, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + ahead])
            unit.set_modules_to_backward_prefetch(units[max(0, i - ahead) : i][::-1])


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Every module that fully_shard manages, the root first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Free gathered parameters that no backward will: those of units that stay gathered after a forward alone."""
    for module in fsdp_modules(model):
        module.reshard()
