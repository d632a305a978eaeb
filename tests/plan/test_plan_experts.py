"""The plan of a mixture whose experts ranks divide, beside what ranks really send and hold."""

import functools
import json

import inject
import pytest
from messages_of_a_step import rows_of_512_ranks, steps_of_experts
from recipe import planned

from fsdp_trainer.cli import main
from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.config.devices import DEVICES
from fsdp_trainer.plan.changes import Candidate
from fsdp_trainer.plan.memory import memory
from fsdp_trainer.plan.plan_inputs import architecture, target
from fsdp_trainer.plan.planned_run import PlannedRun
from fsdp_trainer.plan.suggest import suggest
from fsdp_trainer.plan.wire import wire

MIXTURE = (
    "model=tiny", "model.family=qwen3_moe", "model.num_experts=8", "model.num_experts_per_tok=2",
    "model.hidden_size=128", "model.moe_intermediate_size=256", "model.tie_word_embeddings=false",
    "model.vocab_size=512", "model.num_hidden_layers=2", "plan.world_size=4", "batch.seq_len=512",
    "batch.micro_rows=1", "batch.rows=4", "precision=fp32",
)  # fmt: skip
LAYOUTS = (
    ("sharding.expert=2",),
    ("sharding.expert=4", "activation_checkpoint=full"),
    ("sharding.expert=2", "sharding.tensor=2", "batch.rows=2"),
    ("sharding.tensor=2", "batch.rows=2", "activation_checkpoint=full"),
    ("sharding.expert=2", "sharding=hsdp", "sharding.replicas=2"),
    ("sharding.expert=4", "model.num_experts=4", "activation_checkpoint=selective"),
    ("sharding.expert=2", "model.num_experts=2", "model.num_experts_per_tok=1"),
    (
        "sharding.tensor=2",
        "batch.rows=2",
        "activation_checkpoint=full",
        "model.family=qwen2_moe",
        "model.shared_expert_intermediate_size=96",
    ),
)
CONTEXT = ("sharding.expert=2", "sharding.context=2", "batch.rows=2")
QLORA = (
    "sharding.expert=2",
    "adapter=qlora",
    "adapter.targets=[all,experts]",
    "activation_checkpoint=full",
)
MIXTRAL = ("model=mixtral_8x7b", "plan.gpu=h100", "batch.rows=64", "batch.seq_len=4096")
QWEN = ("model=qwen3_30b_a3b", "plan.gpu=h100", "batch.rows=64", "batch.seq_len=4096")


@pytest.fixture(scope="module")
def measured(world):
    """Return a function that returns of a layout its configuration, its model, and what rank 0 of
    four sent and held."""

    @functools.cache
    def of_layout(layout):
        cfg = compose("plan", [*MIXTURE, *layout], inputs=False)
        case = cfg, architecture(cfg)[0]
        [step] = world.call(4, steps_of_experts, [case])[0]
        return *case, step

    return of_layout


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
@pytest.mark.grid(1)
@pytest.mark.further
def test_ranks_send_the_bytes_that_the_plan_counts(measured, layout):
    """Routing is even. Ranks of a tensor group also exchange a few numbers of each token's loss."""
    cfg, config, step = measured(layout)
    ways = wire(PlannedRun.of(cfg, config, 4), DEVICES["h100"])
    for gathers in (True, False):
        counted = {}
        for name in ("shard", "eshard", "tensor"):
            if name in ways and ways[name].ranks > 1:
                size = ways[name].gathered if gathers else ways[name].reduced
                ranks = ways[name].ranks
                counted[ranks] = counted.get(ranks, 0) + size
        real = {
            ranks: size for (ranks, is_gather), size in step.sent.items() if is_gather == gathers
        }
        close = 0.005 if cfg.sharding.tensor > 1 else 0
        assert real == pytest.approx(counted, rel=close)
    way = ways.get("expert")
    assert step.rows == (way.gathered + way.reduced if way else 0)
    # of two blocks, also where they are computed again
    assert step.waits == (2 if way else 0)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*LAYOUTS, CONTEXT, QLORA], ids=" ".join)
@pytest.mark.grid(1)
def test_ranks_hold_what_the_plan_says(measured, layout):
    cfg, config, step = measured(layout)
    with inject.around("allocator_copy", lambda *_: 0.0):  # gloo's own, which is no tensor
        peak = memory(PlannedRun.of(cfg, config, 4), "cpu").peak
    assert peak.total - peak.bytes["allowance"] == pytest.approx(step.peak, rel=0.005)


@pytest.mark.slow
@pytest.mark.further
def test_512_ranks_send_the_rows_that_the_plan_counts(world):
    """Two blocks as wide as Qwen3 30B-A3B's, on ranks that do not exist."""
    words = ("model.num_hidden_layers=2", "plan.world_size=512", "batch.rows=512",
             "batch.seq_len=1024", "batch.micro_rows=1", "sharding.expert=64",
             "activation_checkpoint=full")  # fmt: skip
    cfg = compose("plan", [*QWEN, *words], inputs=False)
    config = architecture(cfg)[0]
    [(sent, rows, waits)] = world.call(1, rows_of_512_ranks, cfg, config)
    ways = wire(PlannedRun.of(cfg, config, 512), DEVICES["h100"])
    assert (rows, waits) == (ways["expert"].gathered + ways["expert"].reduced, 2)
    # 8 nodes of 8: of 63 other ranks 56 are on another node
    assert ways["expert"].across == pytest.approx(rows * 56 / 63)
    for name in ("shard", "eshard"):
        way = ways[name]
        counted = (sent[way.ranks, True], sent[way.ranks, False])
        assert counted == pytest.approx((way.gathered, way.reduced)), name


@pytest.mark.slow
def test_experts_on_several_ranks_are_gathered_by_fewer_and_their_rows_travel():
    alone = planned(*QWEN, "plan.world_size=16")
    divided = planned(*QWEN, "plan.world_size=16", "sharding.expert=8")
    assert divided.wire["eshard"].ranks == 2
    assert divided.wire["expert"].across == 0 < divided.wire["eshard"].across
    assert divided.memory.peak.bytes["gathered"] < alone.memory.peak.bytes["gathered"] / 3
    states = [plan.memory.peak.bytes["optimizer"] for plan in (alone, divided)]
    assert states[0] == pytest.approx(states[1], rel=0.01)
    weights = sum(way.gathered for name, way in divided.wire.items() if name != "expert")
    assert weights < alone.wire["shard"].gathered / 4


@pytest.mark.slow
@pytest.mark.further
def test_the_plan_tells_the_load_of_the_busiest_rank(capsys):
    words = (*QWEN, "plan.world_size=8", "activation_checkpoint=full", "sharding.expert=8")
    assert main(["plan", *words, "batch.micro_rows=4", "plan.format=json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["uneven"]["expert_load"] == 1.5
    assert report["uneven"]["peak_gib"] > report["peak_gib"]
    assert report["uneven"]["step_seconds"][0] > 1.1 * report["step_seconds"][0]
    assert main(["plan", *words, "batch.micro_rows=8", "plan.expert_load=3"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "3 × the even rows at one rank's experts" in out
    assert "it does not fit then" in out


@pytest.mark.slow
@pytest.mark.further
def test_layouts_of_mixtures_divide_experts(capsys):
    cluster = [*MIXTURE, "plan.gpu=h100", "plan.format=json"]
    assert main(["plan", *cluster, "plan.search=true"]) == 0
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    with_experts = [one for one in layouts if "sharding.expert=" in " ".join(one["overrides"])]
    typed = [*cluster, *with_experts[0]["overrides"]]
    assert main(["plan", *typed]) == 0
    report = json.loads(capsys.readouterr().out)
    for name in ("tokens_per_second", "peak_gib"):
        assert report[name] == with_experts[0][name]


@pytest.mark.slow
@pytest.mark.further
def test_what_does_not_fit_is_told_to_divide_its_experts():
    words = (*MIXTRAL, "plan.world_size=16", "activation_checkpoint=full")
    cfg = compose("plan", words, inputs=False)
    options = suggest(Candidate(cfg, architecture(cfg)[0], 16, target(cfg, 16)))
    assert "sharding.expert=" in options[0].override
    words = [*words, *options[0].override.split()]
    assert planned(*words).fits
