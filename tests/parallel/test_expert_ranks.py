"""Expert parallelism: ranks that divide experts compute what one plain process does."""

import pytest
import torch
import torch.distributed as dist
from layouts import (
    GROUPED,
    ROW,
    VOCABULARY,
    assert_same,
    compiled_quickly,
    configuration,
    layout_of,
    take_steps_on_rows,
    whole,
)
from stored import checkpoint, newest, stored, tensors

from fsdp_trainer.base.distributed import local_part, local_slice
from fsdp_trainer.checkpoint.formats.huggingface import import_weights
from fsdp_trainer.config.context_methods import context_method
from fsdp_trainer.models.adapters.adapter_targets import resolve_adapters
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.freeze import choose_trained
from fsdp_trainer.models.hf.new_model import meta_decoder
from fsdp_trainer.models.initialize import initialize_weights
from fsdp_trainer.parallel.context import context_ranks
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.materialize import allocate
from fsdp_trainer.parallel.parallelize import Computation, parallelize
from fsdp_trainer.training.batches import Assembler

CPU = torch.device("cpu")
QWEN = {
    "family": "qwen3_moe", "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "initializer_range": 0.2, "tie_word_embeddings": False, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True,
}  # fmt: skip


@torch.no_grad()
def start(model, one_rank):
    """Weights as at a run's start, and adapters that add something.

    one_rank: all tokens go to the first two experts, and so to one rank.
    """
    initialize_weights(model, 1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or name.endswith("bias"):  # of zeros a missing one would not show
            torch.nn.init.constant_(local_part(parameter), 0.02 if "lora_B" in name else 0.1)
        if one_rank and name.endswith("mlp.gate.weight"):
            first = local_slice(parameter)[0].start
            line = torch.linspace(-1, 1, parameter.shape[1])
            for i, values in enumerate(local_part(parameter), first):
                values.copy_(line * (1, -1, *[0] * 6)[i])


def plain(sizes, settings):
    """One process that has all experts."""
    cfg, config = configuration(settings), ModelConfig(**{**QWEN, **sizes})
    model = Decoder(config)
    choose_trained(model, resolve_adapters(cfg.adapter, config), [])
    start(model, settings.get("one_rank"))
    first = whole(dict(model.named_parameters()))
    return first, *take_steps_on_rows(model, cfg, None, Assembler(ROW, 1, 1, 0, 1, CPU))


def built(cfg, config, compiled=False):
    """This rank's part of a model without weights, and the dimensions."""
    dist.init_process_group("gloo")
    dims = Dims(layout_of(cfg), "cpu", 60)
    model = meta_decoder(config)
    with compiled_quickly():
        model = parallelize(
            model,
            dims,
            Computation.of(cfg, compiled),
            resolve_adapters(cfg.adapter, config),
            cfg.train.freeze,
        )
    allocate(model, CPU)
    return model, dims


def split(sizes, settings):
    """This rank's part."""
    cfg, config = configuration(settings), ModelConfig(**{**QWEN, **sizes})
    model, dims = built(cfg, config, settings.get("compiled", False))
    start(model, settings.get("one_rank"))
    first = whole(dict(model.named_parameters()))
    choice = context_method(cfg.sharding, cfg.batch.seq_len, config.on_tensor_rank(1))
    assembler = Assembler(
        ROW, 1, 1, dims.batch_rank, dims.batch_ranks, CPU,
        same_rows=dims.same_rows, context=context_ranks(dims, choice.method, config.windows),
        attention=settings.get("attention", "documents"),
    )  # fmt: skip
    return first, *take_steps_on_rows(model, cfg, dims, assembler)


EXPERT = {"sharding": {"expert": 2}}
COMPILED = {"compiled": True, "attention": "mask"}
ONE_BLOCK = {"num_hidden_layers": 1}
"""Each block is compiled by itself."""
LORA = {"name": "lora", "rank": 2, "targets": ["all", "experts"], "rank_pattern": {"up_proj": 3}}
TOP_1 = {"num_experts_per_tok": 1, "norm_topk_prob": False}
WIDE = {
    "hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 1,
    "initializer_range": 0.05,
}  # fmt: skip
"""A row of each matrix is a whole block of 256 numbers."""
GPT_OSS = {
    "family": "gpt_oss", "attention_bias": True, "sliding_window": 6, "num_experts": 4,
    "norm_topk_prob": False,
}  # fmt: skip
GPT_OSS_LORA = {"adapter": LORA | {"rank_pattern": {}}}
CASES = {
    "two": (2, {}, EXPERT),
    "parts of an expert": (4, {"num_experts": 2}, EXPERT),
    "all tokens to one rank": (2, TOP_1, EXPERT | {"one_rank": True}),
    "tensor": (4, {"mlp_only_layers": (0,)}, {"sharding": {"expert": 4, "tensor": 2}}),
    "tensor, shared expert": (
        4,
        {"family": "qwen2_moe", "shared_expert_intermediate_size": 20},
        {"sharding": {"expert": 2, "tensor": 2}},
    ),
    "context": (4, {}, {"sharding": {"expert": 4, "context": 2}}),
    "latent attention, groups, tensor, ddp": (
        4,
        GROUPED,
        {"sharding": {"expert": 2, "tensor": 2, "strategy": "ddp"}},
    ),
    "hsdp, unsharded, units of two": (
        4,
        {},
        {
            "sharding": {
                "expert": 2,
                "strategy": "hsdp",
                "replicas": 2,
                "accumulate": "unsharded",
                "blocks_per_unit": 2,
            }
        },
    ),
    "kept gathered, offloaded": (
        2,
        {},
        {
            "sharding": {"expert": 2, "reshard_after_forward": False, "cpu_offload": True},
            "checkpoint": {"offload": True},
        },
    ),
    "lora": (
        4,
        {},
        {"sharding": {"expert": 2, "tensor": 2}, "adapter": LORA},
    ),
    "gpt_oss, lora, one graph": (1, GPT_OSS | ONE_BLOCK, COMPILED | GPT_OSS_LORA),
    "gpt_oss, tensor": (4, GPT_OSS, {"sharding": {"expert": 4, "tensor": 2}}),
    "gpt_oss, context, recomputed": (
        2,
        GPT_OSS,
        {"sharding": {"expert": 2, "context": 2}, "checkpoint": {"mode": "selective"}},
    ),
    "gpt_oss, ring": (2, GPT_OSS, {"sharding": {"context": 2, "context_method": "ring"}}),
    "muon, uneven parts": (
        4,
        {"num_experts": 6},
        EXPERT | {"optim": {"name": "muon", "ns_dtype": "float32"}, "tolerance": 1e-4},
    ),
    "compiled": (2, ONE_BLOCK, COMPILED | EXPERT | {"checkpoint": {"mode": "full"}}),
    "8 bits": (4, WIDE, EXPERT | {"optim": {"state_dtype": "8bit"}, "tolerance": 1e-4}),
}
QUICK = ("two",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in QUICK else pytest.mark.slow) for c in CASES]
)
@pytest.mark.grid(1)
def test_every_layout_computes_what_one_process_does(world, case):
    ranks, sizes, settings = CASES[case]
    expected = plain(sizes, settings)
    for got in world.call(ranks, split, sizes, settings):
        assert_same(got, expected, settings.get("tolerance", 1e-5))


# --- runs -----------------------------------------------------------------------------------------

SMALL = ["model.family=qwen3_moe", "model.num_experts=4", "model.num_hidden_layers=2"]
LAYOUTS = {
    2: (4, ["sharding.expert=2", "sharding.pipeline=2"]),
    3: (2, ["sharding.tensor=2", "sharding.expert=2"]),
    4: (4, ["sharding.expert=4", "sharding.context=2"]),
    5: (1, []),
}
"""Ranks and overrides, by the step up to which they train."""


def imported(folder):
    """The weights of a folder as two ranks that divide experts read them."""
    cfg = configuration(EXPERT)
    model, _ = built(cfg, ModelConfig.from_hf(folder))
    import_weights(model, folder)
    return whole(dict(model.named_parameters()))


@pytest.mark.slow
@pytest.mark.further
def test_a_checkpoint_of_any_expert_degree_goes_on_in_any_other(world, train, tmp_path):
    how = [
        *SMALL,
        "schedule=constant",
        "optim.eps=1e-3",
        "batch.rows=4",
        "batch.micro_rows=1",
    ]
    how += ["checkpoint.keep=9"]
    how += ["train.sample_prompts=[a,bb]", "train.sample_tokens=3"]
    expected = train("whole", *how, "train.steps=5")
    for steps, (ranks, overrides) in LAYOUTS.items():
        run = train("parts", *how, f"train.steps={steps}", *overrides, ranks=ranks)
    assert run.column("loss") == pytest.approx(expected.column("loss"), rel=1e-5)
    assert run.column("grad_norm") == pytest.approx(expected.column("grad_norm"), rel=1e-4)
    weights, others = stored(newest(run)), stored(newest(expected))
    for name in weights:
        torch.testing.assert_close(weights[name], others[name], rtol=0, atol=1e-5)

    # what an expert group has written is exported and imported to the last bit
    source, out = checkpoint(run, 2), tmp_path / "hf"
    world.command("export", f"source={source}", f"out={out}")
    exported = tensors(out)
    experts = [name for name in exported if ".mlp.experts.1.up_proj" in name]
    assert len(experts) == 2
    for name in experts:
        stacked = stored(source)[f"weights/{name.replace('.1.up_proj.weight', '.up_proj')}"]
        assert torch.equal(exported[name], stacked[1])
    [first, second] = world.call(2, imported, out)
    for name, tensor in first.items():
        assert torch.equal(tensor, stored(source)[f"weights/{name}"]), name
        assert torch.equal(tensor, second[name]), name


@pytest.mark.slow
@pytest.mark.further
def test_an_adapter_of_experts_in_4_bits_goes_on_with_any_expert_degree(train):
    how = [*SMALL, "adapter=qlora", "adapter.targets=[all,experts]", "adapter.rank=4"]
    how += ["schedule=constant", "optim.eps=1e-3", "optim.lr=1e-2", "batch.rows=4"]
    how += ["batch.micro_rows=1", "checkpoint.every=1"]
    expected = train("whole", *how, "train.steps=3")
    for steps, degree in ((1, 1), (2, 2), (3, 1)):
        layout = [f"train.steps={steps}", f"sharding.expert={degree}"]
        run = train("parts", *how, *layout, ranks=degree)
    assert run.column("loss") == pytest.approx(expected.column("loss"), rel=1e-5)
    assert run.column("grad_norm") == pytest.approx(expected.column("grad_norm"), rel=1e-4)
    adapters, others = stored(newest(run)), stored(newest(expected))
    assert any(".experts.lora_B.down_proj" in name for name in adapters)
    for name in adapters:
        torch.testing.assert_close(adapters[name], others[name], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.further
def test_losses_of_experts_and_their_load_are_those_of_one_process(train):
    how = [*SMALL, "schedule=constant", "loss.load_balancing=0.1", "loss.router_z_loss=0.01"]
    how += ["train.steps=3", "batch.rows=4", "batch.micro_rows=1", "optim.lr=1e-2"]
    one = train("one", *how)
    names = ("objective", "grad_norm", "load_balancing_loss", "router_z_loss", "expert_load_max")
    for key, ranks in (("tensor", 2), ("pipeline", 4)):
        run = train(key, *how, "sharding.expert=2", f"sharding.{key}=2", ranks=ranks)
        for name in names:
            assert run.column(name) == pytest.approx(one.column(name), rel=1e-4), (key, name)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["sharding.expert=3"], "must divide num_experts=4. Use sharding.expert=2"),
        (["sharding.expert=2"], "(shard × context × tensor), which are 1. Use sharding.expert=1"),
        (["sharding.expert=2", "model.family=qwen3"], "qwen3 has no experts"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_what_can(train, overrides, words):
    family = [] if "model.family=qwen3" in overrides else SMALL
    run = train("refused", *family, *overrides, code=2)
    assert words in " ".join(run.err.split())
