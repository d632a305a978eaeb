"""Two steps of recipes as they are, but for their sizes: one of each kind."""

import json

import pytest
from heads import write_queries
from pairs import write_pairs

SMALLER = [
    "model.init_from=null", "model.num_hidden_layers=2", "model.hidden_size=32",
    "model.intermediate_size=48", "model.num_attention_heads=4", "model.num_key_value_heads=2",
    "model.head_dim=8", "batch.rows=4", "batch.seq_len=128", "train.steps=2",
    "tokenizer.path=demo:bytes", "compile=disabled",
]  # fmt: skip
KINDS = {
    "two stages of each rank": (
        "llama405b_pretrain_pp",
        "text.jsonl",
        ["model.num_hidden_layers=4", "sharding.tensor=1", "sharding.pipeline=2"],
    ),
    "experts on ranks": (
        "deepseek_v3_sft",
        "demo:backwards",
        [
            "model.num_key_value_heads=4", "model.qk_nope_head_dim=4",
            "model.qk_rope_head_dim=4", "model.v_head_dim=8", "model.kv_lora_rank=16",
            "model.q_lora_rank=16", "model.num_experts=8", "model.n_group=2", "model.topk_group=1",
            "model.num_experts_per_tok=2", "model.moe_intermediate_size=16",
            "model.first_k_dense_replace=1", "sharding.expert=2",
        ],
    ),
    "states on disk": ("llama8b_sft_24gb", "demo:backwards", []),
    "a packed base": ("llama70b_qlora", "demo:backwards", []),
    "pairs": ("qwen3_0_6b_dpo_lora", "pairs.jsonl", []),
    "queries": ("qwen3_0_6b_embed", "queries.jsonl", []),
    "answers": (
        "qwen3_0_6b_grpo",
        "demo:sums",
        ["objective.max_new_tokens=8", "objective.samples=2"],
    ),
}  # fmt: skip
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
    assert run.column("step") == [1, 2]
    if kind == "answers":  # whose loss is around 0
        assert all(0 < tokens <= 8 for tokens in run.column("answer_tokens"))
        assert all(0 <= reward <= 1 for reward in run.column("reward"))
    else:
        assert all(loss > 0 for loss in run.column("loss"))
    assert run.events[-1]["exit_code"] == 0
    assert run.checkpoints == ["step-00000002"]
