"""The decoder computes what transformers computes: logits, gradients, generation; and refuses by
name what it does not know."""

import contextlib
import json
import math
from collections import defaultdict
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from zoo import LLAMA3, SIZES, WILD, ZOO, make_model

import fsdp_trainer
from fsdp_trainer.checkpoint.formats.huggingface import tensor_parts
from fsdp_trainer.config.schema import ActivationCheckpoint, Model, TrainConfig
from fsdp_trainer.errors import UserError
from fsdp_trainer.generation.continuations import generate_tokens, stream_tokens
from fsdp_trainer.generation.sampling import Sampling
from fsdp_trainer.models.attention import LAYOUTS, DocumentAttention, MaskedAttention
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import FEED_FORWARDS, MLP, Decoder, MicroBatch
from fsdp_trainer.models.families import FAMILIES, FULL
from fsdp_trainer.models.initialize import BLOCK, draw_numbers, initialize_weights
from fsdp_trainer.models.resolve import model_problems, resolve_model
from fsdp_trainer.models.rope import Rope
from fsdp_trainer.parallel.activation_checkpoint import checkpoint_activations
from fsdp_trainer.training.objective import CrossEntropy


@pytest.fixture(scope="module", params=ZOO)
def pair(request, tmp_path_factory):
    """Ours and theirs with the same random weights, norms and biases included."""
    folder = tmp_path_factory.mktemp("hf")
    theirs = make_model(request.param)
    theirs.save_pretrained(folder)
    return fsdp_trainer.load_model(folder).requires_grad_(True), theirs


def random_tokens(*shape):
    return torch.randint(SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(0))


def positions_of(lengths, row):
    return torch.stack(
        [
            F.pad(torch.cat([torch.arange(n) for n in lens]), (0, row - sum(lens)))
            for lens in lengths
        ]
    )


def test_logits_are_those_of_transformers_also_past_the_original_context(pair):
    ours, theirs = pair
    tokens = random_tokens(2, 150)
    with torch.no_grad():
        assert (ours.logits(tokens) - theirs(tokens).logits).abs().max() <= 1e-4


LENGTHS = [[5, 1, 17, 9], [40], [3, 3]]


@pytest.mark.parametrize("layout", ["documents", "mask"])
def test_packed_documents_never_see_each_other(pair, layout):
    ours, theirs = pair
    tokens, row = random_tokens(3, 40), 40
    where = LAYOUTS[layout](LENGTHS, row, torch.device("cpu"))
    with torch.no_grad():
        packed = ours.lm_head(
            ours.model.norm(ours.hidden(tokens, positions_of(LENGTHS, row), where)[0])
        )
        for i, lengths in enumerate(LENGTHS):
            start = 0
            for length in lengths:
                document = tokens[i : i + 1, start : start + length]
                assert (
                    packed[i, start : start + length] - theirs(document).logits[0]
                ).abs().max() <= 1e-4
                start += length
    assert packed.isfinite().all(), "padding too"


@pytest.mark.parametrize("layout", ["documents", "mask"])
@pytest.mark.grid(30)
def test_gradients_of_all_parameters_are_those_of_transformers(pair, layout):
    ours, theirs = pair
    tokens, row = random_tokens(3, 40), 40
    index, targets = (
        torch.tensor([0, 3, 7, 25, 50, 79, 80, 84]),
        torch.tensor([1, 96, 5, 5, 0, 7, 3, 2]),
    )
    weights = torch.tensor([1, 0.5, 1, 1, 2, 1, 1, 1])
    where = LAYOUTS[layout](LENGTHS, row, torch.device("cpu"))
    ours.zero_grad()
    ours(
        MicroBatch(tokens, positions_of(LENGTHS, row), where, index, targets, weights),
        CrossEntropy(weights),
    )[0].backward()
    theirs.zero_grad()
    loss = torch.zeros(())
    for i, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            logits = theirs(tokens[i : i + 1, start : start + length]).logits[0]
            for at, target, weight in zip(index.tolist(), targets, weights, strict=True):
                if 0 <= at - (i * row + start) < length:
                    loss = loss + weight * F.cross_entropy(logits[at - (i * row + start)], target)
            start += length
    loss.backward()
    wanted = stored_gradients(theirs)
    gradients = defaultdict(list)
    parameters = dict(ours.named_parameters())
    for part in tensor_parts(ours, ours.config.vocab_size):
        if part.parameter not in parameters:
            continue  # a buffer
        gradient = parameters[part.parameter].grad
        matrix = gradient.flatten(0, -2) if gradient.ndim > 1 else gradient
        gradients[part.tensor].append(matrix[part.parameter_row :][: part.rows])
    for whole, parts in gradients.items():
        gradient = torch.cat(parts).view_as(wanted[whole])
        assert (gradient - wanted[whole]).abs().max() <= 1e-4 * max(
            1, wanted.pop(whole).abs().max()
        ), whole
    assert not wanted, "every parameter has one of ours"


def stored_gradients(theirs):
    """Their gradients by the names of a folder's tensors, which transformers fuses in memory."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(theirs, {n: p.grad for n, p in theirs.named_parameters()})


def test_an_empty_row_gives_every_parameter_a_gradient_of_zero(pair):
    ours, _ = pair
    ours.zero_grad()
    nothing = torch.zeros(128, dtype=torch.int64)
    zeros = torch.zeros(2, 40, dtype=torch.int64)
    ours(
        MicroBatch(
            zeros,
            zeros,
            DocumentAttention([[], []], 40, torch.device("cpu")),
            nothing,
            nothing,
            torch.zeros(128),
        ),
        CrossEntropy(torch.zeros(128)),
    )[0].backward()
    assert all(p.grad is not None and not p.grad.any() for p in ours.parameters())


NEW = 8
"""Tokens of an answer."""


@pytest.mark.slow
@pytest.mark.grid(4)
def test_prompts_in_one_batch_continue_as_each_alone_and_as_in_transformers(pair):
    """They end on both sides of the windows, of 8 or 16 tokens, and of yarn's first context."""
    ours, theirs = pair
    prompts = [random_tokens(length).tolist() for length in (3, 20, 1, 11)]
    sampling = Sampling(max_tokens=NEW)
    together = [answers[0] for answers in generate_tokens(ours, prompts, (), sampling)]
    assert together == [list(stream_tokens(ours, prompt, (), sampling)) for prompt in prompts]
    assert together == [greedily_recomputed(ours, prompt, NEW) for prompt in prompts]
    theirs.generation_config.eos_token_id = None
    for prompt, tokens in zip(prompts, together, strict=True):
        given = torch.tensor([prompt])
        expected = theirs.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
        )
        assert tokens == expected[0, len(prompt) :].tolist()


def greedily_recomputed(model, prompt, count):
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model.logits(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_attention_costs_what_the_masks_let_through(pair):
    ours, _ = pair
    lengths = np.array([1, 5, 8, 9, 30])
    counted = np.zeros(len(lengths))
    for window in ours.config.windows:
        for i, length in enumerate(lengths):
            masks = (
                MaskedAttention([[length]], length, torch.device("cpu"))
                .with_window(window)
                .mask.sum()
            )
            counted[i] += 2 * masks - min(
                length, window or length
            )  # n² where n(n+1)/2 pairs are seen
    assert ours.config.attention_cost(lengths) == pytest.approx(counted / len(ours.config.windows))


def test_parameters_are_counted_without_building(pair):
    ours, theirs = pair
    assert (
        ours.config.parameters()
        == sum(p.numel() for p in theirs.parameters())
        == sum(p.numel() for p in ours.parameters())
    )


# --- parts of a block ---------------------------------------------------------------------------


class Balanced(MLP):
    """A feed-forward that returns a loss to be minimised and a figure to be watched."""

    auxiliary_names = ("balance_loss", "largest")

    def forward(self, x):
        out = super().forward(x)
        return out, {"balance_loss": 0.1 * out.square().mean(), "largest": out.detach().amax()}


@pytest.fixture
def balanced(monkeypatch):
    """A model whose blocks have this feed-forward, and a micro-batch."""
    monkeypatch.setitem(FEED_FORWARDS, "balanced", Balanced)
    family = replace(FAMILIES["llama"], feed_forward="balanced")
    monkeypatch.setitem(FAMILIES, "balanced", family)

    def make():
        model = Decoder(ModelConfig(family="balanced", vocab_size=97, num_hidden_layers=3))
        initialize_weights(model, 0)
        return model

    tokens, index = random_tokens(1, 40), torch.arange(40)
    layout = DocumentAttention([[40]], 40, torch.device("cpu"))
    return make, MicroBatch(tokens, index[None], layout, index, tokens[0], torch.full((40,), 0.1))


def of_each_block(model, batch):
    """(the stream behind the block, its auxiliary values), block by block."""
    rope = Rope(model.config)(batch.positions, torch.float32, batch.layout)
    x, auxiliary = model.model.embed_tokens(batch.tokens), []
    for block in model.blocks().values():
        x, values = block(x, rope, batch.layout)
        auxiliary.append(values)
    return auxiliary


def test_what_blocks_return_besides_is_summed_and_losses_are_minimised(balanced):
    make, batch = balanced
    model, objective = make(), CrossEntropy(batch.weights)
    output = model(batch, objective)
    each = of_each_block(model, batch)
    loss = sum(values["balance_loss"] for values in each)
    assert output.auxiliary["balance_loss"].item() == pytest.approx(loss.item())
    assert output.auxiliary["largest"] == sum(values["largest"] for values in each)
    plain = -(output.scores.log_probability * batch.weights).sum()
    assert output.value.item() == pytest.approx((plain + loss).item())
    assert not output.auxiliary["balance_loss"].requires_grad
    output.value.backward()
    together = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    hidden, auxiliary = model.hidden(batch.tokens, batch.positions, batch.layout)
    value, _ = model.lm_head(model.model.norm(hidden[0]), batch.targets, objective)
    value.backward(retain_graph=True)
    auxiliary["balance_loss"].backward()
    for grad, p in zip(together, model.parameters(), strict=True):
        assert torch.allclose(grad, p.grad, atol=1e-6)


@contextlib.contextmanager
def every_block_balanced():
    family = replace(FAMILIES["llama"], feed_forward="balanced")
    parts, families = (
        patch.dict(FEED_FORWARDS, balanced=Balanced),
        patch.dict(FAMILIES, llama=family),
    )
    with parts, families:
        yield


@pytest.mark.slow
@pytest.mark.further
def test_losses_of_blocks_are_learnt_alike_however_the_blocks_are_sharded(train):
    how = ["train.steps=3", "batch.rows=4", "batch.micro_rows=2", "loss.z_loss=1e-9"]
    variants = ["sharding=fsdp", "activation_checkpoint=full", "sharding=ddp"]
    runs = [
        train(f"{i}", *how, variant, ranks=2, seam=every_block_balanced)
        for i, variant in enumerate(variants)
    ]
    losses, objectives = (runs[0].column(name) for name in ("loss", "objective"))
    assert all(more > loss + 1e-6 for more, loss in zip(objectives, losses, strict=True))
    for run in runs[1:]:
        for name in ("loss", "objective", "grad_norm", "balance_loss"):
            assert run.column(name) == pytest.approx(runs[0].column(name), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["checkpointed", "compiled"])
def test_what_blocks_return_besides_is_the_same_recomputed_and_compiled(balanced, how):
    make, batch = balanced
    plain, other = make(), make()
    if how == "checkpointed":
        checkpoint_activations(other, ActivationCheckpoint(mode="full"))
    else:
        torch._dynamo.reset()
        for block in other.blocks().values():
            block.compile(fullgraph=True, backend="aot_eager")
        masked = MaskedAttention([[40]], 40, torch.device("cpu"))
        batch = replace(batch, layout=masked)
    outputs = [model(batch, CrossEntropy(batch.weights)) for model in (plain, other)]
    for name, value in outputs[0].auxiliary.items():
        assert outputs[1].auxiliary[name].item() == pytest.approx(value.item(), rel=1e-5)
    for output in outputs:
        output.value.backward()
    for p, q in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, atol=1e-6)


# --- random weights -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "count"), [(0, 10), (BLOCK - 3, 6), (BLOCK, BLOCK), (5, 2 * BLOCK + 7)]
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
    ("initializer", "shares"),
    [("plain", [1, 1, 1]), ("depth", [6**-0.5] * 3), ("layer", [2**-0.5, 0.5, 6**-0.5])],
)
def test_what_adds_to_the_stream_may_start_smaller_with_depth(initializer, shares):
    model = Decoder(
        ModelConfig(
            vocab_size=500, num_hidden_layers=3, initializer=initializer, initializer_range=0.05
        )
    )
    initialize_weights(model, 0)
    for block, share in zip(model.model.layers.values(), shares, strict=True):
        for p in (block.self_attn.o_proj.weight, block.mlp.down_proj.weight):
            assert p.detach().std().item() == pytest.approx(0.05 * share, rel=0.05)
        assert block.mlp.up_proj.weight.detach().std().item() == pytest.approx(0.05, rel=0.05)


# --- config.json --------------------------------------------------------------------------------


def config_json(folder, **values):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps(
            {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES, **values}
        )
    )
    return folder


def test_the_spellings_of_transformers_4_and_5_read_equal(tmp_path):
    scaling = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    four = config_json(tmp_path / "4", rope_theta=5e5, rope_scaling=scaling, torch_dtype="bfloat16")
    older = config_json(
        tmp_path / "3", rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0}
    )
    five = config_json(tmp_path / "5", rope_parameters=LLAMA3, dtype="bfloat16")
    assert ModelConfig.from_hf(four) == ModelConfig.from_hf(five)
    assert ModelConfig.from_hf(five).rope_theta == 5e5
    assert ModelConfig.from_hf(five).rope_scaling == scaling
    assert ModelConfig.from_hf(older).rope_scaling == {"rope_type": "linear", "factor": 2.0}
    assert (
        ModelConfig.from_hf(config_json(tmp_path / "none", rope_scaling=None)).rope_theta == 10_000
    )


@pytest.mark.parametrize("name", WILD)
def test_what_a_published_config_json_leaves_out_means_what_transformers_takes_it_to_mean(
    tmp_path, name
):
    transformers = pytest.importorskip("transformers")

    def told_by_transformers(folder, described):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(described))
        read = transformers.AutoConfig.from_pretrained(folder)
        getattr(read, "text_config", read).save_pretrained(folder / "again")
        return replace(ModelConfig.from_hf(folder / "again"), layer_types=()), ModelConfig.from_hf(
            folder / "again"
        ).windows

    theirs = told_by_transformers(tmp_path / "theirs", WILD[name])
    ours = ModelConfig.from_hf(tmp_path / "theirs")
    assert (replace(ours, layer_types=()), ours.windows) == theirs
    assert told_by_transformers(tmp_path / "ours", ours.to_hf("bfloat16")) == theirs, (
        "what we write means the same"
    )


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": LLAMA3},
        {"head_dim": 8},
    ],
)
def test_what_is_written_is_what_was_read(tmp_path, values):
    config = ModelConfig.from_hf(config_json(tmp_path / "in", **values))
    written = config.to_hf("bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert ModelConfig.from_hf(tmp_path) == config
    assert written["torch_dtype"] == written["dtype"] == "bfloat16"
    assert written["rope_parameters"]["rope_theta"] == written["rope_theta"]


def test_gemma_of_our_own_sizes_says_what_its_scores_are_divided_by(tmp_path):
    config = ModelConfig(family="gemma2", head_dim=24)
    written = config.to_hf("float32")
    assert written["query_pre_attn_scalar"] == 24, "transformers cannot compute with null"
    (tmp_path / "config.json").write_text(json.dumps(written | {"query_pre_attn_scalar": None}))
    assert ModelConfig.from_hf(tmp_path).query_pre_attn_scalar is None, "written before 0.7.0"


UNSUPPORTED = {
    "model_type": "mamba",
    "architectures": ["LlamaForTokenClassification"],
    "hidden_act": "relu",
    "quantization_config": {"quant_method": "fp8"},
    "layer_types": ["chunked_attention", "full_attention"],
    "attention_dropout": 0.1,
    "use_bidirectional_attention": True,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    "rope_parameters": {"rope_type": "dynamic", "factor": 4.0},
    "hidden_size": None,
    "num_attention_heads": None,
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_supported_is_refused_by_name(tmp_path, name):
    with pytest.raises(UserError) as raised:
        ModelConfig.from_hf(config_json(tmp_path, **{name: UNSUPPORTED[name]}))
    said = str(raised.value)
    assert {"rope_scaling": "yarn", "rope_parameters": "dynamic", "model_type": "mamba"}.get(
        name, name
    ) in said


@pytest.mark.parametrize(
    "theirs, near, lacks",
    [
        ({"model_type": "granite", "logits_scaling": 8.0}, "llama", "logits_scaling=8.0"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "llama", "no_rope_layers"),
        ({"model_type": "olmo3", "layer_types": ["sliding_attention"] * 2}, "olmo2", "layer_types"),
        ({"model_type": "granitemoe", "num_local_experts": 8}, "mixtral", None),
        ({"model_type": "qwen9", "num_experts": 8}, "qwen3_moe", None),
        ({"model_type": "mistral9"}, "mistral", None),
        ({"model_type": "kimi_k2", "kv_lora_rank": 512}, "deepseek_v3", None),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else None,
)
def test_an_unknown_model_type_is_told_its_nearest_family_and_what_to_do(
    tmp_path, theirs, near, lacks
):
    with pytest.raises(UserError) as raised:
        ModelConfig.from_hf(config_json(tmp_path, architectures=["X"], **theirs))
    said = str(raised.value)
    assert f"The nearest is {near}" in said
    assert (lacks or f'"model_type": "{near}"') in said
    assert "docs/add-a-model.md" in said


def test_a_config_json_of_another_kind_has_no_near_family(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 768}))
    with pytest.raises(UserError, match="None of them is near"):
        ModelConfig.from_hf(tmp_path)


@pytest.mark.slow
def test_what_transformers_would_not_compute_is_ignored_in_a_folder_and_refused_when_asked_for(
    tmp_path, train
):
    bogus = {
        "model_type": "mistral",
        "architectures": None,
        "partial_rotary_factor": 0.5,
        "attn_logit_softcapping": 5.0,
        "attention_bias": True,
    }
    read = ModelConfig.from_hf(config_json(tmp_path, **bogus))
    assert (read.partial_rotary_factor, read.attn_logit_softcapping, read.attention_bias) == (
        1,
        None,
        False,
    )
    refused = train(
        "run",
        "model.attn_logit_softcapping=5",
        "model.partial_rotary_factor=0.5",
        "train.steps=1",
        code=2,
    )
    assert "model.attn_logit_softcapping=5.0" in refused.err
    assert "gemma2 have it" in refused.err
    assert "model.partial_rotary_factor=0.5" in refused.err


def test_all_that_is_not_supported_is_told_at_once_with_exit_2(tmp_path, train):
    from zoo import make_folder

    folder = make_folder(tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(
            {
                **config,
                "attention_dropout": 0.1,
                "hidden_act": "relu",
                "rope_parameters": {"rope_type": "yarn"},
            }
        )
    )
    refused = train("run", f"model.init_from={folder}", "train.steps=1", base=[], code=2)
    assert all(text in refused.err for text in ("attention_dropout", "relu", "yarn"))


ODD = [0, -1, 10**300, math.inf, math.nan, "x", [1], {"a": 1}, {FULL: 5}, {FULL: {"rope_type": []}},
       {"rope_theta": "x"}, {"rope_type": "linear", "factor": 0}]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_no_value_of_an_untrusted_config_json_crashes_the_program_or_keeps_it_busy(
    tmp_path, family
):
    written = resolve_model(Model(family=family), 320).to_hf("float32")
    cfg = TrainConfig(model=Model(init_from=str(tmp_path)))
    for name in written:
        for value in ODD:
            (tmp_path / "config.json").write_text(json.dumps(written | {name: value}))
            with contextlib.suppress(UserError):
                config = ModelConfig.from_hf(tmp_path)
                model_problems(cfg)
                assert config.num_hidden_layers <= 1000
                assert config.parameters() <= 10**15


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": "llama"}', "[" * 10**5])
def test_a_broken_config_json_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json"):
        ModelConfig.from_hf(tmp_path)
