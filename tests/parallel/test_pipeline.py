"""Pipeline parallelism: stages compute what one plain process does."""

import pytest
import torch
import torch.distributed as dist
from layouts import (
    ROW,
    VOCABULARY,
    assert_same,
    compiled_quickly,
    configuration,
    layout_of,
    of_all_stages,
    take_steps_on_rows,
)
from schedules import followed
from stored import checkpoint, newest, stored, tensors
from torch.distributed.tensor import DTensor
from world import read_lines, write_chats

from fsdp_trainer.checkpoint.formats.huggingface import import_weights
from fsdp_trainer.config.context_methods import choose_context_method
from fsdp_trainer.config.pipeline_schedules import SCHEDULES, Stages, divide_blocks
from fsdp_trainer.config.schema import Batch, Sharding
from fsdp_trainer.models.adapters.adapter_targets import four_bit_weights, resolve_adapters
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.four_bit import quantize_linears
from fsdp_trainer.models.freeze import choose_trained
from fsdp_trainer.models.hf.new_model import meta_decoder
from fsdp_trainer.models.initialize import initialize_weights
from fsdp_trainer.parallel.context import context_ranks
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.materialize import allocate, initialize_magnitudes
from fsdp_trainer.parallel.parallelize import Computation, parallelize
from fsdp_trainer.parallel.pipeline import Pipeline
from fsdp_trainer.training.batches import Assembler

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2,
    "tie_word_embeddings": False, "family": "qwen3",
}  # fmt: skip


def rows_of_step(ranks, settings):
    """Two micro-batches for each stage of each pipeline, at most 8 rows."""
    sharding = Sharding(**settings["sharding"])
    batch_ranks = ranks // (sharding.pipeline * sharding.tensor * sharding.context)
    return min(8, 2 * sharding.pipeline * batch_ranks)


def pipelined(settings, rows):
    """The configuration of so many micro-batches a step."""
    return configuration(settings, batch=Batch(seq_len=ROW, rows=rows, micro_rows=1))


def start(model):
    """Weights as at a run's start, and adapters that add something."""
    initialize_weights(model, 1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            torch.nn.init.constant_(local, 0.1)
    initialize_magnitudes(model)


def plain(sizes, settings, rows):
    """One process that has the whole model."""
    cfg, config = pipelined(settings, rows), ModelConfig(**{**SIZES, **sizes})
    model = Decoder(config)
    adapters = resolve_adapters(cfg.adapter, config)
    quantize_linears(model, four_bit_weights(model, adapters), torch.float32)
    choose_trained(model, adapters, cfg.train.freeze)
    start(model)
    first = {n: p.detach().clone() for n, p in model.named_parameters()}
    return first, *take_steps_on_rows(model, cfg, None, Assembler(ROW, 1, 1, 0, 1, CPU), rows)


def staged(sizes, settings, rows):
    """This rank's part."""
    dist.init_process_group("gloo")
    cfg, config = pipelined(settings, rows), ModelConfig(**{**SIZES, **sizes})
    dims = Dims(layout_of(cfg), "cpu", 60)
    adapters = resolve_adapters(cfg.adapter, config)
    compiled = settings.get("compiled", False)
    with compiled_quickly():
        model = parallelize(
            meta_decoder(config), dims, Computation.of(cfg, compiled), adapters, cfg.train.freeze
        )
    allocate(model, CPU)
    start(model)
    first = of_all_stages(dict(model.named_parameters()))
    heads = config.num_attention_heads // cfg.sharding.tensor
    choice = choose_context_method(cfg.sharding, heads, ROW, softcap=False)
    assembler = Assembler(
        ROW, 1, 1, dims.batch_rank, dims.batch_ranks, CPU,
        attention=settings.get("attention", "documents"),
        same_rows=dims.same_rows, context=context_ranks(dims, choice.method, config.windows),
    )  # fmt: skip
    pipeline = Pipeline(model, dims, getattr(torch, cfg.precision.param_dtype), CPU)
    return first, *take_steps_on_rows(model, cfg, dims, assembler, rows, pipeline)


def layout(**options):
    return {"sharding": {"pipeline": 2, **options}}


EXPERTS = {
    "family": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
    "mlp_only_layers": (1,),
}  # fmt: skip
BLOCKS_OF_64 = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
NF4 = {"name": "lora", "rank": 2, "base": "nf4"}
MUON = {"name": "muon", "ns_dtype": "float32"}
WINDOWS = {"family": "gemma3_text", "sliding_window": 6, "tie_word_embeddings": True}
CASES = {
    "1f1b": (2, {}, layout()),
    "dualpipev, context": (4, {}, layout(pipeline_schedule="dualpipev", context=2)),
    "zbv, lora, full": (
        2,
        {},
        layout(pipeline_schedule="zbv")
        | {"checkpoint": {"mode": "full"}, "adapter": {"name": "lora", "rank": 2}},
    ),
    "dualpipev, tied": (4, WINDOWS, layout(pipeline_schedule="dualpipev")),
    "zbv, tied, tensor and shard": (8, WINDOWS, layout(pipeline_schedule="zbv", tensor=2)),
    "interleaved, tied": (2, WINDOWS, layout(pipeline_schedule="interleaved")),
    "unsharded, interleaved, frozen in front": (
        4,
        {},
        layout(pipeline_schedule="interleaved", accumulate="unsharded")
        | {"freeze": ["*embed_tokens*", "model.layers.0.*"]},
    ),
    "compiled, interleaved": (
        2,
        {},
        layout(pipeline_schedule="interleaved") | {"compiled": True, "attention": "mask"},
    ),
    "zbv, dora, selective": (
        2,
        {},
        layout(pipeline_schedule="zbv")
        | {"checkpoint": {"mode": "selective"}, "adapter": {"name": "dora", "rank": 2}},
    ),
    "normuon, zbv, tied": (
        4,
        {"tie_word_embeddings": True},
        layout(pipeline_schedule="zbv") | {"optim": MUON | {"normuon": True}, "tolerance": 2e-6},
    ),
    "lamb, tied, unequal stages, shard": (
        4,
        {"num_hidden_layers": 3, "tie_word_embeddings": True},
        layout() | {"optim": {"name": "lamb"}},
    ),
    "muon, a stage without matrices": (
        2,
        {},
        layout() | {"optim": MUON, "freeze": ["model.layers.[012].*"], "tolerance": 2e-6},
    ),
    "gpipe, hsdp, 8 bits": (
        8,
        {},
        layout(pipeline_schedule="gpipe", strategy="hsdp", replicas=2)
        | {"optim": {"state_dtype": "8bit"}, "tolerance": 1e-4},
    ),
    "lars, tied, shard": (
        4,
        {"tie_word_embeddings": True},
        layout() | {"optim": {"name": "lars", "trust_coefficient": 1.0}},
    ),
    "4 bits": (2, BLOCKS_OF_64, layout() | {"adapter": NF4}),
    "ring and tensor": (8, {}, layout(context=2, tensor=2, context_method="ring")),
    "experts and shard": (8, EXPERTS, layout(expert=2)),
    "zbv, lora on experts": (
        4,
        EXPERTS,
        layout(expert=2, pipeline_schedule="zbv")
        | {"adapter": {"name": "lora", "rank": 2, "targets": ["all", "experts"]}},
    ),
}


QUICK = ("1f1b",)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in QUICK else [pytest.mark.slow]) for c in CASES]
)
@pytest.mark.grid(2)
def test_stages_compute_what_one_process_does(world, case):
    ranks, sizes, settings = CASES[case]
    rows = rows_of_step(ranks, settings)
    expected = plain(sizes, settings, rows)
    for got in world.call(ranks, staged, sizes, settings, rows):
        # where states are rounded, one of them may be rounded to the other side
        assert_same(got, expected, settings.get("tolerance", 1e-5))


# --- division -------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_stage_has_one_rank(schedule):
    sharding = Sharding(pipeline=4, pipeline_schedule=schedule)
    stages = Stages.of(sharding)
    numbers = {rank: stages.of_rank(rank) for rank in range(4)}
    count = 4 * SCHEDULES[schedule].stages
    assert sorted(n for own in numbers.values() for n in own) == list(range(count))
    for rank, own in numbers.items():
        assert [stages.rank_of(n) for n in own] == [rank] * len(own)


@pytest.mark.parametrize(
    ("blocks", "head", "stages", "sizes"),
    [
        (8, 0, 4, [2, 2, 2, 2]),
        (8, 2, 4, [1, 3, 3, 1]),
        (5, 1, 2, [3, 2]),
        (126, 1, 16, [7, *[8] * 14, 7]),
        (3, 9, 3, [1, 1, 1]),
    ],
)
def test_blocks_are_divided_by_cost_and_the_head_counts(blocks, head, stages, sizes):
    parts = divide_blocks([1] * blocks, head, stages)
    assert [number for part in parts for number in part] == list(range(blocks))
    assert [len(part) for part in parts] == sizes


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zbv", "dualpipev"])
@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 8), (4, 16), (8, 64)])
def test_torchs_schedules_wait_and_hold_as_long_as_is_said(name, ranks, count):
    """The forward pass and both halves of backward take equally long here."""
    sharding = Sharding(pipeline=ranks, pipeline_schedule=name)
    idle, held = followed(name, ranks, count)
    stages = Stages.of(sharding)
    assert idle == pytest.approx(stages.idle(count))
    assert held == [stages.in_flight(rank, count) for rank in range(ranks)]


# --- runs -----------------------------------------------------------------------------------------


BESIDE = [
    "schedule=constant", "checkpoint.keep=9", "batch.micro_rows=1",
    "batch.rows=4", "model.num_hidden_layers=4", "optim.eps=1e-3", "data.validation=0.1",
    "train.validate_every=2", "train.sample_prompts=[a,bb]", "train.sample_tokens=3",
    "train.check_every=2",
]  # fmt: skip
LAYOUTS = {
    1: (2, []),
    2: (2, ["sharding.pipeline=2"]),
    3: (2, ["sharding.pipeline=2", "sharding.pipeline_schedule=zbv"]),
    4: (4, ["sharding.pipeline=2", "sharding.pipeline_schedule=interleaved"]),
    5: (1, []),
}
"""Ranks and overrides, by the step up to which they train."""


@pytest.mark.slow
@pytest.mark.further
def test_a_checkpoint_of_any_layout_goes_on_in_any_other(world, train, tmp_path):
    expected = train("whole", *BESIDE, "train.steps=5", ranks=2)
    for steps, (ranks, overrides) in LAYOUTS.items():
        run = train("parts", *BESIDE, f"train.steps={steps}", *overrides, ranks=ranks)
    for name in ("step", "tokens", "supervised_tokens"):
        assert run.column(name) == expected.column(name)
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
    assert weights.keys() == others.keys()
    for name in weights:
        torch.testing.assert_close(weights[name], others[name], rtol=0, atol=1e-5)

    # what the stages have written is exported and imported to the last bit
    source, out = checkpoint(run, 3), tmp_path / "hf"
    world.command("export", f"source={source}", f"out={out}")
    exported = tensors(out)
    for name, tensor in exported.items():
        assert torch.equal(tensor, stored(source)[f"weights/{name}"]), name
    for parts in world.call(2, imported, out):
        assert parts.keys() == exported.keys()
        for name, tensor in parts.items():
            assert torch.equal(tensor, exported[name]), name


@pytest.mark.slow
def test_a_step_with_fewer_micro_batches_is_filled_up(train, tmp_path):
    how = [
        f"data.path={write_chats(tmp_path / 'few.jsonl', 14)}", "data.packing=none",
        "batch.rows=8", "batch.micro_rows=1", "optim.eps=1e-3", "schedule=constant",
        "train.epochs=1", "train.steps=null", "model.num_hidden_layers=4",
    ]  # fmt: skip
    expected = train("whole", *how)
    assert expected.column("step")[-1] == 2  # of 14 rows, the last six
    stages = ["sharding.pipeline=2", "sharding.pipeline_schedule=interleaved"]
    run = train("stages", *how, *stages, ranks=2)
    assert run.column("tokens") == expected.column("tokens")
    assert run.column("loss") == pytest.approx(expected.column("loss"), rel=1e-5)
    assert run.column("grad_norm") == pytest.approx(expected.column("grad_norm"), rel=1e-4)


def imported(folder):
    """The weights of a folder as two stages read them."""
    dist.init_process_group("gloo")
    cfg = pipelined(layout(), 8)
    dims = Dims(layout_of(cfg), "cpu", 60)
    model = parallelize(meta_decoder(ModelConfig.from_hf(folder)), dims, Computation.of(cfg))
    allocate(model, CPU)
    import_weights(model, folder)
    return of_all_stages(dict(model.named_parameters()))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["sharding.pipeline=3"], "2 blocks. Use sharding.pipeline=2"),
        (
            ["sharding.pipeline=2", "sharding.pipeline_schedule=interleaved"],
            "makes 4 stages, each of at least one of 2 blocks. Use sharding.pipeline=1",
        ),
        (
            ["sharding.pipeline=2", "sharding.pipeline_schedule=zbv", "compile=enabled"],
            "Use compile=disabled or sharding.pipeline_schedule=interleaved",
        ),
        (["sharding.pipeline_schedule=gpipe"], "only counts with sharding.pipeline=2"),
        (
            ["sharding.pipeline=2", "data.packing=none", "data.pad_to_multiple=8"],
            "stages pass on rows of one length",
        ),
        (["sharding.pipeline=2", "sharding.cpu_offload=true"], "Use sharding.cpu_offload=false"),
        (["sharding.pipeline=2"], "must divide the number of ranks, which is 1"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_what_can(train, overrides, words):
    assert words in " ".join(train("refused", *overrides, code=2).err.split())


def test_a_step_with_too_few_micro_batches_is_refused_with_enough(train):
    run = train("refused", "sharding.pipeline=2", "batch.micro_rows=6", ranks=2, code=2)
    assert "Use batch.rows=12 or batch.micro_rows=3" in " ".join(run.err.split())
