"""The named runs of the ledger, as data: ranks, overrides, and whether the second step is recorded.

Overrides are added to `ledger.BASE`. In a word, DATA is the folder of `ledger.write_data`, and
RUN(name) the folder of another run. A run costs half a second to two; add a name only for what no
other one shows.
"""

from dataclasses import dataclass
from string import Template

from tables import rows

ROW = 256
FULL_ROWS = [
    "data=pretrain", "data.path=DATA/rows.jsonl", f"batch.seq_len={ROW}", "batch.micro_rows=2",
    "train.steps=2", "model.hidden_size=128", "model.intermediate_size=192",
    "schedule=constant", "optim.grad_clip=0.5",
]  # fmt: skip
"""Rows without padding or randomness, so that a step can be rehearsed: each has one document."""
EXPERTS = (
    "model.family=qwen3_moe model.num_experts=4 model.num_experts_per_tok=4"
    " model.moe_intermediate_size=64"
)
"""Each token goes to all experts: routing is even."""
FREED = "sharding.reshard_after_forward=true"
FULL, SELECTIVE = "activation_checkpoint=full", "activation_checkpoint=selective"
STAGES = "sharding.pipeline=2 model.num_hidden_layers=4"
DISTIL = "objective=distil objective.teacher=RUN(teacher)"
WRITTEN = rows("""
one rank → 1 →
fsdp → 2 →
fsdp of three, with padding → 3 →
recomputed → 2 → $FULL $FREED
recomputed selectively → 2 → $SELECTIVE
recomputed in every second block → 2 → $FULL activation_checkpoint.every=2
ddp → 2 → sharding=ddp
hsdp → 4 → sharding=hsdp sharding.replicas=2 $FREED
two micro-batches → 2 → batch.rows=8
summed unsharded → 2 → batch.rows=8 sharding.accumulate=unsharded
gathered again → 2 → $FREED
with a second copy → 4 → sharding.reshard_after_forward=2
in eight bits → 2 → sharding.quantize=both
in eight bits, with feedback → 2 → sharding.quantize=both sharding.error_feedback=true batch.rows=8
two blocks in a unit → 2 → sharding.blocks_per_unit=2
prefetched → 2 → sharding.prefetch=2 model.num_hidden_layers=4 $FREED
bfloat16 → 2 → precision.param_dtype=bfloat16 $FREED
pure bfloat16 → 2 → precision.param_dtype=bfloat16 precision.master_dtype=bfloat16
tied → 2 → model.tie_word_embeddings=true
adapters → 2 → adapter=lora $FREED
frozen → 2 → train.freeze=['model.embed_tokens.*','model.layers.0.*']
eight bits → 2 → optim=adamw_8bit
lion → 2 → optim=lion
muon → 2 → optim=muon
tensor, recomputed → 2 → sharding.tensor=2 $FULL $FREED
tensor and shards → 4 → sharding.tensor=2
context → 2 → sharding.context=2 $FREED
context, gathered → 2 → sharding.context=2 sharding.context_method=gathered
pipeline → 2 → $STAGES
pipeline and shards → 4 → $STAGES
interleaved → 2 → $STAGES sharding.pipeline_schedule=interleaved
zbv → 2 → $STAGES sharding.pipeline_schedule=zbv
experts → 2 → $EXPERTS
experts on ranks, with shards → 4 → $EXPERTS sharding.expert=2 $FREED
with a teacher → 2 → $DISTIL
""")


def read(written):
    """Return the number of ranks and the overrides of each run of a table."""
    return {
        name: (int(ranks), Template(words).substitute(globals())) for name, ranks, words in written
    }


LAYOUTS = read(WRITTEN)
"""Numbers of ranks and overrides, which say only how the work is shared, but for the task's."""


EVEN = (
    "data.packing=best_fit data.format=auto data.loss_on=assistant data.too_long=drop"
    " data.path=DATA/even"
)
METHODS = rows("""
with stored lists → 2 → $DISTIL objective.top_k=8 data.packing=best_fit
labels → 2 → objective=classify ${EVEN}_labels.jsonl
embeddings → 2 → objective=embed ${EVEN}_questions.jsonl batch.rows=8
embeddings of both → 2 → objective=embed objective.symmetric=true ${EVEN}_questions.jsonl
similar texts → 2 → objective=embed objective.comparison=cosent ${EVEN}_similar.jsonl
ranks → 2 → objective=rerank ${EVEN}_ranks.jsonl
words → 2 → objective=tag ${EVEN}_words.jsonl
""")
RECORDED = read(METHODS)
"""Runs of methods whose shapes are in the data, likewise."""


@dataclass(frozen=True)
class NamedRun:
    """A run. records: its second step is recorded, and rehearsed before."""

    ranks: int
    words: tuple[str, ...]
    records: bool = False


def readers(ranks, words):
    """Return how many ranks read different rows."""
    sizes = dict(word.split("=", 1) for word in words)
    for name in ("tensor", "context", "pipeline"):
        ranks //= int(sizes.get(f"sharding.{name}", 1))
    return ranks


def layout(ranks, words):
    """Return the run of a layout, with two rows for each rank that reads, and for each stage."""
    own = words.split()
    count = 4 if "sharding.pipeline=2" in own else 1
    own = [f"batch.rows={2 * count * readers(ranks, own)}", *own]
    if "optim=lion" not in own:  # with the default eps, Adam amplifies what is only rounding
        own.append("optim.eps=1e-3")
    return NamedRun(ranks, (*FULL_ROWS, *own), records=True)


CHATS = "data.path=DATA/chats.jsonl schedule=constant checkpoint.export_hf=true"
PAIRED = "data.path=DATA/pairs.jsonl schedule=constant batch.seq_len=128 train.steps=3"
PAIRS = PAIRED.split()
VALIDATED = "data.validation=0.2 train.validate_every=2"
GRPO = [
    "objective=grpo", "data.path=demo:sums", "objective.samples=4", "objective.max_new_tokens=6",
    'objective.rewards=[{name: regex, pattern: "[a-z]"},{name: length, max: 4, unit: tokens}]',
    "train.steps=3", "checkpoint.export_hf=true", "schedule=constant",
]  # fmt: skip
LORA = ["adapter=lora", "adapter.rank=4"]
RUNS = {
    name: NamedRun(int(ranks), tuple(Template(words).substitute(globals()).split()))
    for name, ranks, words in rows("""
# chats, with all that a run leaves behind
plain → 1 → $CHATS $VALIDATED train.steps=4 checkpoint.every=2
plain on two → 2 → $CHATS $VALIDATED train.steps=4 checkpoint.every=2
long → 1 → $CHATS $VALIDATED train.steps=20 checkpoint.every=10
adapter → 1 → $CHATS adapter=lora adapter.rank=4 train.steps=3 checkpoint.every=2
teacher → 1 → $CHATS model.hidden_size=48 model.num_hidden_layers=3 model.family=qwen3
  model.vocab_size=271 train.steps=1 run.seed=7
# a run of each method
pretrain → 1 → schedule=constant checkpoint.export_hf=true train.steps=3
dpo → 1 → $PAIRED objective=dpo checkpoint.export_hf=true
reward → 1 → $PAIRED $VALIDATED objective=reward checkpoint.export_hf=true optim.lr=1e-2
kto → 1 → schedule=constant batch.seq_len=128 train.steps=3 data.path=DATA/labelled.jsonl
  objective=kto
distil → 1 → $CHATS $VALIDATED train.steps=3 $DISTIL objective.temperature=2
# what an interrupted training is compared with, and goes on from
every step → 2 → data.path=DATA/chats.jsonl schedule=constant train.steps=9 checkpoint.every=1
  checkpoint.keep=9 logging.every=2
""")
}
RUNS |= {"grpo": NamedRun(1, tuple(GRPO))}
RUNS |= {name: layout(*value) for name, value in (LAYOUTS | RECORDED).items()}
"""All named runs. Those of LAYOUTS are compared with one rank, with their plan and rehearsal."""
