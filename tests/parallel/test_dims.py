"""The dimensions of the ranks: who reads which rows, who holds which part, and what sums count."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import yaml
from layouts import SIZES, batch_of, built, configuration, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_trainer.base.torch_private import chunks_when_read, reduce_scatter_groups
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.config.schema import Batch, Sharding, TrainConfig
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.hf.new_model import meta_decoder
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.materialize import grow_vocabulary
from fsdp_trainer.parallel.parallelize import Computation, fsdp_modules, parallelize
from fsdp_trainer.training.gradients import clip_gradients
from fsdp_trainer.training.weights import draw_weights

HSDP = Sharding(strategy="hsdp", replicas=2)
STRATEGIES = {
    # its layout, and the sizes of the mesh's dimensions
    "fsdp": (Sharding(), {"shard": 4}),
    "hsdp": (HSDP, {"replicate": 2, "shard": 2}),
    "ddp": (Sharding(strategy="ddp"), {"replicate": 4, "shard": 1}),
}


def dims_of(sharding, timeout=60):
    dist.init_process_group("gloo")
    return Dims(Layout(sharding, dist.get_world_size(), Batch()), "cpu", timeout)


def timeout_of(group):
    """Seconds."""
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def placed(sharding):
    """Return a rank's place, its mesh, groups, and sums of what each rank has."""
    dims = dims_of(sharding)
    rows, tokens = (torch.tensor(float(dims.batch_rank + 1)) for _ in range(2))
    dims.sum_over_batch(rows)
    dims.sum_over_tokens(tokens)
    inner = [name for name in ("context", "tensor") if dims.sizes[name] > 1]
    groups = [*dims.mesh.get_all_groups(), *map(dims.group, inner)]
    return {
        "sizes": dims.sizes,
        "mesh": dict(zip(dims.mesh.mesh_dim_names, dims.mesh.shape, strict=True)),
        "batch": (dims.batch_rank, dims.batch_ranks, dims.same_rows),
        "members": [dist.get_process_group_ranks(dims.group(name)) for name in inner],
        "sums": (rows.item(), tokens.item()),
        "timeouts": {timeout_of(group) for group in groups},
        "copies": (dims.groups_along("replicate"), dims.groups_along("shard")),
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_rank_reads_its_own_rows_and_the_mesh_has_no_dimension_to_spare(world, strategy):
    sharding, mesh = STRATEGIES[strategy]
    ranks = world.call(4, placed, sharding)
    sizes = {"pipeline": 1, "replicate": 1, "context": 1, "tensor": 1} | mesh
    assert Layout(sharding, 4, Batch()).sizes == sizes
    for number, rank in enumerate(ranks):
        assert rank["sizes"] == sizes
        assert rank["mesh"] == mesh
        assert rank["batch"] == (number, 4, 1)
        assert rank["sums"] == (10, 10)
        assert rank["timeouts"] == {60.0}
        if strategy == "hsdp":
            assert rank["copies"] == ([[0, 2], [1, 3]], [[0, 1], [2, 3]])


def test_ranks_of_a_tensor_and_a_context_group_read_the_same_rows(world):
    ranks = world.call(8, placed, replace(HSDP, context=2, tensor=2))
    assert [rank["batch"] for rank in ranks] == [(i // 4, 2, 4) for i in range(8)]
    assert ranks[5]["members"] == [[5, 7], [4, 5]]
    assert ranks[0]["mesh"] == {"replicate": 2, "shard": 2}
    # those of a context group have other tokens
    assert {rank["sums"] for rank in ranks} == {(3, 6)}
    assert ranks[0]["timeouts"] == {60.0}


@pytest.mark.parametrize(
    "ranks, layout, words",
    yaml.safe_load(r"""
- [8, {tensor: 3}, "must divide the number of ranks, which is 8.\nUse  sharding.tensor=2"]
- [8, {tensor: 2, context: 3}, sharding.context=3 must divide the number of groups of]
- [8, {strategy: hsdp, replicas: 3}, sharding.replicas=3 must divide the number]
- [8, {strategy: hsdp, replicas: 8, tensor: 2}, which are 4 of 8]
- [10, {tensor: 2, context: 4}, "which is 5.\nUse  sharding.context=1"]
- [8, {reshard_after_forward: 3}, Use  sharding.reshard_after_forward=2]
- [3, {reshard_after_forward: 2}, Use  sharding.reshard_after_forward=true]
"""),
)
def test_a_layout_that_does_not_divide_the_ranks_is_refused_with_one_that_does(
    ranks, layout, words
):
    problem = Layout(Sharding(**layout), ranks, Batch()).problem
    assert words in f"{problem.what} {problem.reason}"


def test_a_layout_knows_what_a_rank_computes_in_a_step():
    sharding = Sharding(strategy="hsdp", replicas=2, pipeline=2, context=2, tensor=2)
    layout = Layout(sharding, 16, Batch(seq_len=64, rows=12, micro_rows=2))
    assert (layout.batch_ranks, layout.same_rows) == (2, 4)
    assert (layout.fsdp_ranks, layout.stage_ranks) == (2, 8)
    assert (layout.row_tokens, layout.tokens, layout.micro_batches) == (32, 64, 3)
    assert layout.stages.count == 2
    assert layout.keeps_gathered(1e12)  # in a pipeline, whatever the model's size is
    assert layout.problem is None
    assert layout.pipeline_problem is None
    few = replace(layout, batch=Batch(seq_len=64, rows=4, micro_rows=2))
    assert "batch.rows=8" in few.pipeline_problem.reason


@pytest.mark.parametrize(
    "sharding, gib, stays",
    yaml.safe_load("""
- [{}, 2, true]
- [{}, 2.1, false]
- [{reshard_after_forward: true}, 2, false]
- [{reshard_after_forward: 2}, 2, false]
- [{reshard_after_forward: false}, 2.1, true]
- [{cpu_offload: true}, 2, false]
- [{strategy: ddp}, 2.1, true]
"""),
    ids=str,
)
def test_a_model_of_at_most_two_gib_stays_gathered_until_backward(sharding, gib, stays):
    assert Layout(Sharding(**sharding), 8, Batch()).keeps_gathered(gib * 2**30) == stays


PLACEMENTS = {
    "rows": (("shard",), [Shard(0)]),
    "columns": (("shard",), [Shard(1)]),
    "replicated": (("shard",), [Replicate()]),
    "replicated rows": (("replicate", "shard"), [Replicate(), Shard(0)]),
    "rows and columns": (("replicate", "shard"), [Shard(0), Shard(1)]),
    "uneven": (("replicate", "shard"), [Shard(0), Shard(0)]),
}
"""Of each parameter: the dimensions of its mesh, and how it lies on them."""


def drawn_gradients():
    """Return gradients of 5 × 6 numbers each, one of them plain."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(5, 6, generator=generator) for name in (*PLACEMENTS, "plain")}


def clipped(max_norm, max_value):
    """The norm, and the whole gradients after clipping."""
    dims = dims_of(HSDP)
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    model = nn.ParameterDict()
    for name, gradient in drawn_gradients().items():
        if name in PLACEMENTS:
            dimensions, places = PLACEMENTS[name]
            mesh = flat if len(dimensions) == 1 else dims.mesh
            gradient = distribute_tensor(gradient, mesh, places)
        model[name] = nn.Parameter(torch.zeros_like(gradient))
        model[name].grad = gradient
    norm = clip_gradients(model, dims, max_norm, max_value)
    gradients = [p.grad for p in model.values()]
    return norm, [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]


@pytest.mark.parametrize("max_value", [None, 0.5], ids=["norm", "norm and value"])
def test_the_norm_is_that_of_one_process_however_parameters_are_placed(world, max_value):
    whole = torch.cat([g.flatten() for g in drawn_gradients().values()])
    limited = whole if max_value is None else whole.clamp(-max_value, max_value)
    ranks = world.call(4, clipped, 1.0, max_value)
    for norm, after in ranks:
        assert torch.equal(norm, ranks[0][0])
        torch.testing.assert_close(norm, whole.norm())
        together = torch.cat([g.flatten() for g in after])
        torch.testing.assert_close(together, limited / limited.norm())


def separate_timeouts():
    dims = dims_of(Sharding())
    cfg = TrainConfig(sharding=Sharding(separate_reduce_scatter=True))
    model = parallelize(meta_decoder(ModelConfig(**SIZES)), dims, Computation.of(cfg))
    groups = {g for module in fsdp_modules(model) for g in reduce_scatter_groups(module)}
    return [timeout_of(group) for group in groups]


def test_a_group_of_its_own_for_reductions_has_the_runs_timeout_too(world):
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        pytest.skip("needs torch 2.13")
    assert world.call(2, separate_timeouts) == [[60.0], [60.0]]


def grown(sharding):
    """Return the embedding before and after tokens from the 51st on are added."""
    config = ModelConfig(**SIZES, vocab_multiple=101)
    cfg = configuration({"sharding": sharding}, batch=batch_of(8))
    model, _ = built(config, cfg)
    draw_weights(model, 3)
    embedding = {"": model.model.embed_tokens.weight}
    before = whole(embedding)[""]
    grow_vocabulary(model, 50)
    return before, whole(embedding)[""]


@pytest.mark.parametrize("sharding", [{}, {"tensor": 2}], ids=str)
def test_new_tokens_start_as_the_mean_of_all_known_ones_for_every_layout(world, sharding):
    """Rows may be divided twice, and no number of ranks divides them."""
    before, after = world.call(4, grown, sharding)[0]
    assert torch.equal(after[:50], before[:50])
    torch.testing.assert_close(after[50:97], before[:50].mean(0).expand(47, -1))
    assert len(after) > 97
    assert not after[97:].any()


@pytest.mark.parametrize("rows, ranks", [(10, 4), (3, 5), (8, 4), (5, 4), (0, 2)])
def test_each_ranks_chunk_of_a_parameter_is_the_one_that_torch_makes(rows, ranks):
    parameter = torch.arange(3 * rows).view(rows, 3)
    torchs = _fsdp_param._chunk_with_empty(parameter, ranks, dim=0)
    with chunks_when_read():
        chunks = _fsdp_param._chunk_with_empty(parameter, ranks, dim=0)
    assert not isinstance(chunks, list)
    for chunk, same in zip(chunks, torchs, strict=True):
        assert chunk.tolist() == same.tolist()
        assert (chunk.numel() == 0) or chunk.data_ptr() == same.data_ptr()


def test_where_torch_makes_chunks_in_another_way_it_makes_all_and_that_is_said_once(
    monkeypatch, recwarn
):
    monkeypatch.delattr(_fsdp_param, "_chunk_with_empty")
    for _ in range(2):
        with chunks_when_read():
            pass
    [said] = recwarn
    assert "lacks _chunk_with_empty: every rank makes" in str(said.message)
