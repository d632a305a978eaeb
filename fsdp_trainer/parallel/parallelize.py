"""Turn a decoder on the meta device into this rank's share of it, in one visible list."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from fsdp_trainer.config.schema import NEEDS_NCCL, Precision, Sharding, TrainConfig
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.adapter_spec import AdapterSpec
from fsdp_trainer.models.adapters import four_bit_weights, frozen_dtype
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.four_bit import keep_levels
from fsdp_trainer.models.four_bit_experts import quantize_weights
from fsdp_trainer.models.freeze import choose_trained, frozen_parameters
from fsdp_trainer.parallel.activation_checkpoint import checkpoint_activations
from fsdp_trainer.parallel.activation_offload import Offloader, offload_activations
from fsdp_trainer.parallel.compile import compile_blocks
from fsdp_trainer.parallel.convert import convert_linears
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.experts import expert_placement, share_experts
from fsdp_trainer.parallel.memory_check import (
    block_units,
    free_bytes,
    gathered_bytes,
    grouped_blocks,
    keeps_gathered,
)
from fsdp_trainer.parallel.pipeline import Stage, cut_into_stages, stages_of
from fsdp_trainer.parallel.tensor import shard_tensors
from fsdp_trainer.torch_private import reduce_scatter_groups, set_timeout

COMM_BUFFERS = {
    "ordinary": lambda module: None,
    "symmetric": lambda module: module.set_symm_mem_for_comm(),
    "registered": lambda module: module.set_allocate_memory_from_process_group_for_comm(True),
}
"""Functions that set where FSDP2 allocates its messages, by sharding.messages."""


def parallelize(
    model: Decoder,
    dims: Dims,
    cfg: TrainConfig,
    adapters: AdapterSpec | None = None,
    compiled: bool = False,
) -> Decoder:
    """Turn a meta-device model into this rank's share of it; its parameters become DTensors.

    The order matters. A kind of parallelism is a file beside this one and a line here: a pipeline
    cuts a model whose adapters and number formats are known, then a tensor group shares its blocks
    and an expert group its experts.
    """
    prepare(model, dims, cfg, adapters)
    cut_into_stages(model, cfg.sharding, dims)
    shard_tensors(model, dims)
    share_experts(model, dims)
    offloader = Offloader() if cfg.activation_checkpoint.offload else None
    checkpoint_activations(model, cfg.activation_checkpoint, None if compiled else offloader)
    if compiled:
        # before fully_shard: its hooks stay out of the graph, and so do those that offload
        compile_blocks(model, cfg.compile, forward_alone=offloader is not None)
    if offloader is not None:
        offload_activations(model, offloader)
    shard(model, dims, cfg.sharding, cfg.precision)
    return model


def prepare(model: Decoder, dims: Dims, cfg: TrainConfig, adapters: AdapterSpec | None) -> None:
    """Give a whole model its number formats and adapters, and choose what is trained."""
    master_dtype = getattr(torch, cfg.precision.master_dtype)
    model.to(master_dtype)
    convert_linears(model, cfg.precision, cfg.sharding.tensor)
    param_dtype = getattr(torch, cfg.precision.param_dtype)
    quantize_weights(model, four_bit_weights(model, adapters), param_dtype)
    keep_levels(param_dtype, dims.mesh.device_type)
    choose_trained(model, adapters, cfg.train.freeze, master_dtype)
    dtype = getattr(torch, frozen_dtype(cfg.precision, adapters))
    for parameter in frozen_parameters(model).values():  # never updated: they need no master copy
        if parameter.is_floating_point():  # not the codes of 4-bit weights
            parameter.data = parameter.data.to(dtype)


def shard(model: Decoder, dims: Dims, cfg: Sharding, precision: Precision) -> None:
    """Apply fully_shard to every `blocks_per_unit` blocks, to the embedding, and to [norm, head].

    [norm, head] stay gathered after forward, since backward begins with them. Tied weights must be
    in one unit. The root keeps nothing of its own.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, precision.param_dtype),
        reduce_dtype=getattr(torch, precision.reduce_dtype),
        # inputs have param_dtype, as the embedding has. What has not, rotations of some families or
        # weights of tokens, is in float32 for a reason
        cast_forward_inputs=False,
    )
    options: dict[str, Any] = {"mesh": dims.mesh, "mp_policy": policy}
    if cfg.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=dims.mesh.device_type == "cuda")
    of_blocks = options | {"shard_placement_fn": expert_placement(model, dims)}
    for part in parts_of(model):
        shard_part(part, cfg, options, of_blocks)

    for module in fsdp_modules(model):
        # the loss is divided by the step's global weight already
        module.set_gradient_divide_factor(1.0)
        # gloo has no pre-multiplied sum; NCCL's symmetric reduction is a sum
        module.set_force_sum_reduction_for_comms(True)
    choose_communication(model, cfg, dims)


class ShardedPart(NamedTuple):
    """A model, or a stage of it, whose forward gathers what it needs.

    embedding: where it is a unit of its own. ends: one unit that stays gathered after forward. In
    front of the blocks nothing is trained if `is_frozen_before`.
    inference: the name of its other forward.
    """

    root: nn.Module
    embedding: nn.Module | None
    blocks: list[nn.Module]
    ends: list[nn.Module]
    is_frozen_before: bool
    inference: str


def parts_of(model: Decoder) -> list[ShardedPart]:
    """Return this rank's stages, or the whole model. Tied weights are in one unit."""
    whole = model.whole
    tied = model.config.tie_word_embeddings
    is_frozen = not whole.model.embed_tokens.weight.requires_grad
    if stages := stages_of(model):
        return [part_of_stage(stage, is_frozen) for stage in stages]
    embedding: nn.Module = model.model.embed_tokens
    ends: list[nn.Module] = [model.model.norm, model.lm_head]
    blocks = list(model.blocks().values())
    if tied:
        return [ShardedPart(model, None, blocks, [embedding, *ends], is_frozen, "next_logits")]
    return [ShardedPart(model, embedding, blocks, ends, is_frozen, "next_logits")]


def part_of_stage(stage: Stage, is_frozen: bool) -> ShardedPart:
    """Return a stage of a pipeline."""
    ends: list[nn.Module] = [] if stage.ends is None else [stage.ends]
    blocks = list(stage.layers.values())
    is_frozen_before = is_frozen and stage.is_first
    return ShardedPart(stage, stage.embed_tokens, blocks, ends, is_frozen_before, "advance")


def shard_part(
    part: ShardedPart, cfg: Sharding, options: dict[str, Any], of_blocks: dict[str, Any]
) -> None:
    """Apply fully_shard to a part's units, then to the part itself.

    options: fully_shard's; of_blocks: those for units of blocks.
    """
    reshard = not keeps_gathered(cfg)
    if part.embedding is not None:
        embedding: Any = fully_shard(part.embedding, reshard_after_forward=reshard, **options)
        # its gradient needs tokens and the stream's gradient alone: no second all-gather
        embedding.set_unshard_in_backward(False)
    if part.ends:
        fully_shard(part.ends, reshard_after_forward=False, **options)
    units = grouped_blocks(part.blocks, cfg)
    for unit in units:
        fully_shard(unit if len(unit) > 1 else unit[0], reshard_after_forward=reshard, **of_blocks)
    fully_shard(part.root, reshard_after_forward=False, **options)
    for frozen in units_in_front(units) if part.is_frozen_before else []:
        frozen.set_unshard_in_backward(False)
    # samples in training begin as a forward does: after the optimizer's last write
    register_fsdp_forward_method(part.root, part.inference)
    prefetch([unit[0] for unit in units], cfg.prefetch)


def units_in_front(units: list[list[nn.Module]]) -> list[Any]:
    """Return the first module of each unit in front of all that is trained.

    Backward does not reach them. FSDP2 would gather the last of them all the same, ahead of a
    backward that never comes.
    """
    in_front = []
    for unit in units:
        if any(p.requires_grad for block in unit for p in block.parameters()):
            break
        in_front.append(unit[0])
    return in_front


def choose_communication(model: Decoder, cfg: Sharding, dims: Dims) -> None:
    """Set what torch's newer releases add to FSDP2's collectives. Collective.

    Raises UserError for what cannot work here.
    """
    key = f"sharding.messages={cfg.messages}"
    instead = "Use  sharding.messages=ordinary"
    if cfg.messages != "ordinary" and dims.mesh.device_type != "cuda":
        raise UserError("there is no NCCL", [Problem(key, f"{NEEDS_NCCL}.\n{instead}")])
    roots: list[Any] = [part.root for part in parts_of(model)]
    for root in roots if cfg.separate_reduce_scatter else []:
        root.set_separate_reduce_scatter_group(True)
        for module in fsdp_modules(root):
            for group in reduce_scatter_groups(module):
                set_timeout(group, dims.timeout)
    for root in roots if cfg.reduce_scatter_buffers > 1 else []:
        root.set_reduce_scatter_max_input_buffers(cfg.reduce_scatter_buffers)
    try:
        for module in fsdp_modules(model):
            COMM_BUFFERS[cfg.messages](module)
    except RuntimeError as error:  # a torch or a driver without it
        problem = Problem(key, f"{error}\n{instead}")
        raise UserError("these GPUs cannot communicate like that", [problem]) from None


def prefetch(units: list[Any], ahead: int) -> None:
    """Gather `ahead` units before they are needed: in forward, and in reverse order in backward."""
    if ahead == 0:
        return  # FSDP2's own order
    for i, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + ahead])
        unit.set_modules_to_backward_prefetch(units[max(0, i - ahead) : i][::-1])


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Return every module that fully_shard manages, the root first; of stages all of theirs."""
    roots: list[nn.Module] = [*stages_of(model)] or [model]
    modules = dict.fromkeys(module for root in roots for module in root.modules())
    return [module for module in modules if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Free gathered parameters that stay after a forward that no backward follows."""
    for module in fsdp_modules(model):
        module.reshard()


@contextmanager
def stay_gathered(model: Decoder, cfg: Sharding, device: torch.device) -> Iterator[None]:
    """Gather a model once for many forwards without a backward, if every rank has the memory.

    It takes at most half of what is free. The caller reshards the model. Collective.
    """
    computed = max(p.element_size() for p in model.parameters())
    fits = torch.tensor(gathered_bytes([model], computed) <= free_bytes(device) / 2, device=device)
    dist.all_reduce(fits, dist.ReduceOp.MIN)
    modules = resharded_modules(model, cfg) if fits else []
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for module in modules:
            module.set_reshard_after_forward(True, recurse=False)


def resharded_modules(model: Decoder, cfg: Sharding) -> list[Any]:
    """Return the modules whose parameters are freed after each forward."""
    if keeps_gathered(cfg):
        return []
    units: list[Any] = [unit[0] for unit in block_units(model, cfg)]
    embedding = model.model.embed_tokens  # a stage of a pipeline need not have it
    if embedding is None or model.config.tie_word_embeddings:
        return units
    return [embedding, *units]
