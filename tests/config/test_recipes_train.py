"""Two steps of recipes as they are, but for their sizes: one of each kind."""

import json

import pytest
from folders import table
from heads import write_queries
from pairs import write_pairs

SMALLER = [
    "model.init_from=null model.num_hidden_layers=2 model.hidden_size=32",
    "model.intermediate_size=48 model.num_attention_heads=4 model.num_key_value_heads=2",
    "model.head_dim=8 batch.rows=4 batch.seq_len=128 train.steps=2",
    "tokenizer.path=demo:bytes compile=disabled",
]
KINDS = table("config/recipe_kinds.yaml")
"""Recipe, data, and what makes the model and the mesh smaller."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_recipe_of_each_kind_trains_and_ends_with_a_checkpoint(world, inputs, tmp_path, kind):
    recipe, data, smaller = KINDS[kind]
    texts = [f"{i} times two is {2 * i}. " * (1 + i % 9) for i in range(80)]
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    write_pairs(tmp_path / "pairs.jsonl")
    write_queries(tmp_path)
    run = world.train(
        tmp_path / "run",
        f"+recipe={recipe}",
        *SMALLER,
        f"data.path={data if ':' in data else tmp_path / data}",
        f"data.cache={inputs['data.cache']}",
        *smaller,
        ranks=2 if any(word.startswith("sharding.") for word in smaller) else 1,
        base=[],
    )
    assert run["step"] == [1, 2]
    if kind == "answers":  # whose loss is around 0
        assert all(0 < tokens <= 8 for tokens in run["answer_tokens"])
        assert all(0 <= reward <= 1 for reward in run["reward"])
    else:
        assert all(loss > 0 for loss in run["loss"])
    assert run.events[-1]["exit_code"] == 0
    assert run.checkpoints == ["step-00000002"]
