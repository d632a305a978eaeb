"""What every recipe promises, trained: two steps of the recipe as it is, but for its size."""

import pytest

from fsdp_trainer.config.compose import options

SMALLER = [
    "model.init_from=null", "model.num_hidden_layers=2", "model.hidden_size=32", "model.intermediate_size=48",
    "model.num_attention_heads=4", "model.num_key_value_heads=2", "model.head_dim=8", "batch.seq_len=128", "batch.rows=4",
    "train.steps=2", "data.path=demo:backwards", "tokenizer.path=demo:bytes",
]  # fmt: skip


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[] if name == "quickstart" else pytest.mark.slow) for name in options("train")["recipe"]]
)
def test_every_recipe_trains_and_ends_with_a_checkpoint(world, tmp_path, recipe):
    run = world.train(tmp_path / "run", f"+recipe={recipe}", *SMALLER, ranks=2, base=[])
    assert run.column("step") == [1, 2]
    assert all(loss > 0 for loss in run.column("loss"))
    assert run.events[-1]["exit_code"] == 0 and run.checkpoints == ["step-00000002"]
