"""A run that goes on with other ranks, which divide other things, is one run; and what each layout
has written is exported and imported to the last bit."""

import pytest
import torch
from stored import assert_columns, assert_near, newest, stored
from world import read_lines

HOW = (
    "model.family=qwen3_moe model.num_experts=4 model.num_hidden_layers=4"
    " model.vocab_size=301 schedule=constant checkpoint.keep=9 checkpoint.every=1"
    " batch.rows=4 batch.micro_rows=1 optim.eps=1e-3 data.validation=0.1"
    " train.validate_every=2 train.check_every=2 train.sample_prompts=[a,bb]"
    " train.sample_tokens=3"
)
LAYOUTS = {
    1: (2, ["sharding.tensor=2"]),
    2: (2, ["sharding.pipeline=2 sharding.pipeline_schedule=zbv"]),
    3: (4, ["sharding.expert=4 sharding.context=2"]),
    4: (1, []),
}
"""Ranks and overrides, by the step up to which they train."""


@pytest.fixture(scope="module")
def parts(world, inputs, tmp_path_factory):
    """Return a run of which each step is of another layout."""
    folder = tmp_path_factory.mktemp("parts") / "run"
    own = [f"{key}={value}" for key, value in inputs.items()]
    for steps, (ranks, overrides) in LAYOUTS.items():
        words = [*own, HOW, f"train.steps={steps}", *overrides]
        run = world.train(folder, *words, ranks=ranks)
    return run


def test_a_run_of_many_layouts_is_one_run(train, parts):
    whole = train("whole", HOW, "train.steps=4", ranks=2)
    assert_columns(parts, whole, "step", "tokens", "supervised_tokens")
    assert_near(parts, whole, loss=1e-5, grad_norm=1e-4)
    for step in (2, 4):
        lines = [run.metrics[step - 1]["validation_loss"] for run in (parts, whole)]
        assert lines[0] == pytest.approx(lines[1], rel=1e-5)
    answers = [
        [line for line in read_lines(run.folder / "samples.jsonl") if line["step"] == 2]
        for run in (parts, whole)
    ]
    assert answers[0]
    assert answers[0] == answers[1]
    weights, others = stored(newest(parts)), stored(newest(whole))
    torch.testing.assert_close(weights, others, rtol=0, atol=1e-5)
