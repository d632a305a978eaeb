"""Every parameter's gradient and its weight after two steps are those of one process, however ranks
divide tensors, rows, blocks and experts."""

import pytest
from layouts import (
    GROUPED,
    LATENT,
    assert_same,
    on_ranks,
    plain,
    without_padding,
)

ONE_BLOCK = {"num_hidden_layers": 1}
FOUR_BLOCKS = {"num_hidden_layers": 4}
TIED = {"tie_word_embeddings": True}
OLMO2 = ONE_BLOCK | {"family": "olmo2"}
WINDOWS = TIED | {"family": "gemma3_text", "sliding_window": 6}
SOFT_CAPS = TIED | {
    "family": "gemma2", "attn_logit_softcapping": 20.0, "final_logit_softcapping": 5.0,
    "sliding_window": 6,
}  # fmt: skip
LONG_ROPE = {
    "family": "phi3",
    "max_position_embeddings": 64,
    "rope_scaling": {
        "rope_type": "longrope", "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.0, 1.0, 1.0], "long_factor": [2.0, 3.0, 4.0, 5.0],
    },
}  # fmt: skip
BLOCKS_OF_64 = {"head_dim": 32, "intermediate_size": 128, "num_hidden_layers": 1}
"""Half of each row of o and down is whole blocks."""
WIDE = ONE_BLOCK | {"intermediate_size": 512, "num_attention_heads": 64}
"""Half of each row is a whole block of 256 numbers."""
EXPERTS = {
    "family": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
    "norm_topk_prob": True,
}  # fmt: skip
GPT_OSS = EXPERTS | {
    "family": "gpt_oss", "attention_bias": True, "sliding_window": 6, "num_experts": 4,
    "norm_topk_prob": False,
}  # fmt: skip
LORA = {"name": "lora", "rank": 2}
DORA = {"name": "dora", "rank": 2}
OF_EXPERTS = LORA | {"targets": ["all", "experts"], "rank_pattern": {"up_proj": 3}}
MUON = {"name": "muon", "ns_dtype": "float32"}
COMPILED = {"compiled": True, "attention": "mask"}


def over(**sharding):
    return {"sharding": sharding}


def staged(schedule="1f1b", **sharding):
    return over(pipeline=2, pipeline_schedule=schedule, **sharding)


CASES = {
    # ranks, sizes, settings
    "tensor": (2, {}, over(tensor=2)),
    "tensor: phi3, smoothed labels, padding alone on the last": (
        2,
        ONE_BLOCK | {"family": "phi3", "vocab_multiple": 200},
        over(tensor=2) | {"loss": {"label_smoothing": 0.1, "z_loss": 1e-2}},
    ),
    "tensor: gemma2, recomputed": (2, SOFT_CAPS, over(tensor=2) | {"checkpoint": {"mode": "full"}}),
    "tensor: biases, in host memory": (
        2,
        ONE_BLOCK | {"family": "llama", "attention_bias": True, "mlp_bias": True},
        over(tensor=2, cpu_offload=True),
    ),
    "tensor: frozen, latent attention": (
        2,
        LATENT | ONE_BLOCK | {"attention_bias": True},
        over(tensor=2)
        | {"freeze": ["model.embed_tokens.weight", "*norm.weight", "*.q_*_proj.weight"]},
    ),
    "tensor: one key head, all normed": (4, OLMO2 | {"num_key_value_heads": 1}, over(tensor=4)),
    "tensor: dora, latent attention": (
        2,
        LATENT | ONE_BLOCK | {"attention_bias": True},
        over(tensor=2) | {"adapter": DORA},
    ),
    "tensor: 4 bits": (
        4,
        BLOCKS_OF_64,
        over(tensor=2) | {"adapter": LORA | {"base": "nf4"}},
    ),
    "tensor: 8 bits, activations on the host": (
        2,
        WIDE,
        over(tensor=2)
        | {"optim": {"state_dtype": "8bit"}, "tolerance": 1e-4}
        | {"checkpoint": {"mode": "selective", "offload": True}},
    ),
    "tensor: compiled": (2, ONE_BLOCK, over(tensor=2) | COMPILED),
    "context: ring, compiled": (
        2,
        ONE_BLOCK,
        over(context=2, context_method="ring") | COMPILED,
    ),
    "context: fewer key heads than ranks": (4, ONE_BLOCK, over(context=4)),
    "context: windows, gathered by mask": (
        2,
        WINDOWS,
        over(context=2, context_method="gathered") | {"attention": "mask"},
    ),
    "context: long rope": (2, LONG_ROPE, over(context=2)),
    "context: latent attention in a ring, recomputed": (
        2,
        LATENT | ONE_BLOCK,
        over(context=2, context_method="ring") | {"checkpoint": {"mode": "selective"}},
    ),
    "context: windows in a ring, by mask": (
        4,
        WINDOWS,
        over(context=2, context_method="ring") | {"attention": "mask"},
    ),
    "context and tensor: soft caps, gathered, unsharded": (
        4,
        ONE_BLOCK | SOFT_CAPS | {"num_key_value_heads": 4},
        over(context=2, tensor=2, context_method="gathered", accumulate="unsharded"),
    ),
    "context: hsdp, lora": (
        4,
        {},
        over(context=2, strategy="hsdp", replicas=2) | {"adapter": LORA},
    ),
    "experts": (2, EXPERTS, over(expert=2)),
    "experts: parts of one": (4, EXPERTS | {"num_experts": 2}, over(expert=2)),
    "experts: all tokens to one rank": (
        2,
        EXPERTS | {"num_experts_per_tok": 1, "norm_topk_prob": False},
        over(expert=2) | {"one_rank": True},
    ),
    "experts: latent attention, groups, tensor, ddp": (
        4,
        GROUPED,
        over(expert=2, tensor=2, strategy="ddp"),
    ),
    "experts: kept gathered, offloaded": (
        2,
        EXPERTS,
        over(expert=2, reshard_after_forward=False, cpu_offload=True)
        | {"checkpoint": {"offload": True}},
    ),
    "experts: lora, tensor": (4, EXPERTS, over(expert=2, tensor=2) | {"adapter": OF_EXPERTS}),
    "experts: gpt_oss, context, recomputed": (
        2,
        GPT_OSS,
        over(expert=2, context=2) | {"checkpoint": {"mode": "selective"}},
    ),
    "experts: shared, muon, uneven parts": (
        4,
        EXPERTS
        | {"family": "qwen2_moe", "shared_expert_intermediate_size": 20, "num_experts": 6}
        | {"norm_topk_prob": False},
        over(expert=2) | {"optim": MUON, "tolerance": 1e-4},
    ),
    "experts: compiled, recomputed": (
        2,
        EXPERTS | ONE_BLOCK,
        over(expert=2) | COMPILED | {"checkpoint": {"mode": "full"}},
    ),
    "stages: dualpipev, context": (4, FOUR_BLOCKS, staged("dualpipev", context=2)),
    "stages: zbv, tied, tensor and shard": (8, FOUR_BLOCKS | WINDOWS, staged("zbv", tensor=2)),
    "stages: interleaved, unsharded, frozen in front, compiled": (
        4,
        FOUR_BLOCKS,
        staged("interleaved", accumulate="unsharded")
        | COMPILED
        | {"freeze": ["*embed_tokens*", "model.layers.0.*"]},
    ),
    "stages: zbv, dora, recomputed": (
        2,
        FOUR_BLOCKS,
        staged("zbv") | {"checkpoint": {"mode": "full"}, "adapter": DORA},
    ),
    "stages: gpipe, hsdp, 8 bits": (
        8,
        FOUR_BLOCKS,
        staged("gpipe", strategy="hsdp", replicas=2)
        | {"optim": {"state_dtype": "8bit"}, "tolerance": 1e-4},
    ),
    "stages: normuon, zbv, tied": (
        4,
        FOUR_BLOCKS | TIED,
        staged("zbv") | {"optim": MUON | {"normuon": True}, "tolerance": 2e-6},
    ),
    "stages: lamb, tied, unequal, shard": (
        4,
        TIED | {"num_hidden_layers": 3},
        staged() | {"optim": {"name": "lamb"}},
    ),
    "stages: muon, one without matrices": (
        2,
        FOUR_BLOCKS,
        staged() | {"optim": MUON, "freeze": ["model.layers.[012].*"], "tolerance": 2e-6},
    ),
    "stages: lora on experts": (
        4,
        FOUR_BLOCKS | EXPERTS | {"num_experts": 4, "mlp_only_layers": (1,)},
        staged("zbv", expert=2) | {"adapter": LORA | {"targets": ["all", "experts"]}},
    ),
}


def rows_of_step(ranks, settings):
    """Return two micro-batches for each stage of each pipeline, at most 8 rows; else 4."""
    sharding = settings["sharding"]
    if "pipeline" not in sharding:
        return 4
    same_rows = 2 * sharding.get("tensor", 1) * sharding.get("context", 1)
    return min(8, 4 * ranks // same_rows)


@pytest.mark.parametrize("case", CASES)
def test_each_gradient_is_that_of_one_process(world, case):
    ranks, sizes, settings = CASES[case]
    rows = rows_of_step(ranks, settings)
    expected = plain(sizes, settings, rows)
    for got in world.call(ranks, on_ranks, sizes, settings, rows):
        # where states are rounded, one of them may be rounded to the other side
        assert_same(got, expected, settings.get("tolerance", 1e-5))
        assert got[1] == pytest.approx(expected[1], rel=1e-5)


WIDTHS_OF_16 = ONE_BLOCK | {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128}
FLOAT8 = {"param_dtype": "bfloat16", "float8": "tensorwise"}


@pytest.mark.parametrize("precision", [{"param_dtype": "bfloat16"}, FLOAT8], ids=str)
def test_in_fewer_bits_gradients_are_as_near_to_float32_as_without_tensor_groups(world, precision):
    if "float8" in precision:
        pytest.importorskip("torchao")
    exact = plain(WIDTHS_OF_16, {}, 4)
    usual, got = (
        world.call(2, on_ranks, WIDTHS_OF_16, {"sharding": layout, "precision": precision}, 4)[0]
        for layout in ({}, {"tensor": 2})
    )
    assert got[1] == pytest.approx(exact[1], rel=0.03)
    for name, gradient in exact[3].items():
        both = (without_padding(run[3], exact[3])[name] for run in (usual, got))
        errors = [(one - gradient).norm() / gradient.norm() for one in both]
        assert errors[1] < 1.5 * errors[0], name
