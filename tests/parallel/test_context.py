"""Context parallelism: ranks that split rows compute what one plain process does."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from layouts import (
    LATENT,
    ROW,
    VOCABULARY,
    assert_same,
    compiled_quickly,
    configuration,
    layout_of,
    take_steps_on_rows,
    whole,
)
from stored import assert_byte_equal, tensors
from torch.distributed.tensor import DTensor
from world import read_lines, write_chats

from fsdp_trainer.config.context_methods import choose_context_method, context_method
from fsdp_trainer.config.schema import Sharding
from fsdp_trainer.models.adapters.adapter_targets import resolve_adapters
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.freeze import choose_trained
from fsdp_trainer.models.initialize import initialize_weights
from fsdp_trainer.parallel.balance_tokens import deal_tokens, token_costs
from fsdp_trainer.parallel.context import context_ranks
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.materialize import allocate
from fsdp_trainer.parallel.parallelize import Computation, parallelize
from fsdp_trainer.training.batches import Assembler

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2,
    "tie_word_embeddings": False, "family": "qwen3",
}  # fmt: skip


def start(model):
    """Weights as at a run's start, and adapters that add something."""
    initialize_weights(model, 1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            torch.nn.init.constant_(local, 0.1)


def plain(sizes, settings):
    """One process that has whole rows."""
    cfg, config = configuration(settings), ModelConfig(**{**SIZES, **sizes})
    model = Decoder(config)
    choose_trained(model, resolve_adapters(cfg.adapter, config), [])
    start(model)
    first = whole(dict(model.named_parameters()))
    return first, *take_steps_on_rows(model, cfg, None, Assembler(ROW, 1, 1, 0, 1, CPU))


def split(sizes, settings):
    """This rank's part."""
    dist.init_process_group("gloo")
    cfg, config = configuration(settings), ModelConfig(**{**SIZES, **sizes})
    dims = Dims(layout_of(cfg), "cpu", 60)
    with torch.device("meta"):
        model = Decoder(config)
    adapters = resolve_adapters(cfg.adapter, config)
    with compiled_quickly():
        model = parallelize(
            model,
            dims,
            Computation.of(cfg, settings.get("compiled", False)),
            adapters,
            cfg.train.freeze,
        )
    allocate(model, CPU)
    start(model)
    first = whole(dict(model.named_parameters()))
    choice = context_method(cfg.sharding, cfg.batch.seq_len, config.on_tensor_rank(1))
    assembler = Assembler(
        ROW, 1, 1, dims.batch_rank, dims.batch_ranks, CPU,
        attention=settings.get("attention", "documents"),
        same_rows=dims.same_rows, context=context_ranks(dims, choice.method, config.windows),
    )  # fmt: skip
    return first, *take_steps_on_rows(model, cfg, dims, assembler)


ONE_BLOCK = {"num_hidden_layers": 1}
TWO = {"sharding": {"context": 2}}
GATHERED = {"sharding": {"context": 2, "context_method": "gathered"}}
RING = {"sharding": {"context": 2, "context_method": "ring"}}
THREE_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 1}
WINDOWS = {"family": "gemma3_text", "sliding_window": 6, "tie_word_embeddings": True}
SOFT_CAPS = {
    "family": "gemma2", "attn_logit_softcapping": 20.0, "final_logit_softcapping": 5.0,
    "sliding_window": 6, "tie_word_embeddings": True,
}  # fmt: skip
LONG_ROPE = {
    "family": "phi3",
    "max_position_embeddings": 64,
    "rope_scaling": {
        "rope_type": "longrope", "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.0, 1.0, 1.0], "long_factor": [2.0, 3.0, 4.0, 5.0],
    },
}  # fmt: skip
CASES = {
    "two": (2, {}, TWO),
    "four, fewer key heads": (4, ONE_BLOCK, {"sharding": {"context": 4}}),
    "windows, tied": (2, WINDOWS, TWO),
    "norms over all heads, recomputed": (
        2,
        ONE_BLOCK | {"family": "olmo2"},
        TWO | {"checkpoint": {"mode": "selective"}},
    ),
    "long rope": (2, LONG_ROPE, TWO),
    "latent attention": (2, LATENT | ONE_BLOCK, TWO),
    "latent attention, ring": (2, LATENT | ONE_BLOCK, RING),
    "gathered": (2, THREE_HEADS, TWO),
    "gathered by mask": (2, WINDOWS, GATHERED | {"attention": "mask"}),
    "four gathered, windows": (
        4,
        WINDOWS,
        {"sharding": {"context": 4, "context_method": "gathered"}},
    ),
    "tensor": (4, ONE_BLOCK, {"sharding": {"context": 2, "tensor": 2}}),
    "tensor, gathered": (
        4,
        ONE_BLOCK | SOFT_CAPS | {"num_key_value_heads": 4},
        {"sharding": {"context": 2, "tensor": 2, "context_method": "gathered"}},
    ),
    "hsdp, lora": (
        4,
        {},
        {
            "sharding": {"context": 2, "strategy": "hsdp", "replicas": 2},
            "adapter": {"name": "lora", "rank": 2},
        },
    ),
    "ddp": (4, ONE_BLOCK, {"sharding": {"context": 2, "strategy": "ddp"}}),
    "soft caps, unsharded, full recomputation": (
        2,
        SOFT_CAPS,
        {
            "sharding": {"context": 2, "accumulate": "unsharded"},
            "checkpoint": {"mode": "full"},
        },
    ),
    "four in a ring": (4, ONE_BLOCK, {"sharding": {"context": 4, "context_method": "ring"}}),
    "ring by mask, recomputed": (
        2,
        WINDOWS,
        RING | {"attention": "mask", "checkpoint": {"mode": "selective"}},
    ),
    "ring, compiled": (2, ONE_BLOCK, RING | {"compiled": True, "attention": "mask"}),
    "ring and shard, windows": (4, WINDOWS, RING),
    "tensor, ring": (
        4,
        ONE_BLOCK | {"num_key_value_heads": 4},
        {"sharding": {"context": 2, "tensor": 2, "context_method": "ring"}},
    ),
    "compiled": (2, ONE_BLOCK, TWO | {"compiled": True, "attention": "mask"}),
}


QUICK = ("two",)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in QUICK else pytest.mark.slow) for c in CASES]
)
@pytest.mark.grid(3)
def test_ranks_that_split_rows_compute_what_one_process_does(world, case):
    ranks, sizes, settings = CASES[case]
    expected = plain(sizes, settings)
    for got in world.call(ranks, split, sizes, settings):
        assert_same(got, expected)


# --- runs -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.further
def test_a_run_goes_on_with_rows_split_and_not(train, tmp_path):
    (tmp_path / "data").mkdir()
    for name, start_at in (("a", 0), ("b", 200)):
        write_chats(tmp_path / "data" / f"{name}.jsonl", 60, start_at)
    how = [
        f"data.path={tmp_path / 'data'}", "data.validation=0.1", "train.validate_every=1",
        "train.sample_prompts=[aaa]", "train.sample_tokens=4", "schedule=constant",
        "batch.micro_rows=2", "train.check_every=1",
    ]  # fmt: skip
    whole = train("whole", *how, "train.steps=3")
    train("run", *how, "train.steps=1", "sharding.context=2", ranks=2)
    train("run", *how, "train.steps=2", ranks=2)
    run = train("run", *how, "train.steps=3", "sharding.context=2", ranks=4)
    assert "shared by 2 ranks, 32 tokens each, by ulysses: 4 heads over 2 ranks" in run.out
    for name in ("step", "tokens", "supervised_tokens"):
        assert run.column(name) == whole.column(name)
    assert run.column("loss") == pytest.approx(whole.column("loss"), rel=1e-5)
    assert run.column("grad_norm") == pytest.approx(whole.column("grad_norm"), rel=1e-4)
    for ours, alone in zip(run.metrics, whole.metrics, strict=True):
        assert ours["loss_by_source"] == pytest.approx(alone["loss_by_source"], rel=1e-5)
    losses = [[line["loss"] for line in r.event("evaluation")] for r in (run, whole)]
    assert len(losses[1]) == 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    texts = [read_lines(r.folder / "samples.jsonl") for r in (run, whole)]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 3


@pytest.mark.slow
def test_an_export_is_the_same_bytes_however_rows_were_split(train, tmp_path, world):
    how = ["train.steps=1", "sharding.context=2", "checkpoint.export_hf=true"]
    run = train("run", *how, "sharding.context_method=gathered", ranks=2)
    out = tmp_path / "out"
    world.command("export", f"source={run.folder}", f"out={out}")
    assert_byte_equal(tensors(run.folder / "hf"), tensors(out))


@pytest.mark.slow
@pytest.mark.further
def test_streamed_rows_are_split(train):
    how = ["data.streaming=true", "train.steps=3", "schedule=constant"]
    whole = train("whole", *how)
    run = train("run", *how, "sharding.context=2", ranks=2)
    assert run.column("tokens") == whole.column("tokens")
    assert run.column("loss") == pytest.approx(whole.column("loss"), rel=1e-5)


# --- what is dealt, and what is refused -----------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(
    ("lengths", "windows"),
    [
        ([8192], [None]),
        ([8192], [512, 512, 512, None]),
        ([400] * 20, [None]),
        ([5000, 100, 3000], [None]),
        ([8000, 64, 64], [1024, None]),
    ],
)
def test_the_slowest_rank_computes_little_more_than_the_mean(ranks, lengths, windows):
    costs = token_costs(lengths, 8192, windows)
    parts = deal_tokens(costs, ranks)
    assert sorted(parts.ravel()) == list(range(8192))
    assert (np.diff(parts) > 0).all()
    shares = costs[parts].sum(1)
    assert shares.max() < 1.05 * shares.mean()


@pytest.mark.parametrize(
    ("heads", "row", "softcap", "method"),
    [
        (8, 131_072, False, "ulysses"),
        (14, 8192, False, "gathered"),
        (14, 131_072, False, "ring"),
        (14, 131_072, True, "gathered"),
    ],
)
def test_whole_heads_are_dealt_where_they_divide_and_else_keys_travel(heads, row, softcap, method):
    split = Sharding(context=4)
    assert choose_context_method(split, heads, row, softcap).method == method


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (
            ["sharding.context=3", "sharding.context_method=ulysses", "batch.seq_len=63"],
            "must divide num_attention_heads=4.\n",
        ),
        (["sharding.context=3"], "Use  batch.seq_len=66  or  63"),
        (["sharding.context=2", "data.packing=none", "data.pad_to_multiple=8"], "all of one"),
        (["sharding.context_method=ulysses"], "only counts with  sharding.context=2"),
        (["sharding.context=2", "sharding.context_method=star"], "gathered, ring"),
        (
            [
                "sharding.context=2",
                "sharding.context_method=ring",
                "model.family=gemma2",
                "model.attn_logit_softcapping=20",
            ],
            "Use  sharding.context_method=gathered",
        ),
        (
            [
                "sharding.context=2",
                "sharding.context_method=gathered",
                "model.attention=varlen",
                "precision.param_dtype=bfloat16",
            ],
            "there are documents and mask",
        ),
    ],
)
def test_what_cannot_be_split_is_refused_before_anything_starts(train, typed, words):
    assert words in train("run", *typed, ranks=1, code=2).err
