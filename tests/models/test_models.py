"""The decoder computes what transformers computes: logits, gradients, generation; and refuses by
name what it does not know."""

import contextlib
import importlib
import itertools
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
import yaml
from gradients import (
    LENGTHS,
    ROW,
    assert_gradients_are_those_of,
    documents,
    positions_of,
    random_tokens,
)
from refused import refusal
from tables import rows
from world import write_json
from zoo import LLAMA3, SIZES, WILD, ZOO, make_model

import fsdp_trainer
from fsdp_trainer.config.parts.families import FAMILIES, FULL
from fsdp_trainer.config.schema import Model, TrainConfig
from fsdp_trainer.errors import UserError
from fsdp_trainer.generation.continuations import generate_tokens, stream_tokens
from fsdp_trainer.generation.sampling import Sampling
from fsdp_trainer.models.attention import LAYOUTS, DocumentAttention, MaskedAttention
from fsdp_trainer.models.config import REFUSED_UNLESS, TRANSFORMERS, ModelConfig
from fsdp_trainer.models.decoder import Decoder, MicroBatch
from fsdp_trainer.models.from_config.initialize import BLOCK, draw_numbers, initialize_weights
from fsdp_trainer.models.from_config.resolve import model_problems, resolve_model
from fsdp_trainer.models.hf.read_architecture import read_architecture, stored_vocabulary
from fsdp_trainer.models.rope import Rope
from fsdp_trainer.run.describe import left_out_of_training
from fsdp_trainer.training.objective import CrossEntropy
from fsdp_trainer.training.weights import stored_config

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=ZOO)
def pair(request, tmp_path_factory):
    """Ours and theirs with the same random weights, norms and biases included."""
    folder = tmp_path_factory.mktemp("hf")
    theirs = make_model(request.param)
    theirs.save_pretrained(folder)
    return fsdp_trainer.load_model(folder).requires_grad_(True), theirs


def test_logits_are_those_of_transformers_also_past_the_original_context(pair):
    ours, theirs = pair
    tokens = random_tokens(2, 150)
    with torch.no_grad():
        assert (ours.logits(tokens) - theirs(tokens).logits).abs().max() <= 1e-4


@pytest.mark.parametrize("layout", ["documents", "mask"])
def test_packed_documents_never_see_each_other(pair, layout):
    ours, theirs = pair
    tokens = random_tokens(3, ROW)
    where = LAYOUTS[layout](LENGTHS, ROW, CPU)
    with torch.no_grad():
        hidden, _ = ours.hidden(tokens, positions_of(LENGTHS, ROW), where)
        packed = ours.lm_head(ours.model.norm(hidden))
        for row, part, alone in documents(tokens):
            assert (packed[row, part] - theirs(alone).logits[0]).abs().max() <= 1e-4
    assert packed.isfinite().all(), "padding too"


def test_gradients_of_all_parameters_are_those_of_transformers(pair):
    ours, theirs = pair
    assert_gradients_are_those_of(theirs, ours)


def test_an_empty_row_gives_every_parameter_a_gradient_of_zero(pair):
    ours, _ = pair
    ours.zero_grad()
    nothing, zeros = torch.zeros(128, dtype=torch.int64), torch.zeros(2, ROW, dtype=torch.int64)
    layout = DocumentAttention([[], []], ROW, CPU)
    batch = MicroBatch(zeros, zeros, layout, nothing, nothing, torch.zeros(128))
    ours(batch, CrossEntropy(batch.weights)).value.backward()
    assert all(p.grad is not None and not p.grad.any() for p in ours.parameters())


NEW = 8
"""Tokens of an answer."""
CACHES = (
    *("llama yarn", "mistral window", "qwen3_moe", "deepseek_v3", "gpt_oss"),
    *("gemma2", "gemma3 long", "phi4 mini"),
)
"""Models that keep or turn what they have seen in different ways."""


@pytest.mark.parametrize("pair", CACHES, indirect=True)
def test_prompts_in_one_batch_continue_as_each_alone_and_as_in_transformers(pair):
    """They end on both sides of the windows, of 8 or 16 tokens, and of yarn's first context."""
    ours, theirs = pair
    prompts = [random_tokens(length).tolist() for length in (3, 20, 1, 11)]
    sampling = Sampling(max_tokens=NEW)
    together = [answers[0] for answers in generate_tokens(ours, prompts, (), sampling)]
    assert together == [list(stream_tokens(ours, prompt, (), sampling)) for prompt in prompts]
    theirs.generation_config.eos_token_id = None
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    for prompt, tokens in zip(prompts, together, strict=True):
        given = torch.tensor([prompt])
        expected = theirs.generate(given, attention_mask=torch.ones_like(given), **options)
        assert tokens == expected[0, len(prompt) :].tolist()


def test_attention_costs_what_the_masks_let_through(pair):
    ours, _ = pair
    lengths = np.array([1, 5, 8, 9, 30])
    counted = np.zeros(len(lengths))
    for window in ours.config.windows:
        for i, length in enumerate(lengths):
            mask = MaskedAttention([[length]], length, CPU).with_window(window).mask
            # n² where n(n+1)/2 pairs are seen
            counted[i] += 2 * mask.sum() - min(length, window or length)
    assert ours.config.attention_cost(lengths) == pytest.approx(counted / len(ours.config.windows))


def test_parameters_are_counted_without_building(pair):
    ours, theirs = pair
    numbers = sum(p.numel() for p in theirs.parameters())
    assert ours.config.parameters() == numbers == sum(p.numel() for p in ours.parameters())


# --- random weights -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "start, count", [(0, 10), (BLOCK - 3, 6), (BLOCK, BLOCK), (5, 2 * BLOCK + 7)]
)
def test_any_part_of_a_random_matrix_can_be_drawn_alone(start, count):
    whole = draw_numbers(0, "a", 0, 3 * BLOCK, 0.5)
    assert torch.equal(draw_numbers(0, "a", start, count, 0.5), whole[start : start + count])
    assert abs(whole.std() - 0.5) < 0.01
    assert abs(whole.mean()) < 0.01
    assert not torch.equal(draw_numbers(0, "b", start, count, 0.5), whole[start : start + count])


def test_norms_start_at_one_and_matrices_with_the_models_deviation():
    model = Decoder(ModelConfig(family="qwen3", vocab_size=500, initializer_range=0.05))
    initialize_weights(model, 0)
    for name, p in model.named_parameters():
        assert (p == 1).all() if name.endswith("norm.weight") else abs(p.std() - 0.05) < 0.003, name
    gemma = Decoder(ModelConfig(family="gemma3_text", vocab_size=500))
    initialize_weights(gemma, 0)
    assert not gemma.model.norm.weight.any(), "its norms scale by 1 + weight"


@pytest.mark.parametrize(
    "initializer, shares",
    [("plain", [1, 1, 1]), ("depth", [6**-0.5] * 3), ("layer", [2**-0.5, 0.5, 6**-0.5])],
)
def test_what_adds_to_the_stream_may_start_smaller_with_depth(initializer, shares):
    sizes = {"vocab_size": 500, "num_hidden_layers": 3}
    model = Decoder(ModelConfig(**sizes, initializer=initializer, initializer_range=0.05))
    initialize_weights(model, 0)
    for block, share in zip(model.model.layers.values(), shares, strict=True):
        for p in (block.self_attn.o_proj.weight, block.mlp.down_proj.weight):
            assert p.detach().std().item() == pytest.approx(0.05 * share, rel=0.05)
        assert block.mlp.up_proj.weight.detach().std().item() == pytest.approx(0.05, rel=0.05)


# --- config.json --------------------------------------------------------------------------------


def config_json(folder, **values):
    folder.mkdir(exist_ok=True)
    own = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES, **values}
    write_json(folder / "config.json", own)
    return folder


def test_the_spellings_of_transformers_4_and_5_read_equal(tmp_path):
    scaling = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    linear = {"type": "linear", "factor": 2.0}
    four = config_json(tmp_path / "4", rope_theta=5e5, rope_scaling=scaling, torch_dtype="bfloat16")
    older = config_json(tmp_path / "3", rope_theta=5e5, rope_scaling=linear)
    five = config_json(tmp_path / "5", rope_parameters=LLAMA3, dtype="bfloat16")
    none = config_json(tmp_path / "none", rope_scaling=None)
    read = ModelConfig.from_hf(five)
    assert ModelConfig.from_hf(four) == read
    assert (read.rope_theta, read.rope_scaling) == (5e5, scaling)
    assert ModelConfig.from_hf(older).rope_scaling == {"rope_type": "linear", "factor": 2.0}
    assert ModelConfig.from_hf(none).rope_theta == 10_000
    written = read.to_hf("bfloat16")
    assert written["torch_dtype"] == written["dtype"] == "bfloat16"
    assert written["rope_parameters"]["rope_theta"] == written["rope_theta"] == 5e5


SCALINGS, PARAMETERS, OUTSIDE = yaml.safe_load("""
- # rope_scaling
  - null
  - {type: linear, factor: 2.0}
  - {type: linear, rope_type: default, factor: 2.0}
  - {type: default, rope_type: linear, factor: 2.0, rope_theta: 777.0}
  - {rope_type: yarn, factor: 2.0, original_max_position_embeddings: 32}
- # rope_parameters
  - {}
  - {rope_type: default, rope_theta: 500000.0}
  - {rope_type: linear, factor: 4.0, rope_theta: 500000.0}
- # beside them
  - {}
  - {rope_theta: 999.0, original_max_position_embeddings: 16}
""")
ROTARY = {"llama": ("llama", "Llama"), "gemma3_text": ("gemma3", "Gemma3")}
"""Module and beginning of the name of transformers' class."""


@pytest.mark.parametrize("family", ROTARY)
def test_rope_scaling_counts_before_rope_parameters_as_in_transformers(tmp_path, family):
    module, name = ROTARY[family]
    modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    written = resolve_model(Model(family=family), 320).to_hf("float32")
    for key in ("rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq"):
        written.pop(key, None)

    def frequencies(raw):
        write_json(tmp_path / "config.json", raw)
        rope = Rope(ModelConfig.from_hf(tmp_path))
        config = transformers.AutoConfig.from_pretrained(tmp_path)
        theirs = getattr(modeling, f"{name}RotaryEmbedding")(config)
        prefix = "full_attention_" if module == "gemma3" else ""
        assert torch.allclose(rope.frequencies, getattr(theirs, f"{prefix}inv_freq")), raw
        assert rope.attention_factor == getattr(theirs, f"{prefix}attention_scaling")
        return rope.frequencies

    for scaling, parameters, outside in itertools.product(SCALINGS, PARAMETERS, OUTSIDE):
        if module == "gemma3":
            parameters = {FULL: parameters} if parameters else None
        raw = {**written, **outside, "rope_scaling": scaling, "rope_parameters": parameters}
        read = frequencies(raw)
        exported = ModelConfig.from_hf(tmp_path).to_hf("float32")
        assert torch.equal(frequencies(exported), read)


def test_the_older_name_of_a_scaling_is_one_in_a_recipe_too():
    model = Model(rope_scaling={"type": "linear", "factor": 2.0})
    assert resolve_model(model, 320).rope_scaling == {"rope_type": "linear", "factor": 2.0}


def meaning(config):
    return replace(config, layer_types=()), config.windows


@pytest.mark.parametrize("name", WILD)
def test_what_a_published_config_json_leaves_out_means_what_transformers_takes_it_to_mean(
    tmp_path, name
):
    def told_by_transformers(folder, described):
        folder.mkdir()
        write_json(folder / "config.json", described)
        read = transformers.AutoConfig.from_pretrained(folder)
        getattr(read, "text_config", read).save_pretrained(folder / "again")
        return meaning(ModelConfig.from_hf(folder / "again"))

    theirs = told_by_transformers(tmp_path / "theirs", WILD[name])
    ours = ModelConfig.from_hf(tmp_path / "theirs")
    assert meaning(ours) == theirs
    again = told_by_transformers(tmp_path / "ours", ours.to_hf("bfloat16"))
    assert again == theirs, "what we write means the same"
    assert meaning(ModelConfig.from_hf(tmp_path / "ours")) == meaning(ours)


def test_gemma_of_our_own_sizes_says_what_its_scores_are_divided_by(tmp_path):
    config = ModelConfig(family="gemma2", head_dim=24)
    written = config.to_hf("float32")
    assert written["query_pre_attn_scalar"] == 24, "transformers cannot compute with null"
    write_json(tmp_path / "config.json", written | {"query_pre_attn_scalar": None})
    assert ModelConfig.from_hf(tmp_path).query_pre_attn_scalar is None, "written before 0.7.0"
    third = ModelConfig(family="gemma2", query_pre_attn_scalar=256 / 3).to_hf("float32")
    assert third["query_pre_attn_scalar"] == 256 / 3


UNSUPPORTED = """
{"model_type": "mamba"}
{"architectures": ["LlamaForQuestionAnswering"]}
{"hidden_act": "relu"}
{"quantization_config": {"quant_method": "fp8"}}
{"layer_types": ["chunked_attention", "full_attention"]}
{"attention_dropout": 1.5}
{"use_bidirectional_attention": true}
{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
{"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}
{"hidden_size": null}
{"num_attention_heads": null}
{"sliding_window": 0, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
{"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 8, \
"short_factor": [1.0], "long_factor": [1.0]}}
"""


@pytest.mark.parametrize("text", UNSUPPORTED.strip().splitlines())
def test_what_is_not_supported_is_refused_by_name(tmp_path, text):
    said = refusal(ModelConfig.from_hf, config_json(tmp_path, **json.loads(text)))
    name, value = re.findall(r"\w+", text)[0], re.findall("mamba|yarn|dynamic|short_factor", text)
    assert (value or [name])[0] in said


UNKNOWN = rows("""
{"model_type": "granite", "logits_scaling": 8.0} → llama → logits_scaling=8.0
{"model_type": "smollm3", "no_rope_layers": [1, 0]} → llama → no_rope_layers
{"model_type": "olmo3", "layer_types": ["sliding_attention"]} → olmo2 → layer_types
{"model_type": "granitemoe", "num_local_experts": 8} → mixtral → "model_type": "mixtral"
{"model_type": "qwen9", "num_experts": 8} → qwen3_moe → "model_type": "qwen3_moe"
{"model_type": "mistral9"} → mistral → "model_type": "mistral"
{"model_type": "kimi_k2", "kv_lora_rank": 512} → deepseek_v3 → "model_type": "deepseek_v3"
""")
"""Parts of a config.json, its nearest family, and what is said of it."""


@pytest.mark.parametrize("text, near, part", UNKNOWN)
def test_an_unknown_model_type_is_told_its_nearest_family_and_what_to_do(
    tmp_path, text, near, part
):
    folder = config_json(tmp_path, architectures=["X"], **json.loads(text))
    said = refusal(ModelConfig.from_hf, folder)
    assert f"The nearest is {near}" in said
    assert part in said
    assert "docs/add-a-model.md" in said


def test_a_config_json_of_another_kind_has_no_near_family(tmp_path):
    write_json(tmp_path / "config.json", {"model_type": "gpt2", "n_embd": 768})
    assert "None of them is near" in refusal(ModelConfig.from_hf, tmp_path)


def test_what_transformers_would_not_compute_is_ignored_in_a_folder_and_refused_when_asked_for(
    tmp_path, train
):
    bogus = {"partial_rotary_factor": 0.5, "attn_logit_softcapping": 5.0, "attention_bias": True}
    folder = config_json(tmp_path, model_type="mistral", architectures=None, **bogus)
    read = ModelConfig.from_hf(folder)
    assert (read.partial_rotary_factor, read.attn_logit_softcapping) == (1, None)
    assert not read.attention_bias
    changes = "model.attn_logit_softcapping=5 model.partial_rotary_factor=0.5"
    refused = train("run", changes, "train.steps=1", code=2)
    for said in ("attn_logit_softcapping=5.0", "gemma2 have it", "partial_rotary_factor=0.5"):
        assert said in refused.err


REFUSED = [
    *(("llama", key) for key in REFUSED_UNLESS),
    *((family, key) for family, spec in FAMILIES.items() for key in spec.refused_unless),
]


@pytest.mark.parametrize("family, key", REFUSED)
def test_a_key_of_a_folder_that_is_refused_is_named_with_its_file_and_what_to_do(
    tmp_path, family, key
):
    value, names = key.startswith("use_") or "other", [FAMILIES[family].architecture]
    folder = config_json(tmp_path, model_type=family, architectures=names, **{key: value})
    [problem] = model_problems(TrainConfig(model=Model(init_from=str(folder))))
    assert problem.what == f"{folder}/config.json: {key}={value}"
    ways = ("model.implementation=transformers", f'"{key}": ', "its own model_type", "convert the")
    assert any(way in problem.reason for way in ways), problem.reason


def test_dropout_is_left_out_of_training_with_a_line_whatever_computes_the_model(tmp_path):
    keys = {"attention_dropout": 0.1, "resid_pdrop": 0.0, "classifier_dropout": 0.1}
    config = ModelConfig.from_hf(config_json(tmp_path, **keys))
    [line] = left_out_of_training(config.source)
    assert "attention_dropout=0.1 in config.json: dropout" in line
    assert "pdrop" not in line
    assert "classifier" not in line
    nested = left_out_of_training({"text_config": {"hidden_dropout": 0.2}, "vision_config": {}})
    assert "text_config.hidden_dropout=0.2" in nested[0]
    assert not left_out_of_training({"attention_dropout": 0.0})


def test_a_folder_that_only_transformers_computes_is_asked_for_its_vocabulary(tmp_path):
    folder = config_json(tmp_path, hidden_act="relu")
    config = read_architecture(folder, TRANSFORMERS)
    assert stored_vocabulary(folder) == stored_config(folder, config).vocab_size
    assert "model.implementation=transformers" in refusal(read_architecture, folder)


def test_all_that_is_not_supported_is_told_at_once(tmp_path):
    odd = {"logit_scale": 0.1, "hidden_act": "relu", "rope_parameters": {"rope_type": "yarn"}}
    with pytest.raises(UserError, match=r"(?s)logit_scale.*relu.*yarn"):
        ModelConfig.from_hf(config_json(tmp_path, **odd))


ODD = [10**300]
ODD += yaml.safe_load("""
[0, -1, .inf, .nan, x, [1], {a: 1}, {full_attention: 5}, {full_attention: {rope_type: []}},
 {rope_theta: x}, {rope_type: linear, factor: 0}]
""")


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_no_value_of_an_untrusted_config_json_crashes_the_program_or_keeps_it_busy(
    tmp_path, family
):
    written = resolve_model(Model(family=family), 320).to_hf("float32")
    cfg = TrainConfig(model=Model(init_from=str(tmp_path)))
    for name in written:
        for value in ODD:
            write_json(tmp_path / "config.json", written | {name: value})
            with contextlib.suppress(UserError):
                config = ModelConfig.from_hf(tmp_path)
                model_problems(cfg)
                assert config.num_hidden_layers <= 1000
                assert config.parameters() <= 10**15


@pytest.mark.parametrize("change", [{"num_hidden_layers": 10**9}, {"num_attention_heads": -1}])
def test_a_model_of_an_absurd_size_is_not_built_by_transformers_classes_either(tmp_path, change):
    with pytest.raises(UserError, match=r"num_hidden_layers|cannot build"):
        read_architecture(config_json(tmp_path, **change), "transformers")


DEEP = f'{{"model_type": "llama", "x": {"[" * 900}{"]" * 900}}}'


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": "llama"}', "[" * 10**5, DEEP])
def test_a_broken_config_json_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    assert "config.json" in refusal(ModelConfig.from_hf, tmp_path)
