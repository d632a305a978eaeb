"""Muon: one optimizer with AdamW, whose matrices are computed by one rank each and sharded all the
same."""

from functools import cache
from shutil import copytree

import inject
import pytest
import torch
import torch.distributed as dist
from layouts import whole
from stored import assert_bitwise_equal, newest, stored
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdp_trainer.config.schema import Optim
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.initialize import initialize_weights
from fsdp_trainer.optim.newton_schulz import orthogonalize
from fsdp_trainer.optim.optimizers import build_optimizer

MUON = ["optim=muon", "optim.ns_dtype=float32", "optim.lr=1e-2"]
SHAPES = {
    "tall": (14, 6),
    "wide": (6, 14),
    "square": (8, 8),
    "few_rows": (2, 9),
    "stack": (5, 6, 4),
}
LAYOUTS = {
    "two": ((2,), [Shard(0)]),
    "three, uneven": ((3,), [Shard(0)]),
    "replicas": ((2, 2), [Replicate(), Shard(0)]),
    "whole on each": ((2,), [Replicate()]),
    "columns": ((2, 2), [Shard(0), Shard(-1)]),
    "rows twice": ((2, 2), [Shard(0), Shard(0)]),
}
"""The shape of a mesh, and how every matrix lies on it."""


def small():
    config = ModelConfig(
        vocab_size=50, hidden_size=16, head_dim=4, intermediate_size=24, num_hidden_layers=2,
        family="qwen3", tie_word_embeddings=False,
    )  # fmt: skip
    model = Decoder(config)
    initialize_weights(model, 0)
    return model


def is_matrix(name, parameter):
    return name.startswith("model.layers.") and parameter.ndim == 2


def steps(optimizers, models, count=3):
    for step in range(count):
        for i, parameters in enumerate(zip(*(m.parameters() for m in models), strict=True)):
            generator = torch.Generator().manual_seed(100 * step + i)
            gradient = torch.randn(parameters[0].shape, generator=generator)
            for parameter in parameters:
                parameter.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize(
    ("scale", "theirs"), [("adamw", "match_rms_adamw"), ("keller", "original")]
)
def test_steps_are_those_of_torchs_muon_and_adamw(scale, theirs):
    ours, model = small(), small()
    options = {"lr": 1e-2, "weight_decay": 0.1}
    optimizer = build_optimizer(ours, Optim("muon", scale=scale, **options))
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if is_matrix(name, p)]
    tables = [p for name, p in named.items() if p.ndim == 2 and not is_matrix(name, p)]
    vectors = [{"params": p, "weight_decay": 0.0} for p in named.values() if p.ndim == 1]
    muon = torch.optim.Muon(matrices, adjust_lr_fn=theirs, **options)
    adamw = torch.optim.AdamW(
        [{"params": tables}, *vectors], betas=(0.9, 0.95), fused=True, **options
    )
    steps([optimizer, muon, adamw], [ours, model])
    assert len(matrices) == 14
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, named[name]), name


def test_embedding_and_head_are_never_muons():
    model = small()
    optimizer = build_optimizer(model, Optim("muon"))
    steps([optimizer], [model], 1)
    for name, parameter in model.named_parameters():
        state = set(optimizer.state[parameter])
        assert ("momentum_buffer" in state) == is_matrix(name, parameter), name
        assert state == set(optimizer.empty_state(parameter)), name


@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (9, 9)])
def test_newton_schulz_ends_near_the_polar_factor(shape):
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    quintic = orthogonalize(matrices, "quintic", 5)
    values = torch.linalg.svdvals(quintic)
    assert values.min() > 0.5
    assert values.max() < 1.3
    polar = torch.linalg.svdvals(orthogonalize(matrices, "polar_express", 5))
    assert (polar - 1).abs().max() < 0.15 < (values - 1).abs().max()
    assert torch.allclose(orthogonalize(matrices, "polar_express", 8), u @ v, atol=1e-3)


def test_a_skipped_step_leaves_every_byte_without_a_wait():
    model = small()
    optimizer = build_optimizer(model, Optim("muon", lr=0.1))
    steps([optimizer], [model], 1)
    tensors = [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())]
    before = [t.detach().clone() for t in tensors]
    for p in model.parameters():
        p.grad = torch.full_like(p, float("nan"))
    assert optimizer.skips_on_device
    optimizer.step_unless(torch.tensor(True))
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def blocks_of(place):
    """A model of matrices by the names of a block's, and one table beside them."""
    model = nn.Module()
    model.model = nn.ModuleDict({"layers": nn.ParameterDict()})
    for name, shape in SHAPES.items():
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        model.model["layers"][name] = nn.Parameter(place(weight))
    model.table = nn.Parameter(place(torch.randn(12, 8, generator=torch.Generator())))
    return model


@cache
def moved(layout, **options):
    """Whole weights and momenta after four steps, the third skipped."""
    mesh, places = None, []
    if layout:
        shape, places = LAYOUTS[layout]
        mesh = init_device_mesh("cpu", shape)

    def place(tensor):
        if not layout:
            return tensor
        # the last dimension of a stack is that of its matrices' columns
        own = [Shard(tensor.ndim - 1) if p == Shard(-1) else p for p in places]
        return distribute_tensor(tensor, mesh, own)

    model = blocks_of(place)
    cfg = Optim("muon", lr=0.05, weight_decay=0.1, ns_dtype="float32", eps=1e-3, **options)
    optimizer = build_optimizer(model, cfg)
    for step in range(4):
        for i, p in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * step + i)
            p.grad = place(torch.randn(p.shape, generator=generator))
        optimizer.step_unless(torch.tensor(step == 2))
    state = dict(model.named_parameters())
    for name, parameter in model.named_parameters():
        state |= {f"{name} {key}": value for key, value in optimizer.state[parameter].items()}
    return whole(state)


def largest_difference(some, others):
    assert some.keys() == others.keys()
    return max((some[name] - others[name]).abs().max().item() for name in some)


def moved_both_ways(layout):
    """Results of Muon and of NorMuon."""
    dist.init_process_group("gloo")
    return moved(layout), moved(layout, normuon=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["two", *(pytest.param(one, marks=pytest.mark.slow) for one in [*LAYOUTS][1:])]
)
@pytest.mark.grid(3)
def test_every_layout_moves_matrices_and_stacks_of_them_as_one_process_does(world, layout):
    ranks = torch.Size(LAYOUTS[layout][0]).numel()
    for muon, normuon in world.call(ranks, moved_both_ways, layout):
        assert largest_difference(moved(None), muon) < 2e-6
        assert largest_difference(moved(None, normuon=True), normuon) < 2e-6


def test_normuon_is_the_formula_of_its_paper():
    """Li et al. 2025 (arXiv 2510.05491), algorithm 1, on each matrix of a stack."""
    lr, decay, beta1, beta2 = 0.05, 0.1, 0.9, 0.8
    model, reference = blocks_of(lambda tensor: tensor), blocks_of(lambda tensor: tensor)
    options = {"nesterov": False, "momentum": beta1, "normuon": True, "normuon_beta": beta2}
    cfg = Optim("muon", lr=lr, weight_decay=decay, ns_dtype="float32", **options)
    optimizer = build_optimizer(model, cfg)
    expected = {n: p.detach() for n, p in reference.named_parameters() if n != "table"}
    momentum = {name: torch.zeros_like(p) for name, p in expected.items()}
    square = {name: torch.zeros(*p.shape[:-1], 1) for name, p in expected.items()}
    for step in range(3):
        for i, (name, parameter) in enumerate(model.named_parameters()):
            generator = torch.Generator().manual_seed(100 * step + i)
            parameter.grad = gradient = torch.randn(parameter.shape, generator=generator)
            if name == "table":
                continue
            momentum[name] = beta1 * momentum[name] + (1 - beta1) * gradient
            rows, columns = gradient.shape[-2:]
            stack = momentum[name].view(-1, rows, columns)
            moved = orthogonalize(stack, "quintic", 5).view_as(gradient)
            mean = moved.square().mean(-1, keepdim=True)
            square[name] = beta2 * square[name] + (1 - beta2) * mean
            moved = moved / (square[name].sqrt() + 1e-8)
            norm = moved.square().sum((-2, -1), keepdim=True).sqrt()
            step_size = 0.2 * lr * (rows * columns) ** 0.5 / norm
            expected[name] = expected[name] * (1 - lr * decay) - step_size * moved
        optimizer.step_unless(torch.tensor(False))
    for name, weight in expected.items():
        assert torch.allclose(dict(model.named_parameters())[name], weight, atol=1e-6), name


TRAININGS = {
    "hsdp": (4, ["sharding=hsdp", "sharding.replicas=2"]),
    "ddp": (2, ["sharding=ddp"]),
    "tensor and shard": (4, ["sharding.tensor=2"]),
}
"""The number of ranks, and how they share the model; the next test has uneven shards and stages."""


@pytest.mark.slow
@pytest.mark.further
def test_a_training_does_not_depend_on_the_ranks(train):
    options = [*MUON, "train.steps=3", "batch.rows=4", "batch.micro_rows=1", "optim.eps=1e-3"]
    one = train("one", *options)
    assert one.column("loss")[-1] < one.column("loss")[0]
    for name, (ranks, how) in TRAININGS.items():
        run = train(name.split()[-1], *options, *how, ranks=ranks)
        assert run.column("loss") == pytest.approx(one.column("loss"), abs=2e-6), name
        difference = largest_difference(stored(newest(one)), stored(newest(run)))
        print(f"{name}: {difference:.1e}")
        assert difference < 2e-6, name


@pytest.mark.slow
@pytest.mark.further
def test_a_run_goes_on_with_its_momentum_on_any_number_of_ranks(train):
    muon = ["optim=normuon", *MUON[1:]]  # whose state is Muon's and more
    options = [*muon, "batch.rows=4", "batch.micro_rows=1"]
    options += ["checkpoint.every=1", "checkpoint.keep=9"]
    stages = [*options, "sharding.pipeline=2"]  # of two ranks each
    through = train("through", *stages, "train.steps=3", ranks=4)
    again = train("again", *stages, "train.steps=1", ranks=4)
    assert again.column("loss") == through.column("loss")[:1]
    copytree(again.folder, again.folder.parent / "same")
    train("again", *options, "train.steps=2", ranks=3)
    ended = train("again", *options, "train.steps=3")
    assert ended.column("loss") == pytest.approx(through.column("loss"), abs=2e-6)
    same = train("same", *stages, "train.steps=3", ranks=4)
    assert_bitwise_equal(stored(newest(same)), stored(newest(through)))


@pytest.mark.slow
@pytest.mark.further
def test_a_bad_number_on_one_rank_skips_the_step_of_all_matrices(train):
    options = [*MUON, "train.steps=4", "checkpoint.every=1", "checkpoint.keep=9"]
    run = train("run", *options, "batch.micro_rows=1", ranks=2, seam=inject.bad_gradient(3))
    two, three, four = (stored(run.folder / "checkpoints" / f"step-0000000{i}") for i in (2, 3, 4))
    assert_bitwise_equal(two, three)
    assert all(t.isfinite().all() for t in four.values())
    assert not torch.equal(three["weights/model.layers.0.mlp.up_proj.weight"],
                           four["weights/model.layers.0.mlp.up_proj.weight"])  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        (["optim=muon", "adapter=lora", "model.init_from=hf"], "low-rank"),
        (["optim=muon", "sharding.cpu_offload=true"], "sharding.cpu_offload=false"),
        (["optim.ns_steps=4"], "optim=muon"),
        (["optim=muon", "optim.normuon_beta=0.9"], "optim.normuon=true"),
        (["optim=muon", "optim.momentum=1"], "optim.momentum=0.95"),
    ],
)
def test_what_muon_cannot_do_is_refused_before_anything_starts(train, typed, named):
    assert named in train("run", *typed, code=2).err
