"""The dimensions of the ranks: who reads which rows, who holds which part, and what sums count."""

import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdp_trainer.base.torch_private import reduce_scatter_groups
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.config.schema import Batch, Sharding, TrainConfig
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.initialize import initialize_weights
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.materialize import grow_vocabulary
from fsdp_trainer.parallel.parallelize import Computation, fsdp_modules, parallelize
from fsdp_trainer.training.gradients import clip_gradients

INNER = {"context": 1, "tensor": 1}
OUTER = {"pipeline": 1}
STRATEGIES = {
    "fsdp": (Sharding(), {**OUTER, "replicate": 1, "shard": 4, **INNER}, ("shard",)),
    "hsdp": (
        Sharding(strategy="hsdp", replicas=2),
        {**OUTER, "replicate": 2, "shard": 2, **INNER},
        ("replicate", "shard"),
    ),
    "ddp": (
        Sharding(strategy="ddp"),
        {**OUTER, "replicate": 4, "shard": 1, **INNER},
        ("replicate", "shard"),
    ),
}


def dims_of(sharding, timeout=60):
    dist.init_process_group("gloo")
    return Dims(Layout(sharding, dist.get_world_size(), Batch()), "cpu", timeout)


def timeout_of(group):
    """Seconds."""
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def described(sharding):
    """Return what a rank knows of its place, and the sum of all ranks' numbers."""
    dims, total = dims_of(sharding), torch.tensor(float(os.environ["RANK"]))
    dims.sum_over_batch(total)
    timeouts = [timeout_of(group) for group in dims.mesh.get_all_groups()]
    return (
        dims.sizes,
        dims.mesh.mesh_dim_names,
        (dims.batch_rank, dims.batch_ranks),
        total,
        timeouts,
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_rank_reads_its_own_rows_and_the_mesh_has_no_dimension_to_spare(world, strategy):
    sharding, sizes, names = STRATEGIES[strategy]
    ranks = world.call(4, described, sharding)
    assert Layout(sharding, 4, Batch()).sizes == sizes
    assert [rank[0] for rank in ranks] == [sizes] * 4
    assert [rank[1] for rank in ranks] == [names] * 4
    assert [rank[2] for rank in ranks] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert [rank[3] for rank in ranks] == [6.0] * 4
    assert [rank[4] for rank in ranks] == [[60.0] * len(names)] * 4


def placed(sharding):
    """A rank's place, the ranks of its groups, and sums of what each rank of a tensor group has."""
    dims = dims_of(sharding)
    rows, tokens = (torch.tensor(float(dims.batch_rank + 1)) for _ in range(2))
    dims.sum_over_batch(rows)
    dims.sum_over_tokens(tokens)
    members = [dist.get_process_group_ranks(dims.group(name)) for name in ("context", "tensor")]
    timeouts = {timeout_of(dims.group(name)) for name in ("context", "tensor")}
    shape = dict(zip(dims.mesh.mesh_dim_names, dims.mesh.shape, strict=True))
    batch = (dims.batch_rank, dims.batch_ranks, dims.same_rows)
    return batch, members, shape, rows.item(), tokens.item(), timeouts


@pytest.mark.slow
def test_ranks_of_a_tensor_and_a_context_group_read_the_same_rows(world):
    layout = Sharding(strategy="hsdp", replicas=2, context=2, tensor=2)
    ranks = world.call(8, placed, layout)
    assert [rank[0] for rank in ranks] == [(i // 4, 2, 4) for i in range(8)]
    assert ranks[5][1] == [[5, 7], [4, 5]]
    assert ranks[0][2] == {"replicate": 2, "shard": 2}
    assert {rank[3] for rank in ranks} == {3.0}
    assert {rank[4] for rank in ranks} == {6.0}  # those of a context group have other tokens
    assert ranks[0][5] == {60.0}


def groups(sharding):
    dims = dims_of(sharding)
    return dims.groups_along("replicate"), dims.groups_along("shard")


@pytest.mark.slow
def test_ranks_that_hold_the_same_part_are_known(world):
    assert world.call(4, groups, STRATEGIES["hsdp"][0])[0] == ([[0, 2], [1, 3]], [[0, 1], [2, 3]])


def refused(sharding):
    with pytest.raises(UserError) as error:
        dims_of(sharding)
    dist.barrier()  # a rank that left now would break the connection that another is opening
    return str(error.value)


def test_replicas_that_do_not_divide_the_ranks_are_refused(world):
    assert "3" in world.call(2, refused, Sharding(strategy="hsdp", replicas=3))[0]


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (
            {"tensor": 3},
            "must divide the number of ranks, which is 8.\nUse  sharding.tensor=2",
        ),
        ({"tensor": 2, "context": 3}, "sharding.context=3 must divide the number of groups of"),
        ({"strategy": "hsdp", "replicas": 8, "tensor": 2}, "which are 4 of 8"),
    ],
)
def test_a_layout_that_does_not_divide_the_ranks_is_refused_with_one_that_does(layout, words):
    problem = Layout(Sharding(**layout), 8, Batch()).problem
    assert words in f"{problem.what} {problem.reason}"


def test_a_layout_knows_what_a_rank_computes_in_a_step():
    sharding = Sharding(strategy="hsdp", replicas=2, pipeline=2, context=2, tensor=2)
    layout = Layout(sharding, 16, Batch(seq_len=64, rows=12, micro_rows=2))
    assert (layout.batch_ranks, layout.same_rows, layout.fsdp_ranks, layout.stage_ranks) == (
        2, 4, 2, 8,
    )  # fmt: skip
    assert (layout.row_tokens, layout.tokens, layout.micro_batches) == (32, 64, 3)
    assert layout.stages.count == 2
    assert layout.keeps_gathered  # in a pipeline, unless sharding.reshard_after_forward says no
    assert layout.problem is None
    assert layout.pipeline_problem is None
    few = replace(layout, batch=Batch(seq_len=64, rows=4, micro_rows=2))
    assert "batch.rows=8" in few.pipeline_problem.reason


PLACEMENTS = {
    "rows": (("shard",), [Shard(0)]),
    "columns": (("shard",), [Shard(1)]),
    "replicated": (("shard",), [Replicate()]),
    "replicated rows": (("replicate", "shard"), [Replicate(), Shard(0)]),
    "rows and columns": (("replicate", "shard"), [Shard(0), Shard(1)]),
    "uneven": (("replicate", "shard"), [Shard(0), Shard(0)]),
}
"""Of each parameter: the dimensions of its mesh, and how it lies on them."""


def gradients():
    """Return gradients of 5 × 6 numbers each, one of them plain."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(5, 6, generator=generator) for name in (*PLACEMENTS, "plain")}


def clipped(max_norm, max_value):
    """The norm, and the whole gradients after clipping."""
    dims = dims_of(STRATEGIES["hsdp"][0])
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    model = nn.ParameterDict()
    for name, gradient in gradients().items():
        if name in PLACEMENTS:
            dimensions, places = PLACEMENTS[name]
            mesh = flat if len(dimensions) == 1 else dims.mesh
            gradient = distribute_tensor(gradient, mesh, places)
        model[name] = nn.Parameter(torch.zeros_like(gradient))
        model[name].grad = gradient
    norm = clip_gradients(model, dims, max_norm, max_value)
    return norm, {
        name: p.grad.full_tensor() if name in PLACEMENTS else p.grad for name, p in model.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("max_value", [None, 0.5], ids=["norm", "norm and value"])
def test_the_norm_is_that_of_one_process_however_parameters_are_placed(world, max_value):
    whole = torch.cat([g.flatten() for g in gradients().values()])
    limited = whole if max_value is None else whole.clamp(-max_value, max_value)
    ranks = world.call(4, clipped, 1.0, max_value)
    for norm, after in ranks:
        assert torch.equal(norm, ranks[0][0])
        torch.testing.assert_close(norm, whole.norm())
        together = torch.cat([g.flatten() for g in after.values()])
        torch.testing.assert_close(together, limited / limited.norm())


LAYOUTS = {
    "rows": ((4,), [Shard(0)]),
    "columns": ((4,), [Shard(1)]),
    "rows and columns": ((2, 2), [Shard(0), Shard(1)]),
    "columns and rows": ((2, 2), [Shard(1), Shard(0)]),
    "rows twice": ((2, 2), [Shard(0), Shard(0)]),
    "strided rows": ((2, 2), [Shard(0), None]),
}
"""The shape of a mesh of four ranks, and how a matrix lies on it; None: as fully_shard has it."""


def decoder():
    """Return a decoder without storage; it has 77 rows for 74 tokens, which no number of ranks
    divides."""
    config = ModelConfig(
        vocab_size=74,
        vocab_multiple=77,
        hidden_size=20,
        head_dim=4,
        intermediate_size=30,
        num_hidden_layers=1,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        return Decoder(config)


def separate_timeouts():
    dims = dims_of(Sharding())
    cfg = TrainConfig(sharding=Sharding(separate_reduce_scatter=True))
    model = parallelize(decoder(), dims, Computation.of(cfg))
    groups = {g for module in fsdp_modules(model) for g in reduce_scatter_groups(module)}
    return [timeout_of(group) for group in groups]


def test_a_group_of_its_own_for_reductions_has_the_runs_timeout_too(world):
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        pytest.skip("needs torch 2.13")
    assert world.call(2, separate_timeouts) == [[60.0], [60.0]]


def laid_out(layout):
    """A decoder whose matrices lie as `layout` says; its vectors are replicated."""
    shape, places = LAYOUTS[layout]
    model, mesh = decoder(), init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    strided = None in places
    tensor_mesh, places = (mesh["a"], places[:1]) if strided else (mesh, places)
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            own = places if parameter.ndim > 1 else [Replicate()] * len(places)
            sharded = distribute_tensor(parameter.detach(), tensor_mesh, own)
            setattr(module, name, nn.Parameter(sharded))
    if strided:
        fully_shard(model, mesh=mesh["b"])
    model.to_empty(device="cpu")
    return model


def started(layout, known):
    model = laid_out(layout) if layout else decoder().to_empty(device="cpu")
    initialize_weights(model, 3)
    if known:
        grow_vocabulary(model, known)
    return {
        name: p.detach().full_tensor() if layout else p.detach()
        for name, p in model.named_parameters()
    }


def started_in_all_layouts():
    """Random weights by layout, before and after tokens are added."""
    dist.init_process_group("gloo")
    return {layout: (started(layout, None), started(layout, 50)) for layout in LAYOUTS}


@pytest.fixture(scope="module")
def of_four_ranks(world):
    return world.call(4, started_in_all_layouts)[0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.grid(3)
def test_random_weights_are_the_same_numbers_for_every_layout(of_four_ranks, layout):
    whole = started(None, None)
    together = of_four_ranks[layout][0]
    assert whole.keys() == together.keys()
    for name in whole:
        assert torch.equal(whole[name], together[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_new_tokens_start_as_the_mean_of_all_known_ones_for_every_layout(of_four_ranks, layout):
    name = "model.embed_tokens.weight"
    together = of_four_ranks[layout][1][name]
    before = started(None, None)[name]
    assert torch.equal(together[:50], before[:50])
    torch.testing.assert_close(together[50:74], before[:50].mean(0).expand(24, -1))
    assert not together[74:].any()
