"""model.depth: one number for the sizes of a model and its training."""

import re

import pytest
from recipe import planned

from fsdp_trainer.config.composing.compose import compose


def composed(*words):
    return compose("train", ["model.depth=12", *words], inputs=False)


def test_twelve_blocks_are_the_model_that_the_rules_were_measured_on():
    cfg = composed("optim=muon")
    model = cfg.model
    assert (model.num_hidden_layers, model.hidden_size, model.intermediate_size) == (12, 768, 2048)
    assert (model.num_attention_heads, model.num_key_value_heads, model.head_dim) == (6, 6, 128)
    assert cfg.batch.rows * cfg.batch.seq_len == 2**19
    # blocks of 12 · 768² weights, and the head
    parameters = 12 * 12 * 768**2 + 32_768 * 768
    assert cfg.train.steps == round(12 * parameters / 2**19)
    twice = composed("optim=muon", "train.tokens_per_parameter=24")
    assert twice.train.steps == pytest.approx(2 * cfg.train.steps, abs=1)
    assert cfg.optim.lr == 3.6e-3
    assert composed().optim.lr == 1e-3


def test_a_deeper_model_has_larger_steps_and_a_wider_one_a_lower_rate():
    larger = composed("model.depth=24", "optim=muon")
    assert larger.model.hidden_size == 1536
    assert larger.batch.rows * larger.batch.seq_len == 2**20
    # half of the width's factor, twice that of the batch
    assert larger.optim.lr == composed("optim=muon").optim.lr
    odd = composed("model.depth=5").model
    assert (odd.hidden_size, odd.num_attention_heads) == (384, 3)


def test_what_is_typed_or_stands_in_a_recipe_wins(tmp_path):
    cfg = composed("batch.rows=100", "optim.lr=0.5", "model.head_dim=64", "train.epochs=2")
    assert (cfg.batch.rows, cfg.optim.lr, cfg.train.steps, cfg.train.epochs) == (100, 0.5, None, 2)
    assert (cfg.model.num_attention_heads, cfg.model.hidden_size) == (12, 768)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("batch: {seq_len: 512}\ntrain: {steps: 7}\n")
    cfg = composed(f"+recipe={recipe}")
    assert (cfg.batch.seq_len, cfg.batch.rows, cfg.train.steps) == (512, 1024, 7)


def test_a_plan_has_its_sizes_and_layouts(program):
    words = ["data=pretrain", "plan.gpu=h100"]
    plan = planned("model.depth=12", *words, "plan.world_size=8")
    assert plan.tokens == 2**19
    assert plan.fits
    # the rules have no learning rate for lion
    words += ["optim=lion", "optim.lr=1e-4", "plan.world_size=2", "plan.search=true"]
    printed = program("plan", "plan.rehearse=false", "model.depth=2", *words)
    assert re.search(r"^[1-9]\d* of \d+ layouts may fit", printed, re.MULTILINE)
