"""Tensor parallelism: every layout of ranks computes what one plain process does."""

from contextlib import ExitStack
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from layouts import (
    LATENT,
    assert_same,
    compiled_quickly,
    configuration,
    layout_of,
    take_steps,
    whole,
    without_padding,
)
from stored import checkpoint, newest, stored, tensors
from torch import nn
from torch.distributed.tensor import DTensor
from world import read_lines

from fsdp_trainer.checkpoint.formats.huggingface import import_weights
from fsdp_trainer.models.adapters.adapter_targets import four_bit_weights, resolve_adapters
from fsdp_trainer.models.attention import LAYOUTS as LAYOUTS_OF_ROWS
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder, MicroBatch
from fsdp_trainer.models.families import FAMILIES
from fsdp_trainer.models.four_bit import quantize_linears
from fsdp_trainer.models.freeze import choose_trained
from fsdp_trainer.models.hf.new_model import meta_decoder
from fsdp_trainer.parallel import activation_offload, convert
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.materialize import allocate, initialize_magnitudes
from fsdp_trainer.parallel.parallelize import Computation, parallelize
from fsdp_trainer.parallel.tensor import sharded_form
from fsdp_trainer.training.weights import draw_weights

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2,
    "tie_word_embeddings": False,
}  # fmt: skip
LENGTH = 32
DOCUMENTS = ([20, 12], [7, 9, 11], [32], [5, 5, 5, 5, 5, 5])


def micro_batch(row, step, attention="documents"):
    """A row with 0 to 32 supervised tokens."""
    generator = torch.Generator().manual_seed(10 * step + row)
    tokens = torch.randint(SIZES["vocab_size"], (1, LENGTH), generator=generator)
    lengths = DOCUMENTS[row]
    positions = torch.cat([torch.arange(n) for n in lengths] + [torch.zeros(32, dtype=torch.long)])
    count = (3, 0, 32, 17)[row]
    index = torch.randperm(LENGTH, generator=generator)[:count].sort().values
    padding = torch.zeros(40 - count, dtype=torch.long)
    index = torch.cat([index, padding])
    weights = torch.cat([torch.rand(count, generator=generator) + 0.5, torch.zeros(40 - count)])
    targets = torch.randint(SIZES["vocab_size"], (40,), generator=generator)
    layout = LAYOUTS_OF_ROWS[attention]([lengths], LENGTH, torch.device("cpu"))
    return MicroBatch(tokens, positions[None, :LENGTH], layout, index, targets, weights)


def train(model, cfg, dims, settings):
    own = range(4) if dims is None else range(dims.batch_rank, 4, dims.batch_ranks)

    def weight(step):
        return sum(micro_batch(row, step).weights.sum() for row in range(4))

    batch = partial(micro_batch, attention=settings.get("attention", "documents"))
    return take_steps(model, cfg, dims, own, batch, weight, **settings.get("loss", {}))


def plain(sizes, settings):
    """One process without any parallelism."""
    torch.manual_seed(0)
    cfg, config = configuration(settings), ModelConfig(**{**SIZES, **sizes})
    model, adapters = Decoder(config), resolve_adapters(cfg.adapter, config)
    quantize_linears(model, four_bit_weights(model, adapters), torch.float32)
    choose_trained(model, adapters, cfg.train.freeze)
    start(model)
    first = {n: p.detach().clone() for n, p in model.named_parameters()}
    return first, *train(model, cfg, None, settings)


def start(model):
    draw_weights(model, 1)
    initialize_magnitudes(model)
    for name, p in model.named_parameters():
        if name.endswith(("norm.weight", ".bias")) or "lora_B" in name:
            local = p.to_local() if isinstance(p, DTensor) else p
            with torch.no_grad():  # of zeros a missing one would not show
                local += 0.1


def built(config, settings):
    """This rank's part of a model without weights, and the dimensions."""
    dist.init_process_group("gloo")
    cfg = configuration(settings)
    dims = Dims(layout_of(cfg), "cpu", 60)
    config = config.with_equal_rows(cfg.sharding.tensor)
    model = meta_decoder(config)
    adapters = resolve_adapters(cfg.adapter, config)
    with compiled_quickly():
        model = parallelize(
            model,
            dims,
            Computation.of(cfg, settings.get("compiled", False)),
            adapters,
            cfg.train.freeze,
        )
    allocate(model, torch.device("cpu"))
    return model, dims


def sharded(sizes, settings):
    """The weights at the start, and what `train` gives."""
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(activation_offload, "SMALLEST", 256))
        patches.enter_context(mock.patch.object(convert, "EMULATED", True))
        patches.enter_context(mock.patch.object(convert, "worth_float8", is_linear))
        model, dims = built(ModelConfig(**{**SIZES, **sizes}), settings)
        cfg = configuration(settings)
        start(model)
        first = whole(dict(model.named_parameters()))
        return first, *train(model, cfg, dims, settings)


def is_linear(module, *_):
    return isinstance(module, nn.Linear)


def compare(world, ranks, sizes, settings):
    expected = plain(sizes, settings)
    for got in world.call(ranks, sharded, sizes, settings):
        # where states are rounded, one of them may be rounded to the other side
        assert_same(got, expected, settings.get("tolerance", 1e-5))
        assert got[1] == pytest.approx(expected[1], rel=1e-5)


ONE_BLOCK = {"num_hidden_layers": 1}
OLMO2 = {"family": "olmo2"}
GEMMA2 = {
    "family": "gemma2", "attn_logit_softcapping": 20.0, "final_logit_softcapping": 5.0,
    "sliding_window": 6, "tie_word_embeddings": True,
}  # fmt: skip
WIDE = {"intermediate_size": 512, "num_attention_heads": 64, "num_hidden_layers": 1}
"""Half of each row is a whole block of 256 numbers."""
TENSOR = {"sharding": {"tensor": 2}}
BIASED = {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 1}
BLOCKS_OF_64 = {"head_dim": 32, "intermediate_size": 128, "num_hidden_layers": 1}
"""Half of each row of o and down is whole blocks."""
CASES = {
    "tensor": (2, {}, TENSOR),
    "phi3, smoothed labels, padding alone on the last": (
        2,
        ONE_BLOCK | {"family": "phi3", "vocab_multiple": 200},
        TENSOR | {"loss": {"label_smoothing": 0.1, "z_loss": 1e-2}},
    ),
    "olmo2, unsharded": (
        4,
        ONE_BLOCK | OLMO2,
        {"sharding": {"tensor": 2, "accumulate": "unsharded"}},
    ),
    "gemma2, recomputed": (2, GEMMA2, TENSOR | {"checkpoint": {"mode": "full"}}),
    "biases, in host memory": (2, BIASED, {"sharding": {"tensor": 2, "cpu_offload": True}}),
    "frozen, latent attention": (
        2,
        ONE_BLOCK | LATENT | {"attention_bias": True},
        TENSOR | {"freeze": ["model.embed_tokens.weight", "*norm.weight", "*.q_*_proj.weight"]},
    ),
    "latent attention, dora": (
        2,
        LATENT | {"attention_bias": True, "num_hidden_layers": 1},
        TENSOR | {"adapter": {"name": "dora", "rank": 2}},
    ),
    "fewer key heads": (4, ONE_BLOCK | {"family": "qwen3"}, {"sharding": {"tensor": 4}}),
    "one key head, all normed": (
        4,
        ONE_BLOCK | OLMO2 | {"num_key_value_heads": 1},
        {"sharding": {"tensor": 4}},
    ),
    "ddp": (4, ONE_BLOCK, {"sharding": {"tensor": 2, "strategy": "ddp"}}),
    "hsdp": (8, {}, {"sharding": {"tensor": 2, "strategy": "hsdp", "replicas": 2}}),
    "lora": (2, {}, TENSOR | {"adapter": {"name": "lora", "rank": 2}}),
    "dora": (4, BIASED, TENSOR | {"adapter": {"name": "dora", "rank": 2}}),
    "4 bits": (4, BLOCKS_OF_64, TENSOR | {"adapter": {"name": "lora", "base": "nf4", "rank": 2}}),
    "offloaded": (
        2,
        {},
        TENSOR | {"checkpoint": {"mode": "selective", "offload": True}},
    ),
    "8 bits": (2, WIDE, TENSOR | {"optim": {"state_dtype": "8bit"}, "tolerance": 1e-4}),
    "compiled": (
        2,
        {"family": "qwen3", "num_hidden_layers": 1},
        TENSOR | {"compiled": True, "attention": "mask"},
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_has_a_placement_except_those_of_experts(family):
    sizes = SIZES | BIASED | FAMILIES[family].defaults | {"family": family}
    for path, module in meta_decoder(ModelConfig(**sizes)).named_modules():
        name = path.rpartition(".")[2]
        form = sharded_form(name, module, FAMILIES[family].qk_norm)
        parameters = dict(module.named_parameters(recurse=False))
        if parameters and name != "experts":
            assert form is not None, path
            assert parameters.keys() <= form.placements.keys(), path


QUICK = ("tensor",)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in QUICK else pytest.mark.slow) for c in CASES]
)
@pytest.mark.grid(3)
def test_every_layout_computes_what_one_process_does(world, case):
    compare(world, *CASES[case])


WIDTHS_OF_16 = ONE_BLOCK | {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128}
FLOAT8 = {"param_dtype": "bfloat16", "float8": "tensorwise"}


@pytest.mark.slow
@pytest.mark.parametrize("precision", [{"param_dtype": "bfloat16"}, FLOAT8], ids=str)
@pytest.mark.grid(1)
def test_in_fewer_bits_gradients_are_as_near_to_float32_as_without_tensor_groups(world, precision):
    if "float8" in precision:
        pytest.importorskip("torchao")
    exact = plain(WIDTHS_OF_16, {})
    usual, got = (
        world.call(2, sharded, WIDTHS_OF_16, {"sharding": layout, "precision": precision})[0]
        for layout in ({}, {"tensor": 2})
    )
    assert got[1] == pytest.approx(exact[1], rel=0.03)
    for name, gradient in exact[3].items():
        both = (without_padding(run[3], exact[3])[name] for run in (usual, got))
        errors = [(one - gradient).norm() / gradient.norm() for one in both]
        assert errors[1] < 1.5 * errors[0], name


BESIDE = [
    "schedule=constant", "checkpoint.keep=9", "batch.micro_rows=1",
    "batch.rows=4", "optim.eps=1e-3", "data.validation=0.1", "train.validate_every=2",
    "model.vocab_size=301", "train.sample_prompts=[a,bb]", "train.sample_tokens=3",
]  # fmt: skip
LAYOUTS = {
    1: (2, []),
    2: (2, ["sharding.tensor=2"]),
    3: (4, ["sharding.tensor=2", "sharding.context=2"]),
    4: (1, []),
}
"""Ranks and overrides, by the step up to which they train."""


def imported(folder):
    """The weights of a folder as two ranks of a tensor group read them."""
    model, _ = built(ModelConfig.from_hf(folder), {"sharding": {"tensor": 2}})
    import_weights(model, folder)
    return whole(dict(model.named_parameters()))


@pytest.mark.slow
def test_a_checkpoint_of_any_layout_goes_on_in_any_other(world, train, tmp_path):
    expected = train("whole", *BESIDE, "train.steps=4", ranks=2)
    for steps, (ranks, overrides) in LAYOUTS.items():
        run = train("parts", *BESIDE, f"train.steps={steps}", *overrides, ranks=ranks)
    assert run.column("loss") == pytest.approx(expected.column("loss"), rel=1e-5)
    assert run.column("grad_norm") == pytest.approx(expected.column("grad_norm"), rel=1e-4)
    for step in (2, 4):
        lines = [other.metrics[step - 1]["validation_loss"] for other in (run, expected)]
        assert lines[0] == pytest.approx(lines[1], rel=1e-5)
    lines = [read_lines(other.folder / "samples.jsonl") for other in (run, expected)]
    answers = [[line for line in each if line["step"] in (2, 4)] for each in lines]
    assert answers[0]
    assert answers[0] == answers[1]
    weights, others = stored(newest(run)), stored(newest(expected))
    for name in weights:
        torch.testing.assert_close(weights[name], others[name], rtol=0, atol=1e-5)

    # what such a layout has written is exported and imported to the last bit
    source, out = checkpoint(run, 3), tmp_path / "hf"
    world.command("export", f"source={source}", f"out={out}")
    exported = tensors(out)
    assert exported["model.embed_tokens.weight"].shape[0] == 301
    for name, tensor in exported.items():
        assert torch.equal(tensor, stored(source)[f"weights/{name}"][: len(tensor)]), name
    for parts in world.call(2, imported, out):
        for name, tensor in exported.items():
            assert torch.equal(parts[name][: len(tensor)], tensor), name
    (answer,) = world.command("generate", f"source={source}", "prompt=a", "max_tokens=3")
    assert answer.out


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["sharding.tensor=3"], "Use sharding.tensor=2"),
        (["sharding.tensor=2", "batch.seq_len=63"], "must divide batch.seq_len=63"),
        (
            ["sharding.tensor=2", "optim=adamw_8bit", "model.intermediate_size=64"],
            "cuts blocks of 64. Use optim.state_dtype=bfloat16",
        ),
        (
            [
                *["sharding.tensor=2", "optim=adamw_8bit", "model.intermediate_size=64"],
                "train.freeze=['*.o_proj.weight']",
            ],
            "intermediate_size=64 leaves each of 2 ranks 32",
        ),
        (["sharding.tensor=2", "adapter=qlora"], "cuts blocks of 64. Use adapter.base=bf16"),
        (["sharding.tensor=2", "data.pad_to_multiple=3"], "Use data.pad_to_multiple=4"),
    ],
)
def test_what_cannot_be_sharded_is_refused_with_what_can(train, overrides, words):
    run = train("refused", *overrides, code=2)
    assert words in " ".join(run.err.split())


def test_ranks_that_tensor_groups_do_not_divide_are_refused_before_data_is_read(train):
    run = train("refused", "sharding.tensor=2", code=2)
    assert "must divide the number of ranks, which is 1" in " ".join(run.err.split())


@pytest.mark.slow
def test_ranks_of_a_tensor_group_read_one_stream_and_pass_the_check_of_computation(train):
    how = ["data.streaming=true", "data.workers=1", "batch.rows=4", "batch.micro_rows=1"]
    how += ["train.steps=2", "train.check_every=2", "optim.eps=1e-3", "schedule=constant"]
    expected = train("alone", *how)
    run = train("group", *how, "sharding.tensor=2", ranks=2)
    assert run.column("tokens") == expected.column("tokens")
    assert run.column("loss") == pytest.approx(expected.column("loss"), rel=1e-5)
    assert run.event("end")[-1]["exit_code"] == 0
