"""The messages that the plan counts, beside those that a step of the real model issues."""

from dataclasses import replace

import pytest
from messages_of_a_step import Message, messages_of, messages_of_stages

from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.config.devices import DEVICES
from fsdp_trainer.plan.plan_inputs import architecture
from fsdp_trainer.plan.planned_run import PlannedRun
from fsdp_trainer.plan.wire import tensor_traffic, wire

STAGES = (
    "model=tiny", "model.num_hidden_layers=5", "plan.world_size=4", "sharding.pipeline=2",
    "batch.seq_len=64", "batch.rows=12", "batch.micro_rows=1",
    "precision=fp32",
)  # fmt: skip
RANKS, TENSOR = 512, 8
LLAMA_70B = ("model=llama3_70b", "model.num_hidden_layers=2", f"plan.world_size={RANKS}")
ROWS = ("batch.seq_len=1024", f"batch.rows={RANKS // TENSOR}", "batch.micro_rows=1")


def planned_case(recomputed, family):
    words = [*LLAMA_70B, *ROWS, f"sharding.tensor={TENSOR}", f"activation_checkpoint={recomputed}"]
    cfg = compose("plan", words, inputs=False)
    return cfg, replace(architecture(cfg)[0], family=family)


@pytest.mark.slow
@pytest.mark.further
def test_512_ranks_issue_the_messages_that_the_plan_counts(world):
    """Two blocks as wide as Llama 70B's. A norm behind the last sum of a block needs it again."""
    kinds = [("none", "llama"), ("full", "llama"), ("full", "olmo2")]
    cases = [planned_case(*kind) for kind in kinds]
    [measured] = world.call(1, messages_of, cases, RANKS)
    for kind, (cfg, config), (count, size) in zip(kinds, cases, measured, strict=True):
        traffic = tensor_traffic(PlannedRun.of(cfg, config, RANKS).model)
        assert count[Message(TENSOR, gathers=True)] == traffic.gathers, kind
        assert count[Message(TENSOR, gathers=False)] == traffic.sums, kind
        ways = wire(PlannedRun.of(cfg, config, RANKS), DEVICES["h100"])
        for way in (ways["shard"], ways["tensor"]):
            sent = (way.ranks - 1) / way.ranks
            gathered = size[Message(way.ranks, gathers=True)] * sent
            reduced = size[Message(way.ranks, gathers=False)] * sent
            assert (gathered, reduced) == pytest.approx((way.gathered, way.reduced)), kind


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "tied"), [("1f1b", "false"), ("interleaved", "false"), ("zbv", "true")]
)
@pytest.mark.further
def test_stages_send_the_messages_that_the_plan_counts(world, schedule, tied):
    words = [*STAGES, f"sharding.pipeline_schedule={schedule}", f"model.tie_word_embeddings={tied}"]
    cfg = compose("plan", words, inputs=False)
    config = architecture(cfg)[0]
    planned = wire(PlannedRun.of(cfg, config, 4), DEVICES["h100"])
    counted = world.call(4, messages_of_stages, cfg, config)
    largest = max(counted, key=sum)
    way = planned["pipeline"]
    assert largest[0] == way.gathered + way.reduced
    way = planned["shard"]
    assert (2 * largest[1], 2 * largest[2]) == (2 * 2 * way.gathered, 2 * 2 * way.reduced)
