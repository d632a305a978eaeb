"""Conversion of a decoder on the meta device into this rank's part of it, one step per line.

What a call of a block runs afterwards, from the outside to the inside. Each line wraps or replaces
what stands below it; most are absent in most runs.

    set by                   is                         does
    shard (fully_shard)      hooks of the block         gathers its parameters before, frees them
                                                        after; in backward also reduces gradients
    offload_activations      forward of the block       moves what is saved for backward to the host
    compile_blocks           the block's call; with     runs a graph of all below
                             offloading its forward
    checkpoint_activations   forward of the block       keeps less, backward runs all below again
    a second, frozen model   forward of the block       Block.forward under another name
    Block.forward
      shard_tensors          hooks before attention,    gather the tokens of all ranks
                             feed-forward, shared
                             expert
                             hooks after k and v        gather the parts of a key head
                             classes of norms, router,  compute this rank's part, and sum, gather
                             gate, linear layers and    or scatter tokens
                             their adapters; of
                             attention with sinks
                             forward of an adapted      that of models.adapters, in parts
                             linear layer
      shard_experts          class of experts           sends rows to the ranks of their experts
      choose_trained         forward of an adapted      adds the adapter to its class's forward
                             linear layer; experts
                             add theirs in their own
      quantize_weights       class of linear layers     decodes 4-bit matrices
      convert_linears        class of linear layers     computes float8 products
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
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

from fsdp_trainer.base.torch_private import (
    chunks_when_read,
    free_second_copy,
    gathered_after_forward,
    keep_second_copy,
    reduce_scatter_groups,
    set_timeout,
    spare_one_rank,
)
from fsdp_trainer.config.pipeline_schedules import Stages
from fsdp_trainer.config.schema import (
    NEEDS_NCCL,
    ActivationCheckpoint,
    Compile,
    Precision,
    Sharding,
    TrainConfig,
)
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.adapters.adapter_spec import AdapterSpec, frozen_dtype
from fsdp_trainer.models.adapters.adapter_targets import four_bit_weights
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.four_bit_experts import quantize_weights
from fsdp_trainer.models.from_config.freeze import choose_trained, frozen_parameters
from fsdp_trainer.parallel.activation_checkpoint import checkpoint_activations
from fsdp_trainer.parallel.activation_offload import Offloader, offload_activations
from fsdp_trainer.parallel.compile import compile_blocks
from fsdp_trainer.parallel.convert import convert_linears
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.experts import expert_placement, shard_experts
from fsdp_trainer.parallel.gloo_messages import send_directly
from fsdp_trainer.parallel.memory_check import (
    CountedModel,
    free_bytes,
    gathered_on_rank,
    grouped_blocks,
    stays_gathered,
)
from fsdp_trainer.parallel.pipeline import Stage, cut_into_stages, stages_of
from fsdp_trainer.parallel.quantized_messages import quantize_messages
from fsdp_trainer.parallel.tensor import matrix_parts, shard_tensors

COMM_BUFFERS = {
    "ordinary": lambda module: None,
    "symmetric": lambda module: module.set_symm_mem_for_comm(),
    "registered": lambda module: module.set_allocate_memory_from_process_group_for_comm(True),
}
"""Functions that set where FSDP2 allocates communication buffers, by sharding.messages."""


@dataclass(frozen=True)
class Computation:
    """The groups of the configuration that decide how ranks compute a model.

    compile: None if blocks are not compiled; offload: optim.offload of the model in training.
    """

    sharding: Sharding
    precision: Precision
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile | None = None
    offload: str = "none"

    @classmethod
    def of(cls, cfg: TrainConfig, compiled: bool = False) -> "Computation":
        checkpointing, compiling = cfg.activation_checkpoint, cfg.compile if compiled else None
        return cls(cfg.sharding, cfg.precision, checkpointing, compiling, cfg.optim.offload)

    def forward_only(self) -> "Computation":
        """Return the computation, with the same layout, of a model that only runs forward.

        Its weights are stored in the number format used for computing.
        """
        sharding, precision = self.sharding, self.precision
        return replace(
            self,
            sharding=replace(sharding, separate_reduce_scatter=False, reduce_scatter_buffers=1),
            precision=replace(precision, master_dtype=precision.param_dtype, float8=None),
            activation_checkpoint=ActivationCheckpoint(mode="none"),
            offload="none",
        )


def parallelize(
    model: Decoder,
    dims: Dims,
    computation: Computation,
    adapters: AdapterSpec | None = None,
    freeze: Sequence[str] = (),
) -> Decoder:
    """Turn a meta-device model into this rank's part of it; its parameters become DTensors.

    Each kind of parallelism is a file in this folder and a line here. The order matters: the
    pipeline cuts a model with final adapters and number formats, then blocks are sharded over
    tensor groups, and experts over expert groups. freeze: patterns of train.freeze.
    """
    recompute = computation.activation_checkpoint
    prepare(model, dims, computation, adapters, freeze)
    cut_into_stages(model, dims)
    shard_tensors(model, dims)
    shard_experts(model, dims)
    offloader = Offloader() if recompute.offload else None
    moving = None if computation.compile else offloader
    splits_backward = Stages.of(computation.sharding).order.splits
    checkpoint_activations(model, recompute, moving, splits_backward)
    if computation.compile:
        # before fully_shard and offloading, whose hooks must not be part of the graph
        compile_blocks(model, computation.compile, forward_alone=offloader is not None)
    if offloader is not None:
        offload_activations(model, offloader)
    shard(model, dims, computation)
    return model


def prepare(
    model: Decoder,
    dims: Dims,
    computation: Computation,
    adapters: AdapterSpec | None,
    freeze: Sequence[str],
) -> None:
    precision = computation.precision
    master_dtype = getattr(torch, precision.master_dtype)
    model.to(master_dtype)
    parts = partial(matrix_parts, ranks=computation.sharding.tensor)
    convert_linears(model, precision, parts)
    param_dtype = getattr(torch, precision.param_dtype)
    quantize_weights(model, four_bit_weights(model, adapters), param_dtype)
    choose_trained(model, adapters, freeze, master_dtype)
    dtype = getattr(torch, frozen_dtype(precision, adapters))
    for parameter in frozen_parameters(model).values():  # not updated, so no master copy is needed
        if parameter.is_floating_point():  # not the codes of 4-bit weights
            parameter.data = parameter.data.to(dtype)


def shard(model: Decoder, dims: Dims, computation: Computation) -> None:
    """Apply fully_shard to every `blocks_per_unit` blocks, to the embedding, and to [norm, head].

    [norm, head] stay gathered after forward, since backward begins with them. Tied weights must be
    in one unit. The root has no parameters of its own.
    """
    cfg, precision = computation.sharding, computation.precision
    model.whole.gather_as(getattr(torch, precision.param_dtype))
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, precision.param_dtype),
        reduce_dtype=getattr(torch, precision.reduce_dtype),
        # hidden states have param_dtype already, from the embedding; other inputs, such as token
        # weights and some families' rotations, must stay in float32
        cast_forward_inputs=False,
    )
    options: dict[str, Any] = {"mesh": dims.mesh, "mp_policy": policy}
    if cfg.cpu_offload or computation.offload != "none":
        # what is in files is not in pinned memory
        pins = dims.mesh.device_type == "cuda" and computation.offload != "disk"
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=pins)
    of_blocks = options | {"shard_placement_fn": expert_placement(model, dims)}
    reshard = not stays_gathered(dims.layout, model.config, precision)
    for part in parts_of(model):
        shard_part(part, dims, options, of_blocks, reshard)

    for module in fsdp_modules(model):
        # the loss is already divided by the step's global weight
        module.set_gradient_divide_factor(1.0)
        # gloo has no pre-multiplied sum, and NCCL's symmetric reduction supports only sums
        module.set_force_sum_reduction_for_comms(True)
    choose_communication(model, cfg, dims)
    for module in fsdp_modules(model):
        spare_one_rank(module)
    if dims.mesh.device_type == "cpu":
        send_directly(fsdp_modules(model))
    if cfg.quantize != "none":
        quantize_messages(fsdp_modules(model), cfg.quantize, cfg.error_feedback)


class ShardedPart(NamedTuple):
    """A model, or a stage of it, that becomes one FSDP root.

    embedding: the embedding if it is a separate unit. tower: see Decoder.image_parts. heads: for
    further tokens, units that some forwards leave out. ends:
    modules of the unit that stays gathered after forward. is_frozen_before: True if nothing before
    the blocks is trained. inference: names of the methods for inference, which must also gather
    parameters.
    """

    root: nn.Module
    embedding: nn.Module | None
    tower: list[nn.Module]
    blocks: list[nn.Module]
    heads: list[nn.Module]
    ends: list[nn.Module]
    is_frozen_before: bool
    inference: tuple[str, ...]


def parts_of(model: Decoder) -> list[ShardedPart]:
    """Return this rank's stages, or the complete model. Tied weights are in one unit."""
    whole = model.whole
    tied = model.config.tie_word_embeddings
    is_frozen = not whole.embedding.weight.requires_grad and not trains_images(model)
    if stages := stages_of(model):
        return [part_of_stage(stage, is_frozen) for stage in stages]
    embedding: nn.Module | None = None if tied else model.embedding
    blocks, ends = list(model.blocks().values()), model.ends()
    tower, methods = model.image_parts(), model.inference_methods
    heads = model.mtp_heads()
    return [ShardedPart(model, embedding, tower, blocks, heads, ends, is_frozen, methods)]


def trains_images(model: Decoder) -> bool:
    return any(p.requires_grad for part in model.image_parts() for p in part.parameters())


def part_of_stage(stage: Stage, is_frozen: bool) -> ShardedPart:
    ends: list[nn.Module] = [] if stage.ends is None else [stage.ends]
    blocks = list(stage.layers.values())
    is_frozen_before = is_frozen and stage.is_first
    inference = ("advance",)
    return ShardedPart(stage, stage.embed_tokens, [], blocks, [], ends, is_frozen_before, inference)


@chunks_when_read()
def shard_part(
    part: ShardedPart,
    dims: Dims,
    options: dict[str, Any],
    of_blocks: dict[str, Any],
    reshard: bool,
) -> None:
    """Apply fully_shard to a part's units, then to the part itself.

    options: arguments of fully_shard; of_blocks: arguments for units of blocks. reshard: free all
    but the ends after forward.
    """
    cfg = dims.layout.sharding
    if part.embedding is not None:
        embedding: Any = fully_shard(part.embedding, reshard_after_forward=reshard, **options)
        # its backward needs only the tokens and the output's gradient: no second all-gather
        embedding.set_unshard_in_backward(False)
    for module in part.tower:  # pixels come in float32
        policy = replace(options["mp_policy"], cast_forward_inputs=True)
        fully_shard(module, reshard_after_forward=reshard, **options | {"mp_policy": policy})
    if part.ends:
        fully_shard(part.ends, reshard_after_forward=False, **options)
    units = grouped_blocks(part.blocks, cfg)
    for unit in [*units, *([head] for head in part.heads)]:
        fully_shard(unit if len(unit) > 1 else unit[0], reshard_after_forward=reshard, **of_blocks)
    fully_shard(part.root, reshard_after_forward=False, **options)
    before_trained = units_before_trained(units) if part.is_frozen_before else []
    for frozen in [*before_trained, *tower_before_trained(part.tower)]:
        frozen.set_unshard_in_backward(False)
    if dims.copy_mesh is not None:
        for unit in units[len(before_trained) :]:  # those that backward gathers again
            keep_second_copy(unit[0], dims.copy_mesh)
    # samples during training must, like a forward, wait for the optimizer's last write
    for name in part.inference:
        register_fsdp_forward_method(part.root, name)
    prefetch([unit[0] for unit in units], cfg.prefetch)


def units_before_trained(units: list[list[nn.Module]]) -> list[Any]:
    """Return the first module of each unit before all trained units.

    Backward does not reach these units, but FSDP2 would prefetch the last of them for backward.
    """
    in_front = []
    for unit in units:
        if any(p.requires_grad for block in unit for p in block.parameters()):
            break
        in_front.append(unit[0])
    return in_front


def tower_before_trained(units: list[nn.Module]) -> list[Any]:
    """Return the units of a tower for images that come before all trained ones.

    units: see Decoder.image_parts; the last one, the tower itself, begins.
    """
    if not units:
        return []
    *inner, tower = units
    others = {parameter for module in inner for parameter in module.parameters()}
    if any(p.requires_grad for p in tower.parameters() if p not in others):
        return []
    return [tower, *units_before_trained([[module] for module in inner])]


def choose_communication(model: Decoder, cfg: Sharding, dims: Dims) -> None:
    """Set options of FSDP2's collectives that newer releases of torch have. Collective.

    Raises UserError for options that do not work here.
    """
    key = f"sharding.messages={cfg.messages}"
    instead = "Use  sharding.messages=ordinary"
    if cfg.messages != "ordinary" and dims.mesh.device_type != "cuda":
        raise UserError("there is no NCCL", key, f"{NEEDS_NCCL}.\n{instead}")
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
    except RuntimeError as error:  # not supported by this torch or driver
        raise UserError(
            "these GPUs cannot communicate like that", key, f"{error}\n{instead}"
        ) from None


def prefetch(units: list[Any], ahead: int) -> None:
    """Prefetch `ahead` units in forward, and in reverse order in backward."""
    if ahead == 0:
        return  # FSDP2's default prefetching
    for i, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + ahead])
        unit.set_modules_to_backward_prefetch(units[max(0, i - ahead) : i][::-1])


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    roots: list[nn.Module] = [*stages_of(model)] or [model]
    modules = dict.fromkeys(module for root in roots for module in root.modules())
    return [module for module in modules if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    for module in fsdp_modules(model):
        module.reshard()
        free_second_copy(module)


@contextmanager
def stay_gathered(
    model: Decoder, sharding: Sharding, precision: Precision, device: torch.device
) -> Iterator[None]:
    """Gather a model once for many forwards without a backward, if every rank has the memory.

    The gathered model may use at most half of the free memory. The caller reshards it. Collective.
    """
    computed = getattr(torch, precision.param_dtype).itemsize
    needed = gathered_on_rank(CountedModel.of(model).whole, sharding, computed, whole=False)
    fits = torch.tensor(needed <= free_bytes(device) / 2, device=device)
    dist.all_reduce(fits, dist.ReduceOp.MIN)
    with gathered_after_forward(fsdp_modules(model) if fits else []):
        yield
