"""Muon: one optimizer with AdamW, whose matrices are computed by one rank each."""

import pytest
import torch
from optimizer_steps import gradient_of, optimizer_of, small_decoder, tensors_of_a_block

from fsdp_trainer.config.schema import Optim
from fsdp_trainer.optim.newton_schulz import orthogonalize
from fsdp_trainer.optim.optimizers import build_optimizer


def small():
    return small_decoder(num_hidden_layers=2, tie_word_embeddings=False)


def is_matrix(name, parameter):
    return name.startswith("model.layers.") and parameter.ndim > 1 and "bias" not in name


def steps(optimizers, models, count=3):
    for step in range(count):
        for i, parameters in enumerate(zip(*(m.parameters() for m in models), strict=True)):
            for parameter in parameters:
                parameter.grad = gradient_of(i, step, parameter.shape, is_even=True)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("scale, theirs", [("adamw", "match_rms_adamw"), ("keller", "original")])
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


def test_normuon_is_the_formula_of_its_paper():
    """Li et al. 2025 (arXiv 2510.05491), algorithm 1, on each matrix of a stack."""
    lr, decay, beta1, beta2 = 0.05, 0.1, 0.9, 0.8
    model = tensors_of_a_block(lambda tensor: tensor)
    options = {"nesterov": False, "momentum": beta1, "normuon": True, "normuon_beta": beta2}
    cfg = optimizer_of("muon", lr=lr, weight_decay=decay, ns_dtype="float32", **options)
    optimizer = build_optimizer(model, cfg)
    matrices = {n: p for n, p in model.named_parameters() if is_matrix(n, p)}
    expected = {name: p.detach().clone() for name, p in matrices.items()}
    momentum = {name: torch.zeros_like(p) for name, p in expected.items()}
    square = {name: torch.zeros(*p.shape[:-1], 1) for name, p in expected.items()}
    for step in range(3):
        for i, (name, parameter) in enumerate(model.named_parameters()):
            parameter.grad = gradient = gradient_of(i, step, parameter.shape, is_even=True)
            if name not in matrices:
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
    assert len(matrices) == 7
    for name, weight in expected.items():
        assert torch.allclose(matrices[name], weight, atol=1e-6), name
