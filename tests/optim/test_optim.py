"""Schedules, decay and clipping."""

from unittest.mock import patch

import inject
import pytest
import torch
import torch.distributed as dist
import yaml
from optimizer_steps import small_decoder
from stored import assert_same_end, newest, stored

from fsdp_trainer.base import compiled
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.config.schema import Batch, Optim, Schedule, Sharding
from fsdp_trainer.optim.optimizers import build_optimizer
from fsdp_trainer.optim.schedules import learning_rate, peak_learning_rate
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.run.build import fuses_update
from fsdp_trainer.training.gradients import clip_divisor, clip_gradients

SCHEDULES = yaml.safe_load("""
- [{name: constant, warmup_steps: 4}, {1: 0.25, 4: 1, 5: 1, 100: 1}]
- [{name: linear, warmup_steps: 0}, {1: 1, 51: 0.5, 100: 0.01}]
- [{name: linear, warmup_steps: 20, min_ratio: 0.1}, {10: 0.5, 20: 1, 21: 1, 61: 0.55}]
- [{name: cosine, warmup_steps: 0}, {1: 1, 51: 0.5}]
- [{name: cosine, warmup_steps: 20, min_ratio: 0.2}, {1: 0.05, 20: 1, 21: 1, 61: 0.6}]
- [{name: wsd, warmup_steps: 0, decay_share: 0.2}, {1: 1, 81: 1, 91: 0.5, 100: 0.05}]
- [{name: wsd, warmup_steps: 0, min_ratio: 0.5, decay_share: 0}, {100: 1}]
- [{name: cosine, warmup_steps: 200}, {100: 0.5}]
- [{name: constant, warmup: 0.031}, {1: 0.25, 4: 1}]
- [{name: linear, warmup_steps: 20, from_zero: true}, {1: 0, 11: 0.5, 20: 0.95, 21: 1, 61: 0.5}]
""")
"""Settings, and shares of the peak by step, of 100 steps."""


@pytest.mark.parametrize("settings, values", SCHEDULES)
def test_the_learning_rate_at_the_corners(settings, values):
    for step, share in values.items():
        rate = learning_rate(Schedule(**settings), 2.0, step, 100)
        assert rate == pytest.approx(2.0 * share, abs=1e-12), step


def test_the_learning_rate_follows_the_batch_by_the_rule():
    batch = Batch(seq_len=64, rows=32)
    assert peak_learning_rate(Optim(lr=1e-3), batch) == 1e-3
    assert peak_learning_rate(
        Optim(lr=1e-3, lr_scaling="sqrt", lr_batch_tokens=512), batch
    ) == pytest.approx(2e-3)
    assert peak_learning_rate(
        Optim(lr=1e-3, lr_scaling="linear", lr_batch_tokens=8192), batch
    ) == pytest.approx(0.25e-3)


def test_a_scaled_learning_rate_is_told_and_the_same_on_any_world_and_after_a_restart(train):
    rule = ["optim.lr=1e-2 optim.lr_scaling=sqrt optim.lr_batch_tokens=1536"]
    rule += ["schedule=constant schedule.warmup_steps=0 batch.micro_rows=1"]
    run = train("run", *rule, "train.steps=2", ranks=2)
    # 6 rows of 64 tokens: a quarter of 1536
    again = train("run", *rule, "train.steps=3")
    assert again["lr"] == pytest.approx([5e-3] * 3)
    assert "lr     0.005 for 384 tokens a step" in run.out


def one_rank():
    """The dimensions of a process that trains alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return Dims(Layout(Sharding(), dist.get_world_size(), Batch()), "cpu", timeout=60)
    finally:
        dist.destroy_process_group()


def as_on_a_gpu(real, _device, deterministic):
    return real("cuda", deterministic)


def test_a_fused_update_clips_and_differs_in_the_last_bits(train):
    assert not fuses_update("cpu", deterministic=False)
    how = "optim.grad_clip=0.05 optim.lr=1e-2 schedule=constant train.steps=3"
    plain = train("plain", how)
    seam = inject.around("fuses_update", as_on_a_gpu)
    fused = train("fused", how, seam=seam)
    exact = train("exact", how, "train.deterministic=true", seam=seam)
    assert_same_end(exact, plain)
    assert fused["grad_norm"][0] == plain["grad_norm"][0] > 0.05
    pairs = [(stored(newest(fused))[name], one) for name, one in stored(newest(plain)).items()]
    assert any(not torch.equal(*pair) for pair in pairs)
    weights = [pair for pair in pairs if pair[0].is_floating_point()]
    assert max((a - b).abs().max() for a, b in weights) < 1e-4 * 1e-2


def test_moments_in_bfloat16_are_clipped_in_the_update_and_run_without_a_compiler():
    cfg, ends = Optim(lr=0.1, state_dtype="bfloat16"), []
    for fused in (False, True):
        model = small_decoder()
        optimizer = build_optimizer(model, cfg)
        if fused:
            with (
                patch.object(compiled, "missing_compiler", lambda _: "no compiler"),
                pytest.warns(UserWarning, match="update .* more passes: there is no compiler"),
            ):
                optimizer.fuse()
        for step in range(3):
            torch.manual_seed(step)
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            limit = None if fused else 0.5
            norm = clip_gradients(model, one_rank(), limit, None)
            if fused:
                optimizer.divide_gradients(clip_divisor(norm, 0.5))
            optimizer.step_unless(torch.tensor(step == 1))
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert not torch.equal(*ends)
    assert (ends[0] - ends[1]).abs().max() < 1e-4 * 0.1
