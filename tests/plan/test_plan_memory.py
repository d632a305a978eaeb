"""The plan's memory: exact if it is arithmetic, else what steps really hold."""

import json
import os
from dataclasses import replace
from pathlib import Path

import inject
import pytest
import torch
from memory_of_a_step import LiveBytes, only_tensors, peak_of_stages, peaks

from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.plan.block_memory import trace_blocks
from fsdp_trainer.plan.memory import CATEGORIES, memory
from fsdp_trainer.plan.planned_run import PlannedRun

MODEL = ModelConfig(
    vocab_size=8000,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    tie_word_embeddings=False,
)
FULL = {"activation_checkpoint.mode": "full"}
LORA = {"adapter.name": "lora"}


def configured(ranks: int = 8, micro_batches: int = 1, **keys) -> TrainConfig:
    """keys: `group.key`, or `group__key`."""
    cfg = TrainConfig()
    cfg.batch.seq_len = 512
    for name, value in keys.items():
        group, key = name.replace("__", ".").split(".")
        setattr(getattr(cfg, group), key, value)
    cfg.batch.rows = ranks * micro_batches * cfg.batch.micro_rows
    return cfg


def without_allowance(moment) -> float:
    return moment.total - moment.bytes["allowance"]


@pytest.mark.parametrize("ranks", [1, 2, 7, 8])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.grid(4)
def test_states_are_those_of_a_ranks_largest_shards(ranks, tied):
    config = replace(MODEL, tie_word_embeddings=tied, vocab_size=8003, hidden_size=500)
    moments = {
        m.when: m.bytes
        for m in memory(PlannedRun.of(configured(ranks), config, ranks), "cpu").moments
    }
    with torch.device("meta"):
        shards = [p.chunk(ranks)[0] for p in Decoder(config).parameters()]  # as fully_shard does
    numbers = sum(shard.numel() for shard in shards)
    bytes_of = moments["optimizer step"]
    assert bytes_of["parameters"] == 4 * numbers
    assert bytes_of["gradients"] == 4 * numbers
    assert bytes_of["optimizer"] == 8 * numbers
    assert all(set(categories) == set(CATEGORIES) for categories in moments.values())


@pytest.mark.slow
def test_strategies_and_formats_change_what_they_should():
    def at(category, ranks=8, **keys):
        return max(
            m.bytes[category]
            for m in memory(PlannedRun.of(configured(ranks, **keys), MODEL, ranks)).moments
        )

    assert at("parameters", sharding__strategy="ddp") == 8 * at("parameters")
    assert at("parameters", sharding__strategy="hsdp", sharding__replicas=4) == 4 * at("parameters")
    assert at("optimizer", optim__state_dtype="8bit") < 0.27 * at("optimizer")
    assert at("gathered", sharding__reshard_after_forward=False) > 2 * at("gathered")
    assert (
        at("gradients", micro_batches=2, sharding__accumulate="unsharded")
        == sum(p.numel() for p in meta().parameters()) * 4
    )
    assert at("communication", sharding__prefetch=3) > at("communication")
    assert at("activations", batch__micro_rows=2, batch__seq_len=1024) > 3.5 * at("activations")


def meta() -> Decoder:
    with torch.device("meta"):
        return Decoder(MODEL)


@pytest.mark.slow
def test_offloaded_states_are_the_hosts():
    here, there = (
        memory(PlannedRun.of(configured(2, sharding__cpu_offload=offload), MODEL, 2), "cuda")
        for offload in (False, True)
    )
    assert here.host == 0
    assert (
        there.peak.bytes["parameters"]
        == there.peak.bytes["optimizer"]
        == there.peak.bytes["gradients"]
        == 0
    )
    assert there.host == pytest.approx(
        sum(p.numel() for p in meta().parameters()) * 16 / 2, rel=1e-3
    )


@pytest.mark.slow
def test_a_block_that_is_computed_again_keeps_its_input_alone():
    config, stream = MODEL, 512 * 512 * 2
    saved = [
        trace_blocks(PlannedRun.of(configured(**keys), config, 1).model, "cpu")[0][0].saved
        for keys in (
            FULL,
            {"activation_checkpoint.mode": "selective"},
            {"activation_checkpoint.mode": "selective", "activation_checkpoint.save": ["matmul"]},
            {},
        )
    ]
    assert saved[0] == stream
    assert saved == sorted(saved)
    assert len(set(saved)) == 4
    every = [
        block.saved
        for block in trace_blocks(
            PlannedRun.of(configured(**FULL, activation_checkpoint__every=2), config, 1).model,
            "cpu",
        )[0]
    ]
    assert every == [saved[0], saved[3]] * 2
    half = trace_blocks(
        PlannedRun.of(configured(**{"activation_checkpoint.mode": "budget"}), config, 1).model,
        "cpu",
    )[0][0].saved
    assert half == (saved[0] + saved[3]) / 2


@pytest.mark.slow
def test_a_mask_costs_the_rows_length_squared():
    def kept(length, layout):
        return trace_blocks(
            PlannedRun.of(
                configured(
                    batch__seq_len=length, model__attention=layout, model__attention_kernel="auto"
                ),
                MODEL,
                1,
            ).model,
            "cpu",
        )

    (blocks, shared), (longer, more) = (kept(length, "mask") for length in (512, 1024))
    assert more - 2 * shared == 2 * 512**2
    assert longer[0].saved > 2 * blocks[0].saved + 2 * 512**2
    assert kept(1024, "documents")[0][0].saved < 2.01 * kept(512, "documents")[0][0].saved


LIVE = {
    "bf16": {},
    "fp32, 8 blocks": {"blocks": 8, "precision.param_dtype": "float32", **FULL},
    "hsdp, selective": {
        "sharding.strategy": "hsdp",
        "sharding.replicas": 2,
        "activation_checkpoint.mode": "selective",
    },
    "ddp": {"ranks": 2, "sharding.strategy": "ddp", **FULL},
    "tied, uneven, 2 micro-batches": {"ranks": 7, "tied": True, "micro_batches": 2, **FULL},
    "gemma, units of 2 blocks, 8 bits": {
        "blocks": 4,
        "family": "gemma3_text",
        "sharding.blocks_per_unit": 2,
        "sharding.prefetch": 2,
        "optim.state_dtype": "8bit",
        "ranks": 2,
        **FULL,
    },
    "a large vocabulary": {"vocabulary": 64000, "batch.seq_len": 64},
    "whole gradients": {"micro_batches": 2, "sharding.accumulate": "unsharded", **FULL},
    "lora": {**LORA, "ranks": 1, **FULL},
    "lora on two layers, rank 2, uneven, 2 micro-batches": {
        **LORA,
        "adapter.targets": ["q_proj", "v_proj"],
        "adapter.rank": 2,
        "ranks": 3,
        "micro_batches": 2,
    },
    "dora, selective, hsdp": {
        **LORA,
        "adapter.name": "dora",
        "activation_checkpoint.mode": "selective",
        "sharding.strategy": "hsdp",
        "sharding.replicas": 2,
        "ranks": 4,
    },
    "lora in fp32, tied": {
        **LORA,
        "ranks": 4,
        "tied": True,
        "adapter.base": "fp32",
        "precision.param_dtype": "float32",
    },
    "lora on upper blocks, head and norms trained, units of 2 blocks": {
        "blocks": 4,
        **LORA,
        "adapter.targets": ["model.layers.[2-3].*"],
        "adapter.also": ["head", "norms"],
        "sharding.blocks_per_unit": 2,
        "ranks": 2,
        **FULL,
    },
    "qlora": {**LORA, "adapter.base": "nf4", "ranks": 1, **FULL},
    "dora in 4 bits on two layers, uneven, selective": {
        "adapter.name": "dora",
        "adapter.base": "nf4",
        "adapter.targets": ["q_proj", "down_proj"],
        "activation_checkpoint.mode": "selective",
        "ranks": 3,
    },
    "frozen blocks below trained ones": {
        "blocks": 4,
        "train.freeze": ["model.embed_tokens.*", "model.layers.[0-1].*"],
        "ranks": 2,
    },
}
TRACKED = ("bf16", "hsdp, selective")


def case(ranks=8, blocks=2, tied=False, family="llama", vocabulary=8000, **keys):
    config = replace(
        MODEL,
        num_hidden_layers=blocks,
        tie_word_embeddings=tied,
        family=family,
        vocab_size=vocabulary,
    )
    return configured(ranks, **keys), config, ranks


@pytest.mark.slow
@pytest.mark.further
def test_the_plan_is_what_a_step_of_the_real_model_holds(world):
    """Tensors have no storage. torch's own tracker takes the modules of one unit for units of their
    own: 5% is for that."""
    cases = [(*case(**keys), "live") for keys in LIVE.values()] + [
        (*case(**LIVE[name]), "tracker") for name in TRACKED
    ]
    [measured] = world.call(1, peaks, cases)
    covered = set()
    for name, (cfg, config, ranks, by), held in zip(
        [*LIVE, *TRACKED], cases, measured, strict=True
    ):
        with only_tensors():
            peak = memory(PlannedRun.of(cfg, config, ranks), "cpu").peak
        tolerance = {"live": 0.005, "tracker": 0.05}[by]
        assert without_allowance(peak) == pytest.approx(held, rel=tolerance), (name, by, peak)
        covered |= {category for category, size in peak.bytes.items() if size > 0.02 * held}
    assert covered == set(CATEGORIES)  # a category left out would have been seen


@inject.fault
def measured_by_storages():
    """Write down what a step holds from its beginning to its update.

    The smallest of all steps but the first counts: gloo may hold a message for a moment longer.
    """
    peaks = []
    with LiveBytes() as live:

        def begin():
            live.begin()

        def end():
            peaks.append(live.most)
            Path(os.environ["PEAKS"], os.environ["RANK"]).write_text(str(min(peaks[1:] or peaks)))

        with inject.at(None, begin), inject.after("update", end):
            yield


GEMMA = {"family": "gemma3_text", "tie_word_embeddings": True, "vocab_size": 8000}
SMALL_HEAD = {"vocab_size": 1000}  # gloo may hold its message for a moment longer
UNITS = {
    "sharding.strategy": "hsdp",
    "sharding.replicas": 2,
    "sharding.blocks_per_unit": 2,
    "batch.micro_rows": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "model", "keys"),
    [(2, {}, {}), (4, GEMMA, UNITS), (3, SMALL_HEAD, {**LORA, "batch.micro_rows": 2})],
    ids=["llama, 2 ranks", "gemma, 4 ranks, units of 2 blocks", "lora, 3 ranks"],
)
@pytest.mark.further
def test_the_plan_is_what_a_real_training_holds(train, tmp_path, ranks, model, keys):
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": "plan " * 400}) + "\n" for _ in range(16)))
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "num_attention_heads": 8,
        "vocab_size": 4000,
        **model,
    }
    overrides = [
        *(f"model.{k}={v}" for k, v in sizes.items()),
        "batch.seq_len=256",
        "train.steps=4",
    ]
    keys = {"batch.micro_rows": 1, **keys}
    rows = 2 * ranks * keys["batch.micro_rows"]
    overrides += [f"batch.rows={rows}", *(f"{k}={v}" for k, v in keys.items())]
    overrides = [word.replace("adapter.name=", "adapter=") for word in overrides]
    train(
        "run",
        *overrides,
        f"data.path={texts}",
        "data.too_long=split",
        ranks=ranks,
        seam=measured_by_storages(),
        env={"PEAKS": str(tmp_path)},
    )
    held = max(int((tmp_path / rank).read_text()) for rank in map(str, range(ranks)))
    config = ModelConfig(**sizes, num_key_value_heads=2)
    cfg = configured(ranks, 2, **{"batch.seq_len": 256, "precision.param_dtype": "float32", **keys})
    with only_tensors():
        assert without_allowance(
            memory(PlannedRun.of(cfg, config, ranks), "cpu").peak
        ) == pytest.approx(held, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
@pytest.mark.further
def test_stages_hold_what_the_plan_says(world, schedule):
    """The rank that holds more is compared, of two."""
    keys = {"sharding.pipeline": 2, "sharding.pipeline_schedule": schedule}
    cfg = configured(1, 4, **keys, batch__micro_rows=1, precision__param_dtype="float32")
    smaller = replace(MODEL, hidden_size=256, intermediate_size=768, vocab_size=4000)
    measured = max(world.call(2, peak_of_stages, cfg, smaller))
    with only_tensors():
        planned = without_allowance(memory(PlannedRun.of(cfg, smaller, 2), "cpu").peak)
    assert planned == pytest.approx(measured, rel=0.1)
