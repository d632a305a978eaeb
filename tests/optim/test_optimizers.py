"""Every optimizer and format: against other implementations, on any number of ranks, and through
bad steps."""

import inject
import pytest
import torch
import yaml
from optimizer_steps import (
    SKIPPED,
    STEPS,
    gradient_of,
    optimizer_of,
    steps,
    steps_on_a_rank,
    tensors_of_a_block,
)
from torch import nn

from fsdp_trainer.optim.footprint import state_bytes
from fsdp_trainer.optim.optimizers import build_optimizer

F32, BF16 = torch.float32, torch.bfloat16
BETAS, LR, DECAY, EPS = (0.9, 0.99), 0.02, 0.1, 1e-6
BY_HAND = {
    "lion": {"betas": [*BETAS]},
    "sgd": {"momentum": 0.9},
    "sgd without nesterov": {"momentum": 0.9, "nesterov": False},
    "lamb": {"betas": [*BETAS], "eps": EPS},
    "lars": {"momentum": 0.9, "trust_coefficient": 0.5},
}


def of_paper(name):
    return optimizer_of(name.split()[0], lr=LR, weight_decay=DECAY, **BY_HAND[name])


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
    local = BY_HAND["lars"]["trust_coefficient"] * quotient
    state["sum"] = 0.9 * state.get("sum", 0) + LR * local * (gradient + decay * weight)
    return state["sum"]


def by_hand(name, count):
    """The weights after some steps as the papers have them, in float64; SGD is torch's."""
    weights = {}
    for i, (key, first) in enumerate(tensors_of_a_block(lambda t: t).named_parameters()):
        weight = first.detach().double()
        is_matrix = weight.ndim > 1 and not key.endswith("bias")
        decay, state = DECAY if is_matrix else 0.0, {}
        plain = nn.Parameter(weight.clone())
        nesterov = BY_HAND[name].get("nesterov", True)
        sgd = torch.optim.SGD([plain], lr=LR, momentum=0.9, nesterov=nesterov)
        for step in range(count):
            gradient = gradient_of(i, step, weight.shape).double()
            if name == "lion":
                weight = weight * (1 - LR * decay) - LR * lion(weight, gradient, state, step)
            elif name == "lamb":
                update = lamb(weight, gradient, state, step + 1) + decay * weight
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


@pytest.mark.parametrize("name", BY_HAND)
def test_steps_are_those_of_the_paper(name):
    got = steps(of_paper(name), skipped=None)
    for key, weight in by_hand(name, STEPS).items():
        close = torch.allclose(got[f"weights/{key}"].double(), weight, rtol=1e-5, atol=2e-6)
        assert close, key


MUON = optimizer_of("muon", lr=0.05, ns_dtype="float32", eps=1e-3)
NORMUON = optimizer_of("muon", lr=0.05, ns_dtype="float32", eps=1e-3, normuon=True)
FORMATS = {
    "bfloat16 moments": (optimizer_of("adamw", state_dtype="bfloat16"), F32),
    "8-bit moments": (optimizer_of("adamw", state_dtype="8bit"), F32),
    "bfloat16": (optimizer_of("adamw"), BF16),
    "bfloat16 weights": (optimizer_of("adamw", state_dtype="float32"), BF16),
    "bfloat16, 8-bit moments": (optimizer_of("adamw", state_dtype="8bit"), BF16),
}
TORCHS = {
    "fused": (optimizer_of("adamw"), F32),
    "foreach": (optimizer_of("adamw", implementation="foreach"), F32),
    "bfloat16 to nearest": (optimizer_of("adamw", rounding="nearest"), BF16),
}
"""Whose CPU kernel computes the last few numbers of a rank another way."""
OTHERS = {
    **{name: (of_paper(name), F32) for name in ("lion", "sgd", "lamb", "lars")},
    "muon": (MUON, F32),
    "normuon": (NORMUON, F32),
}
ALL = FORMATS | TORCHS | OTHERS


@pytest.mark.parametrize("name", ALL)
def test_a_skipped_step_leaves_every_byte(name):
    cfg, dtype = ALL[name]
    before, after, last = (steps(cfg, dtype=dtype, count=SKIPPED + i) for i in range(3))
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]), key
    assert not torch.equal(last["weights/table"], after["weights/table"])
    optimizer = build_optimizer(tensors_of_a_block(lambda t: t, dtype), cfg)
    assert optimizer.skips_on_device or name == "foreach", "without a wait"


NEAR = {"rtol": 0, "atol": 2e-6}
CLOSE = {"lamb": {}, "lars": {}, "muon": NEAR, "normuon": NEAR}
"""Tolerances where numbers are sums or products of matrices of other parts; others are equal."""
LAYOUTS_OF = dict.fromkeys(FORMATS, ("rows",)) | yaml.safe_load("""
lion: [rows of replicas]
sgd: [rows of replicas]
lamb: [rows of replicas, rows and columns]
lars: [rows and columns]
8-bit moments: [rows twice, columns and rows, columns of replicas]
bfloat16: [rows and columns]
normuon: [rows, whole on each, rows and columns, columns of replicas]
muon: [rows and columns]
""")


def test_every_layout_steps_as_one_process_does(world):
    """Some ranks have no row of a matrix."""
    names = [(name, layout) for name, layouts in LAYOUTS_OF.items() for layout in layouts]
    cases = [(ALL[name][0], layout, ALL[name][1]) for name, layout in names]
    expected = {name: steps(ALL[name][0], dtype=ALL[name][1]) for name in LAYOUTS_OF}
    for place, got in zip(names, world.call(4, steps_on_a_rank, cases)[-1], strict=True):
        alone = expected[place[0]]
        assert alone.keys() == got.keys(), place
        for key, tensor in alone.items():
            assert tensor.dtype == got[key].dtype, (place, key)
            close = CLOSE.get(place[0], {"rtol": 0, "atol": 0})
            assert torch.allclose(tensor, got[key], **close), (place, key)


def test_chunks_change_nothing():
    for cfg, dtype in FORMATS.values():
        whole = steps(cfg, dtype=dtype)
        with inject.setting("optimizer_chunk", {"cpu": 256}):
            for key, tensor in steps(cfg, dtype=dtype).items():
                assert torch.equal(tensor, whole[key]), key


@pytest.mark.parametrize("name", ["lion", "sgd", "lamb", "lars", "adamw", "muon"])
@pytest.mark.parametrize(
    "form, master, promised",
    [
        (None, "float32", 8),
        (None, "bfloat16", 4),
        ("bfloat16", "float32", 4),
        ("8bit", "float32", 2 * (1 + 4 / 256)),
    ],
)
def test_bytes_of_state_are_what_the_plan_counts(name, form, master, promised):
    model = nn.Module()
    model.model = nn.ModuleDict({"layers": nn.ParameterDict()})
    weight = nn.Parameter(torch.zeros(4, 256, dtype=getattr(torch, master)))
    model.model["layers"]["matrix"] = weight
    cfg = optimizer_of(name, state_dtype=form)
    state = build_optimizer(model, cfg).empty_state(weight)
    held = sum(t.nbytes for key, t in state.items() if key != "step") / weight.numel()
    assert held == state_bytes(cfg, master, weight.shape)
    assert held == promised or name != "adamw"
