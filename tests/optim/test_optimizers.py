"""Lion, SGD, LAMB and LARS: against other implementations, on any number of ranks, through bad
steps and restarts."""

import pytest
import torch
import torch.distributed as dist
from layouts import whole
from stored import newest, stored
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdp_trainer.config.schema import Optim
from fsdp_trainer.optim.footprint import state_bytes
from fsdp_trainer.optim.optimizers import build_optimizer

SHAPES = {"matrix": (7, 64), "stack": (3, 5, 8), "vector": (9,), "experts_bias": (4, 8)}
LR, DECAY, BETAS, EPS = 0.02, 0.1, (0.9, 0.99), 1e-6
OPTIONS = {"lr": LR, "weight_decay": DECAY, "betas": list(BETAS), "eps": EPS, "momentum": 0.9}
NAMES = {
    "lion": {},
    "sgd": {},
    "sgd without nesterov": {"nesterov": False},
    "lamb": {},
    "lars": {"trust_coefficient": 0.5},
}
LAYOUTS = {
    "rows": ((2,), [Shard(0)]),
    "rows, uneven, of replicas": ((2, 2), [Replicate(), Shard(0)]),
    "rows and columns": ((2, 2), [Shard(0), Shard(1)]),
}


def gradient_of(number, step, shape):
    generator = torch.Generator().manual_seed(100 * step + number)
    return torch.randn(shape, generator=generator)


def steps(name, layout=None, count=4, skipped=(2,), **formats):
    """Whole weights and states after some steps."""
    mesh, places = None, []
    if layout:
        shape, places = LAYOUTS[layout]
        mesh = init_device_mesh("cpu", shape)

    def place(tensor):
        own = places if tensor.ndim > 1 else [Replicate()] * len(places)
        return distribute_tensor(tensor, mesh, own) if layout else tensor

    model = nn.ParameterDict()
    for i, (key, shape) in enumerate(SHAPES.items()):
        model[key] = nn.Parameter(place(gradient_of(i, 99, shape)))
    cfg = Optim(name.split()[0], **OPTIONS, **NAMES[name], **formats)
    optimizer = build_optimizer(model, cfg)
    assert optimizer.skips_on_device
    for step in range(count):
        for i, p in enumerate(model.values()):
            number = torch.nan if step in skipped else 1.0
            p.grad = place(gradient_of(i, step, p.shape) * number)
        optimizer.step_unless(torch.tensor(step in skipped))
    state = dict(model.items())
    for key, parameter in model.items():
        state |= {f"{key} {name}": t for name, t in optimizer.state[parameter].items()}
        assert set(optimizer.empty_state(parameter)) == set(optimizer.state[parameter])
    return whole(state)


def lion(weight, gradient, state, _step):
    mean = state.get("mean", 0)
    state["mean"] = BETAS[1] * mean + (1 - BETAS[1]) * gradient
    return torch.sign(BETAS[0] * mean + (1 - BETAS[0]) * gradient)


def lamb(weight, gradient, state, step):
    mean, square = state.get("mean", 0), state.get("square", 0)
    state["mean"] = mean = BETAS[0] * mean + (1 - BETAS[0]) * gradient
    state["square"] = square = BETAS[1] * square + (1 - BETAS[1]) * gradient**2
    mean, square = mean / (1 - BETAS[0] ** step), square / (1 - BETAS[1] ** step)
    return mean / (square.sqrt() + EPS)


def lars(weight, gradient, state, decay):
    """Algorithm 1 of You et al. 2017, for a learning rate LR."""
    quotient = weight.norm() / (gradient.norm() + decay * weight.norm())
    local = NAMES["lars"]["trust_coefficient"] * quotient
    state["sum"] = 0.9 * state.get("sum", 0) + LR * local * (gradient + decay * weight)
    return state["sum"]


def by_hand(name, count):
    """The weights after some steps as the papers have them, in float64; SGD is torch's."""
    weights = {}
    for i, (key, shape) in enumerate(SHAPES.items()):
        weight = gradient_of(i, 99, shape).double()
        decay, state = DECAY if weight.ndim > 1 and not key.endswith("bias") else 0.0, {}
        plain = nn.Parameter(weight.clone())
        nesterov = NAMES[name].get("nesterov", True)
        sgd = torch.optim.SGD([plain], lr=LR, momentum=0.9, nesterov=nesterov)
        for step in range(count):
            gradient = gradient_of(i, step, shape).double()
            if name == "lion":
                weight = weight * (1 - LR * decay) - LR * lion(weight, gradient, state, step)
            elif name == "lamb":
                update = lamb(weight, gradient, state, step + 1) + decay * weight
                is_matrix = weight.ndim > 1 and not key.endswith("bias")
                ratio = weight.norm() / update.norm() if is_matrix else 1.0
                weight = weight - LR * ratio * update
            elif name == "lars":
                weight = weight - lars(weight, gradient, state, decay)
            else:
                plain.data.mul_(1 - LR * decay)
                plain.grad = gradient
                sgd.step()
                weight = plain.detach().clone()
        weights[key] = weight
    return weights


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_those_of_the_paper(name):
    got = steps(name, skipped=())
    for key, weight in by_hand(name, 4).items():
        assert torch.allclose(got[key].double(), weight, rtol=1e-5, atol=2e-6), key


@pytest.mark.parametrize("name", ["lion", "sgd", "lamb", "lars"])
def test_a_skipped_step_changes_nothing(name):
    before, after = steps(name, count=2), steps(name, count=3)
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]), key


def steps_of_each(layout):
    dist.init_process_group("gloo")
    return {name: steps(name, layout) for name in ("lion", "sgd", "lamb", "lars")}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_steps_as_one_process_does(world, layout):
    ranks = torch.Size(LAYOUTS[layout][0]).numel()
    for name, got in world.call(ranks, steps_of_each, layout)[-1].items():
        alone = steps(name)
        assert alone.keys() == got.keys()
        # norms are sums of other parts
        same = torch.allclose if name in ("lamb", "lars") else torch.equal
        for key, tensor in alone.items():
            assert same(tensor, got[key]), (name, key)


@pytest.mark.parametrize("name", ["lion", "sgd", "lamb", "lars", "adamw", "muon"])
@pytest.mark.parametrize("form", [None, "bfloat16", "8bit"])
def test_bytes_of_state_are_what_the_plan_counts(name, form):
    model = nn.Module()
    model.model = nn.ModuleDict({"layers": nn.ParameterDict()})
    weight = model.model["layers"]["matrix"] = nn.Parameter(torch.zeros(4, 256))
    cfg = Optim(name, state_dtype=form)
    state = build_optimizer(model, cfg).empty_state(weight)
    held = sum(t.nbytes for key, t in state.items() if key != "step")
    assert held == state_bytes(cfg, "float32", weight.shape) * weight.numel()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lion", "sgd", "lamb", "lars"])
@pytest.mark.grid(1)
def test_a_run_goes_on_on_any_number_of_ranks(train, name):
    rate = 0.3 if name == "lars" else 1e-3
    options = [f"optim={name}", f"optim.lr={rate}", "batch.micro_rows=2", "checkpoint.every=1"]
    through = train("through", *options, "train.steps=3")
    train("again", *options, "train.steps=2", ranks=2)
    again = train("again", *options, "train.steps=3")
    assert again.column("loss") == pytest.approx(through.column("loss"), abs=2e-6)
    ended, other = stored(newest(through)), stored(newest(again))
    assert ended.keys() == other.keys()
    assert through.column("loss")[-1] < through.column("loss")[0]


@pytest.mark.slow
def test_keys_of_other_optimizers_are_refused(train):
    assert "optim=adamw" in train("run", "optim=sgd", "optim.eps=1e-6", code=2).err
    assert "optim=sgd" in train("run", "optim=lamb", "optim.momentum=0.8", code=2).err
    said = train("run", "optim=sgd", "optim.trust_coefficient=0.1", code=2).err
    assert "only counts with  optim=lars" in said
