"""A run that goes on with other ranks, which divide other things, is one run; and what each layout
has written is exported and imported to the last bit."""

import pytest
import torch
from layouts import imported
from stored import assert_columns, assert_near, checkpoint, newest, stored, tensors
from world import read_lines

HOW = [
    "model.family=qwen3_moe model.num_experts=4 model.num_hidden_layers=4",
    "model.vocab_size=301 schedule=constant checkpoint.keep=9",
    "checkpoint.every=1 batch.rows=4 batch.micro_rows=1 optim.eps=1e-3",
    "data.validation=0.1 train.validate_every=2 train.check_every=2",
    "train.sample_prompts=[a,bb] train.sample_tokens=3",
]
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
        words = [*own, *HOW, f"train.steps={steps}", *overrides]
        run = world.train(folder, *words, ranks=ranks)
    return run


def test_a_run_of_many_layouts_is_one_run(train, parts):
    whole = train("whole", *HOW, "train.steps=4", ranks=2)
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
    assert weights.keys() == others.keys()
    for name in weights:
        torch.testing.assert_close(weights[name], others[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "step, sharding", [(1, {"tensor": 2}), (2, {"pipeline": 2}), (3, {"expert": 2})]
)
def test_what_a_layout_has_written_is_exported_and_imported_to_the_last_bit(
    world, parts, tmp_path, step, sharding
):
    source, out = checkpoint(parts, step), tmp_path / "hf"
    world.command("export", f"source={source} out={out}")
    exported, written = tensors(out), stored(source)
    assert exported["model.embed_tokens.weight"].shape[0] == 301
    experts = [name for name in exported if ".mlp.experts.1.up_proj" in name]
    assert len(experts) == 4
    for name, tensor in exported.items():
        if ".experts." not in name:
            assert torch.equal(tensor, written[f"weights/{name}"][: len(tensor)]), name
    for name in experts:
        stacked = written[f"weights/{name.replace('.1.up_proj.weight', '.up_proj')}"]
        assert torch.equal(exported[name], stacked[1])
    for rank in world.call(2, imported, out, sharding):
        for name, tensor in rank.items():
            expected = exported[name] if name in exported else written[f"weights/{name}"]
            assert torch.equal(tensor[: len(expected)], expected), name
