"""Tensor parallelism (Shoeybi et al. 2019) with sequence parallelism (Korthikanti et al. 2022).

The ranks of a tensor group divide each block's heads and feed-forward channels, and the rows of
the vocabulary. Outside attention and feed-forward each rank holds a part of the tokens of a row: an
all-gather before either of them collects the tokens, and a reduce-scatter after it sums the ranks'
results and divides the tokens again.

`LINEARS` and `MODULES` say what becomes of each module. Experts are not among them: they are on a
mesh of their own (parallel/experts.py), and each rank routes its own tokens.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from fsdp_trainer.base.distributed import place
from fsdp_trainer.models.adapters.adapter_spec import MAGNITUDE, A, B
from fsdp_trainer.models.decoder import Attention, Decoder
from fsdp_trainer.models.feed_forward import MLP
from fsdp_trainer.models.head import Head, ScoreHead, StatesHead
from fsdp_trainer.models.latent_attention import LatentAttention
from fsdp_trainer.models.moe import ROUTERS, Gate
from fsdp_trainer.models.norm import RMSNorm
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.tensor_layers import (
    ColumnLinear,
    ColumnNorm,
    DoraLinear,
    GatheredInput,
    LoraLinear,
    ReplicatedGate,
    ReplicatedLinear,
    ReplicatedNorm,
    ReplicatedRouter,
    RowLinear,
    TensorAttention,
    TensorDecoder,
    TensorEmbedding,
    TensorHead,
    TensorModule,
    TensorScoreHead,
    TensorStatesHead,
)
from fsdp_trainer.parallel.tensor_ranks import TensorRanks


class ShardedForm(NamedTuple):
    """The sharded form of a module: its class, and the placements of its parameters by name.

    A module may lack some of the parameters.
    """

    cls: type[TensorModule]
    placements: dict[str, Placement]


EACH = Replicate()
COLUMN = ShardedForm(ColumnLinear, {"weight": Shard(0), "bias": Shard(0), MAGNITUDE: Shard(0)})
ROW = ShardedForm(RowLinear, {"weight": Shard(1), "bias": EACH, MAGNITUDE: EACH})
WHOLE = ShardedForm(ReplicatedLinear, {"weight": EACH, "bias": EACH, MAGNITUDE: EACH})
LINEARS = {
    "q_proj": COLUMN,
    "k_proj": COLUMN,
    "v_proj": COLUMN,
    "o_proj": ROW,
    "q_a_proj": WHOLE,
    "q_b_proj": COLUMN,
    "kv_a_proj_with_mqa": WHOLE,
    "kv_b_proj": COLUMN,
    "gate_proj": COLUMN,
    "up_proj": COLUMN,
    "down_proj": ROW,
}
"""The blocks' linear layers by name, those of shared experts included."""
ADAPTERS: dict[type[TensorModule], tuple[ShardedForm, ShardedForm]] = {
    ColumnLinear: (WHOLE, COLUMN),
    RowLinear: (ROW, WHOLE),
    ReplicatedLinear: (WHOLE, WHOLE),
}
"""Matrices A and B of an adapter by the class of its layer."""
MODULES: dict[type[nn.Module], ShardedForm] = {
    Attention: ShardedForm(TensorAttention, {"sinks": Shard(0)}),
    LatentAttention: ShardedForm(GatheredInput, {}),
    MLP: ShardedForm(GatheredInput, {}),
    RMSNorm: ShardedForm(ReplicatedNorm, {"weight": EACH}),
    **dict.fromkeys(
        ROUTERS.values(), ShardedForm(ReplicatedRouter, {"weight": EACH, "bias": EACH})
    ),
    Gate: ShardedForm(ReplicatedGate, {"weight": EACH}),
    nn.Embedding: ShardedForm(TensorEmbedding, {"weight": Shard(0)}),
    Head: ShardedForm(TensorHead, {"weight": Shard(0)}),
    ScoreHead: ShardedForm(TensorScoreHead, {"weight": EACH, "bias": EACH}),
    StatesHead: ShardedForm(TensorStatesHead, {}),
    Decoder: ShardedForm(TensorDecoder, {}),
}
NORM_OF_ALL_HEADS = ShardedForm(ColumnNorm, {"weight": Shard(0)})


def shard_tensors(model: Any, dims: Dims) -> None:
    """Shard a model over the ranks of a tensor group, if it has several.

    model: a Decoder, which becomes a TensorDecoder. Must be called after adapters and freezing,
    before activation checkpointing, compile and fully_shard.
    """
    if dims.tensor_mesh is None:
        return
    mesh = dims.tensor_mesh
    group = mesh.get_group()
    ranks = TensorRanks(group, dist.get_rank(group), dist.get_world_size(group))
    for path, module in list(model.named_modules()):
        form = sharded_form(path.rpartition(".")[2], module, model.config.family_spec.qk_norm)
        if form is not None:
            shard_module(module, form, ranks, mesh)
    model.tie_weights()


def sharded_form(name: str, module: nn.Module, qk_norm: str | None) -> ShardedForm | None:
    """Return what becomes of a module; None: it stays as it is.

    name: its name in its parent; qk_norm: see Family.
    """
    if name in ("q_norm", "k_norm") and qk_norm == "whole":
        return NORM_OF_ALL_HEADS
    return LINEARS.get(name) or MODULES.get(type(module))


def shard_module(module: Any, form: ShardedForm, ranks: TensorRanks, mesh: DeviceMesh) -> None:
    for name, placement in form.placements.items():
        parameter = getattr(module, name, None)
        if parameter is not None:
            setattr(module, name, place(parameter, mesh, placement))
    turn_into(module, form.cls)
    if hasattr(module, A):
        for name, of_matrix in zip((A, B), ADAPTERS[form.cls], strict=True):
            shard_module(getattr(module, name), of_matrix, ranks, mesh)
        turn_into(module, DoraLinear if hasattr(module, MAGNITUDE) else LoraLinear)
        del module.forward  # the one for complete matrices
    module.tensor_ranks = ranks
    module.set_part()


def turn_into(module: Any, cls: type) -> None:
    kind: Any = type(module)
    module.__class__ = cls if issubclass(cls, kind) else combined_class(cls, kind)


@lru_cache
def combined_class(cls: type, kind: type) -> type:
    return type(f"{cls.__name__}{kind.__name__}", (cls, kind), {})


def matrix_parts(name: str, ranks: int) -> tuple[int, int]:
    """Return into how many parts `ranks` ranks divide a matrix's outputs and its inputs."""
    weight = LINEARS[name].placements["weight"] if name in LINEARS else EACH
    return ranks if weight.is_shard(0) else 1, ranks if weight.is_shard(1) else 1
