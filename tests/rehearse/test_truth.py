"""A rehearsal beside a real step: collectives in order and in bytes, and the peak."""

import json

import pytest
from recorded_step import calls, recorded, recording, rehearsal_of
from world import SMALL

ROW = 256
BASE = [
    "data=pretrain", f"batch.seq_len={ROW}", "batch.micro_rows=2", "train.steps=2",
    "model.hidden_size=128", "model.intermediate_size=192", "schedule=constant",
]  # fmt: skip
EXPERTS = [
    "model.family=qwen3_moe", "model.num_experts=4", "model.num_experts_per_tok=4",
    "model.moe_intermediate_size=64",
]  # fmt: skip
FULL, SELECTIVE = "activation_checkpoint=full", "activation_checkpoint=selective"
STAGES = ["sharding.pipeline=2", "model.num_hidden_layers=4"]
LAYOUTS = {
    "one rank": (1, []),
    "one rank, recomputed": (1, [FULL]),
    "fsdp": (2, []),
    "fsdp of four": (4, []),
    "fsdp of eight": (8, []),
    "fsdp of three, with padding": (3, []),
    "recomputed": (2, [FULL]),
    "recomputed selectively": (2, [SELECTIVE]),
    "recomputed in every second block": (2, [FULL, "activation_checkpoint.every=2"]),
    "ddp": (2, ["sharding=ddp"]),
    "hsdp": (4, ["sharding=hsdp", "sharding.replicas=2"]),
    "two micro-batches": (2, ["batch.rows=8"]),
    "summed unsharded": (2, ["batch.rows=8", "sharding.accumulate=unsharded"]),
    "kept gathered": (2, ["sharding.reshard_after_forward=false"]),
    "with a second copy": (4, ["sharding.reshard_after_forward=2"]),
    "in eight bits": (2, ["sharding.quantize=both"]),
    "in eight bits, with feedback": (
        4,
        ["sharding.quantize=both", "sharding.error_feedback=true", "batch.rows=8"],
    ),
    "two blocks in a unit": (2, ["sharding.blocks_per_unit=2"]),
    "prefetched": (2, ["sharding.prefetch=2", "model.num_hidden_layers=4"]),
    "bfloat16": (2, ["precision.param_dtype=bfloat16"]),
    "pure bfloat16": (2, ["precision.param_dtype=bfloat16", "precision.master_dtype=bfloat16"]),
    "tied": (2, ["model.tie_word_embeddings=true"]),
    "adapters": (2, ["adapter=lora"]),
    "frozen": (2, ["train.freeze=['model.embed_tokens.*','model.layers.0.*']"]),
    "eight bits": (2, ["optim=adamw_8bit"]),
    "lion": (2, ["optim=lion"]),
    "muon": (2, ["optim=muon"]),
    "tensor": (2, ["sharding.tensor=2"]),
    "tensor, recomputed": (2, ["sharding.tensor=2", FULL]),
    "tensor and shards": (4, ["sharding.tensor=2"]),
    "context": (2, ["sharding.context=2"]),
    "context, gathered": (2, ["sharding.context=2", "sharding.context_method=gathered"]),
    "context and tensor": (4, ["sharding.context=2", "sharding.tensor=2"]),
    "pipeline": (2, STAGES),
    "pipeline and shards": (4, STAGES),
    "interleaved": (2, [*STAGES, "sharding.pipeline_schedule=interleaved"]),
    "zbv": (2, [*STAGES, "sharding.pipeline_schedule=zbv"]),
    "pipeline and tensor": (4, [*STAGES, "sharding.tensor=2"]),
    "experts": (2, EXPERTS),
    "experts on ranks": (2, [*EXPERTS, "sharding.expert=2"]),
    "experts on ranks, with shards": (4, [*EXPERTS, "sharding.expert=2"]),
}
"""Numbers of ranks and overrides. With experts each token goes to all: routing is even."""


@pytest.fixture
def rows(tmp_path):
    """A file of documents that each fill a row."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": "a" * (ROW - 1)}) + "\n" for _ in range(64)))
    return file


def readers(ranks, words):
    """Return how many ranks read different rows."""
    sizes = dict(word.split("=", 1) for word in words)
    for name in ("tensor", "context", "pipeline"):
        ranks //= int(sizes.get(f"sharding.{name}", 1))
    return ranks


def passed(step):
    """Return the bytes of all that a rank sends to other stages and receives; 0 without stages."""
    return sum(one.bytes for one in step.collectives if one.peer is not None)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.grid(1)
def test_a_real_step_has_the_collectives_and_the_peak_of_its_rehearsal(
    train, rows, tmp_path, layout
):
    ranks, own = LAYOUTS[layout]
    count = 4 if "sharding.pipeline=2" in own else 1
    words = [*BASE, f"data.path={rows}", f"batch.rows={2 * count * readers(ranks, own)}", *own]
    rehearsal = rehearsal_of([*SMALL, *words, "tokenizer.path=demo:bytes"], ranks)
    assert rehearsal.finishes, [one.problem for one in rehearsal.kinds] + rehearsal.mismatches
    # gloo's threads hold what a pipeline passes on for a while after it has arrived
    limits = {one.kind.rank: 1.01 * one.peak + passed(one.step) for one in rehearsal.kinds}
    train("run", *words, ranks=ranks, seam=recording(tmp_path, limits))
    real = recorded(tmp_path, ranks)
    for one in rehearsal.kinds:
        called, peak = real[one.kind.rank]
        assert calls(one.step.collectives, one.step.groups) == called
        assert 0.98 * one.peak <= peak.total <= 1.02 * one.peak + passed(one.step)
    known = [calls(one.step.collectives, one.step.groups) for one in rehearsal.kinds]
    assert all(called in known for called, _ in real), "also of ranks that were only counted"
