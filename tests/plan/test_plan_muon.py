"""The plan of a run with Muon: the messages of owners of matrices, and their products."""

import pytest
from messages_of_a_step import messages_of_owners
from recipe import planned

from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.config.devices import DEVICES
from fsdp_trainer.plan.changes import Candidate
from fsdp_trainer.plan.plan_inputs import architecture, target
from fsdp_trainer.plan.planned_run import PlannedRun
from fsdp_trainer.plan.suggest import suggest
from fsdp_trainer.plan.wire import wire

TINY = (
    "model=tiny", "optim=muon", "plan.world_size=4", "batch.seq_len=64", "batch.rows=4",
    "batch.micro_rows=1", "model.intermediate_size=256", "model.vocab_size=512",
)  # fmt: skip
LAYOUTS = (
    ("sharding=fsdp",),
    ("sharding=hsdp", "sharding.replicas=2", "optim.ns_dtype=float32"),
    ("sharding=ddp",),
    ("sharding.tensor=2",),
    ("sharding.pipeline=2",),
    ("model.family=qwen3_moe", "model.num_experts=8", "model.num_experts_per_tok=2",
     "sharding.expert=2"),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.further
def test_owners_are_sent_the_bytes_that_the_plan_counts(world):
    """Bytes are a mean over the ranks: a rank may own more of its whole experts than by chance."""
    cfgs = [compose("plan", [*TINY, *layout], inputs=False) for layout in LAYOUTS]
    cases = [(cfg, architecture(cfg)[0]) for cfg in cfgs]
    sent = zip(*world.call(4, messages_of_owners, cases), strict=True)
    for layout, (cfg, config), by_rank in zip(LAYOUTS, cases, sent, strict=True):
        way = wire(PlannedRun.of(cfg, config, 4), DEVICES["h100"])["owners"]
        counted = way.gathered + way.reduced
        ranks = len(by_rank) // cfg.sharding.pipeline
        mean = max(sum(stage) / ranks for stage in (by_rank[:ranks], by_rank[-ranks:]))
        if config.num_experts:
            assert counted / 2 < mean <= counted, layout
        else:
            assert mean == pytest.approx(counted), layout


@pytest.mark.slow
def test_newton_schulz_takes_its_share_of_a_step():
    """docs/optimizers.md: 2.8% of the arithmetic of Llama 8B with half a million tokens."""
    words = ("+recipe=llama8b_pretrain", "plan.gpu=h100", "plan.world_size=8", "batch.rows=64",
             "activation_checkpoint=none")  # fmt: skip
    adamw, muon = (planned(*words, f"optim={name}").fast for name in ("adamw", "muon"))
    share = (muon.optimizer - adamw.optimizer) / muon.compute
    assert 0.01 < share < 0.03  # products of wide matrices are faster than the rest
    assert muon.compute == adamw.compute


@pytest.mark.slow
def test_owners_of_other_nodes_are_sent_to_over_the_network():
    words = ("+recipe=llama8b_pretrain", "plan.gpu=h100", "optim=muon")
    assert planned(*words, "plan.world_size=8").wire["owners"].across == 0
    way = planned(*words, "plan.world_size=64").wire["owners"]
    assert way.across == pytest.approx((way.gathered + way.reduced) * 56 / 63)


@pytest.mark.slow
def test_a_pretraining_that_does_not_fit_is_told_of_muon():
    words = ["model=llama3_8b", "batch.seq_len=8192", "batch.rows=32", "plan.gpu=a100_40gb",
             "plan.world_size=8", "activation_checkpoint=full", "batch.micro_rows=1",
             "plan.memory_gib=24"]  # fmt: skip
    cfg = compose("plan", words, inputs=False)
    options = suggest(Candidate(cfg, architecture(cfg)[0], 8, target(cfg, 8)))
    [muon] = [option for option in options if option.override == "optim=muon"]
    assert planned(*words, "optim=muon").memory.peak.total == pytest.approx(muon.peak_bytes)
