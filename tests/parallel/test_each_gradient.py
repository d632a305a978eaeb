"""Every parameter's gradient and its weight after two steps are those of one process, however ranks
divide tensors, rows, blocks and experts."""

import json
from string import Template

import pytest
import yaml
from layouts import (
    GROUPED,
    LATENT,
    assert_same,
    on_ranks,
    plain,
    without_padding,
)
from tables import rows


def of_model(sizes):
    """Return the words of some sizes of a model."""
    return " ".join(f"model.{name}={json.dumps(value)}" for name, value in sizes.items())


NAMES = dict(
    rows("""
ONE → model.num_hidden_layers=1
TIED → model.tie_word_embeddings=true
WINDOWS → model.tie_word_embeddings=true model.family=gemma3_text model.sliding_window=6
BIASED → model.attention_bias=true
# half of each row is a whole block of 256 numbers
WIDE → model.num_hidden_layers=1 model.intermediate_size=512 model.num_attention_heads=64
EXPERTS → model.family=qwen3_moe model.num_experts=8 model.num_experts_per_tok=2
  model.moe_intermediate_size=12 model.norm_topk_prob=true sharding.expert=2
STAGES → model.num_hidden_layers=4 sharding.pipeline=2 sharding.pipeline_schedule
FULL → checkpoint.mode=full
SELECTIVE → checkpoint.mode=selective
EIGHT_BITS → optim.state_dtype=8bit tolerance=0.0001
MUON → optim.name=muon optim.ns_dtype=float32
LORA → adapter.name=lora adapter.rank=2
COMPILED → compiled=true attention=mask
""")
) | {"LATENT": of_model(LATENT), "GROUPED": of_model(GROUPED)}
CASES = rows("""
tensor: smoothed labels, padding alone on the last → 2 → $ONE model.family=phi3
  model.vocab_multiple=200 sharding.tensor=2 loss.label_smoothing=0.1 loss.z_loss=0.01
tensor: biases, in host memory → 2 → $ONE model.family=llama $BIASED model.mlp_bias=true
  sharding.tensor=2 sharding.cpu_offload=true
tensor: frozen, latent attention → 2 → $LATENT $ONE $BIASED sharding.tensor=2
  freeze=['model.embed_tokens.weight','*norm.weight','*.q_*_proj.weight']
tensor: one key head, all normed → 4 → $ONE model.family=olmo2 model.num_key_value_heads=1
  sharding.tensor=4
tensor: 8 bits, activations on the host → 2 → $WIDE sharding.tensor=2 $EIGHT_BITS $SELECTIVE
  checkpoint.offload=true
tensor: compiled → 2 → $ONE sharding.tensor=2 $COMPILED
context: ring by flash → 2 → $ONE sharding.context=2 sharding.context_method=ring kernel=flash
context: ring by cudnn → 4 → $ONE sharding.context=4 sharding.context_method=ring kernel=cudnn
context: ring by cudnn, compiled → 2 → $ONE sharding.context=2 sharding.context_method=ring
  kernel=cudnn $COMPILED
context: fewer key heads than ranks → 4 → $ONE sharding.context=4
context: windows, gathered by mask → 2 → $WINDOWS sharding.context=2
  sharding.context_method=gathered attention=mask
context: long rope → 2 → model.family=phi3 model.max_position_embeddings=64 sharding.context=2
  model.rope_scaling={"rope_type":"longrope","original_max_position_embeddings":16,"short_factor":[1.0,1.0,1.0,1.0],"long_factor":[2.0,3.0,4.0,5.0]}
context: windows in a ring, by mask → 4 → $WINDOWS sharding.context=2 sharding.context_method=ring
  attention=mask
context and tensor: soft caps, gathered, unsharded → 4 → $ONE $TIED model.family=gemma2
  model.attn_logit_softcapping=20.0 model.final_logit_softcapping=5.0 model.sliding_window=6
  model.num_key_value_heads=4 sharding.context=2 sharding.tensor=2
  sharding.context_method=gathered sharding.accumulate=unsharded
context: hsdp, lora → 4 → sharding.context=2 sharding.strategy=hsdp sharding.replicas=2 $LORA
experts: parts of one → 4 → $EXPERTS model.num_experts=2
experts: all tokens to one rank → 2 → $EXPERTS model.num_experts_per_tok=1
  model.norm_topk_prob=false one_rank=true
experts: latent attention, groups, tensor, ddp → 4 → $GROUPED sharding.expert=2 sharding.tensor=2
  sharding.strategy=ddp
experts: kept gathered, offloaded → 2 → $EXPERTS sharding.reshard_after_forward=false
  sharding.cpu_offload=true checkpoint.offload=true
experts: lora, tensor → 4 → $EXPERTS sharding.tensor=2 $LORA adapter.targets=[all,experts]
  adapter.rank_pattern={"up_proj":3}
experts: gpt_oss, context, recomputed → 2 → $EXPERTS model.family=gpt_oss model.num_experts=4
  model.norm_topk_prob=false $BIASED model.sliding_window=6 sharding.context=2 $SELECTIVE
experts: shared, muon, uneven parts → 4 → $EXPERTS model.family=qwen2_moe
  model.shared_expert_intermediate_size=20 model.num_experts=6 model.norm_topk_prob=false $MUON
  tolerance=0.0001
experts: compiled, recomputed → 2 → $EXPERTS $ONE $COMPILED $FULL
stages: dualpipev, context → 4 → $STAGES=dualpipev sharding.context=2
stages: zbv, tied, tensor → 4 → $WINDOWS $STAGES=zbv sharding.tensor=2
stages: interleaved, frozen in front, compiled → 2 → $STAGES=interleaved $COMPILED
  freeze=['*embed_tokens*','model.layers.0.*']
stages: gpipe, hsdp, 8 bits → 4 → $STAGES=gpipe sharding.strategy=hsdp sharding.replicas=2
  $EIGHT_BITS
stages: lamb, tied, unequal, unsharded → 4 → $TIED $STAGES=1f1b model.num_hidden_layers=3
  optim.name=lamb sharding.accumulate=unsharded
stages: muon, one without matrices → 2 → $STAGES=1f1b $MUON freeze=['model.layers.[012].*']
  tolerance=0.000002
""")
"""Names, ranks, and words, in which $NAME stands for those of NAMES.

Words without a group, and `loss`, are settings of `layouts.plain`.
"""


def read(words):
    """Return the model's sizes, and settings by group."""
    settings = {"sharding": {}}
    for word in Template(words).substitute(NAMES).split():
        name, value = word.split("=", 1)
        group, _, key = name.rpartition(".")
        (settings.setdefault(group, {}) if group else settings)[key] = yaml.safe_load(value)
    return settings.pop("model", {}), settings


def rows_of_step(ranks, settings):
    """Return two micro-batches for each stage of each pipeline, at most 8 rows; else 4."""
    sharding = settings["sharding"]
    if "pipeline" not in sharding:
        return 4
    same_rows = 2 * sharding.get("tensor", 1) * sharding.get("context", 1)
    return min(8, 4 * ranks // same_rows)


@pytest.mark.parametrize("ranks, words", [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_each_gradient_is_that_of_one_process(world, ranks, words):
    ranks = int(ranks)
    sizes, settings = read(words)
    rows = rows_of_step(ranks, settings)
    expected = plain(sizes, settings, rows)
    for got in world.call(ranks, on_ranks, sizes, settings, rows):
        # where states are rounded, one of them may be rounded to the other side
        assert_same(got, expected, settings.get("tolerance", 1e-5))
        assert got[1] == pytest.approx(expected[1], rel=1e-5)


WIDTHS_OF_16 = {
    "num_hidden_layers": 1, "hidden_size": 64, "head_dim": 16, "intermediate_size": 128,
}  # fmt: skip
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
