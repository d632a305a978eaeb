"""The plan's bound of memory, and its messages, beside those of a step.

Steps are rehearsed: `test_layouts.py` compares the rehearsals of LAYOUTS with real steps.
"""

from string import Template

import named_runs
import pytest
from named_runs import FULL, LAYOUTS, RUNS, layout
from recorded_step import rehearsal_of
from tables import rows

WIDE = (
    "model.hidden_size=512 model.intermediate_size=1536 model.vocab_size=8000"
    " model.num_attention_heads=8 model.num_key_value_heads=2 model.head_dim=64"
    " model.tie_word_embeddings=false batch.seq_len=512"
)
"""A model whose tensors are so large that a row's own, which the plan leaves out, hardly count."""
UNITS = "model.num_hidden_layers=4 sharding.blocks_per_unit=2"
TIED = "model.tie_word_embeddings=true"
MIXTURE = (
    "model.family=qwen3_moe model.num_experts=8 model.num_experts_per_tok=2"
    " model.moe_intermediate_size=256 sharding.expert"
)
STEPS = {
    name: (int(ranks), Template(words).substitute(vars(named_runs) | globals()))
    for name, ranks, words in rows("""
seven ranks, tied → 7 → $TIED $FULL $FREED batch.rows=28
units, in eight bits → 2 → model.family=gemma3_text $UNITS sharding.prefetch=2 optim=adamw_8bit
  $FULL $FREED
a large vocabulary → 2 → model.vocab_size=64000
adapters on two matrices → 3 → adapter=lora adapter.base=fp32 adapter.targets=[q_proj,v_proj]
  adapter.rank=2 $TIED batch.rows=12
adapters on upper blocks → 2 → adapter=lora adapter.targets=['model.layers.[2-3].*']
  adapter.also=[head,norms] $UNITS $FULL
adapters in four bits → 3 → adapter=dora adapter.base=nf4 adapter.targets=[q_proj,down_proj]
  $SELECTIVE
gpipe → 2 → $STAGES sharding.pipeline_schedule=gpipe
gathered products → 2 → model.family=olmo2 sharding.tensor=2 $FULL
ring → 2 → sharding.context=2 sharding.context_method=ring
experts, selective → 8 → $MIXTURE=2 sharding=hsdp sharding.replicas=2 $SELECTIVE
  sharding.prefetch=2 precision.param_dtype=bfloat16 $FREED
experts and tensor → 8 → $MIXTURE=4 sharding.tensor=2 $FULL $FREED
a shared expert → 4 → $MIXTURE=1 model.family=qwen2_moe
  model.shared_expert_intermediate_size=96 sharding.tensor=2 $FULL
experts with adapters in four bits → 4 → $MIXTURE=2 adapter=qlora
  adapter.targets=[all,experts] $FULL $FREED
muon of stages and tensor → 8 → $STAGES optim=muon sharding.tensor=2
""")
}
"""What LAYOUTS does not have: numbers of ranks and overrides of a rehearsal."""
RUNS_AND_STEPS = {name: RUNS[name] for name in LAYOUTS} | {
    name: layout(ranks, f"{WIDE} {own}") for name, (ranks, own) in STEPS.items()
}
LEAST = 0.5
"""Least share of a peak that its lower bound is."""
TIED_BYTES = 260 * 128 * 4
"""A small model's embedding, whose gradient the plan does not count where stages share it."""


@pytest.mark.parametrize("name", RUNS_AND_STEPS)
def test_a_step_holds_at_least_and_sends_what_arithmetic_says(ledger, name):
    compared = ledger.comparison(RUNS_AND_STEPS[name])
    assert compared.rehearsal.finishes
    assert LEAST * compared.tensors < compared.same.memory.tensors <= compared.tensors
    rehearsed, planned = (sum(sent.values()) for sent in (compared.sent, compared.planned))
    shared = 1.01 * TIED_BYTES if "pipeline" in compared.sent and name not in STEPS else 0
    assert planned == pytest.approx(rehearsed, rel=0.003 if name in STEPS else 0.01, abs=shared)


def test_512_ranks_hold_and_send_what_the_plan_says():
    """Blocks as wide as Qwen3 30B-A3B's; of 63 ranks with other experts 56 are on other nodes."""
    words = [
        "model=qwen3_30b_a3b", "model.num_hidden_layers=2", "plan.gpu=h100", FULL,
        "sharding.expert=64", "batch.seq_len=1024", "batch.rows=512", "batch.micro_rows=1",
    ]  # fmt: skip
    compared = rehearsal_of(words, 512)
    assert compared.rehearsal.finishes
    assert compared.planned == pytest.approx(compared.sent, rel=1e-4)
    rows = compared.same.wire["expert"]
    assert rows.across == pytest.approx((rows.gathered + rows.reduced) * 56 / 63)
    across = sum(wire.across for wire in compared.same.wire.values())
    assert across == pytest.approx(compared.across, rel=1e-4)


def test_a_second_copy_is_gathered_as_the_plan_says(ledger):
    called, *_ = ledger.run("with a second copy").steps[0]
    among_two = [size for _, ranks, op, size, *_ in called if (ranks, op) == (2, "all_gather")]
    planned = ledger.comparison("with a second copy").same.wire["copy"].gathered
    assert sum(among_two) / 2 == planned > 0
