"""Schedules, decay, clipping, and steps that are skipped everywhere when a number anywhere is not
finite."""

import inject
import pytest
import torch
import torch.distributed as dist
from stored import assert_bitwise_equal, stored

from fsdp_trainer.config.layout import Layout
from fsdp_trainer.config.schema import Batch, Optim, Schedule, Sharding
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.initialize import initialize_weights
from fsdp_trainer.optim.optimizers import build_optimizer
from fsdp_trainer.optim.schedules import learning_rate, peak_learning_rate
from fsdp_trainer.parallel.dims import Dims


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (Schedule("constant", 4), {1: 0.25, 4: 1, 5: 1, 100: 1}),
        (Schedule("linear", 0), {1: 1, 51: 0.5, 100: 0.01}),
        (Schedule("linear", 20, min_ratio=0.1), {10: 0.5, 20: 1, 21: 1, 61: 0.55}),
        (Schedule("cosine", 0), {1: 1, 51: 0.5}),
        (Schedule("cosine", 20, min_ratio=0.2), {1: 0.05, 20: 1, 21: 1, 61: 0.6}),
        (Schedule("wsd", 0, decay_share=0.2), {1: 1, 81: 1, 91: 0.5, 100: 0.05}),
        (Schedule("wsd", 0, min_ratio=0.5, decay_share=0), {100: 1}),
        (Schedule("cosine", 200), {100: 0.5}),
    ],
    ids=lambda value: f"{value.name}" if isinstance(value, Schedule) else "",
)
def test_the_learning_rate_at_the_corners(schedule, values):
    for step, share in values.items():
        assert learning_rate(schedule, 2.0, step, 100) == pytest.approx(2.0 * share, abs=1e-12), (
            step
        )


def test_the_learning_rate_follows_the_batch_by_the_rule():
    batch = Batch(seq_len=64, rows=32)
    assert peak_learning_rate(Optim(lr=1e-3), batch) == 1e-3
    assert peak_learning_rate(
        Optim(lr=1e-3, lr_scaling="sqrt", lr_batch_tokens=512), batch
    ) == pytest.approx(2e-3)
    assert peak_learning_rate(
        Optim(lr=1e-3, lr_scaling="linear", lr_batch_tokens=8192), batch
    ) == pytest.approx(0.25e-3)


@pytest.mark.slow
def test_a_scaled_learning_rate_is_told_and_the_same_on_any_world_and_after_a_restart(train):
    rule = [
        "optim.lr=1e-2",
        "optim.lr_scaling=sqrt",
        "optim.lr_batch_tokens=1536",
        "schedule=constant",
        "schedule.warmup_steps=0",
    ]
    run = train(
        "run", *rule, "train.steps=2", "batch.micro_rows=1", ranks=2
    )  # 6 rows of 64 tokens: a quarter of 1536
    again = train("run", *rule, "train.steps=3", "batch.micro_rows=1")
    assert again.column("lr") == pytest.approx([5e-3] * 3)
    assert "lr     0.005 for 384 tokens a step" in run.out
    refused = train("half", "optim.lr_scaling=sqrt", code=2)
    assert "optim.lr_batch_tokens" in refused.err
    assert "optim.lr_scaling=sqrt optim.lr_batch_tokens=" in refused.err


def small():
    model = Decoder(
        ModelConfig(
            vocab_size=50,
            hidden_size=16,
            head_dim=4,
            intermediate_size=16,
            num_hidden_layers=1,
            family="qwen3",
        )
    )
    initialize_weights(model, 0)
    return model


def test_matrices_decay_and_norms_do_not():
    model = small()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, Optim(lr=0.1, weight_decay=0.5))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step_unless(torch.tensor(False))
    for name, p in model.named_parameters():
        assert torch.allclose(p, before[name] * (1 if "norm" in name else 0.95)), name
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(before)


def test_a_skipped_step_leaves_weights_moments_and_counts():
    model = small()
    optimizer = build_optimizer(model, Optim(lr=0.1))
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step_unless(torch.tensor(False))
    before = [p.detach().clone() for p in model.parameters()] + [
        v.clone() for s in optimizer.state.values() for v in s.values()
    ]
    for p in model.parameters():
        p.grad = torch.full_like(p, float("nan"))
    optimizer.step_unless(torch.tensor(True))
    after = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("bad", ["gradient", "loss"])
@pytest.mark.parametrize(
    ("ranks", "how"),
    [(1, []), (2, []), pytest.param(2, ["sharding=ddp"], marks=pytest.mark.slow)],
    ids=["1", "2", "ddp"],
)
@pytest.mark.grid(2)
def test_a_number_that_is_not_finite_on_one_rank_skips_the_step_everywhere(train, bad, ranks, how):
    run = train(
        "run",
        "train.steps=5",
        "checkpoint.every=1",
        "checkpoint.keep=9",
        "batch.micro_rows=1",
        *how,
        ranks=ranks,
        seam=inject.bad_numbers(bad, [3]),
    )
    two, three, four = (stored(run.folder / "checkpoints" / f"step-0000000{i}") for i in (2, 3, 4))
    assert_bitwise_equal(two, three)
    assert all(t.isfinite().all() for t in four.values())
    assert not torch.equal(three["weights/model.norm.weight"], four["weights/model.norm.weight"])
    assert run.column("step") == [1, 2, 3, 4, 5]
    assert [e["step"] for e in run.event("skipped")] == [3]
    assert run.metrics[2]["grad_norm"] is None
    assert "NaN" not in (run.folder / "metrics.jsonl").read_text()
    assert "not finite" in run.out
    assert (run.metrics[2]["loss"] is None) == (bad == "loss")
    assert run.column("tokens")[2] > run.column("tokens")[1], "its rows are not trained again"


@pytest.mark.slow
def test_too_many_skipped_steps_in_a_row_end_the_run(train):
    run = train(
        "run",
        "train.steps=9",
        "train.max_skipped=3",
        "checkpoint.every=1",
        "checkpoint.keep=2",
        ranks=2,
        seam=inject.bad_gradient(2, 4, 5, 6, 7, 8),
        code=1,
    )
    assert [e["step"] for e in run.event("skipped")] == [2, 4, 5, 6]
    assert run.events[-1]["exit_code"] == 1
    assert "3 steps in a row" in run.err
    assert "Traceback" not in run.err
    assert run.column("step") == [1, 2, 3, 4, 5, 6]


def one_rank():
    """The dimensions of a process that trains alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return Dims(Layout(Sharding(), dist.get_world_size(), Batch()), "cpu", timeout=60)
    finally:
        dist.destroy_process_group()


def test_elements_are_clipped_before_the_norm_and_the_norm_told_is_that_before_both():
    from fsdp_trainer.training.gradients import clip_gradients

    model = small()
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    whole = torch.cat([p.grad.flatten() for p in model.parameters()])
    norm = clip_gradients(model, one_rank(), 1.0, 0.5)
    wanted = whole.clamp(-0.5, 0.5)
    wanted = wanted / wanted.norm()
    assert torch.allclose(norm, whole.norm())
    assert torch.allclose(
        torch.cat([p.grad.flatten() for p in model.parameters()]), wanted, atol=1e-5
    )


@pytest.mark.slow
def test_without_clipping_the_norm_is_told_all_the_same(train):
    free, clipped = (
        train("free", "train.steps=2", "optim.grad_clip=null"),
        train("clipped", "train.steps=2", "optim.grad_clip=0.01", ranks=2),
    )
    assert free.column("grad_norm")[0] == pytest.approx(clipped.column("grad_norm")[0], rel=1e-4)
    assert free.column("grad_norm")[0] > 0.01
